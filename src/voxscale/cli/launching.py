"""The verb that runs a user's own script."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from voxscale.cli.options import After, Anywhere, Debug, DebugComm, Detach, Devices, Json, Nodes, RayAddress, SiteName
from voxscale.command import answer

PASS_ON = {"ignore_unknown_options": True}  # they are the script's


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
    python: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="The interpreter; default: the site's, or this one.", show_default=False),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A new folder for logs and outcome; default: runs/ and the script's name."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where all output goes, or a copy of it; a job's may have %j.", show_default=False
        ),
    ] = None,
    site: SiteName = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="site.KEY=VALUE", help="Override the site, e.g. site.time=2:00:00; may be repeated."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run; write nothing.")] = False,
    detach: Detach = False,
    after: After = None,
    debug_comm: DebugComm = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run your own script, unchanged, as ranks of torchrun: here or on a cluster.

    Our options may stand before SCRIPT or among its arguments; what we do not know is the script's, and so is
    everything after --. The exit code is the script's.
    """
    from voxscale.errors import ConfigError
    from voxscale.files import read_json
    from voxscale.launch.given import apart_from_site, placed, placed_on_ray
    from voxscale.launch.ray_job import refuse_with_ray
    from voxscale.launch.ray_script import launch_on_ray, script_commands_on_ray
    from voxscale.launch.sbatch import render_sbatch
    from voxscale.launch.script import choose_folder, command_here, launch_here, make_script
    from voxscale.launch.script_job import draft_script_job, launch_on_slurm

    others, of_site = apart_from_site(settings)
    if others:
        raise ConfigError(f"--set {others[0]}: expected site.KEY=VALUE", fix="give the script's arguments after SCRIPT")
    if with_ray:
        refuse_with_ray(on=on, plain=plain)
    given = make_script(script, arguments or (), plain=plain, nodes=nodes, python=python, output=output)
    place = placed(on, nodes, devices, site, of_site, os.environ, after=after, debug_comm=debug_comm, detach=detach)
    on_ray = placed_on_ray(
        on, address, nodes, devices, site or of_site, debug_comm=debug_comm, after=after, detach=detach
    )
    root = choose_folder(run, given)
    if place is not None:
        draft = draft_script_job(given, root, os.environ, place, with_ray=with_ray)
        if dry_run:
            text = render_sbatch(draft.job, draft.site)
            answer(as_json, {"run": str(root), "jobs": [(draft.job.purpose, text)]}, text)
            return
        jobs = launch_on_slurm(draft, os.environ, place, as_json=as_json)
        if detach and jobs:
            content = {"run": str(root), "state": "submitted", "jobs": [vars(job) for job in jobs]}
            answer(as_json, content, f"run folder {root}; cancel with: voxscale cancel {shlex.quote(str(root))}")
            return
    elif on_ray is not None and dry_run:
        commands = script_commands_on_ray(given, root, os.environ, on_ray)
        text = "\n".join(f"# {purpose}\n{command}" for purpose, command in commands)
        answer(as_json, {"run": str(root), "commands": [command for _, command in commands]}, text)
        return
    elif on_ray is not None:
        launch_on_ray(given, root, os.environ, on_ray, as_json=as_json)
    elif dry_run:
        _, words, added = command_here(given, root, os.environ, devices=devices, debug_comm=debug_comm)
        text = " ".join([*(f"{name}={value}" for name, value in added.items()), shlex.join(words)])
        answer(as_json, {"run": str(root), "commands": [text]}, text)
        return
    else:
        launch_here(given, root, os.environ, devices=devices, debug_comm=debug_comm, as_json=as_json)
    metrics = read_json(root / "metrics.json")
    ranks = f"{metrics['world_size']} rank{'s' if metrics['world_size'] > 1 else ''}"
    answer(as_json, {"run": str(root), **metrics}, f"done in {metrics['wall_s']:.1f} s, {ranks}, run folder {root}")
