"""Train and evaluate on SLURM: check the request against the cluster, make the run folder, submit, follow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from voxscale.config.load import read_config, render_config, with_fold
from voxscale.config.schema import Config, PerDevice
from voxscale.config.site import Site
from voxscale.data.build import store_root
from voxscale.data.formats import find_cases
from voxscale.errors import BY_CODE, InfrastructureError, VoxscaleError
from voxscale.files import read_json, remove, write_text
from voxscale.launch.allocation import Allocation, run_in_allocation
from voxscale.launch.asking import plan_request
from voxscale.launch.batch import (
    COLLECT,
    EVALUATE,
    MEASURE,
    OPEN,
    PREPARE,
    TRAIN,
    Submitted,
    binds_of,
    fold_jobs,
    make_images_ready,
    prepare_job,
    ranks_job,
    refuse_if_queued,
    submit_jobs,
    train_jobs,
    unfinished_jobs,
)
from voxscale.launch.cluster import Cluster
from voxscale.launch.folder import Draft, draft_run, is_prepared, move_aside, open_run
from voxscale.launch.folds import count_folds
from voxscale.launch.follow import failure_of, follow
from voxscale.launch.local import EVALUATION, Evaluation, evaluation_words
from voxscale.launch.machine import look_at_machine
from voxscale.launch.outcome import (
    judge,
    newest_reports,
    node_failures,
    read_failure,
    read_state,
    train_with_restarts,
    unsaid,
)
from voxscale.launch.placing import (
    check_place,
    is_of_one_node,
    look_at_nodes,
    make_request,
    own_code,
    scratch_of,
    with_code,
    with_scratch,
    within_limit,
)
from voxscale.launch.sbatch import Job, Placement, Request, refuse_unspeakable, render_sbatch
from voxscale.launch.slurm import GONE, cancel, restarts_of
from voxscale.plan.resources import Machine
from voxscale.runs import RunFolder, error_files


@dataclass(frozen=True)
class Submission:
    """What is to be submitted, checked: the run or its folds, the jobs, and whether they can be opened before."""

    root: Path
    place: Placement
    config: Config
    drafts: list[Draft]
    jobs: dict[str, Job]
    request: Request
    opened: bool
    allocation: Allocation | None

    @property
    def is_done(self) -> bool:
        return all(draft.held and read_state(draft.run) == "done" for draft in self.drafts) and len(self.drafts) == 1

    def as_texts(self) -> list[tuple[str, str]]:
        """The files of the jobs, each with what it is for."""
        return [(job.purpose, render_sbatch(job, self.place.site)) for job in self.jobs.values()]


def draft_submission(
    config: Config, root: Path, environ: Mapping[str, str], place: Placement, *, fresh: bool, folds: bool = False
) -> Submission:
    """Check everything that can be checked before a job waits for hours. Nothing is written."""
    refuse_unspeakable(root)
    config = with_scratch(config, place.site, environ)
    nodes_of = look_at_nodes(place, environ)
    code = own_code(config)
    place = replace(place, site=with_code(place.site, code))
    request = make_request(place, config.train.batch, nodes_of, preferred=config.train.devices)
    binds = [*binds_for(config, root, environ, place.site), *code]
    check_place(place.site, request, binds, nodes_of)
    count = count_folds(config) if folds else 0
    each = {root / f"fold-{k}": with_fold(config, k) for k in range(1, count + 1)} if folds else {root: config}
    drafts = _draft_each(each, request, place.site, fresh=fresh)
    opened, asked = is_prepared(config, environ), request
    if opened and isinstance(nodes_of, Cluster):
        asked = plan_request(next(iter(each.values())), root, environ, place, request, nodes_of)
        request = replace(asked, planned=None)
        drafts = _draft_each(each, request, place.site, fresh=fresh)
    if is_of_one_node(root):
        print(f"warning: {root}: nodes rarely share this folder; choose another with --run", file=sys.stderr)
    place = replace(place, site=within_limit(place.site, asked, nodes_of))
    if folds:
        jobs = fold_jobs(root, place.site, asked, binds, folds=count, opened=opened, debug_comm=place.debug_comm)
    else:
        jobs = train_jobs(root, place.site, asked, binds, opened=opened, debug_comm=place.debug_comm)
    allocation = nodes_of if isinstance(nodes_of, Allocation) else None
    return Submission(root, place, config, drafts, jobs, request, opened, allocation)


def _draft_each(each: Mapping[Path, Config], request: Request, site: Site, *, fresh: bool) -> list[Draft]:
    """A run in each folder."""
    cpus = request.cpus or site.cpus_per_device * request.devices
    machine = Machine(gpus=request.devices if request.gpus else 0, cpus=cpus)
    return [
        draft_run(config, folder, machine, devices=str(request.devices), nodes=request.nodes, fresh=fresh)
        for folder, config in each.items()
    ]


def train_on_slurm(submission: Submission, environ: Mapping[str, str], *, detach: bool) -> list[Submitted]:
    """Open the run, or leave that to a job; submit the training and, unless detached, follow it to its end.

    Inside an allocation it trains there and then. Raises what made it fail or stop early.
    """
    run, place = RunFolder(submission.root), submission.place
    refuse_if_queued(run, environ)
    if submission.is_done:
        print(f"{run.root}: done already; --fresh trains it anew", file=sys.stderr)
        return []
    make_images_ready(submission.jobs, place.site, environ)
    _open(submission, environ)
    if submission.allocation is not None:
        _train_there(submission, submission.allocation, environ)
        return []
    preparing = [job.id for job, _ in unfinished_jobs(run, environ) if job.kind == PREPARE]
    submitted = submit_jobs(submission.jobs, place.site, environ, after=[*place.after, *preparing])
    announce(submitted)
    if not detach:
        _follow_training(submission, submitted, environ)
    return submitted


def _train_there(submission: Submission, allocation: Allocation, environ: Mapping[str, str]) -> None:
    """Run the jobs of a submission in an allocation; an array has no tasks there, so its folds come one by one."""
    place, jobs = submission.place, submission.jobs
    if OPEN in jobs:
        run_in_allocation({OPEN: jobs[OPEN]}, place.site, environ, allocation)
        _refuse_unopened(submission)
    for draft in submission.drafts:
        if read_state(draft.run) != "done":
            of_fold = train_jobs(
                draft.run.root,
                place.site,
                submission.request,
                jobs[TRAIN].binds,
                opened=True,
                debug_comm=place.debug_comm,
            )
            train_with_restarts(
                partial(_train_once_there, draft.run, of_fold, submission, allocation, environ), place.restarts
            )
    if COLLECT in jobs:
        _, code = run_in_allocation({COLLECT: jobs[COLLECT]}, place.site, environ, allocation)
        if code != 0:
            raise InfrastructureError(
                f"bringing the folds together ended with exit code {code}", fix="see what it said"
            )


def _train_once_there(
    run: RunFolder, jobs: Mapping[str, Job], submission: Submission, allocation: Allocation, environ: Mapping[str, str]
) -> None:
    attempt, _ = run_in_allocation(jobs, submission.place.site, environ, allocation)
    judge_job(run, run.logs / f"{allocation.job}-{attempt}", submission.request)


def evaluate_on_slurm(
    runs: Sequence[RunFolder], root: Path, choice: Evaluation, environ: Mapping[str, str], place: Placement
) -> list[Submitted]:
    """Submit the evaluation of runs, to begin when what trains in `root` has ended well; follow it unless detached.

    Raises what made it fail.
    """
    made = runs[0].config if runs[0].exists else RunFolder(root).asked
    config = with_scratch(read_config(made), place.site, environ)
    nodes_of = look_at_nodes(place, environ)
    request = make_request(place, PerDevice(per_device=1), nodes_of)
    code = own_code(config)
    place = replace(place, site=with_code(place.site, code))
    binds = [*binds_for(config, root, environ, place.site), *code]
    if choice.data is not None:
        other = {"source": str(choice.data.resolve()), "format": "auto", "split": None, "synthetic": None}
        given = config.model_copy(update={"data": config.data.model_copy(update=other)})
        binds += binds_for(given, root, environ, place.site)
    check_place(place.site, request, binds, nodes_of)
    words = [EVALUATION, *evaluation_words(runs, choice)]
    job = ranks_job(
        root, place.site, request, binds, words, kind=EVALUATE, purpose="evaluate", debug_comm=place.debug_comm
    )
    jobs = {EVALUATE: job}
    waits = [job.id for job, _ in unfinished_jobs(RunFolder(root), environ) if job.kind in (TRAIN, COLLECT)]
    place = replace(place, after=(*place.after, *waits))
    return run_on_slurm(jobs, request, environ, place, nodes_of)


def run_on_slurm(
    jobs: Mapping[str, Job],
    request: Request,
    environ: Mapping[str, str],
    place: Placement,
    nodes_of: Cluster | Allocation,
    *,
    may_leave: bool = True,
    has_result: Callable[[], bool] = lambda: False,
) -> list[Submitted]:
    """Run jobs that leave no state but their ranks' reports: in the allocation, or submitted and followed.

    Raises what made them fail. Without `may_leave`, Ctrl-C cancels them. What SLURM has forgotten is judged by its
    nodes' reports, or of a job without them by `has_result`.
    """
    run = RunFolder(next(iter(jobs.values())).folder)
    make_images_ready(jobs, place.site, environ)
    if isinstance(nodes_of, Allocation):
        attempt, code = run_in_allocation(jobs, place.site, environ, nodes_of)
        _judge_reports(run.logs / f"{nodes_of.job}-{attempt}", request)
        if code != 0:
            raise InfrastructureError(f"ended with exit code {code}", fix="see what it said")
        return []
    submitted = submit_jobs(jobs, place.site, environ, after=place.after)
    announce(submitted)
    if not place.detach:
        state = follow(run, submitted, environ, may_leave=may_leave)
        number = submitted[-1].id
        reports = newest_reports(run, since=number, until=number, restarts=restarts_of(number, environ))
        if reports != run.logs:
            _judge_reports(reports, request)
        is_known_well = state is GONE and (_all_ended(reports, request) or has_result())
        if state.state != "COMPLETED" and not is_known_well:
            raise failure_of(state, run, submitted, environ)
    return submitted


def measure_on_slurm(submission: Submission, words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Open the run, or leave that to a job, and have the ranks of a job run a module of ours, named first in `words`.

    The folder is the caller's to remove, so that nothing is left to run in it. Raises what made it fail.
    """
    _open(submission, environ)
    site, request, jobs = submission.place.site, submission.request, submission.jobs
    job = ranks_job(
        submission.root, site, request, jobs[TRAIN].binds, words, kind=MEASURE, purpose="measure steps"
    )  # fmt: skip
    opening = {OPEN: jobs[OPEN]} if OPEN in jobs else {}
    nodes_of = submission.allocation or look_at_nodes(submission.place, environ)
    try:
        run_on_slurm({**opening, MEASURE: job}, request, environ, submission.place, nodes_of, may_leave=False)
    except VoxscaleError:
        cancel([each.id for each, _ in unfinished_jobs(RunFolder(submission.root), environ)], environ)
        _refuse_unopened(submission)
        raise


def prepare_on_slurm(
    config: Config, root: Path, words: Sequence[str], environ: Mapping[str, str], place: Placement
) -> list[Submitted]:
    """Have a job prepare a config's data; `words`, the arguments of the verb, begin with the config.

    Followed unless detached, and inside an allocation run there. Raises what made it fail.
    """
    refuse_unspeakable(root)
    config = with_scratch(config, place.site, environ)
    if config.data.store is not None:
        words = [*(word for word in words if not word.startswith("data.store=")), f"data.store={config.data.store}"]
    nodes_of = look_at_nodes(place, environ)
    binds = [*binds_for(config, root, environ, place.site), Path(words[0]).parent]
    request = Request(cpus=nodes_of.cpus if isinstance(nodes_of, Allocation) else None)
    check_place(place.site, request, binds, nodes_of)
    return run_on_slurm(
        {PREPARE: prepare_job(root, place.site, request, binds, words)},
        request,
        environ,
        place,
        nodes_of,
        has_result=partial(is_prepared, config, environ),
    )


def _judge_reports(reports: Path, request: Request) -> None:
    if not reports.is_dir():
        return  # a job of one process
    failures, otherwise = node_failures(reports), unsaid(reports, request.nodes)
    if failures or otherwise or error_files(reports):
        raise read_failure(reports, failures, otherwise=otherwise)


def _all_ended(reports: Path, request: Request) -> bool:
    return len(list(reports.glob("node-*.end.json"))) == request.nodes


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
    """Write the run folders, or where the data are not prepared yet what the job that opens them needs.

    What an earlier start said of the whole is gone then.
    """
    run = RunFolder(submission.root)
    remove(run.open_error)
    if COLLECT in submission.jobs:
        remove(run.metrics)
    if submission.opened:
        for draft in submission.drafts:
            open_run(draft, look_at_machine(environ), environ)
        return
    for draft in submission.drafts:
        if draft.fresh and draft.run.exists:
            move_aside(draft.run)
    run.make()
    write_text(run.asked, render_config(submission.config))


def _follow_training(submission: Submission, submitted: Sequence[Submitted], environ: Mapping[str, str]) -> None:
    run = RunFolder(submission.root)
    state = follow(run, submitted, environ)
    if state.state == "COMPLETED" or read_state(run) == "done":
        return
    _refuse_unopened(submission)
    number = next(job.id for job in submitted if job.kind == TRAIN)
    restarts = restarts_of(number, environ)
    for each in sorted((draft.run for draft in submission.drafts), key=lambda run: read_state(run) != "failed"):
        reports = newest_reports(each, since=number, restarts=restarts)
        if read_state(each) != "done" and reports != each.logs:
            _judge_run(each, reports, submission.request, failure_of(state, each, submitted, environ))
    raise failure_of(state, run, submitted, environ)


def _refuse_unopened(submission: Submission) -> None:
    """Raise why the job that was to open the run could not, if it says so."""
    run = RunFolder(submission.root)
    if OPEN in submission.jobs and run.open_error.exists():
        error = read_json(run.open_error)
        raise BY_CODE[error["code"]](error["message"], fix=error["fix"])


def _judge_run(run: RunFolder, reports: Path, request: Request, of_scheduler: VoxscaleError) -> None:
    """Raise why a run is not done: as its ranks say, else as its nodes saw it, else as SLURM does."""
    failures, unsaid_by_ranks = node_failures(reports), unsaid(reports, request.nodes)
    otherwise = unsaid_by_ranks or (None if failures else of_scheduler)
    judge(run, reports, failures, world_size=request.world_size, otherwise=otherwise)


def binds_for(config: Config, root: Path, environ: Mapping[str, str], site: Site) -> list[Path]:
    """The folders that a run's processes read and write, where they run in a container."""
    if site.container is None:
        return []
    known = config.data.synthetic is None or Path(config.data.source).exists()
    cases = find_cases(config.data, store_root(config.data, environ)).cases if known else []
    scratch = scratch_of(site, environ)
    return [
        *binds_of(config, root, environ, [file for case in cases for file in case.files]),
        *([scratch] if scratch is not None and scratch.is_dir() else []),
    ]
