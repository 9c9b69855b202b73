"""How far a trial is, read from its events as they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from voxscale.files import NewLines
from voxscale.search.asha import Mode, best_so_far
from voxscale.train.events import parse_events


class Progress:
    """A trial's step and the values of its validations; `look` takes in what was written since."""

    def __init__(self, events: Path, metric: str) -> None:
        self._lines, self._metric = NewLines(events), metric
        self.step, self.steps = 0, 0
        self._validated: list[tuple[int, float]] = []

    @property
    def values(self) -> list[float]:
        """Of each validation, in order; NaN where it had none, such as Dice where no case has the class."""
        return [value for _, value in self._validated]

    def look(self) -> bool:
        """Whether there was anything new."""
        lines = self._lines.read()
        for row in parse_events(lines):
            self._take_in(row)
        return bool(lines)

    def _take_in(self, row: dict[str, Any]) -> None:
        if "step" not in row:
            return
        self.step = row["step"]
        if row["event"] == "start":
            self.steps = row["steps"]
        elif row["event"] == "resume":  # what was beyond it is done again
            self._validated = [each for each in self._validated if each[0] <= row["step"]]
        elif row["event"] == "validate":
            value = row.get(self._metric)
            self._validated = [each for each in self._validated if each[0] != row["step"]]
            self._validated.append((row["step"], math.nan if value is None else float(value)))


def best_value(values: Sequence[float], mode: Mode) -> float | None:
    best = best_so_far(values, mode) if values else math.nan
    return None if math.isnan(best) else best
