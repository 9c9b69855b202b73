"""Run folders as jobs: which jobs a run needs, how they hang together, and handing them to SLURM."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from voxscale.config.schema import Config
from voxscale.config.site import Site
from voxscale.data.build import store_root
from voxscale.errors import InfrastructureError, VoxscaleError
from voxscale.files import locked, read_json, write_json, write_text
from voxscale.launch.container import folders_of
from voxscale.launch.image import make_ready
from voxscale.launch.local import profile_words
from voxscale.launch.sbatch import (
    Job,
    Request,
    cpus_per_task,
    job_name,
    output_pattern,
    python_words,
    render_once,
    render_ranks,
    render_sbatch,
    signal_before_limit_s,
)
from voxscale.launch.slurm import GONE, JobState, cancel, expand_output, states_of, submit
from voxscale.runs import RunFolder

TRAIN, OPEN, COLLECT, EVALUATE, PREPARE, SCRIPT, CHECK, SEARCH, MEASURE = (
    "train", "open", "collect", "evaluate", "prepare", "script", "check", "search", "measure"
)  # fmt: skip


_ADVANCING = frozenset({OPEN, TRAIN, COLLECT, SEARCH})  # jobs that carry a run on: one of them at a time
_PROGRAMS = ("node.py", "meeting.py", "ranks.py", "as_rank.py", "ray_node.py", "ray_process.py")  # some need others
END_S = 15  # of the time before the limit, for a job to end after its ranks have saved


@dataclass(frozen=True)
class Submitted:
    """A job that SLURM has taken, as `jobs.json` records it."""

    kind: str
    id: int
    file: str
    logs: list[str]  # of an array one for each task
    errors: list[str] = field(default_factory=list)  # likewise, where the site keeps them apart

    @property
    def is_array(self) -> bool:
        return len(self.logs) > 1

    @property
    def log(self) -> str:
        return self.logs[0] if not self.is_array else f"{self.logs[0]} … {Path(self.logs[-1]).name}"

    @property
    def outputs(self) -> list[str]:
        """All files that SLURM writes for it, each once."""
        return [*dict.fromkeys([*self.logs, *self.errors])]

    def state_in(self, states: Mapping[int, JobState]) -> JobState:
        """Its state among those that SLURM tells by number. The same number with another file is another job's: the
        folder may be seen from a second cluster, or the numbers have begun again."""
        state = states.get(self.id, GONE)
        return state if state.file == self.file else GONE


def train_jobs(
    root: Path, site: Site, request: Request, binds: Sequence[Path], *, opened: bool, debug_comm: bool
) -> dict[str, Job]:
    """The jobs that train one run: one that opens it where its data are not prepared yet, and the training."""
    python = python_words(binds, site, gpus=request.gpus)
    training = _training_job(root, shlex.quote(str(root)), site, request, python, debug_comm=debug_comm)
    opening = {} if opened else {OPEN: open_job(root, site, request, python)}
    return _bound({**opening, TRAIN: training}, binds)


def fold_jobs(
    root: Path, site: Site, request: Request, binds: Sequence[Path], *, folds: int, opened: bool, debug_comm: bool
) -> dict[str, Job]:
    """The jobs of a cross-validation: an array with a task for each fold, and one that brings the scores together."""
    python = python_words(binds, site, gpus=request.gpus)
    run = f'{shlex.quote(str(root))}/fold-"$SLURM_ARRAY_TASK_ID"'
    training = _training_job(root, run, site, request, python, debug_comm=debug_comm)
    collect = Job(
        name=f"{training.name}-collect",
        purpose=f"voxscale: bring the scores of {folds} folds together",
        folder=root,
        request=replace(request, nodes=1, planned=None),
        lines=render_once(
            site,
            request,
            python,
            ["-m", "voxscale.launch.folds", str(root), "--devices", str(request.devices)],
            page_of=root,
        ),
    )
    opening = {} if opened else {OPEN: open_job(root, site, request, python, folds=True)}
    return _bound({**opening, TRAIN: replace(training, array=folds), COLLECT: collect}, binds)


def _bound(jobs: Mapping[str, Job], binds: Sequence[Path]) -> dict[str, Job]:
    """Jobs of voxscale's own processes, which see these folders in a container."""
    return {kind: replace(job, binds=tuple(binds), is_own=True) for kind, job in jobs.items()}


def _training_job(
    root: Path, run: str, site: Site, request: Request, python: Sequence[str], *, debug_comm: bool
) -> Job:
    world = f"--world-size {request.world_size}"
    traced = "".join(f" {word}" for word in profile_words(request.profile))
    return Job(
        name=job_name(root.name),
        purpose=f"voxscale: train {_described(request)}; by hand: sbatch THIS_FILE",
        folder=root,
        request=request,
        lines=render_ranks(
            run,
            f'-m voxscale.train.worker "$run" --reports "$reports" {world}{traced}',
            site,
            request,
            python=python,
            program=RunFolder(root).node_program,
            finish=[*finish_words(request), world, '--limit "$limit"'],
            node_options=("--echo first", f"--save-time {max(10, signal_before_limit_s(site, request) - END_S)}"),
            resumes=True,
            is_own=True,
            page=True,
        ),
        resumes=True,
        debug_comm=debug_comm,
    )


def finish_words(request: Request) -> list[str]:
    """The last line of a job, as shell text: how it ended."""
    return ["-m voxscale.launch.outcome", '"$run"', '--reports "$reports"', f"--nodes {request.nodes}"]


def open_job(root: Path, site: Site, request: Request, python: Sequence[str], *, folds: bool = False) -> Job:
    """The job that finds, checks and prepares the data, and then writes the run folder."""
    words = ["-m", "voxscale.launch.opening", str(root), "--nodes", str(request.nodes)]
    words += ["--devices", str(request.devices), "--cpus", str(cpus_per_task(site, request))]
    words += [*(["--gpus"] if request.gpus else []), *(["--folds"] if folds else [])]
    return Job(
        name=f"{job_name(root.name)}-open",
        purpose="voxscale: check and prepare the data, then write the run folder",
        folder=root,
        request=Request(devices=request.devices),
        lines=render_once(site, request, python, words),
    )


def ranks_job(
    root: Path,
    site: Site,
    request: Request,
    binds: Sequence[Path],
    words: Sequence[str],
    *,
    kind: str,
    purpose: str,
    node_options: Sequence[str] = (),
    debug_comm: bool = False,
) -> Job:
    """A job of ranks that leave no state but their reports; `words` are a module of ours and its arguments."""
    return Job(
        name=f"{job_name(root.name)}-{kind}",
        purpose=f"voxscale: {purpose} {_described(request)}",
        folder=root,
        request=request,
        lines=render_ranks(
            shlex.quote(str(root)),
            f'-m {shlex.join(words)} --reports "$reports" --world-size {request.world_size}',
            site,
            request,
            python=python_words(binds, site, gpus=request.gpus),
            program=RunFolder(root).node_program,
            finish=[*finish_words(request), "--evaluation"],
            node_options=("--echo first", *node_options),
            is_own=True,
            page=kind == EVALUATE,
        ),
        debug_comm=debug_comm,
        binds=tuple(binds),
        is_own=True,
    )  # fmt: skip


def prepare_job(root: Path, site: Site, request: Request, binds: Sequence[Path], words: Sequence[str]) -> Job:
    """The job that builds a store; `words` are the arguments of `voxscale prepare`."""
    python = python_words(binds, site, gpus=False)
    return Job(
        name=f"{job_name(root.name)}-prepare",
        purpose="voxscale: check and prepare the data",
        folder=root,
        request=request,
        lines=render_once(site, request, python, ["-m", "voxscale", "prepare", *words]),
        binds=tuple(binds),
        is_own=True,
    )


def binds_of(config: Config, root: Path, environ: Mapping[str, str], data_files: Sequence[Path] = ()) -> list[Path]:
    """The folders that a run's processes read and write."""
    source, start = Path(config.data.source), Path(config.train.init_from or root)
    return [
        source if source.is_dir() else source.parent,
        *folders_of(data_files),
        store_root(config.data, environ),
        root.parent,
        *([start] if start.exists() else []),  # a run that has begun no longer needs it
    ]


def submit_jobs(
    jobs: Mapping[str, Job], site: Site, environ: Mapping[str, str], *, after: Sequence[int] = ()
) -> list[Submitted]:
    """Write the jobs' files and hand them to SLURM, each to begin when the one before has ended well.

    What was submitted is recorded before the next; where one is refused, those before it are cancelled.
    """
    folder = RunFolder(next(iter(jobs.values())).folder)
    folder.make()
    with locked(folder.submit_lock):
        if not _ADVANCING.isdisjoint(jobs):
            refuse_if_queued(folder, environ)  # asked before too; another command may have submitted it since
        return _submit_in_order(jobs, site, environ, folder, after)


def _submit_in_order(
    jobs: Mapping[str, Job], site: Site, environ: Mapping[str, str], folder: RunFolder, after: Sequence[int]
) -> list[Submitted]:
    earlier = read_jobs(folder)
    submitted: list[Submitted] = []
    waits_for = list(after)
    for kind, file in write_jobs(jobs, site).items():
        job = jobs[kind]
        try:
            number = submit(file, environ, after=waits_for)
        except VoxscaleError:
            cancel([each.id for each in submitted], environ)
            raise
        logs, errors = (_files_of(job, number, pattern) for pattern in (site.output, site.error))
        submitted.append(Submitted(kind, number, str(file), logs, errors))
        write_json(folder.jobs, {"jobs": [vars(each) for each in (*earlier, *submitted)]})
        waits_for = [number]
    return submitted


def _files_of(job: Job, number: int, pattern: str | None) -> list[str]:
    """The files that SLURM writes after a pattern of the site, one for each task."""
    if pattern is None:
        return []
    tasks = range(1, job.array + 1) if job.array is not None else [None]
    return [expand_output(output_pattern(job, pattern), number, job.name, task) for task in tasks]


def make_images_ready(jobs: Mapping[str, Job], site: Site, environ: Mapping[str, str]) -> None:
    """Fetch and check the image that the jobs run in, if they run in one; called before anything is written."""
    for binds, is_own in {(job.binds, job.is_own) for job in jobs.values()}:
        make_ready(site, binds, environ, is_own=is_own)


def write_jobs(jobs: Mapping[str, Job], site: Site) -> dict[str, Path]:
    """Write the jobs' files, and what their nodes run, into the folder they are for."""
    texts = {kind: render_sbatch(job, site) for kind, job in jobs.items()}
    folder = RunFolder(next(iter(jobs.values())).folder)
    folder.make()
    folder.launch.mkdir(exist_ok=True)
    copy_programs(folder)
    written = {}
    for kind in jobs:
        written[kind] = folder.launch / ("job.sbatch" if kind in (TRAIN, SCRIPT) else f"{kind}.sbatch")
        write_text(written[kind], texts[kind])
    for pattern in (site.output, site.error):
        if pattern is not None and not pattern.startswith("/"):
            (folder.root / pattern).parent.mkdir(parents=True, exist_ok=True)  # SLURM does not make it
    return written


def copy_programs(run: RunFolder, *others: str) -> None:
    """Copy what the nodes of a job run to where they find it, voxscale or not."""
    for name in (*_PROGRAMS, *others):
        write_text(run.launch / name, files("voxscale.launch").joinpath(name).read_text())


def read_jobs(run: RunFolder) -> list[Submitted]:
    """The jobs that were ever submitted for a folder, the oldest first."""
    try:
        content: dict[str, Any] = read_json(run.jobs)
        return [Submitted(**job) for job in content["jobs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def refuse_if_queued(run: RunFolder, environ: Mapping[str, str], kinds: Collection[str] = _ADVANCING) -> None:
    """A run that waits in the queue, or trains, is not submitted twice."""
    for job, state in unfinished_jobs(run, environ):
        if job.kind in kinds:
            raise InfrastructureError(
                f"run {run.root}: job {job.id} is {state} for it already",
                fix=f"wait for it, or cancel it: voxscale cancel {shlex.quote(str(run.root))}",
            )


def unfinished_jobs(run: RunFolder, environ: Mapping[str, str]) -> list[tuple[Submitted, JobState]]:
    """Those of a folder's jobs that wait or run now, as far as SLURM can be asked from here."""
    jobs = read_jobs(run) if shutil.which("squeue", path=environ.get("PATH")) else []
    states = states_of([job.id for job in jobs], environ)
    return [(job, state) for job in jobs if not (state := job.state_in(states)).is_over]


def _described(request: Request) -> str:
    kind = "GPU" if request.gpus else "process"
    plural = kind if request.devices == 1 else {"GPU": "GPUs", "process": "processes"}[kind]
    return f"on {request.nodes} node{'s' if request.nodes > 1 else ''} × {request.devices} {plural}"
