"""How far a trial is, read from its events as they are written."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from voxscale.search.asha import Mode, best_so_far


class Progress:
    """A trial's step and the values of its validations; `look` takes in what was written since."""

    def __init__(self, events: Path, metric: str) -> None:
        self._path, self._metric = events, metric
        self._offset, self._rest = 0, b""
        self.step, self.steps = 0, 0
        self._validated: list[tuple[int, float]] = []

    @property
    def values(self) -> list[float]:
        """Of each validation, in order; NaN where it had none, such as Dice where no case has the class."""
        return [value for _, value in self._validated]

    def look(self) -> bool:
        """Whether there was anything new."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                block = stream.read()
        except FileNotFoundError:
            return False
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a line that a killed writer left half
            if isinstance(row, dict):
                self._take_in(row)
        return bool(block)

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
