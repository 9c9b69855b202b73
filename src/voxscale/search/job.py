"""A search as a job on SLURM: a Ray cluster over its nodes, and the driver on the first of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from voxscale.config.load import render_config
from voxscale.config.schema import Config, PerDevice
from voxscale.config.search import Search
from voxscale.config.site import Site
from voxscale.errors import InfrastructureError
from voxscale.files import remove, write_text
from voxscale.launch.allocation import Allocation
from voxscale.launch.batch import END_S, SEARCH, Submitted, copy_programs, finish_words, refuse_if_queued
from voxscale.launch.cluster import Cluster
from voxscale.launch.cluster_run import binds_for, run_on_slurm
from voxscale.launch.folder import move_aside
from voxscale.launch.placing import (
    check_place,
    is_of_one_node,
    look_at_nodes,
    make_request,
    own_code,
    with_code,
    with_scratch,
    within_limit,
)
from voxscale.launch.ray import RayNode, Share
from voxscale.launch.ray_job import check_ray_interpreter, interpreter_here, render_with_ray
from voxscale.launch.sbatch import (
    Job,
    Placement,
    Request,
    cpus_per_task,
    job_name,
    python_words,
    refuse_unspeakable,
    render_sbatch,
    signal_before_limit_s,
)
from voxscale.runs import RunFolder, SearchFolder
from voxscale.search.opening import check_unprepared, continued_search, draft_search, share_of_trial
from voxscale.search.results import read_finished

_WRITE_S = 5  # of the time to save, for the driver itself
_STEPS = 'cat "$run/launch/steps" 2>/dev/null || echo 0'  # changes whenever there is something new to continue from


@dataclass(frozen=True)
class SearchJob:
    """A search as a job, checked against the cluster; nothing is written yet."""

    folder: SearchFolder
    config: Config
    job: Job
    place: Placement
    nodes_of: Cluster | Allocation

    def as_text(self) -> str:
        return render_sbatch(self.job, self.place.site)


def draft_search_job(
    config: Config, root: Path, environ: Mapping[str, str], place: Placement, *, fresh: bool
) -> SearchJob:
    """Check everything that can be checked before a job waits for hours."""
    refuse_unspeakable(root)
    folder = draft_search(config, root, fresh=fresh)
    config = with_scratch(config, place.site, environ)
    nodes_of, code = look_at_nodes(place, environ), own_code(config)
    request = make_request(place, PerDevice(per_device=1), nodes_of)
    place = replace(place, site=with_code(within_limit(place.site, request, nodes_of), code))
    node = _node_of(place.site, request)
    share, ranks = _share_of(continued_search(config, folder, fresh=fresh), node)
    if fresh or not folder.exists:
        check_unprepared(config, folder, share, ranks, environ)
    binds = [*binds_for(config, root, environ, place.site), *code]
    check_place(place.site, request, binds, nodes_of)
    if (python := interpreter_here(place.site, python_words(binds, place.site, gpus=request.gpus))) is not None:
        check_ray_interpreter(python, environ)
    if is_of_one_node(root):
        print(f"warning: {root}: nodes rarely share this folder; choose another with --run", file=sys.stderr)
    return SearchJob(folder, config, search_job(root, place.site, request, binds), place, nodes_of)


def search_on_slurm(draft: SearchJob, environ: Mapping[str, str], *, fresh: bool) -> list[Submitted]:
    """Submit the search and, unless detached, follow it to its end; inside an allocation it runs there and then.

    Raises what made it fail or stop early. Nothing is submitted where nothing is left to do.
    """
    run = RunFolder(draft.folder.root)
    refuse_if_queued(run, environ)
    if not fresh and read_finished(draft.folder, draft.config) is not None:
        print(f"{run.root}: done already; --fresh searches anew", file=sys.stderr)
        return []
    if fresh and draft.folder.exists:
        move_aside(run)
    run.make()
    remove(run.metrics)  # of an earlier start
    write_text(draft.folder.asked, render_config(draft.config))
    copy_programs(run)
    return run_on_slurm({SEARCH: draft.job}, draft.job.request, environ, draft.place, draft.nodes_of)


def search_job(root: Path, site: Site, request: Request, binds: list[Path]) -> Job:
    """The job that drives a search; at its time limit the trials save, and it is queued again."""
    save_time_s = max(10, signal_before_limit_s(site, request) - END_S)
    nodes = f"{request.nodes} node{'s' if request.nodes > 1 else ''}"
    return Job(
        name=job_name(root.name),
        purpose=f"voxscale: search with Ray on {nodes}; by hand: sbatch THIS_FILE",
        folder=root,
        request=request,
        lines=render_with_ray(
            shlex.quote(str(root)),
            f'-m voxscale.search.drive "$run" --reports "$reports" --save-time {max(5, save_time_s - _WRITE_S)}',
            site,
            request,
            python=python_words(binds, site, gpus=request.gpus),
            folder=RunFolder(root),
            finish=[*finish_words(request), '--limit "$limit"'],
            node_options=(f"--save-time {save_time_s}",),
            resumes=True,
            is_own=True,
            page=True,
            saved=_STEPS,
        ),
        resumes=True,
        binds=tuple(binds),
        is_own=True,
    )


def _node_of(site: Site, request: Request) -> RayNode:
    """A node of the job, as its Ray will have it."""
    return RayNode("", "a node", cpus_per_task(site, request), request.devices if request.gpus else 0)


def _share_of(search: Search, node: RayNode) -> tuple[Share, int]:
    try:
        return share_of_trial(search.per_trial, [node])
    except InfrastructureError as error:
        error.fix += "; or ask for more of each node with --devices"
        raise
