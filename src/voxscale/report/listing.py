"""The list of runs: state, progress, best metric, age."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from voxscale.files import read_json
from voxscale.runs import RunFolder
from voxscale.train.events import read_events
from voxscale.train.ownership import is_live


@dataclass(frozen=True)
class RunRow:
    """One run. `state` is done, stopped or failed, as it ended; running; interrupted (killed); new; or damaged."""

    run: str
    state: str
    step: int
    steps: int
    metric: str | None
    best: float | None
    age_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def list_runs(folder: Path) -> list[RunRow]:
    """The runs in `folder` and one level below it, newest first."""
    return sorted((_describe_safely(run) for run in _find(folder)), key=lambda row: row.age_s)


def is_finished(root: Path) -> bool:
    """Whether a run is there that has come to its end, good or bad."""
    run = RunFolder(root)
    return run.exists and describe_run(run).state in ("done", "failed")


def _describe_safely(run: RunFolder) -> RunRow:
    """One run whose files are damaged does not hide the others."""
    try:
        return describe_run(run)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RunRow(str(run.root), "damaged", 0, 0, None, None, 0.0)


def describe_run(run: RunFolder) -> RunRow:
    events = read_events(run.events)
    metrics = _read(run.metrics)
    validated = [event for event in events if event["event"] == "checkpoint" and event.get("best")]
    best = metrics.get("best") or (validated[-1] if validated else {})
    last_touched = max(path.stat().st_mtime for path in (run.config, run.events) if path.exists())
    state = "running" if is_live(run) else metrics.get("state") or ("interrupted" if events else "new")
    return RunRow(
        run=str(run.root),
        state=state,
        step=max((event.get("step") or 0 for event in events), default=0),
        steps=_read(run.plan).get("num_steps", 0),
        metric=best.get("metric"),
        best=None if best.get("value") is None else float(best["value"]),
        age_s=round(max(0.0, time.time() - last_touched), 1),
    )


def render_runs(rows: Sequence[RunRow]) -> str:
    def age(seconds: float) -> str:
        for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
            if seconds >= length:
                return f"{seconds / length:.0f} {unit}"
        return f"{seconds:.0f} s"

    cells = [("RUN", "STATE", "PROGRESS", "BEST", "AGE")]
    for row in rows:
        share = f"{row.step}/{row.steps} ({100 * row.step // max(1, row.steps)} %)"
        best = f"{row.metric} {row.best:.4f}" if row.best is not None else "-"
        cells.append((row.run, row.state, share, best, age(row.age_s)))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _find(folder: Path) -> Iterator[RunFolder]:
    if RunFolder(folder).exists:
        yield RunFolder(folder)
        return
    for pattern in ("*/config.yaml", "*/*/config.yaml"):
        for config in folder.glob(pattern):
            run = RunFolder(config.parent)
            if run.plan.exists() and not run.name.startswith("."):
                yield run


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
