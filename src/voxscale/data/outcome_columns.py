"""Which columns of a table hold outcomes and features: as the config names them, else by their usual names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from voxscale.config.data import Columns
from voxscale.config.schema import Config
from voxscale.data.cases import Case
from voxscale.data.column_names import CLASSES, EVENTS, TIMES, columns_called, nearest_usual
from voxscale.data.formats.sources import nearest, shown
from voxscale.errors import DataError


@dataclass(frozen=True)
class OutcomeColumns:
    """The columns that a task needs of a table; empty where it does not."""

    task: str
    time: str = ""
    event: str = ""
    targets: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def target_names(self) -> tuple[str, ...]:
        """What the numbers to predict are called, one for each."""
        return ("time", "event") if self.task == "survival" else (*self.targets, *self.classes)

    @property
    def num_targets(self) -> int:
        return len(self.target_names)


def find_outcome_columns(config: Config, cases: Sequence[Case]) -> OutcomeColumns:
    """The columns for a config's task. Raises one DataError with all that are missing, the nearest names offered."""
    header = list(cases[0].row) if cases else []
    given = config.data.columns
    found, problems = outcome_columns(config.task, given, header)
    if problems:
        raise DataError.from_findings(
            [f"{config.data.source}: {problem}" for problem in problems],
            fix=f"the columns are {', '.join(map(shown, header[:40])) or 'none: the data is no table'}",
        )
    return found


def outcome_columns(task: str, given: Columns, header: Sequence[str]) -> tuple[OutcomeColumns, list[str]]:
    """(Columns, what is wrong with them)."""
    problems: list[str] = []

    def one(role: str, usual: Sequence[str]) -> str:
        named: str | None = getattr(given, role)
        if named is not None:
            problems.extend(_missing(role, [named], header))
            return named
        known = columns_called(header, usual)
        if not known:
            like = nearest_usual(header, usual)
            meant = f"; did you mean {shown(like)}?" if like else ""
            problems.append(f"data.columns.{role}: found no column of that kind, expected e.g. {usual[0]}{meant}")
        if len(known) > 1:
            both = " and ".join(map(shown, known))
            problems.append(f"data.columns.{role}: found {both}, expected one; name it: data.columns.{role}={known[0]}")
        return known[0] if known else ""

    features = tuple(given.features or ())
    problems += _missing("features", features, header)
    if task == "survival":
        columns = OutcomeColumns(task, time=one("time", TIMES), event=one("event", EVENTS), features=features)
    elif task == "regression":
        columns = OutcomeColumns(task, targets=given.targets or (), features=features)
        problems += _missing("targets", columns.targets, header)
        if not columns.targets:
            problems.append("data.columns.targets: found none, expected the columns to predict")
    elif isinstance(given.classes, tuple):
        columns = OutcomeColumns(task, classes=given.classes, features=features)
        problems += _missing("classes", columns.classes, header)
    else:
        columns = OutcomeColumns(task, classes=(one("classes", CLASSES),), features=features)
    taken = [columns.time, columns.event, *columns.targets, *columns.classes]
    problems += [
        f"data.columns.features: found {shown(name)}, expected none that is to be predicted"
        for name in features
        if name in taken
    ]
    return columns, problems


def _missing(role: str, columns: Sequence[str], header: Collection[str]) -> list[str]:
    return [
        f"data.columns.{role}: found no column {shown(column)}, expected one of the table{nearest(column, header)}"
        for column in columns
        if column not in header
    ]
