"""What a table says of cases beside their images, as numbers: outcomes to predict, and features that help.

Categories, means and scales come from the training cases alone and are kept with the run:

    RUN/outcomes.csv     case, split, then a column for each target (`target:time`) and feature (`feature:sex=F`)
    RUN/encoding.json    how cells became numbers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from voxscale.config.schema import Config
from voxscale.data.cases import TEST, TRAIN, VAL, Case
from voxscale.data.cells import LARGEST, at_most, finite, is_empty, not_negative, zero_or_one
from voxscale.data.findings import Finding, refuse_errors
from voxscale.data.formats.sources import error, shown, warning
from voxscale.data.outcome_columns import OutcomeColumns, find_outcome_columns
from voxscale.data.outcome_encoding import SCHEMA_VERSION, Categorical, Encoding, fit_encoding
from voxscale.errors import DataError
from voxscale.files import read_json, read_rows, write_csv, write_json

FILL = "correct that cell, or take the row out"
_FILL_OR_LEAVE = f"{FILL}, or leave the column out of data.columns.features"
_RESTORE = "restore it, or start anew with --fresh"


@dataclass(frozen=True)
class Outcomes:
    """Targets (n, k) and features (n, f) of cases in the order of their ids, which is that of the store's rows."""

    encoding: Encoding
    cases: tuple[str, ...]
    splits: tuple[str, ...]
    targets: NDArray[np.float64]
    features: NDArray[np.float32]

    def of(self, split: str) -> NDArray[np.float64]:
        """The targets of the cases of a split."""
        return self.targets[np.array([each == split for each in self.splits], np.bool_)]

    def strata_of(self, rows: NDArray[np.int32]) -> tuple[int, ...]:
        """What every batch that is balanced should have its share of, as a number for each case: event or class."""
        values = self.targets[rows, 1:] if self.encoding.columns.task == "survival" else self.targets[rows]
        return tuple(np.unique(values, axis=0, return_inverse=True)[1].ravel().tolist())


def make_outcomes(config: Config, cases: Sequence[Case]) -> Outcomes:
    """The outcomes of cases that have been split. Raises one DataError with every finding."""
    outcomes, findings = examine_outcomes(config, cases)
    refuse_errors(findings)
    return outcomes


def examine_outcomes(config: Config, cases: Sequence[Case]) -> tuple[Outcomes, list[Finding]]:
    """(Outcomes of cases that have been split, what is wrong with cells). Raises DataError for missing columns."""
    encoding, faults = fit_encoding(find_outcome_columns(config, cases), cases)
    outcomes, more = encode(encoding, cases)
    return outcomes, [*check_targets(encoding, cases), *more, *faults, *_validation_findings(outcomes)]


def _validation_findings(outcomes: Outcomes) -> list[Finding]:
    """Whether the validation cases can tell one model from another."""
    held, columns = outcomes.of(VAL), outcomes.encoding.columns
    if not len(held):
        found = "no validation cases: the last model is taken for the best"
        return [warning("no-validation", found, "at least one", "name some in the split, or set data.split.val")]
    fix = "choose another data.split.seed or fold, or keep data.split.stratify on"
    if columns.task == "survival" and not held[:, 1].any():
        found = f"no event in {len(held)} validation cases: the last model is taken for the best"
        return [warning("no-event", found, "at least one", fix)]
    if len(columns.classes) == 1 and len(set(held[:, 0])) < 2:
        found = f"{len(held)} validation cases of one class, for which most metrics are undefined"
        return [warning("one-class", found, "two classes or more", fix)]
    return []


def target_strata(config: Config, cases: Sequence[Case]) -> dict[str, str]:
    """What the parts of a split should have their share of: events or classes; nothing where cells are at fault."""
    columns = find_outcome_columns(config, cases)
    if columns.task == "regression":
        return {}
    names = (columns.event,) if columns.task == "survival" else columns.classes
    return {case.id: " ".join(case.row.get(name, "").strip() for name in names) for case in cases}


def encode(
    encoding: Encoding, cases: Sequence[Case], *, targets: bool = True, fix: str = _FILL_OR_LEAVE
) -> tuple[Outcomes, list[Finding]]:
    """Cells as numbers; zeros, and a finding, where one cannot be. Without `targets` only features are looked at.

    Nothing is said of columns that are not there.
    """
    ordered = sorted(cases, key=lambda case: case.id)
    findings: list[Finding] = []
    features = np.zeros((len(ordered), len(encoding.feature_names)), np.float32)
    values = np.zeros((len(ordered), encoding.columns.num_targets), np.float64)
    for number, case in enumerate(ordered):
        features[number] = _features_of(encoding, case, findings, fix)
        if targets:
            values[number] = _targets_of(encoding, case, findings)
    splits = tuple(case.split for case in ordered)
    return Outcomes(encoding, tuple(case.id for case in ordered), splits, values, features), findings


def _features_of(encoding: Encoding, case: Case, findings: list[Finding], fix: str) -> list[float]:
    row: list[float] = []
    for feature in encoding.features:
        cell = case.row.get(feature.column, "").strip()
        try:
            row += feature.encode(cell)
        except ValueError:
            row += [0.0] * len(feature.names)
            if feature.column in case.row:
                unseen = isinstance(feature, Categorical) and not is_empty(cell)
                code = "unseen-category" if unseen else "bad-feature"
                found = f"{shown(cell) if cell else 'an empty cell'} in {shown(feature.column)}"
                findings.append(error(code, found, feature.expected, fix, case=case.id, file=case.where))
    return row


def _targets_of(encoding: Encoding, case: Case, findings: list[Finding]) -> list[float]:
    """Zeros for cells that `check_targets` names."""
    columns = encoding.columns
    if columns.task == "classification" and len(columns.classes) == 1:
        name = case.row.get(columns.classes[0], "").strip()
        if name in encoding.classes:
            return [float(encoding.classes.index(name))]
        if name:
            expected = f"a class that a training case has: {', '.join(map(shown, encoding.classes[:10]))}"
            found = f"class {shown(name)}"
            fix = "correct its class, take the case out, or add training cases of that class"
            findings.append(error("unseen-class", found, expected, fix, case=case.id, file=case.where))
        return [0.0]
    return [_number_or_zero(parse, case.row.get(column, "")) for column, parse, _ in _targets(columns)]


def _number_or_zero(parse: Callable[[str], float], cell: str) -> float:
    try:
        return parse(cell.strip())
    except ValueError:
        return 0.0


def _targets(columns: OutcomeColumns) -> Iterator[tuple[str, Callable[[str], float], str]]:
    """Columns that hold numbers to predict, each with how its cells are read and what is expected of them."""
    if columns.task == "survival":
        yield columns.time, not_negative, "a time of 0 or more"
        yield columns.event, zero_or_one, "0 (censored) or 1 (event)"
    for column in columns.targets:
        yield column, finite, at_most(LARGEST)
    if len(columns.classes) > 1:
        for column in columns.classes:
            yield column, zero_or_one, "0 or 1"


def check_targets(encoding: Encoding, cases: Iterable[Case]) -> Iterator[Finding]:
    """Cells that hold no outcome of the kind that the task predicts; where there is no such column, none."""
    columns = encoding.columns
    for case in cases:
        for column, parse, expected in _targets(columns):
            cell = case.row.get(column, "").strip()
            try:
                parse(cell)
            except ValueError:
                if column not in case.row:
                    continue
                code = {"survival": "bad-outcome", "regression": "bad-target"}.get(columns.task, "bad-class")
                found = f"{shown(cell) if cell else 'an empty cell'} in {shown(column)}"
                yield error(code, found, expected, FILL, case=case.id, file=case.where)
        if len(columns.classes) == 1 and case.row.get(columns.classes[0], "none").strip() == "":
            found = f"an empty cell in {shown(columns.classes[0])}"
            yield error("bad-class", found, "a class", FILL, case=case.id, file=case.where)


def write_outcomes(table: Path, encoding: Path, outcomes: Outcomes) -> None:
    """Numbers are written so that they are read as the very same."""
    header = _header(outcomes.encoding)
    numbers = zip(outcomes.targets.tolist(), outcomes.features.tolist(), strict=True)
    rows = zip(outcomes.cases, outcomes.splits, numbers, strict=True)
    write_csv(
        table,
        header,
        (dict(zip(header, (case, split, *row, *more), strict=True)) for case, split, (row, more) in rows),
    )
    write_json(encoding, outcomes.encoding.as_json())


def _header(encoding: Encoding) -> tuple[str, ...]:
    targets = (f"target:{name}" for name in encoding.columns.target_names)
    return ("case", "split", *targets, *(f"feature:{name}" for name in encoding.feature_names))


def read_encoding(path: Path) -> Encoding:
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA_VERSION:
            raise DataError(f"{path}: schema {content['schema']}, expected {SCHEMA_VERSION}", fix=_RESTORE)
        return Encoding.from_json(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise DataError(f"{path}: missing or damaged", fix=_RESTORE) from problem


def read_outcomes(table: Path, encoding: Path) -> Outcomes:
    held = read_encoding(encoding)
    first = 2 + held.columns.num_targets  # column of features
    try:
        rows = list(read_rows(table, _header(held)))
        numbers = np.array([row[2:] for row in rows], np.float64).reshape(len(rows), -1)
        with np.errstate(over="ignore"):
            features = numbers[:, first - 2 :].astype(np.float32)
        _check_recorded(rows, np.hstack([numbers, features]))
        return Outcomes(
            held, tuple(row[0] for row in rows), tuple(row[1] for row in rows), numbers[:, : first - 2], features
        )
    except OSError as problem:
        raise DataError(f"{table}: missing or damaged: {problem.strerror}", fix=_RESTORE) from problem
    except ValueError as problem:
        raise DataError(f"{table}: missing or damaged: {problem}", fix=_RESTORE) from problem


def _check_recorded(rows: Sequence[Sequence[str]], numbers: NDArray[np.float64]) -> None:
    """Raises ValueError for what `write_outcomes` does not leave behind."""
    for number, (case, split, *_) in enumerate(rows):
        if split not in (TRAIN, VAL, TEST):
            raise ValueError(f"case {shown(case)}: found split {shown(split)}, expected {TRAIN}, {VAL} or {TEST}")
        if number and case <= rows[number - 1][0]:
            raise ValueError(f"case {shown(case)}: expected each case once, in order")
    if len(unsound := np.argwhere(~np.isfinite(numbers))):
        raise ValueError(f"case {shown(rows[int(unsound[0, 0])][0])}: found a number that is not finite")
