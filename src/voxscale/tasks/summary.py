"""From rows, one per case, to a summary: for each metric its value and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
Summary = dict[str, dict[str, Any]]
RESAMPLES = 1000


def summarise(rows: Sequence[Row], metrics: Sequence[str]) -> Summary:
    """Mean, median, deviation and a bootstrap interval per metric, over the cases that have it."""
    summary = {}
    for metric in metrics:
        values = np.array([row[metric] for row in rows if metric in row], dtype=np.float64)
        if len(values):
            summary[metric] = _summary(values)
    return summary


def _summary(values: NDArray[np.float64]) -> dict[str, Any]:
    low, high = np.percentile(values[drawn(len(values))].mean(1), [2.5, 97.5])
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        "ci95": [float(low), float(high)],
    }


def of_cohort(value: float, resampled: Sequence[float]) -> dict[str, Any]:
    """The entry of a metric that a cohort has as a whole: `mean` is its value, the rest is of the bootstrap."""
    if not len(resampled):
        return {"mean": value, "median": value, "std": 0.0, "ci95": [value, value]}
    low, median, high = np.percentile(resampled, [2.5, 50, 97.5]).tolist()
    return {"mean": value, "median": median, "std": float(np.std(resampled)), "ci95": [low, high]}


@lru_cache(maxsize=2)  # most metrics are defined for the same number of cases
def drawn(count: int) -> NDArray[np.int64]:
    """The cases of each resample, by number."""
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def mean_row(rows: Sequence[Row]) -> Row:
    """The mean of each number of rows that have the same."""
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def metric_value(summary: Mapping[str, Mapping[str, Any]], metric: str) -> float | None:
    """The mean of a metric, or None where it is undefined."""
    return float(summary[metric]["mean"]) if metric in summary else None
