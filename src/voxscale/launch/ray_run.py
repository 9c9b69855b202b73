"""Train, or run a user's script, on the nodes of a Ray cluster, by the same node program and ranks as on SLURM."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxscale.config.schema import Config, PerDevice
from voxscale.errors import BY_CODE, InfrastructureError, StoppedEarly, VoxscaleError
from voxscale.files import read_json
from voxscale.launch.batch import copy_programs, refuse_if_queued
from voxscale.launch.folder import OpenedRun, draft_run, open_run
from voxscale.launch.follow import Screen, Tail, display
from voxscale.launch.local import SAVE_TIME_S
from voxscale.launch.machine import look_at_machine
from voxscale.launch.outcome import judge, node_failures, read_state, unsaid
from voxscale.launch.ray import Group, RayCluster, RayNode, Share, connected, refuse_unfit, stopped_within
from voxscale.launch.sbatch import DEBUG_COMMUNICATION, Request
from voxscale.launch.script import Script, raise_outcome, shown, write_folder
from voxscale.launch.script_end import finish
from voxscale.plan.resources import Machine, choose_devices
from voxscale.runs import RunFolder, error_files
from voxscale.train.ownership import claimed, is_live

RESTARTS = 3  # of a run whose ranks, nodes or actors are lost
_LOOK_S = 0.5
_FREE_S = 60.0  # for the ranks of a lost group to save and let go of their run


@dataclass(frozen=True)
class RayPlacement:
    """Where and how to run on Ray, as the command line says it."""

    address: str | None = None
    nodes: int | None = None
    devices: str = "auto"
    debug_comm: bool = False


def train_on_ray(
    config: Config, root: Path, environ: Mapping[str, str], place: RayPlacement, *, fresh: bool
) -> OpenedRun:
    """Make the run folder, or open the one that is there, and train it to its end on Ray.

    A run that loses a rank or a node is started again from its last checkpoint. Raises what made it fail.
    """
    refuse_if_queued(RunFolder(root), environ)
    with connected(place.address, environ, look_at_machine()) as cluster:
        count, machine = _chosen_nodes(cluster.nodes, place.nodes)
        draft = draft_run(config, root, machine, devices=place.devices, nodes=count, fresh=fresh)
        opened = open_run(draft, look_at_machine(), environ)
        if opened.is_done:
            print(f"{root}: done already; --fresh trains it anew", file=sys.stderr)
            return opened
        request = Request(nodes=count, devices=opened.devices, gpus=bool(machine.gpus))
        share = share_of(machine, opened.devices, threads=int(opened.config.train.threads))
        copy_programs(opened.run)
        refuse_unfit(cluster.nodes, opened.run.root)
        for restart in range(RESTARTS + 1):
            reports = next_reports(opened.run)
            await_free(opened.run)
            words = worker_words(opened.run, request, reports)
            lost = _run_group(cluster, opened.run, request, share, reports, words, _environ(place, environ))
            if restart == RESTARTS or read_state(opened.run) == "done" or not (lost or are_lost(reports)):
                break
            what = "; ".join(lost or node_failures(reports)) or "the ranks ended before their work did"
            print(f"warning: {what}; starting again from the last checkpoint", file=sys.stderr, flush=True)
        otherwise = _loss(lost) if lost else unsaid(reports, count)
        judge(opened.run, reports, node_failures(reports), world_size=request.world_size, otherwise=otherwise)
        return opened


def commands_on_ray(
    config: Config, root: Path, environ: Mapping[str, str], place: RayPlacement, *, fresh: bool
) -> list[tuple[str, str]]:
    """What each node of the Ray cluster would run, and what it would hold for it. Nothing is written."""
    with connected(place.address, environ, look_at_machine()) as cluster:
        count, machine = _chosen_nodes(cluster.nodes, place.nodes)
        draft = draft_run(config, root, machine, devices=place.devices, nodes=count, fresh=fresh)
    request = Request(nodes=count, devices=draft.devices, gpus=bool(machine.gpus))
    reports = draft.run.logs / "ray-0"
    words = node_words(draft.run, request, reports, worker_words(draft.run, request, reports))
    share = share_of(machine, draft.devices, threads=int(draft.config.train.threads))
    return [(f"node {index}, holding {share}", shlex.join(["python", *words(index)])) for index in range(count)]


def launch_on_ray(
    script: Script, root: Path, environ: Mapping[str, str], place: RayPlacement, *, as_json: bool = False
) -> dict[str, Any]:
    """Run a user's script as ranks on Ray, showing its output. Returns metrics.json; raises how the script failed."""
    run = RunFolder(root)
    with connected(place.address, environ, look_at_machine()) as cluster:
        count, machine = _chosen_nodes(cluster.nodes, place.nodes)
        devices = 1 if script.plain else choose_devices(place.devices, machine, PerDevice(per_device=1), nodes=count)[0]
        request = Request(nodes=count, devices=devices, gpus=bool(machine.gpus))
        write_folder(script, run, on="ray", request=request, python=[script.python or "python"])
        refuse_unfit(cluster.nodes, run.root)
        reports = next_reports(run)
        options = ["--echo", "all", "--chdir", str(Path.cwd()), *(["--plain"] if script.plain else [])]
        with claimed(run):
            with shown(script.output, as_json=as_json):
                lost = _run_group(
                    cluster,
                    run,
                    request,
                    share_of(machine, devices),
                    reports,
                    [*options, "--", *script.words],
                    _environ(place, environ),
                    python=script.python,
                    screen_of=_plain_screen,
                )
            metrics = finish(run.root, reports)
    if lost:
        raise _loss(lost)
    raise_outcome(metrics)
    return metrics


def share_of(machine: Machine, devices: int, *, threads: int = 0) -> Share:
    """What the ranks on one node hold of it; `threads` are those of a rank, by default an even part of its CPUs."""
    each = machine.cpus // max(1, machine.gpus or devices)
    cpus = min(machine.cpus, devices * max(1, threads or each))
    return Share(cpus=cpus, gpus=devices if machine.gpus else 0)


def node_words(run: RunFolder, request: Request, reports: Path, rest: Sequence[str]) -> Callable[[int], list[str]]:
    """The words after `python` that start the node program on each node; `rest` are its last options and command."""
    first = [str(run.node_program), "--nodes", str(request.nodes), "--devices", str(request.devices)]
    return lambda index: [*first, "--index", str(index), "--reports", str(reports), *rest]


def worker_words(run: RunFolder, request: Request, reports: Path) -> list[str]:
    """The rest of a node's words where it trains a run."""
    worker = ["-m", "voxscale.train.worker", str(run.root), "--reports", str(reports)]
    alone = ["--plain"] if request.world_size == 1 else []  # torchrun's own imports take as long as a short trial
    return ["--echo", "first", *alone, "--", *worker, "--world-size", str(request.world_size)]


def next_reports(run: RunFolder) -> Path:
    """A new folder for the reports of one start on Ray."""
    numbers = [int(path.name.removeprefix("ray-")) for path in run.logs.glob("ray-*") if path.name[4:].isdigit()]
    reports = run.logs / f"ray-{max(numbers, default=-1) + 1}"
    reports.mkdir(parents=True)
    return reports


def newest_ray_reports(run: RunFolder) -> Path | None:
    numbers = [int(path.name.removeprefix("ray-")) for path in run.logs.glob("ray-*") if path.name[4:].isdigit()]
    return run.logs / f"ray-{max(numbers)}" if numbers else None


def are_lost(reports: Path) -> bool:
    """Whether ranks ended without a word, rather than by an error of their own."""
    return not any(read_json(file)["code"] in BY_CODE for file in error_files(reports))


def await_free(run: RunFolder, *, patience_s: float = _FREE_S) -> None:
    """Wait until no rank of an earlier start works in the run any more."""
    deadline = time.monotonic() + patience_s
    while is_live(run):
        if time.monotonic() > deadline:
            raise InfrastructureError(
                f"run {run.root}: ranks of an earlier start still work in it", fix="end them, then start again"
            )
        time.sleep(0.1)


def _run_group(
    cluster: RayCluster,
    run: RunFolder,
    request: Request,
    share: Share,
    reports: Path,
    rest: Sequence[str],
    environ: Mapping[str, str],
    *,
    python: str | None = None,
    screen_of: Callable[[RunFolder], AbstractContextManager[Screen]] = display,
) -> list[str]:
    """Run the node programs to their end, showing what they print. Returns what was lost of them, in words.

    A signal to this process makes the ranks save; StoppedEarly is raised then.
    """
    outputs = [reports / f"node-{index:04d}.out" for index in range(request.nodes)]
    tails = [Tail(output) for output in outputs]
    with Group(share, nodes=request.nodes) as group, screen_of(run) as screen:

        def show() -> None:
            for tail in tails:
                tail.show(screen)
            screen.move()

        hosts = group.hosts()
        if request.nodes > 1:
            rest = ["--hosts", ",".join(hosts), *rest]
        group.start(node_words(run, request, reports, rest), environ, outputs, python=python)
        try:
            while not group.is_over(wait_s=_LOOK_S):
                cluster.refuse_if_gone()
                show()
            if lost := group.lost():
                stopped_within(group, SAVE_TIME_S)  # the others would wait for it
            show()
            return lost
        except BaseException as interrupt:
            if isinstance(interrupt, Exception):
                raise
            stopped_within(group, SAVE_TIME_S + 5)
            show()
            if read_state(run) == "done":
                return []
            raise StoppedEarly(
                f"stopped by {type(interrupt).__name__.strip('_')}; what was trained is saved",
                fix="start the same command again to continue",
            ) from interrupt


def _chosen_nodes(nodes: Sequence[RayNode], asked: int | None) -> tuple[int, Machine]:
    """How many nodes to use, and what each of them has at least; the largest are used."""
    count = asked or 1
    if count > len(nodes):
        raise InfrastructureError(
            f"--nodes {count}: the Ray cluster has {len(nodes)} ({', '.join(node.host for node in nodes)})",
            fix=f"ask for at most {len(nodes)}, or add nodes: ray start --address HOST:PORT",
        )
    chosen = sorted(nodes, key=lambda node: (node.gpus, node.cpus), reverse=True)[:count]
    machine = Machine(gpus=int(min(node.gpus for node in chosen)), cpus=int(min(node.cpus for node in chosen)))
    if machine.cpus < 1:
        raise InfrastructureError(
            "a node of the Ray cluster offers no CPU, and a rank needs one",
            fix="start it with `ray start --num-cpus N`",
        )
    return count, machine


@contextmanager
def _plain_screen(run: RunFolder) -> Iterator[Screen]:
    """A script's output is the user's own: as it is, on standard output."""
    yield Screen(lambda text: print(text, flush=True), lambda: None)


def _environ(place: RayPlacement, environ: Mapping[str, str]) -> dict[str, str]:
    return {**environ, **(DEBUG_COMMUNICATION if place.debug_comm else {})}


def _loss(lost: Sequence[str]) -> VoxscaleError:
    return InfrastructureError(
        f"Ray lost what ran: {'; '.join(lost)}", fix="start the same command again to continue from the last checkpoint"
    )
