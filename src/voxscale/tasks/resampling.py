"""Metrics of a cohort as a whole, and how sure they are.

A metric is a function of how often each case counts. A resample is then a row of counts: what is the same in all of
them, such as which risk is above which, is computed once, not a thousand times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from voxscale.tasks.summary import Summary, drawn, of_cohort

Array = NDArray[np.float64]
Metric = Callable[[Array], Array]
"""From counts, (r, n), how often each of n cases is in each of r cohorts, to (r,) values; NaN where undefined."""

_COUNTS_AT_ONCE = 1 << 21


def once(metric: Metric, num_cases: int) -> float | None:
    """The metric of the cohort itself; None where it is undefined."""
    value = float(metric(np.ones((1, num_cases)))[0])
    return None if np.isnan(value) else value


def bootstrap(metrics: Mapping[str, Metric], num_cases: int) -> Summary:
    """Each metric that the cohort has, with a 95 % interval over those resamples of the cases that have it.

    What was fitted on training rows (the baseline hazard, the censoring distribution) stays as it is.
    """
    defined = {name: metric for name, metric in metrics.items() if once(metric, num_cases) is not None}
    return summarise_scores(
        lambda counts: {name: metric(counts) for name, metric in defined.items()}, num_cases, list(defined)
    )


def resamples(num_cases: int) -> Iterator[Array]:
    """The counts of all resamples, some rows at a time."""
    draws = drawn(num_cases)
    step = max(1, _COUNTS_AT_ONCE // max(1, num_cases))
    for start in range(0, len(draws), step):
        part = draws[start : start + step]
        cells = part + num_cases * np.arange(len(part))[:, None]
        yield np.bincount(cells.ravel(), minlength=part.size).reshape(part.shape).astype(np.float64)


def undefined(counts: Array) -> Array:
    """The metric that no cohort has."""
    return np.full(len(counts), np.nan)


def ratio(numerator: Array, denominator: Array, *, unknown: NDArray[np.bool_] | None = None) -> Array:
    """NaN where the denominator is not above zero, or where it is said to be `unknown`."""
    defined = denominator > 0
    if unknown is not None:
        defined &= ~unknown
    result = np.full(len(numerator), np.nan)
    np.divide(numerator, denominator, out=result, where=defined)
    return result


def counted(counts: Array, cases: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether any of these cases is in each cohort."""
    return np.asarray((counts[:, cases] > 0).any(axis=1))


def summarise_scores(score: Callable[[Array], Mapping[str, Array]], num_cases: int, names: Sequence[str]) -> Summary:
    """As `bootstrap`, for metrics that are worked out together; those named, in that order."""
    own = score(np.ones((1, num_cases)))
    resampled: dict[str, list[float]] = {name: [] for name in names if not np.isnan(own[name][0])}
    for counts in resamples(num_cases) if resampled else ():
        values = score(counts)
        for name, found in resampled.items():
            found.extend(values[name][~np.isnan(values[name])].tolist())
    return {name: of_cohort(float(own[name][0]), found) for name, found in resampled.items()}
