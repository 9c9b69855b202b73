"""A config for a table of outcomes: which columns hold what, and what fits them. All that is guessed is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from voxscale.config.data import Columns
from voxscale.config.horizons import FollowUp, TimeUnit, choose_horizons
from voxscale.config.load import make_config, with_fold
from voxscale.config.schema import Config
from voxscale.data.cases import TRAIN, Case
from voxscale.data.cells import are_numbers, is_empty, is_finite
from voxscale.data.column_names import (
    CLASSES,
    EVENTS,
    TIMES,
    columns_called,
    nearest_usual,
    says_id,
    says_number,
    says_outcome,
    says_split,
    unit_in,
)
from voxscale.data.formats import table
from voxscale.data.formats.sources import VOLUME_ENDINGS, shown
from voxscale.data.images import IMAGE_ENDINGS
from voxscale.data.outcome_columns import OutcomeColumns, outcome_columns
from voxscale.data.outcome_encoding import Categorical, Numeric
from voxscale.data.outcomes import Outcomes, examine_outcomes, target_strata
from voxscale.data.split import num_folds, split_cases
from voxscale.errors import ConfigError, DataError

_MOST_CATEGORIES = 20
_MOST_ROWS = 10  # that are named
_FOLLOWED = 0.9  # horizons lie within the follow-up of so many, if any can
_MANY_CASES, _BATCH, _SMALL_BATCH = 120, 24, 8
_ZERO_OR_ONE = {"0", "0.0", "false", "1", "1.0", "true"}


def guess_outcomes(
    source: Path,
    content: table.Table,
    cases: Sequence[Case],
    given: Mapping[str, Any],
    task: str | None,
    *,
    taken: Sequence[str],
) -> tuple[dict[str, Any], list[str]]:
    """(Config content beside what is known of images, what was found and guessed in words) for a table without labels.

    `given` are fields of `data` that the user states, `taken` columns that hold something else: images, ids, folds.
    `cases` are those of the table: what is guessed holds for the training cases of every fold.
    """
    columns = Columns.model_validate(given.get("columns", {}))
    task = task or _task_of(content, columns, source.name, taken)
    found, problems = outcome_columns(task, columns, content.columns)
    if problems:
        names = ", ".join(map(shown, content.columns[:40]))
        raise DataError.from_findings([f"{source.name}: {each}" for each in problems], fix=f"the columns are {names}")
    targets = [name for name in (found.time, found.event, *found.targets, *found.classes) if name]
    features, left_out = found.features, list[str]()
    if columns.features is None:
        features, left_out = _features(content, {*taken, *targets})
    named = {**given.get("columns", {}), **_named(found), "features": list(features)}
    folds = _folds(task, {"source": str(source), "columns": named, "split": given.get("split")}, cases)
    if columns.features is None:
        left_out += _leave_unsound(named["features"], folds, content)
    data: dict[str, Any] = {"columns": named}
    fields: dict[str, Any] = {"task": task, "data": data}
    said = [f"task {task}: {_said(task, targets, content)}"]
    if task == "survival":
        unit = data["time_unit"] = given.get("time_unit") or _unit_of(found.time, _cells(content, found.time))
        horizons, line = _horizons(folds, unit)
        fields["validate"] = {"horizons": horizons} if horizons else {}
        said.append(f"guessed: times are in {unit}, {line}")
    fields["train"] = {"batch": _BATCH if len(content.rows) >= _MANY_CASES else _SMALL_BATCH}
    said.append(f"features: {', '.join(map(shown, named['features'])) or 'none'}")
    if left_out:
        said.append(f"left out: {'; '.join(left_out)}")
    return fields, said


def _named(found: OutcomeColumns) -> dict[str, Any]:
    if found.task == "survival":
        return {"time": found.time, "event": found.event}
    if found.task == "classification":
        return {"classes": found.classes[0] if len(found.classes) == 1 else list(found.classes)}
    return {"targets": list(found.targets)}


def _task_of(content: table.Table, columns: Columns, name: str, taken: Sequence[str]) -> str:
    if columns.targets is not None:
        return "regression"
    if columns.classes is not None:
        return "classification"
    time = columns.time or next(iter(columns_called(content.columns, TIMES)), None)
    event = columns.event or next(iter(columns_called(content.columns, EVENTS)), None)
    if time and event:
        return "survival"
    if columns_called(content.columns, CLASSES):
        return "classification"
    raise DataError(
        f"{name}: found columns {', '.join(map(shown, content.columns[:40]))}, expected paths of labels (e.g. mask), "
        f"time and event, or a class{_half_found(content, time, event, taken)}",
        fix="name them in data.columns: label, time and event, classes, or the targets of a regression",
    )


def _half_found(content: table.Table, time: str | None, event: str | None, taken: Sequence[str]) -> str:
    """Which of time and event was found, and what could be the other, or both."""
    others = [other for other in content.columns if other not in (*taken, time, event)]
    if not time and not event:
        usual = {"time": TIMES, "event": EVENTS, "classes": CLASSES}
        near = {role: like for role, names in usual.items() if (like := nearest_usual(others, names))}
        roles = ("time", "event") if {"time", "event"} <= near.keys() else ("classes",)
        meant = " and ".join(f"data.columns.{role}={near[role]}" for role in roles if role in near)
        return f"; did you mean {meant}?" if meant else ""
    known, missing, column = ("time", "event", time) if time else ("event", "time", event)
    looks = _looks_like_event if missing == "event" else _looks_like_time
    like = nearest_usual(others, EVENTS if missing == "event" else TIMES)
    like = like or next((other for other in others if looks(other, _cells(content, other))), None)
    hint = f"; {shown(like)} looks like one: data.columns.{missing}={like}" if like else ""
    return f"; {shown(column)} is the {known}, and no column is called like the {missing}{hint}"


def _looks_like_event(column: str, cells: Sequence[str]) -> bool:
    filled = {cell.casefold() for cell in cells if not is_empty(cell)}
    return bool(filled) and (filled <= _ZERO_OR_ONE or (says_outcome(column) and len(filled) == 2))


def _looks_like_time(column: str, cells: Sequence[str]) -> bool:
    return (says_outcome(column) or unit_in(column) is not None) and are_numbers(cells)


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
        if why := _called_otherwise(column, _cells(content, column)) or _useless(content, column):
            left_out.append(f"{shown(column)} ({why})")
        else:
            features.append(column)
    return tuple(features), left_out


def _called_otherwise(column: str, cells: Sequence[str]) -> str:
    """What the name says it is rather than a feature."""
    if says_outcome(column):
        return "called like an outcome or a date"
    if says_split(column):
        return "called like a part of a split"
    distinct = len(set(cells))
    is_id = (says_id(column) and distinct * 2 > len(cells)) or (says_number(column) and distinct == len(cells))
    return "called like an id" if is_id else ""


def _useless(content: table.Table, column: str) -> str:
    cells = _cells(content, column)
    if empty := sum(map(is_empty, cells)):
        return f"{empty} empty cells: {_in_rows(content, column, is_empty)}"
    distinct = set(cells)
    if len(distinct) == 1:
        return "one value"
    if any(cell.lower().endswith((*VOLUME_ENDINGS, *IMAGE_ENDINGS)) for cell in distinct):
        return "paths"
    if not are_numbers(cells):
        return f"{len(distinct)} different words" if len(distinct) > _MOST_CATEGORIES else ""
    odd = [cell for cell in cells if not is_finite(cell)]
    if not odd:
        return ""
    where = _in_rows(content, column, lambda cell: not is_finite(cell))
    return f"{len(odd)} among numbers that are none, e.g. {shown(odd[0])}: {where}"


def _in_rows(content: table.Table, column: str, is_so: Callable[[str], bool]) -> str:
    """Where cells of a column are so, as a spreadsheet numbers its rows."""
    rows = [str(number) for number, row in content.rows.items() if is_so(row[column].strip())]
    more = f" and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
    return f"row {', '.join(rows[:_MOST_ROWS])}{more}"


def _folds(task: str, data: Mapping[str, Any], cases: Sequence[Case]) -> list[Outcomes]:
    """The outcomes of each fold as training will split the cases; all train where it will refuse to split them."""
    if not cases:
        return []
    config = make_config({"task": task, "data": dict(data)}, name=str(data["source"]), base=Path())
    try:
        folds = [with_fold(config, number + 1) for number in range(num_folds(config.data.split))]
        return [examine_outcomes(fold, _split(fold, cases))[0] for fold in folds]
    except (ConfigError, DataError):
        return [examine_outcomes(config, [replace(case, split=TRAIN) for case in cases])[0]]


def _split(config: Config, cases: Sequence[Case]) -> list[Case]:
    return split_cases(cases, config.data.split, target_strata(config, cases))


def _leave_unsound(features: list[str], folds: Sequence[Outcomes], content: table.Table) -> list[str]:
    """Take out features with a cell that the encoding of a fold would refuse; return why."""
    why: dict[str, str] = {}
    for feature in (feature for fold in folds for feature in fold.encoding.features):
        refused = next((cell for cell in dict.fromkeys(_cells(content, feature.column)) if _refuses(feature, cell)), "")
        if refused:
            where = _in_rows(content, feature.column, refused.__eq__)
            why.setdefault(feature.column, f"found {shown(refused)}, expected {feature.expected}: {where}")
    features[:] = [column for column in features if column not in why]
    return [f"{shown(column)} ({reason})" for column, reason in why.items()]


def _refuses(feature: Numeric | Categorical, cell: str) -> bool:
    try:
        feature.encode(cell)
    except ValueError:
        return True
    return False


def _horizons(folds: Sequence[Outcomes], unit: TimeUnit) -> tuple[list[str], str]:
    """(Horizons that the training cases of every fold can tell of, a line that says so)."""
    rows = [training for fold in folds if len(training := fold.of(TRAIN))]
    follow_ups = [FollowUp.of(training) for training in rows]
    first = max((each.first for each in follow_ups), default=0.0)
    last = min((each.last for each in follow_ups), default=0.0)
    usual = min((float(np.quantile(training[:, 0], _FOLLOWED)) for training in rows), default=0.0)
    for end in (min(usual, last), last):
        if horizons := choose_horizons(FollowUp(first, end), unit):
            return horizons, f"horizons {', '.join(horizons)}"
    return [], f"no horizons: no whole day from the first event ({first:.6g}) to before the last time ({last:.6g})"


def _unit_of(column: str, cells: Sequence[str]) -> TimeUnit:
    """As the column's name says, else by the longest time."""
    if (unit := unit_in(column)) is not None:
        return unit
    longest = max((float(cell) for cell in cells if is_finite(cell)), default=0.0)
    return "days" if longest >= 300 else "months" if longest >= 25 else "years"


def _cells(content: table.Table, column: str) -> list[str]:
    return [row[column].strip() for row in content.rows.values()]
