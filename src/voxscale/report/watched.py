"""A run, a search or a cross-validation as it is now, from the files of its folder; and what its job waits for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from voxscale.config.load import read_config
from voxscale.data.split import num_folds
from voxscale.errors import ConfigError, VoxscaleError
from voxscale.files import NewLines, is_locked, read_json
from voxscale.launch.batch import Submitted
from voxscale.launch.slurm import JobState, states_of
from voxscale.plan.plan import Plan
from voxscale.report.happened import Happened
from voxscale.report.listing import (
    describe_search,
    ended_by_job,
    is_carried_on,
    is_listed,
    newest_job,
    state_of,
    why_failed,
)
from voxscale.report.trials import SeenTrials
from voxscale.runs import RunFolder, SearchFolder, runs_of

_PARTS = 40  # of a curve
_ASK_S = 5.0  # between questions to the scheduler


@dataclass(frozen=True)
class RunView:
    """One run at one moment; None is what is not known. `state` is as `voxscale runs` lists it."""

    run: str
    state: str
    why: str = ""  # it waits, or came to its end
    doing: str = ""
    job: int | None = None
    job_state: str | None = None
    owner: dict[str, Any] | None = None
    step: int = 0
    steps: int = 0
    epoch: int = 0
    epochs: int = 0
    elapsed_s: float | None = None
    left_s: float | None = None
    patches_per_s: float | None = None
    step_s: float | None = None
    data_share: float | None = None
    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    lr: float | None = None
    validation: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    world_size: int = 0
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "stopped", "failed", "interrupted") or (
            self.state == "new" and self.job_state is not None
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GroupView:
    """Runs that belong together: the trials of a search that run, or the folds of a cross-validation."""

    run: str
    kind: str  # search or folds
    state: str
    ended: int
    all: int
    best: dict[str, Any] | None
    runs: list[RunView]
    why: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "stopped", "failed", "interrupted")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


View = RunView | GroupView


class Watched(Protocol):
    def look(self) -> View: ...


def open_watched(root: Path, environ: Mapping[str, str]) -> Watched:
    """What is in a folder. Raises ConfigError where nothing is that can be watched."""
    run = RunFolder(root.resolve())
    if SearchFolder(run.root).exists:
        return WatchedSearch(SearchFolder(run.root), environ)
    if not is_listed(run) and (runs_of(run.root) or (run.jobs.exists() and any(run.root.glob("fold-*")))):
        return WatchedFolds(run, environ)
    if is_listed(run):
        return WatchedRun(run, environ)
    there = "not a run folder" if root.exists() else "no such folder"
    raise ConfigError(f"{root}: {there}", fix="give a folder that `voxscale runs` lists")


class WatchedRun:
    """A run that is looked at again and again; only what is new is read."""

    def __init__(self, run: RunFolder, environ: Mapping[str, str]) -> None:
        self._run, self._environ = run, environ
        self._happened = Happened(run.events)
        self._queue = _Queue(run, environ)
        self._metric = ""

    def look(self) -> RunView:
        run, happened = self._run, self._happened
        happened.look()
        state = state_of(run, began=happened.has_begun or run.command.exists())
        queue = self._queue.ask(state)
        plan = _read_plan(run)
        trained = happened.trained or {}
        steps = plan.num_steps if plan is not None else 0
        shown, why = self._state(state, queue)
        return RunView(
            run=str(run.root),
            state=shown,
            why=why,
            doing=_doing(happened, plan) if shown == "running" else "",
            job=queue.job.id if queue.job is not None else None,
            job_state=str(queue.state) if queue.state is not None else None,
            owner=_read_object(run.owner),
            step=happened.step,
            steps=steps,
            epoch=plan.epoch_of(happened.step) if plan is not None and happened.step else 0,
            epochs=steps // plan.steps_per_epoch if plan is not None else 0,
            elapsed_s=happened.elapsed_s,
            left_s=happened.left_s(steps) if shown == "running" else None,
            **happened.speed,
            loss=trained.get("loss"),
            losses=happened.losses(_PARTS),
            lr=trained.get("lr"),
            validation=self._validation(),
            best={key: happened.best.get(key) for key in ("step", "metric", "value")} if happened.best else None,
            world_size=plan.world_size if plan is not None else 0,
            ranks=_read_ranks(run, plan.world_size if plan is not None else 0),
        )

    def _state(self, state: str, queue: _Asked) -> tuple[str, str]:
        """(State, why it waits or how it ended), the queue taken into account."""
        run = self._run
        if queue.state is not None and is_carried_on(state, queue.state):
            where = f" on {queue.state.nodes}" if queue.state.nodes else ""
            if queue.state.state == "PENDING":
                return "queued", f"the job is {queue.state}"
            return "running", f"the job is {queue.state}{where}, its ranks are still to come"
        if queue.job is not None and queue.state is not None:
            ended = ended_by_job(run, state, queue.job, queue.state, self._environ)
            if ended is not None:
                return ended, f"the job has ended, {queue.state}"
        match state:
            case "failed":
                return state, _safely(run, self._happened.error)
            case "interrupted":
                return state, f"{_described(_read_object(run.owner))} is gone without having ended it"
            case "new" if queue.state is not None:
                return state, f"the job has ended, {queue.state}, before the run began"
            case "new":
                return state, "waits to be started"
        return state, ""

    def _validation(self) -> dict[str, Any] | None:
        row = self._happened.validated
        if row is None:
            return None
        if not self._metric:
            with contextlib.suppress(OSError, VoxscaleError):
                self._metric = read_config(self._run.config).validation.metric
        return {"step": row["step"], "metric": self._metric, "value": row.get(self._metric)}


class WatchedSearch:
    """A search: how many trials have ended, the best of them, and those that run."""

    def __init__(self, search: SearchFolder, environ: Mapping[str, str]) -> None:
        self._search, self._environ = search, environ
        self._ledger, self._trials = NewLines(search.ledger), SeenTrials()
        self._running: dict[int, WatchedRun] = {}
        self._queue = _Queue(RunFolder(search.root), environ)

    def look(self) -> GroupView:
        self._trials.take_in(self._ledger.read())
        described = describe_search(self._search)
        queue = self._queue.ask(described.state)
        state, why = described.state, ""
        if queue.state is not None and is_carried_on(state, queue.state):
            state = "queued" if queue.state.state == "PENDING" else "running"
            why = f"job {queue.job.id if queue.job else ''} is {queue.state}"
        self._running = {
            index: self._running.get(index) or WatchedRun(self._search.trial(index), self._environ)
            for index in self._trials.running
        }
        runs = [run.look() for run in self._running.values()] if state == "running" else []
        return GroupView(described.run, "search", state, described.step, described.steps, self._best(), runs, why)

    def _best(self) -> dict[str, Any] | None:
        section = read_config(self._search.config).search
        best = self._trials.best(section.direction) if section is not None else None
        return {"metric": section.metric, "value": best.value} if section is not None and best is not None else None


class WatchedFolds:
    """The folds of a cross-validation, those that there are so far."""

    def __init__(self, folder: RunFolder, environ: Mapping[str, str]) -> None:
        self._folder, self._environ = folder, environ
        self._folds: dict[Path, WatchedRun] = {}
        self._planned: int | None = None
        self._queue = _Queue(folder, environ)

    def look(self) -> GroupView:
        for run in runs_of(self._folder.root):
            self._folds.setdefault(run.root, WatchedRun(run, self._environ))
        views = [fold.look() for fold in self._folds.values()]
        states = [view.state for view in views]
        count = max(len(views), self._count())
        ended = (_read_object(self._folder.metrics) or {}).get("state")
        state, why = (str(ended), "") if ended else self._under_way(states, count)
        return GroupView(str(self._folder.root), "folds", state, states.count("done"), count, None, views, why)

    def _count(self) -> int:
        """How many there will be, as the first of them knows."""
        if self._planned is None and self._folds:
            with contextlib.suppress(OSError, VoxscaleError):
                self._planned = num_folds(read_config(RunFolder(next(iter(self._folds))).config).data.split)
        return self._planned or 0

    def _under_way(self, states: Sequence[str], count: int) -> tuple[str, str]:
        """(State, why) of folds whose scores are not brought together yet."""
        order = ("running", "queued", "failed", "interrupted", "stopped", "new")
        if (found := next((state for state in order if state in states), None)) is not None:
            return found, ""
        if is_locked(self._folder.collecting):
            return "running", "bringing the scores together"
        queue = self._queue.ask("interrupted")
        if queue.job is not None and queue.state is not None and is_carried_on("interrupted", queue.state):
            return "queued" if queue.state.state == "PENDING" else "running", f"job {queue.job.id} is {queue.state}"
        return "interrupted", "the scores are not brought together" if len(states) == count else "folds are missing"


@dataclass(frozen=True)
class _Asked:
    """What the scheduler says of a run's newest job; nothing where there is none, or it need not be asked."""

    job: Submitted | None = None
    state: JobState | None = None


class _Queue:
    """Asks the scheduler now and then what becomes of a run's job, where the folder does not say it."""

    def __init__(self, run: RunFolder, environ: Mapping[str, str]) -> None:
        self._run, self._environ = run, environ
        self._asked = _Asked()
        self._next = 0.0

    def ask(self, state: str) -> _Asked:
        job = newest_job(self._run)
        if job is None or state in ("running", "done"):
            self._asked, self._next = _Asked(job), 0.0
        elif time.monotonic() >= self._next or self._asked.job != job:
            with contextlib.suppress(VoxscaleError):  # the folder is worth watching where there is no scheduler
                self._asked = _Asked(job, job.state_in(states_of([job.id], self._environ)))
            self._next = time.monotonic() + _ASK_S
        return self._asked


def _doing(happened: Happened, plan: Plan | None) -> str:
    if plan is None or happened.trained is None or happened.last is None:
        return "starting"
    step, event = happened.step, happened.last["event"]
    if event == "train" and plan.validates(step):
        return "validating"
    if step == plan.num_steps and event != "end":
        return "measuring the best model"
    return "training"


def _read_plan(run: RunFolder) -> Plan | None:
    try:
        return Plan.read(run.plan)
    except ConfigError:
        return None


def _read_ranks(run: RunFolder, world_size: int) -> list[dict[str, Any]]:
    """What the ranks last wrote of themselves; `silent_s`: by how much longer ago than the newest, by the files."""
    times, found = [], []
    for rank, path in run.usages().items():
        with contextlib.suppress(OSError, ValueError):
            written = path.stat().st_mtime
            content = read_json(path)
            if rank < world_size and isinstance(content, dict):
                times.append(written)
                found.append(content)
    return [
        {**content, "silent_s": round(max(times) - written, 1)} for content, written in zip(found, times, strict=True)
    ]


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _described(owner: Mapping[str, Any] | None) -> str:
    if not owner:
        return "its owner"
    job = f" of job {owner['job']}" if "job" in owner else ""
    return f"its owner, pid {owner.get('pid')}{job} on {owner.get('host')},"


def _safely(run: RunFolder, error: str) -> str:
    try:
        return why_failed(run, [{"event": "error", "message": error}] if error else [])
    except (OSError, ValueError, KeyError, TypeError):
        return error
