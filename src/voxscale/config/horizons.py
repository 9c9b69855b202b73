"""Spans of time with a unit: horizons such as 1y or 90d, against times in the unit of a table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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


def span_in(horizon: str, unit: TimeUnit) -> float:
    """How long a horizon is, in the unit of the table's times. Raises ValueError for what is none."""
    match = _SPAN.fullmatch(horizon)
    if match is None or not float(match[1]):
        raise ValueError(f"{horizon!r}: expected a number and a unit of d, w, m or y, e.g. 2y")
    return float(match[1]) * _DAYS[_LETTERS[match[2]]] / _DAYS[unit]


def choose_horizons(last: float, unit: TimeUnit, *, most: int = 5) -> list[str]:
    """The first whole years below `last` of the table's times; else months or days, spread evenly."""
    for letter in ("y", "m", "d"):
        one = span_in(f"1{letter}", unit)
        if last > one * (1 + 1e-9):
            number = math.ceil(last / one - 1e-9) - 1
            steps = range(1, min(number, most) + 1) if letter == "y" else _spread(number, most)
            return [f"{step}{letter}" for step in steps]
    return []


def _spread(last: int, most: int) -> Sequence[int]:
    return sorted({max(1, round(last * part / most)) for part in range(1, most + 1)})
