"""A run folder as far as a page shows it. What is missing is left out; what is damaged, too, and that is said."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from voxscale.config.load import read_config
from voxscale.config.schema import Config
from voxscale.errors import VoxscaleError
from voxscale.files import read_csv, read_json
from voxscale.report.listing import RunRow, describe_run
from voxscale.report.private import without_places
from voxscale.runs import RunFolder
from voxscale.train.events import parse_events, without_superseded

Event = Mapping[str, Any]
Cells = Mapping[str, str]
NOT_METRICS = ("case", "patient", "split", "fold")
_NUMBER = (int, float, type(None))
_OF_EVENTS: Mapping[str, tuple[type, ...]] = {
    "event": (str,),
    "step": (int,),
    **dict.fromkeys(("loss", "lr", "data_s", "step_s", "time_s"), _NUMBER),
    "cases": (list,),
    "communication_s": (list,),
    "environment": (dict, type(None)),
}
_STEPPING = ("train", "validate", "checkpoint", "resume")
MOST_PREVIEW_BYTES = 10_500_000  # of one page, before they are base64


@dataclass(frozen=True)
class ReadRun:
    """What a run says of itself."""

    run: RunFolder

    @cached_property
    def row(self) -> RunRow:
        try:
            return describe_run(self.run)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, VoxscaleError):
            return RunRow(str(self.run.root), "damaged", 0, 0, None, None, 0.0)

    @property
    def why(self) -> str:
        """Why it failed, as a page may tell it."""
        return without_places(self.row.why, self.run)

    @cached_property
    def config(self) -> Config | None:
        try:
            return read_config(self.run.config)
        except (VoxscaleError, OSError):
            return None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        return read_object(self.run, "metrics")

    @cached_property
    def plan(self) -> dict[str, Any]:
        return read_object(self.run, "plan")

    @cached_property
    def forecast(self) -> dict[str, Any]:
        return read_object(self.run, "forecast")

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        """All lines of the events; one that a killed writer left half is no damage."""
        try:
            return list(parse_events(self.run.events.read_bytes().splitlines()))
        except OSError:
            return []

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Those that say what events of their kind say."""
        return without_superseded(row for row in self._rows if is_sound(row))

    @cached_property
    def cases(self) -> list[dict[str, str]]:
        try:
            return read_csv(self.run.cases)
        except (OSError, ValueError):
            return []

    @property
    def damaged(self) -> str:
        """Names the files that a page leaves out, or lines of, though they are there."""
        run = self.run
        objects = (run.metrics, run.plan, run.forecast, run.preview_index, run.encoding, *run.usages().values())
        found = [path for path in objects if path.exists() and not _read_object(path)]
        found += [run.config] if run.config.exists() and self.config is None else []
        found += [run.cases] if run.cases.exists() and not self.cases else []
        found += [run.events] if not all(map(is_sound, self._rows)) else []
        return ", ".join(path.relative_to(run.root).as_posix() for path in found)

    @cached_property
    def usage(self) -> list[dict[str, Any]]:
        """What each rank used, in the order of ranks."""
        return [found for path in self.run.usages().values() if "memory_peak_bytes" in (found := _read_object(path))]

    @property
    def task(self) -> str:
        return self.config.task if self.config is not None else str(self.metrics.get("task", "run"))

    @property
    def time_unit(self) -> str:
        """Of times in the table of a cohort."""
        return self.config.data.time_unit if self.config is not None else ""

    @property
    def scales(self) -> dict[str, float]:
        """Of regression: the deviation of each target in the training cases."""
        targets = read_object(self.run, "encoding").get("targets") or []
        return {str(target["column"]): float(target["scale"]) for target in targets}

    @property
    def title(self) -> str:
        root = self.run.root
        return f"{root.parent.name}/{root.name}" if root.name == "run" else root.name

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def timed(self, kind: str) -> list[tuple[float, Event]]:
        """(Seconds that the run has taken until then, over all its starts; the event)."""
        found: list[tuple[float, Event]] = []
        before = last = 0.0
        for event in self.events:
            now = float(event.get("time_s") or 0.0)
            if event["event"] in ("start", "resume") and now < last:
                before += last
            last = now
            found += [(before + last, event)] if event["event"] == kind else []
        return found

    def evaluations(self) -> Iterator[ReadRun]:
        """Those that `voxscale evaluate` left: folders of the same form."""
        for path in sorted(self.run.evaluations.glob("*")):
            if (found := ReadRun(RunFolder(path))).metrics:
                yield found


def is_sound(event: Event) -> bool:
    """Whether it holds what events of its kind do, each as what it should be."""
    has_all = event["event"] not in _STEPPING or "step" in event
    return has_all and all(isinstance(event[name], kind) for name, kind in _OF_EVENTS.items() if name in event)


def read_object(run: RunFolder, name: str) -> dict[str, Any]:
    return _read_object(getattr(run, name))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_own(path: Path) -> bytes:
    """A file's content, not that of another which it links to."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return file.read()


def read_previews(run: RunFolder, *, most_bytes: int = MOST_PREVIEW_BYTES) -> tuple[dict[str, Any] | None, int]:
    """The run's previews with their pictures as base64, as many as fit; and how many bytes are left."""
    index = read_object(run, "preview_index")
    cases = []
    for each in index.get("cases") or []:
        try:
            # By their names alone: the folder may be another's, and a page must not carry other files away.
            names = {name: Path(each[name]).name for name in ("image", "codes") if each.get(name)}
            parts = {name: _read_own(run.previews / file) for name, file in names.items()}
        except (OSError, TypeError, AttributeError):
            continue
        size = sum(map(len, parts.values()))
        if size > most_bytes:
            break
        most_bytes -= size
        cases.append({**each, **{name: base64.b64encode(part).decode() for name, part in parts.items()}})
    shown = {"classes": index.get("classes", []), "exclusive": index.get("exclusive", True), "cases": cases}
    return (shown if cases else None), most_bytes


def numbers_of(rows: Sequence[Cells], column: str) -> list[float | None]:
    """A column of a table as numbers; None where there is none."""
    return [as_number(row.get(column, "")) for row in rows]


def as_number(cell: str | None) -> float | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        return None
