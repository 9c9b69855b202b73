"""The trials of a search as its ledger has them so far, also while it goes on or after it was killed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from voxscale.train.events import parse_events

_ENDED = ("done", "pruned", "nan", "failed")


@dataclass
class SeenTrial:
    """One trial; `value` is None until it has ended with one."""

    index: int
    params: dict[str, Any] = field(default_factory=dict)
    state: str = "waiting"
    value: float | None = None
    steps: int = 0
    wall_s: float | None = None
    why: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


class SeenTrials:
    """Takes in the lines of a ledger as they come; what does not fit is left out."""

    def __init__(self, lines: Iterable[bytes] = ()) -> None:
        self._trials: dict[int, SeenTrial] = {}
        self.take_in(lines)

    def take_in(self, lines: Iterable[bytes]) -> None:
        for row in parse_events(lines):
            if isinstance(row.get("trial"), int):
                self._happened(self._trials.setdefault(row["trial"], SeenTrial(row["trial"])), row)

    def _happened(self, trial: SeenTrial, row: dict[str, Any]) -> None:
        match row["event"]:
            case "trial" if isinstance(row.get("params"), dict):
                trial.params = row["params"]
            case "start":
                trial.state = "running"
            case "again":
                trial.state, trial.why = "waiting", ""
            case "lost" if not trial.has_ended:
                trial.state = "waiting"
            case "end" if not trial.has_ended:
                trial.state, trial.why = str(row.get("state")), str(row.get("why") or "")
                trial.value = value if isinstance(value := row.get("value"), int | float) else None
                trial.steps = steps if isinstance(steps := row.get("steps"), int) else 0
                trial.wall_s = wall_s if isinstance(wall_s := row.get("wall_s"), int | float) else None

    @property
    def all(self) -> list[SeenTrial]:
        return [trial for _, trial in sorted(self._trials.items())]

    @property
    def running(self) -> list[int]:
        return [trial.index for trial in self.all if trial.state == "running"]

    @property
    def num_ended(self) -> int:
        return sum(trial.has_ended for trial in self._trials.values())

    def best(self, direction: str) -> SeenTrial | None:
        """Of those that ran to their end, else of those that were stopped; the first of equals."""
        for state in _ENDED[:2]:
            found = [(trial.value, trial) for trial in self.all if trial.state == state and trial.value is not None]
            if found:
                choose = max if direction == "max" else min
                return choose(found, key=lambda each: each[0])[1]
        return None
