"""What a page consists of, as plain data: sections of blocks, which template/*.js draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Block = dict[str, Any]
Section = dict[str, Any]

_UNITS = {"hd95": "mm", "volume": "ml", "volume_label": "ml"}
_WHOLE = ("step", "devices")  # axes between whose numbers there is nothing
_OF_DAMAGE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, OSError)
_MOST_POINTS = 2000  # of a curve; more cannot be told apart


def section(title: str, *blocks: Block | None, about: str = "") -> Section | None:
    """A part of the page; None where there is nothing to show in it."""
    shown = [block for block in blocks if block]
    return {"title": title, "about": about, "blocks": shown} if shown else None


def attempted(title: str, make: Callable[..., Section | None], *given: Any) -> Section | None:
    """A part of the page; where the files that it is made of are damaged, that it is left out for this."""
    try:
        return make(*given)
    except _OF_DAMAGE:
        about = "Left out: what the folder says of this is damaged."
        return {"title": title, "about": about, "blocks": []}


def facts(rows: Iterable[tuple[str, str, str] | None]) -> Block:
    """The headline: (what, its value, a word on it)."""
    return {"type": "facts", "facts": [{"label": a, "value": b, "note": c} for a, b, c in filter(None, rows)]}


def plot(
    title: str, x: str, y: str, series: Sequence[Block], *, note: str = "", log_x: bool = False, **more: Any
) -> Block | None:
    # By its place among all, so that a run has one colour in every plot, also where another has nothing to draw.
    shown = [{**each, "colour": place} for place, each in enumerate(series) if each["x"]]
    if not shown:
        return None
    axes = {"x": x, "y": y, "logX": log_x, "whole": x in _WHOLE}
    return {"type": "plot", "title": title, **axes, "series": shown, "note": note, **more}


def curve(name: str, x: Sequence[float], y: Sequence[float], kind: str = "line", **more: Any) -> Block:
    """`kind`: line, step, points, or both (points on a line), or guide."""
    return {"name": name, "kind": kind, "x": rounded(x), "y": rounded(y), **more}


def column(name: str, *, number: bool = False, unit: str = "", exact: bool = False) -> Block:
    """Of a table; `number`: its cells are such; `exact`: each with its own digits, as it was chosen."""
    return {"name": name, "number": number, "unit": unit, "exact": exact}


def unit_of(metric: str) -> str:
    """Of a metric, or of one of its classes."""
    return _UNITS.get(metric.partition("/")[0], "")


def with_unit(metric: str) -> str:
    """As it stands at an axis or in a title."""
    return f"{metric} ({unit_of(metric)})" if unit_of(metric) else metric


def columns_of(*names: str) -> list[Block]:
    return [column(name) for name in names]


def table(columns: Sequence[Block], rows: Sequence[Sequence[Any]], *, title: str = "", **more: Any) -> Block | None:
    """`more`: sort (a column), descending, search, hidden (columns), opens (the place of each row's case), plain."""
    return {"type": "table", "title": title, "columns": list(columns), "rows": rows, **more} if rows else None


def pairs_table(pairs: Mapping[str, Any], *, title: str = "") -> Block | None:
    """Names and what they have, in two columns."""
    rows = [[name, words(value)] for name, value in pairs.items() if value is not None]
    return table(columns_of("", ""), rows, title=title, plain=True)


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """The means of neighbours, so that no more points are left than can be told apart."""
    step = math.ceil(len(x) / _MOST_POINTS)
    if step <= 1:
        return list(x), list(y)
    spans = [slice(start, start + step) for start in range(0, len(x), step)]
    return [_mean(x[span]) for span in spans], [_mean(y[span]) for span in spans]


def rounded(values: Iterable[float]) -> list[float]:
    """To six digits: a page need not carry more."""
    return [float(f"{value:.6g}") for value in values]


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:,.0f}"


def words(value: Any) -> str:
    """A value as people write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {words(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(words(each) for each in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
