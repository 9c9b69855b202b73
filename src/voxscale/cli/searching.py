"""The verb that searches."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from voxscale.cli.options import After, ConfigPath, Debug, Detach, Devices, Json, Nodes, Overrides, RayAddress, SiteName
from voxscale.command import answer


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run; write nothing.")] = False,
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
    from voxscale.files import read_json
    from voxscale.launch.given import apart_from_site, config_or_data, default_run, placed, refuse_for_ray
    from voxscale.report.write import refresh_report, reporting, seen_in
    from voxscale.search.drive import search_here
    from voxscale.search.job import draft_search_job, search_on_slurm
    from voxscale.search.opening import draft_search
    from voxscale.search.results import render_outcome
    from voxscale.search.space import render_trials

    of_config, of_site = apart_from_site(overrides)
    settled = config_or_data(config, of_config, os.environ)
    root = (run or default_run(config)).resolve()
    if on == "ray":
        refuse_for_ray(nodes=nodes, devices=devices != "auto", site=site or of_site, detach=detach, after=after)
        if dry_run:
            draft_search(settled, root, fresh=fresh)
            rows, text = render_trials(settled)
            answer(as_json, {"search": str(root), "trials": rows}, text)
            return
        with reporting(root):
            metrics, text = search_here(settled, root, os.environ, address=address, fresh=fresh)
        page = refresh_report(root)
        content = {"search": str(root), "report": str(page) if page else None, **metrics}
        answer(as_json, content, text + seen_in(page))
        return
    place = placed(on, nodes, devices, site, of_site, os.environ, after=after, detach=detach)
    if place is None or address is not None:
        from voxscale.errors import ConfigError

        raise ConfigError(
            "--address: a job on SLURM starts a Ray of its own", fix="leave out one of --address and --on slurm"
        )
    draft = draft_search_job(settled, root, os.environ, place, fresh=fresh)
    if dry_run:
        answer(as_json, {"search": str(root), "jobs": [(draft.job.purpose, draft.as_text())]}, draft.as_text())
        return
    jobs = search_on_slurm(draft, os.environ, fresh=fresh)
    if detach and jobs:
        content = {"search": str(root), "state": "submitted", "jobs": [vars(job) for job in jobs]}
        answer(as_json, content, f"search folder {root}; cancel with: voxscale cancel {shlex.quote(str(root))}")
        return
    metrics, page = read_json(root / "metrics.json"), refresh_report(root)
    content = {"search": str(root), "report": str(page) if page else None, **metrics}
    answer(as_json, content, render_outcome(root, metrics) + seen_in(page))
