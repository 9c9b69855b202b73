"""Horizons: spans with a unit, chosen by the rule that training enforces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from voxscale.config.horizons import FollowUp, choose_horizons, same_spans, span_in


@pytest.mark.parametrize(("horizon", "unit", "span"), [("1y", "days", 365.25), ("12m", "years", 1), ("2w", "days", 14)])
def test_horizons_are_in_the_unit_of_the_table(horizon: str, unit: Any, span: float) -> None:
    assert span_in(horizon, unit) == pytest.approx(span)


@given(
    first=some.floats(0, 5000) | some.integers(0, 60),
    length=some.floats(0.1, 5000) | some.integers(1, 60),
    unit=some.sampled_from(["days", "weeks", "months", "years"]),
)
def test_chosen_horizons_lie_within_follow_up_and_rise(first: float, length: float, unit: Any) -> None:
    follow_up = FollowUp(first, first + length)
    spans = [span_in(horizon, unit) for horizon in choose_horizons(follow_up, unit)]
    assert len(spans) <= 5
    assert all(map(follow_up.holds, spans))
    assert spans == sorted(set(spans))
    assert spans or length <= span_in("1d", unit) * 1.001


@pytest.mark.parametrize(
    ("first", "last", "unit", "chosen"),
    [
        (1, 2000, "days", ["1y", "2y", "3y", "4y", "5y"]),
        (831, 2000, "days", ["3y", "4y", "5y"]),
        (831, 1000, "days", ["28m", "29m", "30m", "31m", "32m"]),
        (831, 833, "days", ["831d", "832d"]),
        (831, 831, "days", []),
        (2, 2.001, "years", ["2y"]),
        (2.0001, 2.001, "years", []),
        (6, 12, "months", ["6m", "7m", "9m", "10m", "11m"]),
        (0, 1e30, "years", ["1y", "2y", "3y", "4y", "5y"]),
    ],
)
def test_what_is_chosen(first: float, last: float, unit: Any, chosen: list[str]) -> None:
    assert choose_horizons(FollowUp(first, last), unit) == chosen


def test_follow_up_is_from_the_first_event_to_the_last_time() -> None:
    assert FollowUp.of([(5, 0), (7, 1), (6, 1), (9, 0)]) == FollowUp(6, 9)
    without_event = FollowUp.of([(5, 0), (7, 0)])
    assert not any(map(without_event.holds, (0, 5, 6, 7)))


def test_one_time_under_several_names() -> None:
    assert same_spans(["1y", "1y", "2y", "12m", "90d"]) == [["1y", "1y", "12m"]]
    assert same_spans(["1y", "2y", "365d"]) == []
