"""How well classes and numbers are predicted: metrics of a whole cohort, pure functions of arrays.

`score_classes`, `score_labels` and `score_numbers` work out every metric for many *draws* of the cases at once: weights
(b, n) say how often each of b draws has each case, so that a bootstrap need not sort a thousand times. The others look
at the cases as they are. What is undefined, as a curve for one class alone or the correlation of a constant, is NaN of
a draw and None of the cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Doubles = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]
Drawn = dict[str, Doubles]  # a metric of every draw, NaN where it is undefined

BINS = 15  # of confidence, equally wide


def accuracy(truth: ArrayLike, predicted: ArrayLike) -> float | None:
    """The share of cases whose class is right."""
    return _value(_accuracy(np.asarray(truth), np.asarray(predicted), _once(truth)))


def balanced_accuracy(truth: ArrayLike, predicted: ArrayLike, num_classes: int) -> float | None:
    """The mean recall of the classes that there are cases of."""
    tallies = _tallies(np.asarray(truth), np.asarray(predicted), num_classes, _once(truth))
    return _value(_balanced_accuracy(*tallies[:2]))


def f1(truth: ArrayLike, predicted: ArrayLike, num_classes: int) -> list[float | None]:
    """Of each class; undefined for one that neither is nor is predicted."""
    return [
        _value(column)
        for column in _f1(*_tallies(np.asarray(truth), np.asarray(predicted), num_classes, _once(truth))).T
    ]


def auroc(positive: ArrayLike, scores: ArrayLike) -> float | None:
    """The area under the ROC curve: how often a positive case scores higher than a negative one, ties half."""
    return _value(_curves(np.asarray(positive, np.bool_), np.asarray(scores, np.float64), _once(scores))[0])


def auprc(positive: ArrayLike, scores: ArrayLike) -> float | None:
    """Average precision: the area under the steps of precision over recall; undefined without a positive case."""
    return _value(_curves(np.asarray(positive, np.bool_), np.asarray(scores, np.float64), _once(scores))[1])


def confusion_matrix(truth: ArrayLike, predicted: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """(true class, predicted class): how many cases."""
    codes = np.asarray(truth, np.int64) * num_classes + np.asarray(predicted, np.int64)
    return np.bincount(codes, minlength=num_classes**2).reshape(num_classes, num_classes).astype(np.int64)


def calibration_error(right: ArrayLike, confidence: ArrayLike) -> float | None:
    """Expected calibration error: how far confidence is from the share that is right, by bin (low, high], weighted."""
    return _value(_calibration_error(np.asarray(right), np.asarray(confidence, np.float64), _once(confidence)))


def r_squared(truth: ArrayLike, predicted: ArrayLike) -> float | None:
    return _value(_r_squared(*_numbers(truth, predicted), _once(truth)))


def mean_absolute_error(truth: ArrayLike, predicted: ArrayLike) -> float | None:
    real, guess = _numbers(truth, predicted)
    return _value(_mean(np.abs(real - guess), _once(truth)))


def root_mean_squared_error(truth: ArrayLike, predicted: ArrayLike) -> float | None:
    real, guess = _numbers(truth, predicted)
    return _value(np.sqrt(_mean((real - guess) ** 2, _once(truth))))


def pearson(truth: ArrayLike, predicted: ArrayLike) -> float | None:
    return _value(_pearson(*_numbers(truth, predicted), _once(truth)))


def spearman(truth: ArrayLike, predicted: ArrayLike) -> float | None:
    return _value(_spearman(*_numbers(truth, predicted), _once(truth)))


def score_classes(
    truth: Integers, probabilities: Doubles, classes: Sequence[str], weights: Doubles | None = None
) -> Drawn:
    """Exclusive classes: `truth` (n,) their numbers, `probabilities` (n, c).

    accuracy, balanced_accuracy, calibration_error; auroc, auprc (one class against the rest) and f1 by class, and
    their means over the classes for which they are defined.
    """
    weights = _once(truth) if weights is None else weights
    predicted = probabilities.argmax(axis=1) if len(probabilities) else np.zeros(0, np.int64)
    confidence = probabilities.max(axis=1, initial=0.0)
    hits, actual, chosen = _tallies(truth, predicted, len(classes), weights)
    curves = [_curves(truth == n, probabilities[:, n], weights) for n in range(len(classes))]
    return {
        "accuracy": _accuracy(truth, predicted, weights),
        "balanced_accuracy": _balanced_accuracy(hits, actual),
        **_by_class("auroc", classes, (roc for roc, _ in curves)),
        **_by_class("auprc", classes, (precision for _, precision in curves)),
        **_by_class("f1", classes, _f1(hits, actual, chosen).T),
        "calibration_error": _calibration_error(truth == predicted, confidence, weights),
    }


def score_labels(
    truth: Integers, probabilities: Doubles, labels: Sequence[str], weights: Doubles | None = None
) -> Drawn:
    """Labels that may hold at once: `truth` (n, k) of 0 and 1, `probabilities` (n, k); each metric by label, and means.

    A label is predicted from a probability of a half. Its calibration is that of the probability itself.
    """
    weights = _once(truth) if weights is None else weights
    held = truth.astype(np.bool_)
    by_label = [_score_label(real, each, weights) for real, each in zip(held.T, probabilities.T, strict=True)]
    drawn: Drawn = {}
    for metric in by_label[0]:
        drawn |= _by_class(metric, labels, (each[metric] for each in by_label))
    return drawn


def _score_label(held: NDArray[np.bool_], probabilities: Doubles, weights: Doubles) -> Drawn:
    predicted = probabilities >= 0.5
    hits, actual, chosen = _tallies(held, predicted, 2, weights)
    roc, precision = _curves(held, probabilities, weights)
    return {
        "accuracy": _accuracy(held, predicted, weights),
        "balanced_accuracy": _balanced_accuracy(hits, actual),
        "auroc": roc,
        "auprc": precision,
        "f1": _f1(hits, actual, chosen)[:, 1],
        "calibration_error": _calibration_error(held, probabilities, weights),
    }


def score_numbers(truth: Doubles, predicted: Doubles, targets: Sequence[str], weights: Doubles | None = None) -> Drawn:
    """A regression: `truth` and `predicted` (n, k) in the units of the targets.

    Means over targets only of what has no unit: r2 and the correlations.
    """
    weights = _once(truth) if weights is None else weights
    columns = list(zip(truth.T, predicted.T, strict=True))
    errors = [np.abs(real - guess) for real, guess in columns]
    return {
        **_by_class("r2", targets, (_r_squared(*pair, weights) for pair in columns)),
        **{f"mae/{name}": _mean(error, weights) for name, error in zip(targets, errors, strict=True)},
        **{f"rmse/{name}": np.sqrt(_mean(error**2, weights)) for name, error in zip(targets, errors, strict=True)},
        **_by_class("pearson", targets, (_pearson(*pair, weights) for pair in columns)),
        **_by_class("spearman", targets, (_spearman(*pair, weights) for pair in columns)),
    }


def _once(values: ArrayLike) -> Doubles:
    return np.ones((1, len(np.asarray(values))))


def _value(values: Doubles) -> float | None:
    return None if np.isnan(values[0]) else float(values[0])


def _numbers(truth: ArrayLike, predicted: ArrayLike) -> tuple[Doubles, Doubles]:
    return np.asarray(truth, np.float64), np.asarray(predicted, np.float64)


def _by_class(metric: str, names: Sequence[str], values: Iterable[Doubles]) -> Drawn:
    """A metric of each, and the mean over those for which it is defined."""
    by_name = dict(zip(names, values, strict=True))
    stacked = np.stack(list(by_name.values()))
    known = ~np.isnan(stacked)
    mean = _ratio(np.where(known, stacked, 0).sum(axis=0), known.sum(axis=0))
    return {**{f"{metric}/{name}": each for name, each in by_name.items()}, f"{metric}/mean": mean}


def _ratio(above: Doubles, below: NDArray[Any]) -> Doubles:
    """NaN, without a word, where there is nothing to divide by."""
    quotient: Doubles = np.full(np.shape(above), np.nan)
    np.divide(above, below, out=quotient, where=below > 0)
    return quotient


def _dot(first: Doubles, second: Doubles) -> Doubles:
    """(b,): row by row."""
    return np.asarray(np.einsum("bn,bn->b", first, second))


def _mean(values: Doubles, weights: Doubles) -> Doubles:
    return _ratio(weights @ values, weights.sum(axis=1))


def _accuracy(truth: NDArray[Any], predicted: NDArray[Any], weights: Doubles) -> Doubles:
    return _mean((truth == predicted).astype(np.float64), weights)


def _tallies(
    truth: NDArray[Any], predicted: NDArray[Any], num_classes: int, weights: Doubles
) -> tuple[Doubles, Doubles, Doubles]:
    """(b, c) each: how many of a class are predicted right, are, and are predicted."""
    hits = weights * (truth == predicted)
    right, actual = (_sums(truth, each, num_classes) for each in (hits, weights))
    return right, actual, _sums(predicted, weights, num_classes)


def _sums(codes: NDArray[Any], values: Doubles, length: int) -> Doubles:
    """(b, length): the sum of each row's values by code."""
    codes = codes.astype(np.int64)
    return np.stack([np.bincount(codes, weights=row, minlength=length) for row in values])


def _balanced_accuracy(hits: Doubles, actual: Doubles) -> Doubles:
    recall = _ratio(hits, actual)
    known = ~np.isnan(recall)
    return _ratio(np.where(known, recall, 0).sum(axis=1), known.sum(axis=1))


def _f1(hits: Doubles, actual: Doubles, chosen: Doubles) -> Doubles:
    return _ratio(2 * hits, actual + chosen)


def _calibration_error(right: NDArray[Any], confidence: Doubles, weights: Doubles) -> Doubles:
    edges = np.linspace(0, 1, BINS + 1)[1:-1]
    gaps = _sums(np.digitize(confidence, edges, right=True), weights * (right - confidence), BINS)
    return _ratio(np.abs(gaps).sum(axis=1), weights.sum(axis=1))


def _curves(positive: NDArray[np.bool_], scores: Doubles, weights: Doubles) -> tuple[Doubles, Doubles]:
    """(auroc, auprc), from one look at the cases in the order of falling scores."""
    order, starts = _order(-scores)
    weights = np.take(weights, order, axis=1)
    hits, taken = _grouped(weights * positive[order], starts), _grouped(weights, starts)
    right, misses = np.cumsum(hits, axis=1), taken - hits
    num_positive = hits.sum(axis=1)
    wins = _dot(misses, right) - _dot(misses, hits) / 2
    precision = np.divide(right, np.cumsum(taken, axis=1), out=np.zeros_like(right), where=right > 0)
    return _ratio(wins, num_positive * misses.sum(axis=1)), _ratio(_dot(hits, precision), num_positive)


def _order(values: Doubles) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Places in ascending order, and where in it each run of equal values begins; None where no two are equal."""
    order = np.argsort(values, kind="stable")
    new = np.diff(values[order], prepend=-np.inf) > 0 if len(values) else np.zeros(0, np.bool_)
    return order, None if new.all() else np.flatnonzero(new)


def _grouped(values: Doubles, starts: NDArray[np.int64] | None) -> Doubles:
    return values if starts is None else np.add.reduceat(values, starts, axis=1)


def _r_squared(truth: Doubles, predicted: Doubles, weights: Doubles) -> Doubles:
    """One less the share of the spread of truth that is missed."""
    centred = truth - _mean(truth, weights)[:, None]
    spread = _dot(weights, centred**2)
    missed = weights @ (truth - predicted) ** 2
    return np.where(_varies(truth, weights), 1 - _ratio(missed, spread), np.nan)


def _pearson(first: Doubles, second: Doubles, weights: Doubles) -> Doubles:
    varies = _varies(first, weights) & _varies(second, weights)
    return np.where(varies, _correlation(first[None], second[None], weights), np.nan)


def _spearman(first: Doubles, second: Doubles, weights: Doubles) -> Doubles:
    varies = _varies(first, weights) & _varies(second, weights)
    return np.where(varies, _correlation(_ranks(first, weights), _ranks(second, weights), weights), np.nan)


def _correlation(first: Doubles, second: Doubles, weights: Doubles) -> Doubles:
    """Of values (b, n), or (1, n) for all draws alike."""
    total = weights.sum(axis=1)
    first, second = (
        each - _ratio(_dot(weights, np.broadcast_to(each, weights.shape)), total)[:, None] for each in (first, second)
    )
    spreads = [np.sqrt(_dot(weights * each, each)) for each in (first, second)]
    return np.clip(_ratio(_dot(weights * first, second), spreads[0] * spreads[1]), -1, 1)


def _ranks(values: Doubles, weights: Doubles) -> Doubles:
    """(b, n): the rank of each value in each draw; equal ones share the mean of theirs."""
    order, starts = _order(values)
    sizes = _grouped(np.take(weights, order, axis=1), starts)
    ranks = np.cumsum(sizes, axis=1) - (sizes - 1) / 2
    if starts is not None:
        ranks = np.repeat(ranks, np.diff(starts, append=len(values)), axis=1)
    placed = np.empty_like(ranks)
    placed[:, order] = ranks
    return placed


def _varies(values: Doubles, weights: Doubles) -> NDArray[np.bool_]:
    """Whether a draw has two different values; a spread of nothing but rounding is none."""
    drawn = weights > 0
    lowest = np.where(drawn, values, np.inf).min(axis=1, initial=np.inf)
    return np.asarray(np.where(drawn, values, -np.inf).max(axis=1, initial=-np.inf) > lowest)
