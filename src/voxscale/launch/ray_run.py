"""Train on the nodes of a Ray cluster, by the same node program and ranks as on SLURM."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from voxscale.config.load import with_fold
from voxscale.config.schema import Config
from voxscale.errors import BY_CODE, InfrastructureError, StoppedEarly, VoxscaleError
from voxscale.files import read_json
from voxscale.launch.batch import copy_programs, refuse_if_queued
from voxscale.launch.folder import OpenedRun, draft_run, open_run
from voxscale.launch.folds import count_folds
from voxscale.launch.follow import Screen, Tail, display
from voxscale.launch.local import SAVE_TIME_S, profile_words
from voxscale.launch.machine import look_at_machine
from voxscale.launch.outcome import judge, node_failures, read_failure, read_state, unsaid
from voxscale.launch.ranks import OUT_OF_MEMORY
from voxscale.launch.ray import Group, RayCluster, RayNode, Share, connected, refuse_unfit
from voxscale.launch.sbatch import DEBUG_COMMUNICATION, Request
from voxscale.plan.resources import Machine
from voxscale.runs import ON_RAY, RunFolder, error_files
from voxscale.train.ownership import is_live
from voxscale.train.stop import StopRequest

RESTARTS = 3  # of a run whose ranks, nodes or actors are lost, unless it is said how often
_LOOK_S = 0.5
_FREE_S = 60.0  # for the ranks of a lost group to save and let go of their run


@dataclass(frozen=True)
class RayPlacement:
    """Where and how to run on Ray, as the command line says it."""

    address: str | None = None
    nodes: int | None = None
    devices: str = "auto"
    debug_comm: bool = False
    restarts: int = RESTARTS
    profile: bool = False


@dataclass(frozen=True)
class GroupEnd:
    """How the node programs of a group ended: what was lost of them, in words, and the signal that stopped them."""

    lost: tuple[str, ...] = ()
    signal: str = ""


def train_on_ray(
    config: Config, root: Path, environ: Mapping[str, str], place: RayPlacement, *, fresh: bool
) -> OpenedRun:
    """Make the run folder, or open the one that is there, and train it to its end on Ray.

    A run that loses a rank or a node is started again from its last checkpoint. Raises what made it fail; after a
    signal StoppedEarly, when the ranks have saved.
    """
    refuse_if_queued(RunFolder(root), environ)
    stop = StopRequest(None)
    with connected_at(place, environ, stop) as cluster:
        count, machine = chosen_nodes(cluster.nodes, place.nodes)
        draft = draft_run(config, root, machine, devices=place.devices, nodes=count, fresh=fresh)
        opened = open_run(draft, look_at_machine(), environ)
        if opened.is_done:
            print(f"{root}: done already; --fresh trains it anew", file=sys.stderr)
            return opened
        request = Request(
            count, opened.devices, gpus=bool(machine.gpus), restarts=place.restarts, profile=place.profile
        )
        share = share_of(machine, opened.devices, threads=int(opened.config.train.threads))
        copy_programs(opened.run)
        with stop.on_signals():
            refuse_unfit(cluster.nodes, opened.run.root)
            end, reports = _train_group(cluster, opened.run, request, share, environ_for(place, environ), stop)
            if end.signal:
                with suppress(InfrastructureError):  # ranks whose cluster is gone save by themselves
                    await_free(opened.run)
            if end.signal and read_state(opened.run) == "stopped":
                raise StoppedEarly(
                    f"stopped by {end.signal}; what was trained is saved",
                    fix="start the same command again to continue",
                )
            again = "start the same command again to continue from the last checkpoint"
            otherwise = loss_of(end.lost, again) if end.lost else unsaid(reports, count)
            if end.signal:  # the ranks say it themselves where they could not save
                otherwise = StoppedEarly(f"stopped by {end.signal}; nothing new was saved", fix=again)
            judge(opened.run, reports, node_failures(reports), world_size=request.world_size, otherwise=otherwise)
        return opened


def _train_group(
    cluster: RayCluster,
    run: RunFolder,
    request: Request,
    share: Share,
    environ: Mapping[str, str],
    stop: StopRequest,
) -> tuple[GroupEnd, Path]:
    """Have the ranks train, again after a loss. Returns how the last start ended, and where its reports are."""
    restarts = 0
    while True:
        reports = run.next_reports(ON_RAY)
        await_free(run)
        end = run_group(cluster, run, request, share, reports, worker_words(run, request, reports), environ, stop)
        if (
            end.signal
            or read_state(run) == "done"
            or not (end.lost or are_lost(reports))
            or restarts == request.restarts
        ):
            return end, reports
        restarts += 1
        what = "; ".join(end.lost or node_failures(reports)) or "the ranks ended before their work did"
        print(f"warning: {what}; starting again from the last checkpoint", file=sys.stderr, flush=True)


def cpus_on_ray(environ: Mapping[str, str], place: RayPlacement) -> int:
    """CPUs that each of the nodes has. Raises where there are not so many nodes."""
    with connected_at(place, environ, StopRequest(None)) as cluster:
        return chosen_nodes(cluster.nodes, place.nodes)[1].cpus


def measure_on_ray(
    config: Config, root: Path, words: Sequence[str], environ: Mapping[str, str], place: RayPlacement
) -> None:
    """Open a run of the config in `root` and have ranks on Ray measure its steps."""
    stop = StopRequest(None)
    with connected_at(place, environ, stop) as cluster:
        count, machine = chosen_nodes(cluster.nodes, place.nodes)
        opened = open_run(
            draft_run(config, root, machine, devices=place.devices, nodes=count), look_at_machine(), environ
        )
        request = Request(count, opened.devices, gpus=bool(machine.gpus))
        share = share_of(machine, opened.devices, threads=int(opened.config.train.threads))
        copy_programs(opened.run)
        reports = opened.run.next_reports(ON_RAY)
        with stop.on_signals():
            refuse_unfit(cluster.nodes, opened.run.root)
            rest = module_words(words, request, reports)
            end = run_group(cluster, opened.run, request, share, reports, rest, environ_for(place, environ), stop)
    again = "start the same command again"
    if end.signal:
        raise StoppedEarly(f"stopped by {end.signal}", fix=again)
    otherwise = loss_of(end.lost, again) if end.lost else unsaid(reports, count)
    if (failures := node_failures(reports)) or otherwise or error_files(reports):
        raise read_failure(reports, failures, otherwise=otherwise)


def commands_on_ray(
    config: Config, root: Path, environ: Mapping[str, str], place: RayPlacement, *, fresh: bool, folds: bool = False
) -> list[tuple[str, str]]:
    """What each node of the Ray cluster would run, and what it would hold for it. Nothing is written."""
    runs = [("", config, root)]
    if folds:
        numbers = range(1, count_folds(config) + 1)
        runs = [(f"fold {fold}, ", with_fold(config, fold), root / f"fold-{fold}") for fold in numbers]
    with connected_at(place, environ, StopRequest(None)) as cluster:
        count, machine = chosen_nodes(cluster.nodes, place.nodes)
        drafts = [
            (of_fold, draft_run(each, where, machine, devices=place.devices, nodes=count, fresh=fresh))
            for of_fold, each, where in runs
        ]
    commands = []
    for of_fold, draft in drafts:
        request = Request(nodes=count, devices=draft.devices, gpus=bool(machine.gpus), profile=place.profile)
        reports = draft.run.logs / "ray-0"
        words = node_words(draft.run, request, reports, worker_words(draft.run, request, reports))
        share = share_of(machine, draft.devices, threads=int(draft.config.train.threads))
        commands += command_lines(words, count, share, "python", of_fold)
    return commands


def command_lines(
    words: Callable[[int], list[str]], count: int, share: Share, python: str, first: str = ""
) -> list[tuple[str, str]]:
    return [(f"{first}node {index}, holding {share}", shlex.join([python, *words(index)])) for index in range(count)]


@contextmanager
def connected_at(place: RayPlacement, environ: Mapping[str, str], stop: StopRequest) -> Iterator[RayCluster]:
    """Be part of the cluster. A signal that came meanwhile is heard after it: inside of Ray it would be Ray's error."""
    with ExitStack() as stack:
        with stop.on_signals():
            cluster = stack.enter_context(connected(place.address, environ, look_at_machine()))
        if stop.signalled:
            raise StoppedEarly(f"stopped by {stop.reason}; nothing had begun", fix="start the same command again")
        yield cluster


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
    return module_words(["voxscale.train.worker", str(run.root), *profile_words(request.profile)], request, reports)


def module_words(words: Sequence[str], request: Request, reports: Path) -> list[str]:
    """The rest of a node's words where its ranks run a module of ours, named first in `words`."""
    alone = ["--plain"] if request.world_size == 1 else []  # torchrun's own imports take as long as a short trial
    of_ranks = ["--reports", str(reports), "--world-size", str(request.world_size)]
    return ["--echo", "first", *alone, "--", "-m", *words, *of_ranks]


def are_lost(reports: Path) -> bool:
    """Whether ranks ended without a word, rather than by an error of their own or for want of memory."""
    if any(failure.endswith(OUT_OF_MEMORY) for failure in node_failures(reports)):
        return False
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


def run_group(
    cluster: RayCluster,
    run: RunFolder,
    request: Request,
    share: Share,
    reports: Path,
    rest: Sequence[str],
    environ: Mapping[str, str],
    stop: StopRequest,
    *,
    python: str | None = None,
    screen_of: Callable[[RunFolder], AbstractContextManager[Screen]] = display,
    also: Mapping[str, str] | None = None,
) -> GroupEnd:
    """Run the node programs to their end, showing what they print. A signal, or a loss, makes the others save first.

    `stop` listens for signals meanwhile. Raises what keeps Ray from starting them, and LostHeadError.
    """
    outputs = [reports / f"node-{index:04d}.out" for index in range(request.nodes)]
    tails = [Tail(output) for output in outputs]

    def look() -> None:
        cluster.refuse_if_gone()
        if stop.signalled:
            raise _Stopped

    with Group(share, nodes=request.nodes) as group, screen_of(run) as screen:

        def show() -> None:
            for tail in tails:
                tail.show(screen)
            screen.move()

        try:
            hosts = group.hosts(look=look)
        except _Stopped:
            return GroupEnd(signal=stop.reason)
        if request.nodes > 1:
            rest = ["--hosts", ",".join(hosts), *rest]
        group.start(node_words(run, request, reports, rest), environ, outputs, python=python, also=also)
        while not stop.signalled and not group.is_over(wait_s=_LOOK_S):
            cluster.refuse_if_gone()
            show()
        lost = group.lost()
        if lost or stop.signalled:
            _stop_within(SAVE_TIME_S + 5, group, cluster)
        show()
        return GroupEnd(tuple(lost), stop.reason)


def _stop_within(seconds: float, group: Group, cluster: RayCluster) -> None:
    """Ask a group to save and end, and wait for what is left of it; not for a cluster that is gone."""
    group.stop()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and cluster.answers and not group.have_ended(wait_s=_LOOK_S):
        pass


class _Stopped(Exception):
    """A signal came while Ray was waited for."""


def chosen_nodes(nodes: Sequence[RayNode], asked: int | None) -> tuple[int, Machine]:
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


def environ_for(place: RayPlacement, environ: Mapping[str, str]) -> dict[str, str]:
    return {**environ, **(DEBUG_COMMUNICATION if place.debug_comm else {})}


def loss_of(lost: Sequence[str], fix: str) -> VoxscaleError:
    return InfrastructureError(f"Ray lost what ran: {'; '.join(lost)}", fix=fix)
