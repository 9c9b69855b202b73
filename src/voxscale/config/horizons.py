"""Spans of time with a unit: horizons such as 1y or 90d, against times in the unit of a table."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

TimeUnit = Literal["days", "weeks", "months", "years"]
_DAYS: dict[str, float] = {"days": 1.0, "weeks": 7.0, "months": 365.25 / 12, "years": 365.25}
_LETTERS = {unit[0]: unit for unit in _DAYS}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([dwmy])")


def _is_span(text: str) -> str:
    span_in(text, "days")
    return text


Horizon = Annotated[str, AfterValidator(_is_span)]


@dataclass(frozen=True)
class FollowUp:
    """The times at which training cases tell of events and of those without: from `first` to before `last`."""

    first: float
    last: float

    @classmethod
    def of(cls, rows: Collection[Iterable[float]]) -> FollowUp:
        """From the first event to the last time of (time, event) rows; empty where there is no event."""
        last = max((float(time) for time, _ in rows), default=0.0)
        return cls(min((float(time) for time, event in rows if event > 0), default=last), last)

    def holds(self, time: float) -> bool:
        """Whether a horizon may lie there."""
        return self.first <= time < self.last


def span_in(horizon: str, unit: TimeUnit) -> float:
    """How long a horizon is, in the unit of the table's times. Raises ValueError for what is none."""
    match = _SPAN.fullmatch(horizon)
    if match is None or not float(match[1]):
        raise ValueError(f"{horizon!r}: expected a number and a unit of d, w, m or y, e.g. 2y")
    return float(match[1]) * _DAYS[_LETTERS[match[2]]] / _DAYS[unit]


def choose_horizons(follow_up: FollowUp, unit: TimeUnit, *, most: int = 5) -> list[str]:
    """The first whole years that the follow-up holds; else months or days, spread evenly; else none."""
    for letter in ("y", "m", "d"):
        one = span_in(f"1{letter}", unit)
        low, high = max(1, math.ceil(follow_up.first / one)), math.ceil(follow_up.last / one) - 1
        steps = range(low, min(high + 1, low + most)) if letter == "y" else _spread(low, high, most)
        if chosen := [name for step in steps if follow_up.holds(span_in(name := f"{step}{letter}", unit))]:
            return chosen
    return []


def same_spans(horizons: Sequence[str]) -> list[list[str]]:
    """Horizons that are the same time, together."""
    groups: dict[float, list[str]] = {}
    for name in horizons:
        groups.setdefault(round(span_in(name, "days"), 6), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _spread(low: int, high: int, most: int) -> Sequence[int]:
    number = high - low + 1
    return sorted({low + max(1, round(number * part / most)) - 1 for part in range(1, most + 1)}) if number > 0 else []
