"""How the cells of a table become numbers: categories, means and scales, learnt from the training cases alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from voxscale.data.cases import TRAIN, Case
from voxscale.data.cells import LARGEST, are_numbers, at_most, finite, is_empty, is_finite, is_number
from voxscale.data.findings import Finding
from voxscale.data.formats.sources import error, shown, warning
from voxscale.data.outcome_columns import OutcomeColumns

SCHEMA_VERSION = 1
_MOST_CATEGORIES = 64
_AVERAGE = {"mean": "it is the average"}
_OF_THE_CASE = dict.fromkeys(("case", "patient", "split", "fold"), "tables of predictions call a column so")


@dataclass(frozen=True)
class Numeric:
    """A column of numbers, brought to mean 0 and deviation 1 over the training cases."""

    column: str
    mean: float
    scale: float

    @property
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def expected(self) -> str:
        return at_most(self._largest)

    @property
    def _largest(self) -> float:
        """So that 32 bits hold it once it is scaled."""
        return LARGEST * min(1.0, self.scale)

    def encode(self, cell: str) -> tuple[float, ...]:
        """Raises ValueError for a cell that is no finite number, or too large."""
        value = finite(cell)
        if abs(value) > self._largest:
            raise ValueError(cell)
        return ((value - self.mean) / self.scale,)


@dataclass(frozen=True)
class Categorical:
    """A column of words: a number for each that a training case has, 1 where the case has it."""

    column: str
    categories: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.column}={category}" for category in self.categories)

    @property
    def expected(self) -> str:
        return f"one that a training case has: {', '.join(map(shown, self.categories[:10]))}"

    def encode(self, cell: str) -> tuple[float, ...]:
        """Raises ValueError for a word that no training case has."""
        self.categories.index(cell)
        return tuple(float(category == cell) for category in self.categories)


@dataclass(frozen=True)
class Encoding:
    """How the cells of a table become numbers. `classes` are those of a classification, in the order of outputs."""

    columns: OutcomeColumns
    features: tuple[Numeric | Categorical, ...] = ()
    classes: tuple[str, ...] = ()
    targets: tuple[Numeric, ...] = ()  # of a regression: their scale in training

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(name for feature in self.features for name in feature.names)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "columns": asdict(self.columns),
            "features": [asdict(feature) for feature in self.features],
            "classes": self.classes,
            "targets": [asdict(target) for target in self.targets],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Encoding:
        columns = {name: _tupled(value) for name, value in content["columns"].items()}
        return cls(
            columns=OutcomeColumns(**columns),
            features=tuple(
                Categorical(each["column"], tuple(each["categories"])) if "categories" in each else Numeric(**each)
                for each in content["features"]
            ),
            classes=tuple(content["classes"]),
            targets=tuple(Numeric(**each) for each in content["targets"]),
        )


def fit_encoding(columns: OutcomeColumns, cases: Sequence[Case]) -> tuple[Encoding, list[Finding]]:
    """Learn the encoding from the training cases; cells that cannot be read are left out, for `encode` to name."""
    training = [case for case in cases if case.split == TRAIN]
    findings: list[Finding] = []
    features = [_fit_feature(column, training, findings) for column in columns.features]
    encoding = Encoding(
        columns=columns,
        features=tuple(features),
        classes=_fit_classes(columns, training),
        targets=tuple(_fit_numbers(column, training) for column in columns.targets),
    )
    if columns.task == "survival" and not any(_cell(case, columns.event) in ("1", "1.0", "true") for case in training):
        found = f"no event in {len(training)} training cases"
        fix = "add cases with an event, or split otherwise"
        findings.append(error("no-event", found, "at least one", fix, file="data.columns.event"))
    findings += [*_check_names(encoding, training), *_alike_classes(encoding.classes)]
    if columns.task == "classification" and len(columns.classes) == 1 and len(encoding.classes) < 2:
        found = f"{len(encoding.classes)} class in {len(training)} training cases"
        fix = "add cases of another class, or split otherwise"
        findings.append(error("one-class", found, "two or more", fix, file="data.columns.classes"))
    return encoding, findings


def _check_names(encoding: Encoding, training: Sequence[Case]) -> Iterator[Finding]:
    """Targets become columns beside those of the case; classes do not, but are averaged as targets are."""
    columns = encoding.columns
    for role, names, reserved in (
        ("classes", encoding.classes, _AVERAGE),
        ("targets", columns.targets, {**_AVERAGE, **_OF_THE_CASE}),
    ):
        for name in names:
            if name in reserved:
                where = f"data.columns.{role}"
                if len(columns.classes) == 1:
                    where = next(case.where for case in training if case.row[columns.classes[0]].strip() == name)
                found, expected = f"{shown(name)} among {role}", f"another name: {reserved[name]}"
                yield error("reserved-name", found, expected, "rename it", file=where)


def _alike_classes(classes: Sequence[str]) -> Iterator[Finding]:
    numbers = sorted(filter(is_finite, classes), key=float)
    for _, alike in groupby(numbers, key=float):
        if len(names := list(alike)) > 1:
            found = f"classes {' and '.join(map(shown, names))}, which are one number"
            fix = "write them alike, unless they are meant to be different classes"
            yield warning("alike-classes", found, "each class in one spelling", fix)


def _fit_classes(columns: OutcomeColumns, training: Sequence[Case]) -> tuple[str, ...]:
    if len(columns.classes) != 1:
        return columns.classes
    names = {case.row.get(columns.classes[0], "").strip() for case in training} - {""}
    return tuple(sorted(names, key=_in_number_order))


def _fit_feature(column: str, training: Sequence[Case], findings: list[Finding]) -> Numeric | Categorical:
    """Numbers where most cells are, else categories."""
    cells = [cell for case in training if not is_empty(cell := case.row.get(column, "").strip())]
    if are_numbers(cells):
        return _fit_numbers(column, training)
    categories = tuple(sorted(set(cells), key=_in_number_order))
    if len(categories) > _MOST_CATEGORIES:
        found = f"{len(categories)} different words in feature {shown(column)}"
        fix = "leave it out of data.columns.features; it may be a name or a date"
        findings.append(
            error("many-categories", found, f"at most {_MOST_CATEGORIES}", fix, file="data.columns.features")
        )
        categories = categories[:1]
    return Categorical(column, categories)


def _fit_numbers(column: str, training: Sequence[Case]) -> Numeric:
    """A column without any spread is scaled by 1: it says nothing, and harms nothing."""
    cells = [case.row.get(column, "").strip() for case in training]
    values = np.array([float(cell) for cell in cells if is_finite(cell)])
    if not len(values):
        return Numeric(column, 0.0, 1.0)
    spread = float(values.std()) if np.ptp(values) else 0.0  # which rounding may leave a little of
    return Numeric(column, float(values.mean()), spread or 1.0)


def _cell(case: Case, column: str) -> str:
    return case.row.get(column, "").strip().casefold()


def _in_number_order(name: str) -> tuple[float, str]:
    """Grades 2 and 10 in the order of numbers."""
    return (float(name) if is_number(name) and not math.isnan(float(name)) else math.inf, name)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
