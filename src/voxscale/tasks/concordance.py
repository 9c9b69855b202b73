"""How well risks put cases in order: Harrell's and Uno's C, and the area under the curve up to a horizon.

A case with an event is compared with those that are known to go on for longer; one who is censored at the very time
of the event counts among these. The share of pairs in which the earlier event has the higher risk is the metric;
equal risks count half. Uno's C and the area weigh an event by the inverse of the probability G(t) to be still followed
at its time, so that cases censored before are stood for by others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from voxscale.tasks.hazard import CensoringCurve
from voxscale.tasks.resampling import Array, Metric, once, ratio, undefined

_CELLS_AT_ONCE = 1 << 22


def harrell_c(time: ArrayLike, event: ArrayLike, risk: ArrayLike) -> float | None:
    """None where no two cases can be compared."""
    return once(harrell_metric(time, event, risk), np.size(time))


def uno_c(
    time: ArrayLike, event: ArrayLike, risk: ArrayLike, censoring: CensoringCurve, *, tau: float | None = None
) -> float | None:
    """Events from `tau` on do not count. None where no two cases can be compared, or an event that counts has no G."""
    return once(uno_metric(time, event, risk, censoring, tau=tau), np.size(time))


def auc_at(
    horizon: float, time: ArrayLike, event: ArrayLike, risk: ArrayLike, censoring: CensoringCurve
) -> float | None:
    """Events up to the horizon against all who are followed beyond it. None where there are none of either."""
    return once(auc_metric(horizon, time, event, risk, censoring), np.size(time))


def harrell_metric(time: ArrayLike, event: ArrayLike, risk: ArrayLike) -> Metric:
    cohort = _Ordered.of(time, event, risk)
    rows = np.flatnonzero(cohort.event)
    return _pairs_metric(cohort, rows, cohort.outlived_from(rows), np.ones(len(rows)))


def uno_metric(
    time: ArrayLike, event: ArrayLike, risk: ArrayLike, censoring: CensoringCurve, *, tau: float | None = None
) -> Metric:
    cohort = _Ordered.of(time, event, risk)
    rows = np.flatnonzero(cohort.event & (cohort.time < (np.inf if tau is None else tau)))
    return _pairs_metric(cohort, rows, cohort.outlived_from(rows), _inverse(censoring.at(cohort.time[rows])) ** 2)


def auc_metric(horizon: float, time: ArrayLike, event: ArrayLike, risk: ArrayLike, censoring: CensoringCurve) -> Metric:
    cohort = _Ordered.of(time, event, risk)
    rows = np.flatnonzero(cohort.event & (cohort.time <= horizon))
    beyond = np.full(len(rows), np.searchsorted(cohort.time, horizon, side="right"))
    return _pairs_metric(cohort, rows, beyond, _inverse(censoring.at(cohort.time[rows])))


@dataclass(frozen=True, eq=False)
class _Ordered:
    """A cohort by time; at one time, events before the censored: who outlives an event is all that follow it."""

    order: NDArray[np.intp]
    time: Array
    event: NDArray[np.bool_]
    risk: Array

    @classmethod
    def of(cls, time: ArrayLike, event: ArrayLike, risk: ArrayLike) -> _Ordered:
        times, events = np.asarray(time, dtype=np.float64), np.asarray(event, dtype=bool)
        order = np.lexsort((~events, times))
        return cls(order, times[order], events[order], np.asarray(risk, dtype=np.float64)[order])

    def outlived_from(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """For each of these events the place from which on cases outlive it: after the last event of its time."""
        first = np.searchsorted(self.time, self.time[rows], side="left")
        end = np.searchsorted(self.time, self.time[rows], side="right")
        events = np.concatenate(([0], np.cumsum(self.event)))
        return np.asarray(first + events[end] - events[first], dtype=np.intp)


def _pairs_metric(cohort: _Ordered, rows: NDArray[np.intp], starts: NDArray[np.intp], weights: Array) -> Metric:
    """The share of pairs in order, each weighed as its event; an event of weight NaN leaves no value where it counts.

    Event `rows[i]` is compared with all cases from `starts[i]` on.
    """
    if not np.isfinite(cohort.risk).all():
        return undefined
    compared = starts < len(cohort.time)
    rows, starts, weights = rows[compared], starts[compared], weights[compared]
    known = np.isfinite(weights)

    def metric(counts: Array) -> Array:
        counts = counts[:, cohort.order]
        following = counts.sum(axis=1, keepdims=True) - np.cumsum(counts, axis=1) + counts
        weighed = counts[:, rows[known]] * weights[known]
        won = _won(cohort.risk, rows[known], starts[known], counts)
        numerator = (weighed * won).sum(axis=1)
        denominator = (weighed * following[:, starts[known]]).sum(axis=1)
        return ratio(numerator, denominator, unknown=_unknown(counts, following, rows[~known], starts[~known]))

    return metric


def _unknown(counts: Array, following: Array, rows: NDArray[np.intp], starts: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Whether any of these events is in a cohort together with a case to compare it with."""
    return np.asarray(((counts[:, rows] > 0) & (following[:, starts] > 0)).any(axis=1))


def _won(risk: Array, rows: NDArray[np.intp], starts: NDArray[np.intp], counts: Array) -> Array:
    """(r, rows): for each event the number of cases from its start on that have a lower risk, equal ones half.

    A product of matrices of halves and counts: float32 is exact for them up to millions of cases.
    """
    won = np.zeros((len(counts), len(rows)), dtype=np.float32)
    small = counts.astype(np.float32)
    step = max(1, _CELLS_AT_ONCE // max(1, len(risk)))
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        first = int(starts[part].min())
        own, others = risk[rows[part], None], risk[None, first:]
        lower = (own > others).astype(np.float32)
        lower += np.float32(0.5) * (own == others)
        lower *= np.arange(first, len(risk)) >= starts[part, None]
        won[:, part] = small[:, first:] @ lower.T
    return won.astype(np.float64)


def _inverse(survival: Array) -> Array:
    """1 / G; NaN where G is 0 or unknown."""
    inverse = np.full(len(survival), np.nan)
    np.divide(1.0, survival, out=inverse, where=survival > 0)
    return inverse
