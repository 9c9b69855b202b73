"""Train and evaluate on SLURM: check the request against the cluster, make the run folder, submit, follow."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from voxscale.config.load import read_config, render_config, with_fold
from voxscale.config.schema import Config, PerDevice
from voxscale.config.site import Site
from voxscale.data.build import store_root
from voxscale.data.formats import find_cases
from voxscale.errors import ConfigError, StoppedEarly
from voxscale.files import write_text
from voxscale.launch.allocation import Allocation, run_in_allocation
from voxscale.launch.batch import (
    EVALUATE,
    Submitted,
    binds_of,
    evaluate_job,
    fold_jobs,
    read_jobs,
    refuse_if_queued,
    submit_jobs,
    train_jobs,
)
from voxscale.launch.cluster import check_request, read_cluster
from voxscale.launch.container import check_container
from voxscale.launch.folder import Draft, draft_run, is_prepared, move_aside, open_run
from voxscale.launch.folds import count_folds
from voxscale.launch.follow import failure_of, follow
from voxscale.launch.machine import look_at_machine
from voxscale.launch.outcome import judge, node_failures, read_state, unsaid
from voxscale.launch.sbatch import Job, Placement, Request, refuse_unspeakable, render_sbatch
from voxscale.launch.slurm import states_of
from voxscale.plan.resources import Machine, choose_devices
from voxscale.runs import RunFolder


@dataclass(frozen=True)
class Submission:
    """What is to be submitted, checked: the run or its folds, the jobs, and whether they can be opened before."""

    root: Path
    config: Config
    drafts: list[Draft]
    jobs: dict[str, Job]
    request: Request
    opened: bool
    allocation: Allocation | None

    @property
    def is_done(self) -> bool:
        return all(draft.held and read_state(draft.run) == "done" for draft in self.drafts) and len(self.drafts) == 1

    def as_texts(self, site: Site) -> list[tuple[str, str]]:
        """The files of the jobs, each with what it is for."""
        return [(job.purpose, render_sbatch(job, site)) for job in self.jobs.values()]


def draft_submission(
    config: Config, root: Path, environ: Mapping[str, str], place: Placement, *, fresh: bool, folds: bool = False
) -> Submission:
    """Check everything that can be checked before a job waits for hours. Nothing is written."""
    refuse_unspeakable(root)
    config = with_scratch(config, place.site, environ)
    allocation = Allocation.from_env(environ)
    request = make_request(place, config.train.batch, environ, allocation)
    cpus = request.cpus or place.site.cpus_per_device * request.devices
    machine = Machine(gpus=request.devices if request.gpus else 0, cpus=cpus)
    count = count_folds(config) if folds else 0
    each = {root / f"fold-{k}": with_fold(config, k) for k in range(1, count + 1)} if folds else {root: config}
    drafts = [
        draft_run(its, folder, machine, devices=str(request.devices), nodes=request.nodes, fresh=fresh)
        for folder, its in each.items()
    ]
    opened = is_prepared(config, environ)
    binds = _binds(config, root, environ, place.site)
    check_place(place.site, request, binds, environ, allocation)
    if folds:
        jobs = fold_jobs(root, place.site, request, binds, folds=count, opened=opened, debug_comm=place.debug_comm)
    else:
        jobs = train_jobs(root, place.site, request, binds, opened=opened, debug_comm=place.debug_comm)
    return Submission(root, config, drafts, jobs, request, opened, allocation)


def train_on_slurm(submission: Submission, environ: Mapping[str, str], place: Placement) -> list[Submitted]:
    """Open the run, or leave that to a job; submit the training and, unless detached, follow it to its end.

    Inside an allocation it trains there and then. Raises what made it fail or stop early.
    """
    run = RunFolder(submission.root)
    refuse_if_queued(run, environ)
    if submission.is_done:
        print(f"{run.root}: done already; --fresh trains it anew", file=sys.stderr)
        return []
    _open(submission, environ)
    if submission.allocation is not None:
        attempt = run_in_allocation(submission.jobs, place.site, environ, submission.allocation)
        reports = run.logs / f"{submission.allocation.job}-{attempt}"
        judge_job(run, reports, submission.request)
        return []
    submitted = submit_jobs(submission.jobs, place.site, environ, after=place.after)
    announce(submitted)
    if not place.detach:
        _follow_training(submission, submitted, environ)
    return submitted


def evaluate_on_slurm(
    runs: Sequence[RunFolder], root: Path, words: Sequence[str], environ: Mapping[str, str], place: Placement
) -> list[Submitted]:
    """Submit the evaluation of runs, to begin when what trains in `root` has ended well; follow it unless detached."""
    config = with_scratch(read_config(runs[0].config), place.site, environ)
    allocation = Allocation.from_env(environ)
    request = make_request(place, PerDevice(per_device=1), environ, allocation)
    binds = _binds(config, root, environ, place.site)
    check_place(place.site, request, binds, environ, allocation)
    jobs = {EVALUATE: evaluate_job(root, place.site, request, binds, words, debug_comm=place.debug_comm)}
    if allocation is not None:
        attempt = run_in_allocation(jobs, place.site, environ, allocation)
        return []
    waits = [job.id for job in read_jobs(RunFolder(root)) if not _is_over(job, environ)]
    submitted = submit_jobs(jobs, place.site, environ, after=[*place.after, *waits[-1:]])
    announce(submitted)
    return submitted


def make_request(
    place: Placement, batch: int | PerDevice, environ: Mapping[str, str], allocation: Allocation | None
) -> Request:
    """How many nodes and devices: as asked for, or as many as the allocation or the partition's nodes have."""
    site = place.site
    nodes = place.nodes or (len(allocation.nodes) if allocation is not None else 1)
    if allocation is not None:
        allocation.refuse_more_than(nodes)
        gpus, most = allocation.gpus > 0, allocation.gpus or max(1, allocation.cpus // site.cpus_per_device)
    else:
        gpus = site.gpus.ask != "none"
        most = site.gpus.per_node or read_cluster(environ).devices_per_node(site)
        if gpus and place.devices.isdigit():
            most = max(most, int(place.devices))  # whether a node has so many is checked with all else
    devices, _ = choose_devices(place.devices, Machine(gpus=most if gpus else 0, cpus=most), batch, nodes=nodes)
    return Request(nodes, devices, gpus=gpus, cpus=allocation.cpus if allocation is not None else None)


def check_place(
    site: Site,
    request: Request,
    binds: Sequence[Path],
    environ: Mapping[str, str],
    allocation: Allocation | None,
) -> None:
    """Refuse what the cluster would refuse, or take and never run; everything at once."""
    findings = check_container(site.container, binds) if site.container is not None else []
    if allocation is None:
        findings += check_request(read_cluster(environ), site, request)
    if findings:
        raise ConfigError.from_findings(findings, fix="change the request or the site's profile")


def with_scratch(config: Config, site: Site, environ: Mapping[str, str]) -> Config:
    """The config with its store in the site's scratch, unless it says itself where the store is."""
    if site.scratch is None or config.data.store is not None:
        return config
    try:
        scratch = Template(site.scratch).substitute(environ)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"site scratch {site.scratch}: {error} is not set", fix="set the variable, or state the folder"
        ) from None
    store = str(Path(scratch).expanduser() / "voxscale")
    return config.model_copy(update={"data": config.data.model_copy(update={"store": store})})


def announce(submitted: Sequence[Submitted]) -> None:
    for job in submitted:
        print(f"submitted job {job.id} ({job.kind}), output in {job.log}", file=sys.stderr)


def judge_job(run: RunFolder, reports: Path, request: Request) -> None:
    """Raise what made a job's run fail or stop early, as its nodes and ranks left it in `reports`."""
    judge(
        run,
        reports,
        node_failures(reports),
        world_size=request.world_size,
        otherwise=unsaid(reports, request.nodes),
    )


def _open(submission: Submission, environ: Mapping[str, str]) -> None:
    """Write the run folders, or where the data are not prepared yet what the job that opens them needs."""
    if submission.opened:
        for draft in submission.drafts:
            open_run(draft, look_at_machine(environ), environ)
        return
    for draft in submission.drafts:
        if draft.fresh and draft.run.exists:
            move_aside(draft.run)
    run = RunFolder(submission.root)
    write_text(run.asked, render_config(submission.config))
    run.root.chmod(0o700)


def _follow_training(submission: Submission, submitted: Sequence[Submitted], environ: Mapping[str, str]) -> None:
    run = RunFolder(submission.root)
    state = follow(run, submitted, environ)
    if state.state == "COMPLETED" or read_state(run) == "done":
        return
    reports = newest_reports(run, submitted[-1].id)
    if reports is None:
        raise failure_of(state, run, submitted)
    if not node_failures(reports) and not isinstance(unsaid(reports, submission.request.nodes), StoppedEarly):
        judge(run, reports, [], world_size=submission.request.world_size, otherwise=failure_of(state, run, submitted))
    judge_job(run, reports, submission.request)


def newest_reports(run: RunFolder, job: int) -> Path | None:
    """Where the ranks of a job's last attempt left their reports."""
    attempts = [path for path in run.logs.glob(f"{job}-*") if path.name.removeprefix(f"{job}-").isdigit()]
    return max(attempts, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _binds(config: Config, root: Path, environ: Mapping[str, str], site: Site) -> list[Path]:
    if site.container is None:
        return []
    known = config.data.synthetic is None or Path(config.data.source).exists()
    cases = find_cases(config.data, store_root(config.data, environ)).cases if known else []
    return binds_of(config, root, environ, [file for case in cases for file in case.files])


def _is_over(job: Submitted, environ: Mapping[str, str]) -> bool:
    state = states_of([job.id], environ)[job.id]
    return state.is_over or state.state == "GONE"
