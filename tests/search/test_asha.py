"""ASHA: rungs, the rule at one of them, and verdicts that depend on the order of arrival alone."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from voxscale.config.search import Asha
from voxscale.search.asha import Halving, Mode, Verdict, best_so_far, is_stopped, rungs

_METRICS = some.floats(allow_nan=True, allow_infinity=False, width=16)
_MODES: some.SearchStrategy[Mode] = some.sampled_from(["max", "min"])
_CURVES = some.lists(some.lists(_METRICS, min_size=1, max_size=10), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("scheduler", "validations", "expected"),
    [
        (Asha(), 20, (1, 3, 9)),
        (Asha(), 27, (1, 3, 9)),
        (Asha(), 28, (1, 3, 9, 27)),
        (Asha(reduction=2, grace=3), 20, (3, 6, 12)),
        (Asha(grace=5), 5, ()),
        (Asha(grace=5), 0, ()),
        ("none", 20, ()),
    ],
)
def test_rungs(scheduler: Asha | Literal["none"], validations: int, expected: tuple[int, ...]) -> None:
    assert rungs(scheduler, validations) == expected


@pytest.mark.parametrize(
    ("value", "others", "stopped"),
    [
        (0.1, [], False),
        (0.1, [0.9], False),
        (0.1, [0.9, 0.8], True),
        (0.85, [0.9, 0.8], True),
        (0.95, [0.9, 0.8], False),
        (0.85, [0.9, 0.8, 0.7, 0.6, 0.5], False),
        (0.75, [0.9, 0.8, 0.7, 0.6, 0.5], True),
        (0.9, [0.9, 0.8], False),
        (math.nan, [0.9, 0.8], True),
        (math.nan, [math.nan, math.nan], False),
        (0.1, [math.nan, math.nan], False),
    ],
)
def test_the_rule_at_a_rung(value: float, others: list[float], stopped: bool) -> None:
    assert is_stopped(value, [*others, value], reduction=3, mode="max") is stopped
    negated = [-other for other in others]
    assert is_stopped(-value, [*negated, -value], reduction=3, mode="min") is stopped


@settings(max_examples=200, deadline=None)
@given(values=some.lists(_METRICS, min_size=1, max_size=30), reduction=some.integers(2, 5), mode=_MODES)
def test_the_best_goes_on_and_no_more_than_its_share(values: list[float], reduction: int, mode: Mode) -> None:
    going = [value for value in values if not is_stopped(value, values, reduction=reduction, mode=mode)]
    numbers = [value for value in values if not math.isnan(value)]
    if numbers:
        best = max(numbers) if mode == "max" else min(numbers)
        assert not is_stopped(best, values, reduction=reduction, mode=mode)
    if len(values) < reduction:
        assert len(going) == len(values)
    elif len(set(numbers)) == len(values):
        assert len(going) == len(values) // reduction


@given(values=some.lists(_METRICS, min_size=1), mode=_MODES)
def test_the_best_so_far_is_a_number_if_any_is(values: list[float], mode: Mode) -> None:
    numbers = [value for value in values if not math.isnan(value)]
    found = best_so_far(values, mode)
    assert math.isnan(found) if not numbers else found == (max if mode == "max" else min)(numbers)


def _named(curves: list[list[float]]) -> dict[str, list[float]]:
    return {f"{index:04d}": curve for index, curve in enumerate(curves)}


def test_a_trial_is_judged_by_its_best_value_up_to_the_rung() -> None:
    halving = Halving(Asha(reduction=2, grace=2), 10, "max")
    curves = {"a": [0.9, 0.1], "b": [0.5, 0.6, 1.0], "c": [0.2, 0.95]}
    assert halving.judge(curves, curves) == [
        Verdict("a", 2, 0.9, False),
        Verdict("b", 2, 0.6, True),
        Verdict("c", 2, 0.95, False),
    ]


def test_a_trial_is_judged_once_and_not_after_it_was_stopped() -> None:
    halving = Halving(Asha(reduction=2), 10, "max")
    assert halving.judge({"a": [0.9], "b": [0.1]}, "ab") == [Verdict("a", 1, 0.9, False), Verdict("b", 1, 0.1, True)]
    assert halving.judge({"a": [0.9], "b": [0.1]}, "ab") == []
    assert halving.judge({"a": [0.9], "b": [0.1, 1.0, 1.0]}, "ab") == []
    assert halving.judge({"a": [0.9, 0.9], "b": [0.1]}, "a") == [Verdict("a", 2, 0.9, False)]


def test_a_trial_that_ended_counts_and_is_not_stopped() -> None:
    halving = Halving(Asha(reduction=2), 3, "max")
    verdicts = halving.judge({"a": [0.9, 0.9, 0.9], "b": [0.1, 0.1, 0.1], "c": [0.5]}, {"c"})
    assert [(verdict.trial, verdict.rung, verdict.stopped) for verdict in verdicts] == [
        *(("a", 1, False), ("a", 2, False), ("b", 1, False), ("b", 2, False)),
        ("c", 1, True),
    ]


def _one_by_one(curves: dict[str, list[float]], asha: Asha, mode: Mode, batch: int) -> list[Verdict]:
    """Verdicts where all trials advance together, looked at after each `batch` validations."""
    halving = Halving(asha, 10, mode)
    found: list[Verdict] = []
    for known in [*range(batch, 10, batch), 10]:
        found += halving.judge({trial: curve[:known] for trial, curve in curves.items()}, curves)
    return found


def _key(verdict: Verdict) -> str:
    return repr(verdict)  # a value that is not a number does not equal itself


@settings(max_examples=100, deadline=None)
@given(curves=_CURVES, reduction=some.integers(2, 4), mode=_MODES, batch=some.integers(1, 10))
def test_verdicts_do_not_depend_on_how_often_one_looks(
    curves: list[list[float]], reduction: int, mode: Mode, batch: int
) -> None:
    asha = Asha(reduction=reduction)
    often, seldom = (_one_by_one(_named(curves), asha, mode, step) for step in (1, batch))
    assert sorted(map(_key, often)) == sorted(map(_key, seldom))


@settings(max_examples=100, deadline=None)
@given(curves=_CURVES, reduction=some.integers(2, 4), mode=_MODES, cut=some.integers(0, 40))
def test_a_new_driver_goes_on_from_the_recorded_verdicts(
    curves: list[list[float]], reduction: int, mode: Mode, cut: int
) -> None:
    asha, named = Asha(reduction=reduction), _named(curves)
    whole = Halving(asha, 10, mode).judge(named, named)
    recorded = whole[:cut]
    rest = Halving(asha, 10, mode, recorded).judge(named, named)
    assert list(map(_key, recorded + rest)) == list(map(_key, whole))


@settings(max_examples=100, deadline=None)
@given(curves=_CURVES, reduction=some.integers(2, 4), mode=_MODES)
def test_what_is_best_at_every_rung_is_never_stopped(curves: list[list[float]], reduction: int, mode: Mode) -> None:
    best = 1e6 if mode == "max" else -1e6
    for place in (0, len(curves) // 2, len(curves)):
        named = {**_named(curves[:place]), "best": [best] * 10, **{f"z{k}": c for k, c in enumerate(curves[place:])}}
        verdicts = Halving(Asha(reduction=reduction), 10, mode).judge(named, named)
        own = [verdict for verdict in verdicts if verdict.trial == "best"]
        assert [verdict.rung for verdict in own] == list(rungs(Asha(reduction=reduction), 10))
        assert not any(verdict.stopped for verdict in own)
