"""The list of runs: state, progress, best metric, age."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from voxscale.config.load import read_config
from voxscale.errors import VoxscaleError, printable
from voxscale.files import read_json
from voxscale.launch.batch import EVALUATE, Submitted, read_jobs
from voxscale.launch.outcome import last_reports, newest_reports, node_failures, read_failure
from voxscale.launch.slurm import JobState, restarts_of, states_of
from voxscale.report.trials import SeenTrials
from voxscale.runs import RunFolder, SearchFolder
from voxscale.train.events import read_events
from voxscale.train.ownership import is_live

_WHY = 60  # characters
_NOTHING = VoxscaleError("")
_SAID_BY_FOLDER = ("running", "done")  # states of which no job says more


@dataclass(frozen=True)
class RunRow:
    """One run. `state` is done, stopped or failed, as it ended; queued or running; interrupted (killed); new; or
    damaged. `why` says what it waits for or why it failed; `job` is what the scheduler knows it by."""

    run: str
    state: str
    step: int
    steps: int
    metric: str | None
    best: float | None
    age_s: float
    why: str = ""
    job: int | None = None
    kind: str = "run"  # or search, whose steps are its trials

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def list_runs(folder: Path) -> list[RunRow]:
    """The runs in `folder` and one level below it, newest first; where there are jobs the scheduler is asked."""
    runs = list(_find(folder))
    jobs = {run.root: job for run in runs if (job := newest_job(run)) is not None}
    rows = {run.root: _describe_safely(run) for run in runs}
    states = _ask_scheduler([job.id for root, job in jobs.items() if rows[root].state not in _SAID_BY_FOLDER])
    for root, job in jobs.items():
        rows[root] = _with_job(rows[root], job, job.state_in(states))
    return sorted(rows.values(), key=lambda row: row.age_s)


def newest_job(run: RunFolder) -> Submitted | None:
    """The job that trains a run; that of an array stands in the folder above the folds."""
    own = [job for job in read_jobs(run) if job.kind != EVALUATE]
    arrays = [job for job in read_jobs(RunFolder(run.root.parent)) if job.is_array]
    return next(iter(reversed(own or arrays)), None)


def _ask_scheduler(jobs: Sequence[int]) -> dict[int, JobState]:
    try:
        return states_of(jobs, os.environ)
    except VoxscaleError as error:  # a list of runs is worth having where there is no scheduler
        print(f"warning: what is queued is not known: {error.message}", file=sys.stderr)
        return {}


def _with_job(row: RunRow, job: Submitted, state: JobState) -> RunRow:
    if (ended := ended_by_job(RunFolder(Path(row.run)), row.state, job, state, os.environ)) is not None:
        return replace(row, job=job.id, state=ended, why=f"the job has ended, {state}")
    if not is_carried_on(row.state, state):
        return replace(row, job=job.id)
    queued = state.state == "PENDING"
    return replace(row, job=job.id, state="queued" if queued else "running", why=state.reason if queued else "")


def is_carried_on(state: str, job: JobState) -> bool:
    """Whether a job says more of a run in this state than its folder does."""
    return not job.is_over and state not in _SAID_BY_FOLDER


def ended_by_job(run: RunFolder, state: str, job: Submitted, now: JobState, environ: Mapping[str, str]) -> str | None:
    """How a run in this state has ended whose job went wrong before its ranks could say so, while the scheduler knows
    it."""
    if not now.went_wrong:
        return None
    if state in ("new", "interrupted") or (state in ("stopped", "failed") and _is_of_earlier(run, job, environ)):
        return "stopped" if now.state == "CANCELLED" else "failed"
    return None


def _is_of_earlier(run: RunFolder, job: Submitted, environ: Mapping[str, str]) -> bool:
    """Whether a run's state was left by an earlier job than this, or by an earlier attempt of it."""
    owner = _read(run.owner)
    if owner:
        number, attempt = str(owner.get("job")), owner.get("attempt", 0)
    else:  # no rank ever began
        number, _, attempt = newest_reports(run).name.partition("-")
    if not number.isdigit():
        return False  # this machine's, which may have come later
    return int(number) < job.id or int(attempt) < restarts_of(job.id, environ).get(int(number), 0)


def is_finished(root: Path) -> bool:
    """Whether a run is there that has come to its end, good or bad."""
    run = RunFolder(root)
    return run.exists and describe_run(run).state in ("done", "failed")


def _describe_safely(run: RunFolder) -> RunRow:
    """One run whose files are damaged does not hide the others."""
    try:
        return describe_run(run)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, VoxscaleError):
        return RunRow(str(run.root), "damaged", 0, 0, None, None, 0.0)


def describe_search(search: SearchFolder) -> RunRow:
    """A search in the place of a run: its steps are its trials."""
    metrics = _read(search.metrics)
    ledger = search.ledger.read_bytes().splitlines() if search.ledger.exists() else []
    best = metrics.get("best") or {}
    state = "running" if is_live(RunFolder(search.root)) else metrics.get("state") or "interrupted"
    section = read_config(search.config).search
    return RunRow(
        run=str(search.root),
        state=state,
        step=SeenTrials(ledger).num_ended,
        steps=section.num_points * section.seeds if section is not None else 0,
        metric=best.get("metric"),
        best=best.get("value"),
        age_s=round(max(0.0, time.time() - (search.ledger if ledger else search.config).stat().st_mtime), 1),
        kind="search",
    )


def describe_run(run: RunFolder) -> RunRow:
    if (search := SearchFolder(run.root)).exists:
        return describe_search(search)
    events = read_events(run.events)
    metrics = _read(run.metrics)
    validated = [event for event in events if event["event"] == "checkpoint" and event.get("best")]
    best = metrics.get("best") or (validated[-1] if validated else {})
    paths = (run.config, run.events, run.jobs, run.command)
    last_touched = max(path.stat().st_mtime for path in paths if path.exists())
    began = bool(events) or run.command.exists()
    state = state_of(run, began=began)
    return RunRow(
        run=str(run.root),
        state=state,
        step=max((event.get("step") or 0 for event in events), default=0),
        steps=_read(run.plan).get("num_steps", 0),
        metric=best.get("metric"),
        best=None if best.get("value") is None else float(best["value"]),
        age_s=round(max(0.0, time.time() - last_touched), 1),
        why=why_failed(run, events) if state == "failed" else "",
    )


def state_of(run: RunFolder, *, began: bool) -> str:
    """A run's state, from its folder alone; `began`: whether anything has happened in it."""
    if is_live(run):
        return "running"
    ended = _read(run.metrics).get("state") or ("failed" if run.open_error.exists() and not run.exists else None)
    return str(ended or ("interrupted" if began else "new"))


def why_failed(run: RunFolder, events: Sequence[dict[str, Any]]) -> str:
    """The error that ended the last start, as its ranks left it, or a script's nodes."""
    if failures := _read(run.metrics).get("failures"):
        return str(failures[0])
    if not run.exists:
        return str(_read(run.open_error).get("message", "")).split("\n")[0]
    reports = last_reports(run)
    failures = node_failures(reports)
    said = read_failure(reports, failures, otherwise=None if failures else _NOTHING).message.splitlines()
    return (
        said[0]
        if said
        else next((str(row.get("message", "")) for row in reversed(events) if row["event"] == "error"), "")
    )


def render_runs(rows: Sequence[RunRow]) -> str:
    def age(seconds: float) -> str:
        for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
            if seconds >= length:
                return f"{seconds / length:.0f} {unit}"
        return f"{seconds:.0f} s"

    cells: list[tuple[str, ...]] = [("RUN", "STATE", "PROGRESS", "BEST", "AGE", "JOB", "WHY")]
    for row in rows:
        unit = " trials" if row.kind == "search" else ""
        share = f"{row.step}/{row.steps}{unit} ({100 * row.step // max(1, row.steps)} %)" if row.steps else "-"
        best = f"{row.metric} {row.best:.4f}" if row.best is not None else "-"
        why = printable(row.why if len(row.why) <= _WHY else row.why[: _WHY - 1] + "…")
        cells.append((row.run, row.state, share, best, age(row.age_s), str(row.job or "-"), why))
    used = [column for column in range(7) if column < 5 or any(line[column] not in ("", "-") for line in cells[1:])]
    cells = [tuple(line[column] for column in used) for line in cells]
    widths = [max(len(line[column]) for line in cells) for column in range(len(used))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _find(folder: Path) -> Iterator[RunFolder]:
    if SearchFolder(folder).exists:
        yield from (run for path in sorted(folder.glob("trials/*")) if is_listed(run := RunFolder(path)))
        return
    if is_listed(RunFolder(folder)):
        yield RunFolder(folder)
        return
    for pattern in ("*", "*/*"):
        for path in folder.glob(pattern):
            if is_listed(run := RunFolder(path)) and not run.name.startswith("."):
                yield run


def is_listed(run: RunFolder) -> bool:
    """A run; a script's; or what a job is to open yet. Folds stand for the folder above them."""
    if run.exists:
        return run.plan.exists()
    if SearchFolder(run.root).exists:
        return True
    return run.command.exists() or (run.jobs.exists() and not any(run.root.glob("fold-*")))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
