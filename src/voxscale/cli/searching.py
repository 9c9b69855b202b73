"""The verb that searches."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from voxscale.cli.options import (
    After,
    ConfigPath,
    Debug,
    Detach,
    Devices,
    DryRun,
    Json,
    Nodes,
    Overrides,
    RayAddress,
    SiteName,
)
from voxscale.cli.telling import tell_submitted
from voxscale.command import answer

if TYPE_CHECKING:
    from voxscale.config.schema import Config
    from voxscale.launch.sbatch import Placement


def search(
    config: ConfigPath,
    overrides: Overrides = None,
    on: Annotated[Literal["ray", "slurm"], typer.Option(help="A Ray cluster, or one inside a SLURM job.")] = "ray",
    address: RayAddress = None,
    nodes: Nodes = None,
    devices: Devices = "auto",
    site: SiteName = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The search's folder; default: runs/ and the config's name.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; a search that is there is moved aside.")] = False,
    dry_run: DryRun = False,
    detach: Detach = False,
    after: After = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Search for the best config: many trials at once, on Ray.

    The config's `search` section says which fields vary and how. Every trial is a run folder of its own; a search that
    is there is continued. Writes trials.csv and best.yaml. On SLURM --nodes and --devices are those of the job; else
    trials take what the Ray cluster has.
    """
    from voxscale.launch.given import apart_from_site, config_or_data, default_run, placed, refuse_for_ray

    of_config, of_site = apart_from_site(overrides)
    root = (run or default_run(config)).resolve()
    how: dict[str, Any] = {"fresh": fresh, "dry_run": dry_run, "as_json": as_json}
    if on == "ray":
        refuse_for_ray(nodes=nodes, devices=devices != "auto", site=site or of_site, detach=detach, after=after)
        _search_on_ray(config_or_data(config, of_config, os.environ), root, address, **how)
        return
    place = placed(on, nodes, devices, site, of_site, os.environ, after=after, detach=detach)
    if place is None or address is not None:
        from voxscale.errors import ConfigError

        raise ConfigError(
            "--address: a job on SLURM starts a Ray of its own", fix="leave out one of --address and --on slurm"
        )
    settled = config_or_data(config, of_config, os.environ, site=place.site)
    _search_by_job(settled, root, place, **how)


def _search_on_ray(
    config: "Config", root: Path, address: str | None, *, fresh: bool, dry_run: bool, as_json: bool
) -> None:
    """Search to the end on a Ray cluster, or print the trials."""
    from voxscale.report.write import refresh_report, reporting, seen_in
    from voxscale.search.drive import search_here
    from voxscale.search.opening import draft_search
    from voxscale.search.space import render_trials

    if dry_run:
        draft_search(config, root, fresh=fresh)
        rows, text = render_trials(config)
        answer(as_json, {"search": str(root), "trials": rows}, text)
        return
    with reporting(root):
        metrics, text = search_here(config, root, os.environ, address=address, fresh=fresh)
    page = refresh_report(root)
    answer(as_json, {"search": str(root), "report": str(page) if page else None, **metrics}, text + seen_in(page))


def _search_by_job(
    config: "Config", root: Path, place: "Placement", *, fresh: bool, dry_run: bool, as_json: bool
) -> None:
    """Search in a job on SLURM, which is followed, left alone, or printed."""
    from voxscale.files import read_json
    from voxscale.report.write import refresh_report, seen_in
    from voxscale.search.job import draft_search_job, search_on_slurm
    from voxscale.search.results import render_outcome

    draft = draft_search_job(config, root, os.environ, place, fresh=fresh)
    if dry_run:
        answer(as_json, {"search": str(root), "jobs": [(draft.job.purpose, draft.as_text())]}, draft.as_text())
        return
    jobs = search_on_slurm(draft, os.environ, fresh=fresh)
    if place.detach and jobs:
        tell_submitted(as_json, "search", root, jobs)
        return
    metrics, page = read_json(root / "metrics.json"), refresh_report(root)
    content = {"search": str(root), "report": str(page) if page else None, **metrics}
    answer(as_json, content, render_outcome(root, metrics) + seen_in(page))
