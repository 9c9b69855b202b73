"""Metrics of classes and numbers, against scikit-learn and scipy; a bootstrap against resampled data."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as oracle
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from voxscale.tasks import scores
from voxscale.tasks.resampling import summarise_scores

Doubles = NDArray[np.float64]
CLOSE = 1e-9
SEEDS = st.integers(0, 2**32 - 1)


def cohort(seed: int, count: int, classes: int, ties: bool) -> tuple[NDArray[np.int64], Doubles]:
    """Classes that are somewhat predicted; with few different probabilities where `ties`."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(classes, size=count)
    raw = rng.exponential(size=(count, classes)) + 0.5 * (truth[:, None] == np.arange(classes))
    if ties:
        raw = np.ceil(raw * 2)
    return truth, raw / raw.sum(axis=1, keepdims=True)


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(1, 60), st.integers(2, 5), st.booleans())
def test_exclusive_classes_agree_with_scikit_learn(seed: int, count: int, classes: int, ties: bool) -> None:
    truth, probabilities = cohort(seed, count, classes, ties)
    predicted = probabilities.argmax(1)
    names = [f"c{n}" for n in range(classes)]
    found = defined(scores.score_classes(truth, probabilities, names))
    assert found["accuracy"] == pytest.approx(oracle.accuracy_score(truth, predicted), abs=CLOSE)
    assert scores.accuracy(truth, predicted) == found["accuracy"]
    recall = [np.mean(predicted[truth == n] == n) for n in np.unique(truth)]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(recall), abs=CLOSE)
    assert scores.balanced_accuracy(truth, predicted, classes) == found["balanced_accuracy"]
    assert np.array_equal(
        scores.confusion_matrix(truth, predicted, classes),
        oracle.confusion_matrix(truth, predicted, labels=range(classes)),
    )
    f1 = oracle.f1_score(truth, predicted, labels=range(classes), average=None, zero_division=np.nan)
    _assert_same(found, "f1", names, f1)
    assert [None if math.isnan(each) else pytest.approx(each, abs=CLOSE) for each in f1] == scores.f1(
        truth, predicted, classes
    )
    assert found["f1/mean"] == pytest.approx(oracle.f1_score(truth, predicted, average="macro"), abs=CLOSE)
    _assert_same(found, "auroc", names, [_auroc(truth == n, probabilities[:, n]) for n in range(classes)])
    _assert_same(found, "auprc", names, [_auprc(truth == n, probabilities[:, n]) for n in range(classes)])


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(40, 80), st.integers(3, 5))
def test_the_mean_curve_is_scikit_learns_one_against_the_rest(seed: int, count: int, classes: int) -> None:
    truth, probabilities = cohort(seed, count, classes, ties=False)
    assume(len(np.unique(truth)) == classes)
    found = defined(scores.score_classes(truth, probabilities, [str(n) for n in range(classes)]))
    expected = oracle.roc_auc_score(truth, probabilities, multi_class="ovr", average="macro")
    assert found["auroc/mean"] == pytest.approx(expected, abs=CLOSE)
    assert found["balanced_accuracy"] == pytest.approx(
        oracle.balanced_accuracy_score(truth, probabilities.argmax(1)), abs=CLOSE
    )


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 60), st.integers(1, 4), st.booleans())
def test_labels_that_hold_at_once_agree_with_scikit_learn(seed: int, count: int, labels: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    truth = (rng.random((count, labels)) < rng.random(labels)).astype(np.int64)
    probabilities = np.clip(rng.random((count, labels)) * 0.8 + 0.2 * truth, 0, 1)
    if ties:
        probabilities = np.round(probabilities, 1)
    names = [f"l{n}" for n in range(labels)]
    found = defined(scores.score_labels(truth, probabilities, names))
    predicted = (probabilities >= 0.5).astype(int)
    columns = range(labels)
    _assert_same(found, "accuracy", names, [np.mean(truth[:, n] == predicted[:, n]) for n in columns])
    f1 = [oracle.f1_score(truth[:, n], predicted[:, n], zero_division=np.nan) for n in columns]
    _assert_same(found, "f1", names, f1)
    _assert_same(found, "auroc", names, [_auroc(truth[:, n] == 1, probabilities[:, n]) for n in columns])
    _assert_same(found, "auprc", names, [_auprc(truth[:, n] == 1, probabilities[:, n]) for n in columns])
    recalls = [[np.mean(predicted[truth[:, n] == v, n] == v) for v in np.unique(truth[:, n])] for n in columns]
    _assert_same(found, "balanced_accuracy", names, [np.mean(each) for each in recalls])
    _assert_same(found, "calibration_error", names, [_calibration(truth[:, n], probabilities[:, n]) for n in columns])


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(2, 50), st.integers(1, 3), st.booleans(), st.sampled_from([1e-3, 1.0, 1e6]))
def test_numbers_agree_with_scikit_learn_and_scipy(
    seed: int, count: int, targets: int, ties: bool, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.normal(3, 1, (count, targets))
    predicted = truth + rng.normal(size=(count, targets))
    if ties:
        truth, predicted = np.round(truth), np.round(predicted)
    truth, predicted = truth * scale, predicted * scale
    names = [f"t{n}" for n in range(targets)]
    found = defined(scores.score_numbers(truth, predicted, names))
    for name, real, guess in zip(names, truth.T, predicted.T, strict=True):
        assert found[f"mae/{name}"] == pytest.approx(oracle.mean_absolute_error(real, guess), rel=CLOSE)
        assert found[f"rmse/{name}"] == pytest.approx(oracle.root_mean_squared_error(real, guess), rel=CLOSE)
        assert (f"r2/{name}" in found) == (np.ptp(real) > 0)
        if np.ptp(real) > 0:
            assert found[f"r2/{name}"] == pytest.approx(oracle.r2_score(real, guess), rel=CLOSE, abs=CLOSE)
        varies = np.ptp(real) > 0 and np.ptp(guess) > 0
        assert (f"pearson/{name}" in found) == (f"spearman/{name}" in found) == varies
        if varies:
            assert found[f"pearson/{name}"] == pytest.approx(stats.pearsonr(real, guess).statistic, abs=CLOSE)
            assert found[f"spearman/{name}"] == pytest.approx(stats.spearmanr(real, guess).statistic, abs=CLOSE)
        plain = (scores.r_squared, scores.mean_absolute_error, scores.root_mean_squared_error, scores.pearson)
        for metric, short in zip((*plain, scores.spearman), ("r2", "mae", "rmse", "pearson", "spearman"), strict=True):
            assert metric(real, guess) == found.get(f"{short}/{name}")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=60))
def test_calibration_is_that_of_fifteen_bins(cases: list[tuple[bool, float]]) -> None:
    right, confidence = (np.array(column) for column in zip(*cases, strict=True))
    assert scores.calibration_error(right, confidence) == pytest.approx(_calibration(right, confidence), abs=CLOSE)


def test_calibration_of_what_is_known() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random(200_000)
    assert (scores.calibration_error(rng.random(200_000) < confidence, confidence) or 0) < 0.01
    assert scores.calibration_error([True] * 4, [0.25] * 4) == pytest.approx(0.75)
    assert scores.calibration_error([True, False], [1.0, 1.0]) == pytest.approx(0.5)
    truth, probabilities = np.array([0, 0, 1]), np.array([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]])
    found = defined(scores.score_classes(truth, probabilities, ["a", "b"]))
    assert found["calibration_error"] == pytest.approx((0.1 + 0.4 + 0.8) / 3)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(2, 40), st.sampled_from(["classes", "labels", "numbers"]), st.booleans())
def test_a_bootstrap_is_that_of_resampled_data(seed: int, count: int, kind: str, ties: bool) -> None:
    score, arguments = _random_scores(kind, seed, count, ties)
    chosen = np.random.default_rng(seed).integers(count, size=(12, count))
    found = score(*arguments, _counts(chosen))
    for number, row in enumerate(chosen):
        expected = score(*(_taken(each, row) for each in arguments))
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name][number] == pytest.approx(values[0], rel=1e-8, abs=CLOSE, nan_ok=True), name


def test_the_order_of_cases_does_not_matter() -> None:
    for kind in ("classes", "labels", "numbers"):
        score, arguments = _random_scores(kind, 1, 50, ties=True)
        shuffled = np.random.default_rng(2).permutation(50)
        there = defined(score(*arguments))
        assert defined(score(*(_taken(each, shuffled) for each in arguments))) == pytest.approx(there)


def test_what_is_undefined_is_absent() -> None:
    one = defined(scores.score_classes(np.zeros(4, int), np.full((4, 2), 0.5), ["a", "b"]))
    assert "auroc/a" not in one
    assert "auroc/mean" not in one
    assert "auprc/b" not in one, "no case of it"
    assert "f1/b" not in one, "neither there nor predicted"
    assert one["auprc/mean"] == one["auprc/a"] == 1
    assert one["f1/mean"] == one["accuracy"] == 1
    assert scores.auroc([True, True], [0.1, 0.2]) is None
    assert scores.auprc([False, False], [0.1, 0.2]) is None
    flat = defined(scores.score_numbers(np.full((3, 1), 0.1), np.array([[1.0], [2], [3]]), ["t"]))
    assert flat.keys() == {"mae/t", "rmse/t"}
    assert scores.pearson([1, 2, 3], [0.1, 0.1, 0.1]) is None
    assert scores.spearman([0.1, 0.1, 0.1], [1, 2, 3]) is None
    assert scores.r_squared([0.1] * 3, [0.1] * 3) is None
    assert scores.r_squared([2.0], [2.0]) is None


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])
def test_no_case_has_no_metric(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    score, arguments = _random_scores(kind, 0, 0, ties=False)
    assert defined(score(*arguments)) == {}
    assert not recwarn.list


def test_a_resample_without_the_one_that_differs_is_constant(recwarn: pytest.WarningsRecorder) -> None:
    truth, predicted = np.array([[0.1], [0.1], [0.1], [1e9]]), np.array([[0.0], [1], [2], [3]])
    chosen = np.array([[0, 1, 2, 0], [0, 1, 3, 3]])
    found = scores.score_numbers(truth, predicted, ["t"], _counts(chosen))
    for name in ("r2", "pearson", "spearman"):
        assert np.isnan(found[f"{name}/t"]).tolist() == [True, False]
    assert not np.isnan(found["mae/t"]).any()
    assert not recwarn.list


def test_a_thousand_resamples_of_ten_thousand_cases_are_affordable() -> None:
    """A second of one slow core for three classes; the limit only keeps it from becoming minutes."""
    truth, probabilities = cohort(0, 10_000, 3, ties=False)
    began = time.process_time()
    score = partial(scores.score_classes, truth, probabilities, ["a", "b", "c"])
    found = summarise_scores(score, 10_000, ["auroc/mean"])["auroc/mean"]
    assert time.process_time() - began < 20
    assert found["ci95"][0] < found["mean"] < found["ci95"][1]
    assert found["ci95"][1] - found["ci95"][0] < 0.03


def _random_scores(kind: str, seed: int, count: int, ties: bool) -> tuple[Any, tuple[Any, ...]]:
    if kind == "classes":
        return scores.score_classes, (*cohort(seed, count, 3, ties), ["a", "b", "c"])
    rng = np.random.default_rng(seed)
    real, guess = rng.normal(size=(count, 2)), rng.normal(size=(count, 2))
    if ties:
        real, guess = np.round(real), np.round(guess)
    if kind == "numbers":
        return scores.score_numbers, (real, guess, ["a", "b"])
    return scores.score_labels, ((real > 0).astype(np.int64), 1 / (1 + np.exp(-guess)), ["a", "b"])


def defined(drawn: Mapping[str, Doubles]) -> dict[str, float]:
    """The metrics of the cases as they are, without those that are undefined."""
    return {name: float(values[0]) for name, values in drawn.items() if not np.isnan(values[0])}


def _counts(chosen: NDArray[np.int64]) -> Doubles:
    return np.stack([np.bincount(row, minlength=chosen.shape[1]) for row in chosen]).astype(np.float64)


def _taken(argument: Any, row: NDArray[np.int64]) -> Any:
    return argument[row] if isinstance(argument, np.ndarray) else argument


def _assert_same(found: dict[str, float], metric: str, names: list[str], expected: Any) -> None:
    known = {name: float(value) for name, value in zip(names, expected, strict=True) if not math.isnan(value)}
    assert {name: found[f"{metric}/{name}"] for name in names if f"{metric}/{name}" in found} == pytest.approx(
        known, abs=CLOSE
    )
    assert found.get(f"{metric}/mean") == (pytest.approx(np.mean([*known.values()]), abs=CLOSE) if known else None)


def _auroc(positive: NDArray[np.bool_], values: Doubles) -> float:
    known = 0 < positive.sum() < len(positive)
    expected = float(oracle.roc_auc_score(positive, values)) if known else math.nan
    assert scores.auroc(positive, values) == (pytest.approx(expected, abs=CLOSE) if known else None)
    return expected


def _auprc(positive: NDArray[np.bool_], values: Doubles) -> float:
    expected = float(oracle.average_precision_score(positive, values)) if positive.any() else math.nan
    assert scores.auprc(positive, values) == (pytest.approx(expected, abs=CLOSE) if positive.any() else None)
    return expected


def _calibration(right: NDArray[Any], confidence: Doubles) -> float:
    """Bin by bin, as it is defined."""
    error = 0.0
    edges = np.linspace(0, 1, 16)
    for n, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = ((confidence > low) | (n == 0)) & (confidence <= high)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error
