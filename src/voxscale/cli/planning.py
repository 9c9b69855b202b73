"""Verbs that say what a run will take, and measure it."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxscale.cli.options import Anywhere, ConfigPath, Debug, Devices, Json, Nodes, Overrides, RayAddress, SiteName
from voxscale.command import answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from voxscale.plan.predict import Layout


def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: Nodes = None,
    devices: Devices = "auto",
    site: SiteName = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="GPU",
            help="A GPU that is not here, such as a100: by its published figures; default: the site's gpus.type.",
            show_default=False,
        ),
    ] = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Measure nothing: take what was measured before.")
    ] = False,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="devices=8..4096", help="Simulate so many devices, beside published figures.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw what is simulated.", show_default=False)
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a run will take before it is submitted. Memory, disk, time, speed-up, and what to ask for.

    Steps are measured on this machine for some seconds, once; more devices and nodes are reckoned from that. GPUs that
    are not here are looked up in a table of published figures.
    """
    from voxscale.config.site import read_site
    from voxscale.launch.given import apart_from_site, config_or_data
    from voxscale.launch.placing import with_scratch
    from voxscale.launch.planning import forecast_run
    from voxscale.plan.curve import parse_range, refuse_plot
    from voxscale.report.forecast import render_forecast
    from voxscale.report.simulation import plot_simulation, render_simulation
    from voxscale.search.simulation import simulate as simulate_worlds

    of_config, of_site = apart_from_site(overrides)
    worlds = parse_range(simulate) if simulate is not None else []
    refuse_plot(plot, simulate)
    say = partial(print, file=sys.stderr)
    profile = read_site(site, os.environ, of_site)
    settled = config_or_data(config, of_config, os.environ, site=profile, say=say)
    settled = with_scratch(settled, profile, os.environ)  # where a job will look for data and measured steps
    ask = partial(forecast_run, settled, os.environ, profile, device=device, probe=not no_probe, say=say)
    forecast = ask(nodes=nodes or 1, devices=devices)
    if simulate is None:
        answer(as_json, forecast.as_json(), render_forecast(forecast))
        return
    per_node = profile.gpus.per_node or forecast.layout.devices
    content = simulate_worlds(
        forecast,
        settled.search,
        worlds,
        per_node=per_node,
        ask=lambda layout: ask(nodes=layout.nodes, devices=str(layout.devices)),
    )
    if plot is not None:
        plot_simulation(content, plot)
    answer(as_json, content, render_simulation(content))


def scale(
    words: Annotated[
        list[str],
        typer.Argument(metavar="CONFIG [KEY=VALUE...]", help="A config or data, or with --script a script's words."),
    ],
    worlds: Annotated[
        str, typer.Option(metavar="NxD,…", help="Nodes × devices of each, in the order of their size.")
    ] = "1x1,1x2",
    script: Annotated[
        bool, typer.Option("--script", help="The words are a script of yours and its arguments: compare wall times.")
    ] = False,
    on: Anywhere = "local",
    site: SiteName = None,
    address: RayAddress = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder for what is measured; default: runs/ and the name, with -scale."),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, help="About how long each world is measured.")] = 10,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything anew.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how training scales, and what holds it back.

    Each world takes real steps for some seconds: with the config's own batch, and with one that grows with the world.
    A user's own script runs to its end on each world; its wall times are compared. Our options may stand among its
    arguments; everything after -- is the script's.
    """
    from voxscale.files import write_json
    from voxscale.launch.given import apart_from_site, default_run
    from voxscale.launch.scaling import open_folder, parse_worlds, refuse_misplaced
    from voxscale.report.scaling import plot_speedup
    from voxscale.report.write import refresh_report, seen_in
    from voxscale.runs import ScaleFolder

    layouts = parse_worlds(worlds)
    of_config, of_site = apart_from_site(() if script else words[1:])
    refuse_misplaced(on, layouts, os.environ, site=site, of_site=of_site, address=address)
    given = Path(words[0])
    default = default_run(given)
    root = (run or default.with_name(f"{default.name}-scale")).resolve()
    open_folder(root, fresh=fresh)
    where: dict[str, Any] = {"on": on, "site": site, "address": address}
    if script:
        content, text = _scale_script(words, layouts, root, **where, as_json=as_json)
    else:
        content, text = _scale_config(given, of_config, layouts, root, **where, of_site=of_site, seconds=seconds)
    folder = ScaleFolder(root)
    plot_speedup(content["rows"], folder.plot, title=given.stem)
    write_json(folder.content, content)
    page = refresh_report(root)
    content |= {"plot": str(folder.plot), "report": str(page) if page else None}
    answer(as_json, {"run": str(root), **content}, f"{text}\nwrote {folder.plot}{seen_in(page)}")


def _scale_script(
    words: list[str],
    layouts: "Sequence[Layout]",
    root: Path,
    *,
    on: str,
    site: str | None,
    address: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], str]:
    """Wall times of a script on each world, for machines and in words."""
    from voxscale.launch.scaling import OWN_BATCH, launch_on, scale_script, where_on
    from voxscale.report.scaling import render_times

    say = partial(print, file=sys.stderr)
    say(f"warning: {OWN_BATCH}")
    launch = launch_on(on, words, os.environ, site=site, address=address, as_json=as_json)
    where = where_on(on, os.environ, site=site, of_site=(), address=address)
    rows = scale_script(words, layouts, root, launch, on=on, where=where, environ=os.environ, say=say)
    return {"rows": rows}, render_times(rows)


def _scale_config(
    config: Path,
    overrides: "Sequence[str]",
    layouts: "Sequence[Layout]",
    root: Path,
    *,
    on: str,
    site: str | None,
    of_site: "Sequence[str]",
    address: str | None,
    seconds: float,
) -> tuple[dict[str, Any], str]:
    """Measured steps of a config on each world and what holds them back, for machines and in words."""
    from voxscale.config.site import read_site
    from voxscale.launch.given import config_or_data
    from voxscale.launch.scaling import cpus_on, measure_on, scale_config, where_on
    from voxscale.plan.scaling import find_bottleneck
    from voxscale.report.scaling import render_scaling

    say = partial(print, file=sys.stderr)
    there = read_site(site, os.environ, of_site) if on == "slurm" else None
    settled = config_or_data(config, overrides, os.environ, site=there, say=say)
    place: dict[str, Any] = {"site": site, "of_site": of_site, "address": address}
    measure, where = measure_on(on, os.environ, **place), where_on(on, os.environ, **place)
    cpus = cpus_on(on, layouts, os.environ, address)
    measured = scale_config(
        settled, layouts, root, measure, on=on, where=where, environ=os.environ, cpus=cpus, seconds=seconds, say=say
    )
    rows, bottleneck = [row.as_json() for row in measured], find_bottleneck(measured)
    return {"rows": rows, "bottleneck": bottleneck}, render_scaling(rows, bottleneck)
