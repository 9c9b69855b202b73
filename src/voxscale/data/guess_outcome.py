"""A config for a table of outcomes: which columns hold what, and what fits them. All that is guessed is said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from voxscale.config.data import Columns
from voxscale.config.horizons import TimeUnit, choose_horizons
from voxscale.data.formats import table
from voxscale.data.formats.sources import VOLUME_ENDINGS, shown
from voxscale.data.images import IMAGE_ENDINGS
from voxscale.data.outcome_columns import CLASSES, EVENTS, TIMES, known_column, outcome_columns, word_of
from voxscale.data.outcomes import is_number
from voxscale.errors import DataError

_MOST_CATEGORIES = 20
_FOLLOWED = 0.9  # horizons lie within the follow-up of so many
_MANY_CASES, _BATCH, _SMALL_BATCH = 120, 24, 8
_UNITS: tuple[TimeUnit, ...] = ("days", "weeks", "months", "years")


def guess_outcomes(
    source: Path, content: table.Table, given: Mapping[str, Any], task: str | None, *, taken: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """(Config content beside what is known of images, what was found and guessed in words) for a table without labels.

    `given` are fields of `data` that the user states, `taken` columns that hold something else: images, ids, folds.
    """
    columns = Columns.model_validate(given.get("columns", {}))
    task = task or _task_of(content, columns, source.name)
    found, problems = outcome_columns(task, columns, content.columns)
    if problems:
        names = ", ".join(map(shown, content.columns[:40]))
        raise DataError.from_findings([f"{source.name}: {each}" for each in problems], fix=f"the columns are {names}")
    targets = [name for name in (found.time, found.event, *found.targets, *found.classes) if name]
    features, left_out = found.features, list[str]()
    if columns.features is None:
        outcomes = (known_column(content.columns, usual) for usual in (TIMES, EVENTS))
        features, left_out = _features(content, {*taken, *targets, *(name for name in outcomes if name)})
    named = dict(given.get("columns", {})) | {"features": list(features)}
    said = [f"task {task}: {_said(task, targets, content)}"]
    fields: dict[str, Any] = {"task": task}
    data: dict[str, Any] = {}
    if task == "survival":
        named |= {"time": found.time, "event": found.event}
        unit = given.get("time_unit") or _unit_of(found.time, _numbers(content, found.time))
        horizons = choose_horizons(_followed(content, found.time), unit)
        data["time_unit"] = unit
        fields["validate"] = {"horizons": horizons} if horizons else {}
        said.append(f"guessed: times are in {unit}, horizons {', '.join(horizons) or 'none within follow-up'}")
    elif task == "classification":
        named["classes"] = found.classes[0] if len(found.classes) == 1 else list(found.classes)
    else:
        named["targets"] = list(found.targets)
    fields["train"] = {"batch": _BATCH if len(content.rows) >= _MANY_CASES else _SMALL_BATCH}
    said.append(f"features: {', '.join(map(shown, features)) or 'none'}")
    if left_out:
        said.append(f"left out: {'; '.join(left_out)}")
    return {**fields, "data": {**data, "columns": named}}, said


def _task_of(content: table.Table, columns: Columns, name: str) -> str:
    if columns.targets is not None:
        return "regression"
    if columns.classes is not None:
        return "classification"
    time = columns.time or known_column(content.columns, TIMES)
    event = columns.event or known_column(content.columns, EVENTS)
    if time and event:
        return "survival"
    if known_column(content.columns, CLASSES):
        return "classification"
    raise DataError(
        f"{name}: found columns {', '.join(map(shown, content.columns[:40]))}, expected paths of labels (e.g. mask), "
        "time and event, or a class",
        fix="name them in data.columns: label, time and event, classes, or the targets of a regression",
    )


def _said(task: str, targets: Sequence[str], content: table.Table) -> str:
    if task == "survival":
        time, event = targets
        events = sum(row[event].strip().casefold() in ("1", "1.0", "true") for row in content.rows.values())
        return f"time in {shown(time)}, event in {shown(event)} ({events} events in {len(content.rows)} rows)"
    return f"{', '.join(map(shown, targets))} of {len(content.rows)} rows"


def _features(content: table.Table, taken: set[str]) -> tuple[tuple[str, ...], list[str]]:
    """(Columns that can serve as they are, why others cannot)."""
    features, left_out = [], []
    for column in content.columns:
        if column in taken:
            continue
        cells = [row[column].strip() for row in content.rows.values()]
        if why := _useless(cells):
            left_out.append(f"{shown(column)} ({why})")
        else:
            features.append(column)
    return tuple(features), left_out


def _useless(cells: Sequence[str]) -> str:
    if empty := cells.count(""):
        return f"{empty} empty cells"
    distinct = set(cells)
    if len(distinct) == 1:
        return "one value"
    if any(cell.lower().endswith((*VOLUME_ENDINGS, *IMAGE_ENDINGS)) for cell in distinct):
        return "paths"
    if sum(is_number(cell) for cell in cells) * 2 <= len(cells) and len(distinct) > _MOST_CATEGORIES:
        return f"{len(distinct)} different words"
    return ""


def _unit_of(column: str, times: Sequence[float]) -> TimeUnit:
    """As the column's name says, else by the longest time."""
    word = word_of(column)
    for unit in _UNITS:
        if unit[:-1] in word:
            return unit
    longest = max(times, default=0.0)
    return "days" if longest >= 300 else "months" if longest >= 25 else "years"


def _followed(content: table.Table, column: str) -> float:
    times = [time for time in _numbers(content, column) if time > 0]
    return float(np.quantile(times, _FOLLOWED)) if times else 0.0


def _numbers(content: table.Table, column: str) -> list[float]:
    cells = (row[column].strip() for row in content.rows.values())
    return [value for cell in cells if is_number(cell) and math.isfinite(value := float(cell))]
