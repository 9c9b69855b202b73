"""The verb that runs a user's own script."""

import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxscale.cli.options import (
    After,
    Anywhere,
    Debug,
    DebugComm,
    Detach,
    Devices,
    DryRun,
    Json,
    Nodes,
    RayAddress,
    SiteName,
)
from voxscale.cli.telling import tell_commands, tell_submitted
from voxscale.command import answer

if TYPE_CHECKING:
    from voxscale.launch.ray_run import RayPlacement
    from voxscale.launch.sbatch import Placement
    from voxscale.launch.script import Script

Interpreter = Annotated[
    str | None,
    typer.Option(metavar="PYTHON", help="The interpreter; default: the site's, or this one.", show_default=False),
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Where all output goes, or a copy of it; a job's may have %j.", show_default=False
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="site.KEY=VALUE", help="Override the site, e.g. site.time=2:00:00; may be repeated."),
]


def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own, options included.")
    ] = None,
    on: Anywhere = "local",
    nodes: Nodes = None,
    devices: Devices = "auto",
    address: RayAddress = None,
    plain: Annotated[bool, typer.Option("--plain", help="Run it once, without torchrun.")] = False,
    with_ray: Annotated[
        bool,
        typer.Option("--with-ray", help="In a job: run it once, with RAY_ADDRESS of a Ray cluster over all its nodes."),
    ] = False,
    python: Interpreter = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A new folder for logs and outcome; default: runs/ and the script's name."),
    ] = None,
    output: Output = None,
    site: SiteName = None,
    settings: Settings = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    after: After = None,
    debug_comm: DebugComm = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run your own script, unchanged, here or on a cluster. Its ranks are those of torchrun.

    Our options may stand before SCRIPT or among its arguments; what we do not know is the script's, and so is
    everything after --. The exit code is the script's.
    """
    from voxscale.errors import ConfigError
    from voxscale.launch.given import apart_from_site, placed, placed_on_ray
    from voxscale.launch.ray_job import refuse_with_ray
    from voxscale.launch.script import choose_folder, claimed_folder, make_script

    others, of_site = apart_from_site(settings)
    if others:
        raise ConfigError(f"--set {others[0]}: expected site.KEY=VALUE", fix="give the script's arguments after SCRIPT")
    if with_ray:
        refuse_with_ray(on=on, plain=plain)
    given = make_script(script, arguments or (), plain=plain, nodes=nodes, python=python, output=output)
    for_jobs: dict[str, Any] = {"after": after, "detach": detach, "debug_comm": debug_comm}
    place = placed(on, nodes, devices, site, of_site, os.environ, **for_jobs)
    on_ray = placed_on_ray(on, address, nodes, devices, site or of_site, **for_jobs)
    with nullcontext(choose_folder(run, given)) if dry_run else claimed_folder(run, given) as root:
        if place is not None:
            has_ended = _launch_by_job(given, root, place, with_ray=with_ray, dry_run=dry_run, as_json=as_json)
        elif on_ray is not None:
            has_ended = _launch_on_ray(given, root, on_ray, dry_run=dry_run, as_json=as_json)
        else:
            here: dict[str, Any] = {"devices": devices, "debug_comm": debug_comm}
            has_ended = _launch_here(given, root, **here, dry_run=dry_run, as_json=as_json)
    if has_ended:
        _tell_script(root, as_json=as_json)


def _launch_by_job(
    script: "Script", root: Path, place: "Placement", *, with_ray: bool, dry_run: bool, as_json: bool
) -> bool:
    """Whether the script was waited for: else its job is printed, or submitted and left alone."""
    from voxscale.launch.sbatch import render_sbatch
    from voxscale.launch.script_job import draft_script_job, launch_on_slurm
    from voxscale.report.write import reporting

    draft = draft_script_job(script, root, os.environ, place, with_ray=with_ray)
    if dry_run:
        text = render_sbatch(draft.job, draft.site)
        answer(as_json, {"run": str(root), "jobs": [(draft.job.purpose, text)]}, text)
        return False
    with reporting(root):
        jobs = launch_on_slurm(draft, os.environ, place, as_json=as_json)
    if place.detach and jobs:
        tell_submitted(as_json, "run", root, jobs)
        return False
    return True


def _launch_on_ray(script: "Script", root: Path, place: "RayPlacement", *, dry_run: bool, as_json: bool) -> bool:
    """Whether the script was run: else the lines that would are printed."""
    from voxscale.launch.ray_script import launch_on_ray, script_commands_on_ray
    from voxscale.report.write import reporting

    if dry_run:
        tell_commands(as_json, root, script_commands_on_ray(script, root, os.environ, place))
    else:
        with reporting(root):
            launch_on_ray(script, root, os.environ, place, as_json=as_json)
    return not dry_run


def _launch_here(script: "Script", root: Path, *, devices: str, debug_comm: bool, dry_run: bool, as_json: bool) -> bool:
    """Whether the script was run: else the line that would is printed."""
    from voxscale.launch.script import command_here, launch_here
    from voxscale.report.write import reporting

    if dry_run:
        _, words, added = command_here(script, root, os.environ, devices=devices, debug_comm=debug_comm)
        text = " ".join([*(f"{name}={value}" for name, value in added.items()), shlex.join(words)])
        answer(as_json, {"run": str(root), "commands": [text]}, text)
    else:
        with reporting(root):
            launch_here(script, root, os.environ, devices=devices, debug_comm=debug_comm, as_json=as_json)
    return not dry_run


def _tell_script(root: Path, *, as_json: bool) -> None:
    """How a script went that has ended."""
    from voxscale.files import read_json
    from voxscale.report.write import refresh_report, seen_in

    metrics, page = read_json(root / "metrics.json"), refresh_report(root)
    ranks = f"{metrics['world_size']} rank{'s' if metrics['world_size'] > 1 else ''}"
    told: dict[str, Any] = {"run": str(root), "report": str(page) if page else None, **metrics}
    answer(as_json, told, f"done in {metrics['wall_s']:.1f} s, {ranks}, run folder {root}{seen_in(page)}")
