"""A user's own script as ranks on Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from voxscale.config.schema import PerDevice
from voxscale.errors import InfrastructureError, StoppedEarly, VoxscaleError
from voxscale.files import write_json
from voxscale.launch.follow import Screen
from voxscale.launch.ray import RayCluster, Share, refuse_unfit
from voxscale.launch.ray_run import (
    GroupEnd,
    RayPlacement,
    chosen_nodes,
    command_lines,
    connected_at,
    environ_for,
    loss_of,
    node_words,
    run_group,
    share_of,
)
from voxscale.launch.sbatch import Request
from voxscale.launch.script import Script, raise_outcome, shown, write_folder
from voxscale.launch.script_end import finish
from voxscale.plan.resources import choose_devices
from voxscale.runs import ON_RAY, RunFolder
from voxscale.train.ownership import claimed
from voxscale.train.stop import StopRequest


def launch_on_ray(
    script: Script, root: Path, environ: Mapping[str, str], place: RayPlacement, *, as_json: bool = False
) -> dict[str, Any]:
    """Run a user's script as ranks on Ray, showing its output. Returns metrics.json; raises how the script failed.

    A plain script finds the cluster in RAY_ADDRESS.
    """
    run, stop = RunFolder(root), StopRequest(None)
    with connected_at(place, environ, stop) as cluster:
        request, share = _share_of_script(cluster, script, place)
        write_folder(script, run, on="ray", request=request, python=[script.python or "python"])
        with stop.on_signals(), claimed(run):
            reports = run.next_reports(ON_RAY)
            try:
                refuse_unfit(cluster.nodes, run.root)
                with shown(script.output, as_json=as_json):
                    end = run_group(
                        cluster,
                        run,
                        request,
                        share,
                        reports,
                        _script_words(script),
                        environ_for(place, environ),
                        stop,
                        python=script.python,
                        screen_of=_plain_screen,
                        also={"RAY_ADDRESS": cluster.address} if script.plain else {},
                    )
            except VoxscaleError as error:  # no node, or no Ray any more
                _finish_script(run, reports, GroupEnd(lost=(error.message,)))
                raise
            metrics = _finish_script(run, reports, end)
    again = "start the same command again"
    if end.signal and metrics["state"] != "done":
        raise StoppedEarly("\n".join([f"stopped by {end.signal}", *metrics["failures"]]), fix=again)
    if end.lost:
        raise loss_of(end.lost, again)
    raise_outcome(metrics)
    return metrics


def script_commands_on_ray(
    script: Script, root: Path, environ: Mapping[str, str], place: RayPlacement
) -> list[tuple[str, str]]:
    """What each node would run for a script, as `commands_on_ray` gives it for a training."""
    run = RunFolder(root)
    with connected_at(place, environ, StopRequest(None)) as cluster:
        request, share = _share_of_script(cluster, script, place)
    words = node_words(run, request, run.logs / "ray-0", _script_words(script))
    return command_lines(words, request.nodes, share, script.python or "python")


def _share_of_script(cluster: RayCluster, script: Script, place: RayPlacement) -> tuple[Request, Share]:
    """What a script runs on; a plain one may be a driver of the cluster, and holds nothing unless devices are asked."""
    count, machine = chosen_nodes(cluster.nodes, place.nodes)
    devices = choose_devices(place.devices, machine, PerDevice(per_device=1), nodes=count)[0]
    holds_nothing = script.plain and place.devices == "auto"
    request = Request(nodes=count, devices=1 if script.plain else devices, gpus=bool(machine.gpus))
    return request, Share(0) if holds_nothing else share_of(machine, devices)


def _script_words(script: Script) -> list[str]:
    options = ["--echo", "all", "--chdir", str(Path.cwd()), *(["--plain"] if script.plain else [])]
    return [*options, "--", *script.words]


def _finish_script(run: RunFolder, reports: Path, end: GroupEnd) -> dict[str, Any]:
    """Write metrics.json, also where nodes could not leave word of their end."""
    metrics = finish(run.root, reports)
    unsaid = sum(1 for _ in reports.glob("node-*.end.json")) < metrics["nodes"]
    if end.signal and unsaid:
        metrics |= {"state": "stopped", "exit_code": StoppedEarly.exit_code, "failures": []}
    elif end.lost:
        metrics |= {"state": "failed", "exit_code": InfrastructureError.exit_code, "failures": [*end.lost]}
    write_json(run.metrics, metrics)
    return metrics


@contextmanager
def _plain_screen(run: RunFolder) -> Iterator[Screen]:
    """A script's output is the user's own: as it is, on standard output."""
    yield Screen(lambda text: print(text, flush=True), lambda: None)
