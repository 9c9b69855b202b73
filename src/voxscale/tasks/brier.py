"""The Brier score of predicted survival: its squared error, weighed so that the censored are stood for by others.

A case with an event up to the horizon should have had survival 0, one followed beyond it survival 1; who is censored
before says nothing. The weights are 1 / G, of the event's time or of the horizon (Graf et al. 1999).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from voxscale.tasks.hazard import CensoringCurve
from voxscale.tasks.resampling import Array, Metric, counted, once, ratio


def brier_at(
    horizon: float, time: ArrayLike, event: ArrayLike, survival: ArrayLike, censoring: CensoringCurve
) -> float | None:
    """`survival` is (n,), predicted for the horizon.

    None where the horizon is before all times or not before any, or where a case that counts has no survival or no G.
    """
    return once(brier_metric(horizon, time, event, survival, censoring), np.size(time))


def integrated_brier(
    times: ArrayLike, time: ArrayLike, event: ArrayLike, survival: ArrayLike, censoring: CensoringCurve
) -> float | None:
    """The mean over `times`, two or more that rise, by trapezoids; `survival` is (n, times). None as in `brier_at`."""
    return once(integrated_brier_metric(times, time, event, survival, censoring), np.size(time))


def brier_metric(
    horizon: float, time: ArrayLike, event: ArrayLike, survival: ArrayLike, censoring: CensoringCurve
) -> Metric:
    followed = np.asarray(time, dtype=np.float64)
    errors = _errors(np.array([horizon]), followed, event, np.asarray(survival)[:, None], censoring)
    return _mean_metric(errors[:, 0], started=followed <= horizon, lasting=followed > horizon)


def integrated_brier_metric(
    times: ArrayLike, time: ArrayLike, event: ArrayLike, survival: ArrayLike, censoring: CensoringCurve
) -> Metric:
    grid, followed = np.asarray(times, dtype=np.float64), np.asarray(time, dtype=np.float64)
    if len(grid) < 2 or not (np.diff(grid) > 0).all():
        raise ValueError("an integral needs two times or more that rise")
    errors = _errors(grid, followed, event, survival, censoring) @ _trapezoids(grid)
    return _mean_metric(errors, started=followed <= grid[0], lasting=followed > grid[-1])


def integration_times(time: ArrayLike, known_to: float, *, points: int = 100) -> Array | None:
    """Even times over the middle 90 % of a cohort's follow-up, as far as training rows tell.

    Not over all of it: the score would hang on the few who were followed longest and be undefined for most resamples.
    """
    followed = np.asarray(time, dtype=np.float64)
    if not len(followed):
        return None
    low, high = np.quantile(followed, [0.05, 0.95]).tolist()
    high = min(high, known_to)
    return np.linspace(low, high, points) if low < high else None


def _errors(grid: Array, time: Array, event: ArrayLike, survival: ArrayLike, censoring: CensoringCurve) -> Array:
    """(n, times): each case's weighed squared error; NaN where it counts and cannot be known."""
    predicted, followed = np.asarray(survival, dtype=np.float64), time[:, None]
    had_event = (followed <= grid) & np.asarray(event, dtype=bool)[:, None]
    beyond = followed > grid
    errors = np.zeros(had_event.shape)
    np.divide(np.square(predicted), _positive(censoring.at(time))[:, None], out=errors, where=had_event)
    np.divide(np.square(1 - predicted), _positive(censoring.at(grid)), out=errors, where=beyond)
    return errors


def _mean_metric(errors: Array, *, started: NDArray[np.bool_], lasting: NDArray[np.bool_]) -> Metric:
    """The mean error of cohorts whose follow-up has begun with some case and lasts with another."""
    unknown = ~np.isfinite(errors)
    finite = np.where(unknown, 0.0, errors)

    def metric(counts: Array) -> Array:
        outside = ~counted(counts, started) | ~counted(counts, lasting)
        return ratio(counts @ finite, counts.sum(axis=1), unknown=outside | counted(counts, unknown))

    return metric


def _trapezoids(grid: Array) -> Array:
    """The weight of each time in the mean over the range."""
    widths = np.pad(np.diff(grid), 1)
    weights: Array = (widths[:-1] + widths[1:]) / (2 * (grid[-1] - grid[0]))
    return weights


def _positive(survival: Array) -> Array:
    """G; NaN where it is 0, since nobody is left to stand for those censored."""
    return np.where(survival > 0, survival, np.nan)
