"""Verbs about what runs, and where."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from voxscale.cli.options import Debug, DebugComm, Devices, Json, Nodes, RunPath, SiteName
from voxscale.command import answer

_DAY_S = 86400.0


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look.")] = Path("runs"),
    prune: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            min=0,
            help="Delete those that came to nothing, or were moved aside by --fresh, so many days ago.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List runs: state, progress, best metric, age.

    --prune deletes what failed, stopped, was interrupted or never began, and was not touched for so many days; never
    what is done, runs or waits.
    """
    from voxscale.launch.pruning import may_go, prune_runs, render_pruned
    from voxscale.report.listing import list_runs, render_runs

    rows = list_runs(folder)
    if prune is not None:
        old = [row for row in rows if row.age_s >= prune * _DAY_S]
        chosen = [
            (Path(row.run), row.state)
            for row in old
            if may_go(Path(row.run), row.state, is_search=row.kind == "search")
        ]
        pruned = prune_runs(chosen, os.environ)
        content = {"deleted": [each.as_json() for each in pruned]}
        answer(as_json, content, render_pruned(pruned, len(rows) - len(pruned)))
        return
    answer(
        as_json,
        {"runs": [row.as_json() for row in rows]},
        render_runs(rows) if rows else f"no runs in {folder}",
    )


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, a search or a folder of folds.")],
    once: Annotated[bool, typer.Option("--once", help="Show the present state and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the present state as one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Watch a run while it trains, wherever that is.

    Shows progress, time left, speed, losses, and what each rank uses.

    Reads the run folder alone. Ends with the run: 0 when it is done, 1 when it failed, 75 when it stopped early.
    Ctrl-C leaves the run alone. Without a terminal it prints a line for each change.
    """
    from voxscale.report.watch_text import render_view
    from voxscale.report.watched import open_watched
    from voxscale.report.watching import watch

    watched = open_watched(run, os.environ)
    if once or as_json:
        view = watched.look()
        answer(as_json, view.as_json(), "\n".join(render_view(view)))
        return
    watch(watched)


def cancel(run: RunPath, as_json: Json = False, debug: Debug = False) -> None:
    """Stop a run, in the queue, on nodes or on this machine. The state is saved."""
    from voxscale.launch.cancel import cancel_run

    done = cancel_run(run, os.environ)
    answer(as_json, {"run": str(run), "done": done}, "\n".join(done))


site = typer.Typer(no_args_is_help=True, help="Write and check the profile of a cluster.")


@site.command()
def detect(
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write it for --site NAME, to your own sites.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; default: site.yaml.", show_default=False)
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a profile from what SLURM says of this cluster. Partition, GPUs, CPUs, memory, time limit."""
    from voxscale.config.load import plain
    from voxscale.config.site import sites_folder
    from voxscale.errors import ConfigError
    from voxscale.files import write_text
    from voxscale.launch.detect import detect_site, render_site
    from voxscale.launch.given import plain_name

    if name is not None and out is not None:
        raise ConfigError("--name and --out: expected one of them", fix="leave one out")
    path = out or (sites_folder(os.environ) / f"{plain_name(name)}.yaml" if name is not None else Path("site.yaml"))
    if path.exists():
        raise ConfigError(f"{path}: exists", fix="choose another with --name or --out, or remove it")
    found, notes = detect_site(os.environ)
    write_text(path, render_site(found, notes))
    given = name or (str(path) if "/" in str(path) else f"./{path}")  # a bare word would be the name of a site
    text = "\n".join([*notes, f"wrote {path}; test it with: voxscale site check --site {shlex.quote(given)}"])
    answer(as_json, {"site": str(path), "notes": notes, **plain(found)}, text)


@site.command()
def check(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="site.KEY=VALUE", help="Override fields of the profile.")
    ] = None,
    site: SiteName = None,
    nodes: Nodes = None,
    devices: Devices = "auto",
    run: Annotated[Path, typer.Option(metavar="DIR", help="Where the job's files go.")] = Path("runs/site-check"),
    debug_comm: DebugComm = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Submit a job of a minute, and say what is wrong. It looks at hosts, devices, clocks and connections."""
    from voxscale.launch.check import check_site, render_check
    from voxscale.launch.given import only_of_site, placed

    place = placed("slurm", nodes, devices, site, only_of_site(overrides), os.environ, debug_comm=debug_comm)
    assert place is not None  # noqa: S101 for the type checker
    found = check_site(run.resolve(), os.environ, place)
    answer(as_json, found, render_check(found))
    if found["findings"]:
        raise typer.Exit(4)
