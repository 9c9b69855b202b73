"""What a table says otherwise than when a run began, in the table's own cells rather than as encoded numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from voxscale.data.formats.sources import shown
from voxscale.data.outcome_encoding import Categorical
from voxscale.data.outcomes import Outcomes

_ROUNDED = 1e-6  # of a deviation, which is kept in 32 bits


@dataclass(frozen=True)
class _Cell:
    """A word or a number, which is known up to `slack`."""

    value: str | float
    slack: float = 0.0

    def differs_from(self, other: _Cell) -> bool:
        if isinstance(self.value, float) and isinstance(other.value, float):
            slack = max(self.slack, other.slack)
            return not math.isclose(self.value, other.value, rel_tol=1e-12, abs_tol=slack)
        return self.value != other.value

    def __str__(self) -> str:
        return shown(self.value) if isinstance(self.value, str) else f"{self.value:.7g}"


def outcome_changes(held: Outcomes, now: Outcomes, where: Mapping[str, str]) -> list[str]:
    """A line for each cell, or column, that differs; `where` says in which row of the table a case is."""
    then_columns, columns = asdict(held.encoding.columns), asdict(now.encoding.columns)
    if changed := [role for role in columns if columns[role] != then_columns[role]]:
        return [f"{role}: found {shown(columns[role])}, expected {shown(then_columns[role])}" for role in changed]
    if held.cases != now.cases:
        differing = sorted({*held.cases} ^ {*now.cases})
        return [f"case {case}: found {'a new row' if case in now.cases else 'no row'}" for case in differing]
    lines = []
    for (column, before), (_, after) in zip(_columns(held), _columns(now), strict=True):
        for case, expected, found in zip(now.cases, before, after, strict=True):
            if found.differs_from(expected):
                texts = f"found {found} in {shown(column)}, expected {expected}"
                lines.append(": ".join(filter(None, (f"case {case}", where.get(case, ""), texts))))
    return lines or ["found cells that differ in their last digits"]


def _columns(outcomes: Outcomes) -> Iterator[tuple[str, list[_Cell]]]:
    """Every column of targets, then of features, with its cells as they can be told from the numbers."""
    encoding = outcomes.encoding
    columns = encoding.columns
    names = (columns.time, columns.event) if columns.task == "survival" else columns.target_names
    exclusive = columns.task == "classification" and len(columns.classes) == 1
    for name, values in zip(names, outcomes.targets.T.tolist(), strict=True):
        yield name, [_Cell(encoding.classes[int(value)] if exclusive else value) for value in values]
    first = 0
    for feature in encoding.features:
        block = outcomes.features[:, first : (first := first + len(feature.names))].astype(float)
        if isinstance(feature, Categorical):
            yield feature.column, [_Cell(feature.categories[index]) for index in block.argmax(1).tolist()]
        else:
            deviations = (block[:, 0] * feature.scale).tolist()
            yield feature.column, [_Cell(feature.mean + each, _ROUNDED * abs(each)) for each in deviations]
