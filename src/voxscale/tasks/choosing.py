"""Which metric chooses the best model: one that every validation measures."""

from __future__ import annotations

import difflib
from typing import Protocol

from voxscale.errors import ConfigError


class Measured(Protocol):
    def metrics(self, *, full: bool) -> tuple[str, ...]: ...

    def choosable(self) -> tuple[str, ...]: ...


def metric_problems(task: Measured, metric: str) -> list[tuple[str, str]]:
    """(What is wrong with `validate.metric`, how to mend it), if anything is."""
    usable = task.choosable()
    if metric in usable:
        return []
    why = ", as the others are measured of the best model alone" * (metric in task.metrics(full=True))
    nearest = difflib.get_close_matches(metric, usable, n=1, cutoff=0)[0]
    return [(f"validate.metric: found {metric!r}, expected one of {', '.join(usable)}{why}", f"e.g. {nearest}")]


def refuse_metric(task: Measured, metric: str) -> None:
    for problem, fix in metric_problems(task, metric):
        raise ConfigError(problem, fix=fix)
