"""Calibration at a horizon: predicted survival against what Kaplan and Meier observe, in groups of cases.

Groups hold equal shares of the cases by predicted survival, lowest first; cases of equal prediction stay together.
The one number is the mean over cases of the absolute difference between their group's observed and mean predicted
survival: 0 for a calibrated model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from voxscale.tasks.resampling import Array, Metric, once, ratio, undefined

GROUPS = 5


@dataclass(frozen=True)
class CalibrationRow:
    """One group; `observed` is None where nobody of it was followed to the horizon."""

    cases: int
    predicted: float
    observed: float | None


def calibration_rows(
    horizon: float, time: ArrayLike, event: ArrayLike, survival: ArrayLike, *, groups: int = GROUPS
) -> list[CalibrationRow]:
    """A row per group that holds a case; none at all where a predicted survival is unknown."""
    predicted = np.asarray(survival, dtype=np.float64)
    if not np.isfinite(predicted).all():
        return []
    cohort = _Cohort.of(horizon, time, event, predicted)
    counts = np.ones((1, len(predicted)))
    rows = []
    for members in cohort.grouped(counts, groups):
        size, mean, observed = (float(each[0]) for each in cohort.compare(members))
        if size:
            rows.append(CalibrationRow(int(size), mean, None if np.isnan(observed) else observed))
    return rows


def calibration_error(
    horizon: float, time: ArrayLike, event: ArrayLike, survival: ArrayLike, *, groups: int = GROUPS
) -> float | None:
    """None where any group has no observed survival, or a predicted survival is unknown."""
    return once(calibration_metric(horizon, time, event, survival, groups=groups), np.size(time))


def calibration_metric(
    horizon: float, time: ArrayLike, event: ArrayLike, survival: ArrayLike, *, groups: int = GROUPS
) -> Metric:
    """Groups are formed anew in each cohort."""
    predicted = np.asarray(survival, dtype=np.float64)
    if not np.isfinite(predicted).all():
        return undefined
    cohort = _Cohort.of(horizon, time, event, predicted)

    def metric(counts: Array) -> Array:
        total = np.zeros(len(counts))
        for members in cohort.grouped(counts, groups):
            size, mean, observed = cohort.compare(members)
            total += np.where(size > 0, size * np.abs(mean - observed), 0.0)
        return ratio(total, counts.sum(axis=1), unknown=np.isnan(total))

    return metric


@dataclass(frozen=True, eq=False)
class _Cohort:
    """What counting needs, computed once: cases by predicted survival, and those of them up to the horizon by time."""

    predicted: Array
    order: NDArray[np.intp]
    tied_from: NDArray[np.intp]
    """For each case in order, the first one with its prediction."""
    by_time: NDArray[np.intp]
    """The cases in order that have an event up to the horizon, by time."""
    event_starts: NDArray[np.intp]
    """Where in `by_time` each distinct time starts."""
    leaves: NDArray[np.intp]
    """The cases in order by time, all of them."""
    left_before: NDArray[np.intp]
    """For each distinct time of events the number of cases in `leaves` whose time is before it."""
    reaches: NDArray[np.bool_]
    """Whether a case is followed to the horizon."""

    @classmethod
    def of(cls, horizon: float, time: ArrayLike, event: ArrayLike, predicted: Array) -> _Cohort:
        order = np.argsort(predicted, kind="stable")
        predicted = predicted[order]
        times, events = np.asarray(time, dtype=np.float64)[order], np.asarray(event, dtype=bool)[order]
        leaves = np.argsort(times, kind="stable")
        by_time = leaves[(events & (times <= horizon))[leaves]]
        distinct, event_starts = np.unique(times[by_time], return_index=True)
        return cls(
            predicted=predicted,
            order=order,
            tied_from=np.searchsorted(predicted, predicted, side="left"),
            by_time=by_time,
            event_starts=event_starts,
            leaves=leaves,
            left_before=np.searchsorted(times[leaves], distinct, side="left"),
            reaches=times >= horizon,
        )

    def grouped(self, counts: Array, groups: int) -> list[Array]:
        """The counts of the members of each group, cases in order."""
        counts = counts[:, self.order]
        lower = (np.cumsum(counts, axis=1) - counts)[:, self.tied_from]
        group = np.floor_divide(lower * groups, np.maximum(counts.sum(axis=1, keepdims=True), 1))
        return [np.where(group == number, counts, 0.0) for number in range(groups)]

    def compare(self, members: Array) -> tuple[Array, Array, Array]:
        """Size, mean predicted and observed survival of a group in each cohort; NaN where undefined."""
        size = members.sum(axis=1)
        return size, ratio(members @ self.predicted, size), self._observed(members, size)

    def _observed(self, members: Array, size: Array) -> Array:
        survival = np.ones(len(members))
        if len(self.by_time):
            left = np.pad(np.cumsum(members[:, self.leaves], axis=1), ((0, 0), (1, 0)))
            at_risk = size[:, None] - left[:, self.left_before]
            events = np.add.reduceat(members[:, self.by_time], self.event_starts, axis=1)
            survival = (1 - events / np.maximum(at_risk, 1)).prod(axis=1)
        followed = (members[:, self.reaches] > 0).any(axis=1)
        return np.where(followed | ((survival == 0) & (size > 0)), survival, np.nan)
