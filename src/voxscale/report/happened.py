"""What has happened in a run so far, taken in from its events as they are written."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

from voxscale.files import NewLines
from voxscale.train.events import parse_events

_RECENT = 50  # steps that the speed is taken from


class Happened:
    """Steps, losses and validations of a run; `look` takes in what was written since."""

    def __init__(self, events: Path) -> None:
        self._lines = NewLines(events)
        self._steps, self._losses = array("q"), array("d")
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._started: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.trained: dict[str, Any] | None = None
        self.validated: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.error = ""

    def look(self) -> bool:
        """Whether there was anything new."""
        lines = self._lines.read()
        for row in parse_events(lines):
            if isinstance(row.get("step"), int):
                self._take_in(row)
        return bool(lines)

    @property
    def step(self) -> int:
        return int(self.last["step"]) if self.last is not None else 0

    @property
    def has_begun(self) -> bool:
        return self.last is not None

    def _take_in(self, row: dict[str, Any]) -> None:
        self.last = row
        match row["event"]:
            case "resume" | "start":  # what was beyond it is done again
                self._take_back(row["step"])
                self._started = row
            case "train":
                self.trained = row
                self._recent.append(row)
                if isinstance(row.get("loss"), int | float):
                    self._steps.append(row["step"])
                    self._losses.append(row["loss"])
            case "validate":
                self.validated = row
            case "checkpoint" if row.get("best"):
                self.best = row
            case "error":
                self.error = str(row.get("message", ""))

    def _take_back(self, step: int) -> None:
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            self._losses.pop()
        self._recent.clear()
        self.error = ""
        for name in ("trained", "validated", "best"):
            row = getattr(self, name)
            if row is not None and row["step"] > step:
                setattr(self, name, None)

    @property
    def elapsed_s(self) -> float | None:
        """Since this start, to the last event."""
        if self.last is None or self._started is None:
            return None
        return float(self.last["time_s"] - self._started["time_s"])

    def left_s(self, steps: int) -> float | None:
        """What the rest may take if it goes on as since this start, validations included."""
        if self._started is None or self.trained is None or self.elapsed_s is None:
            return None
        done = self.trained["step"] - self._started["step"]
        return self.elapsed_s / done * max(0, steps - self.step) if done > 0 else None

    @property
    def speed(self) -> dict[str, float]:
        """Of the last steps, without what lies between them: `patches_per_s`, `step_s`, and the share of data."""
        seconds = sum(row.get("step_s") or 0.0 for row in self._recent)
        if not seconds:
            return {}
        return {
            "patches_per_s": sum(len(row.get("cases") or ()) for row in self._recent) / seconds,
            "step_s": seconds / len(self._recent),
            "data_share": sum(row.get("data_s") or 0.0 for row in self._recent) / seconds,
        }

    def losses(self, parts: int) -> list[float]:
        """The course of the loss so far: means over at most so many equal parts of it."""
        count = len(self._losses)
        edges = [count * part // parts for part in range(parts + 1)] if count > parts else list(range(count + 1))
        return [sum(self._losses[low:high]) / (high - low) for low, high in pairwise(edges)]
