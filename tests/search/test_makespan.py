"""How long a search takes, event by event."""

from __future__ import annotations

import pytest

from voxscale.search.makespan import Pace, Trials, simulate_search


def test_without_early_stopping_trials_fill_the_devices_in_rounds() -> None:
    found = simulate_search(Trials(count=8, steps=10), Pace(2.0), devices=3)
    assert (found.seconds, found.steps) == (60.0, 80)
    assert found.device_hours == pytest.approx(160 / 3600)


def test_a_trial_may_need_several_devices() -> None:
    assert simulate_search(Trials(count=4, steps=10), Pace(1.0), devices=5, per_trial=2).seconds == 20.0
    with pytest.raises(ValueError, match="a trial needs 2"):
        simulate_search(Trials(count=4, steps=10), Pace(1.0), devices=1, per_trial=2)


def test_early_stopping_spends_fewer_steps_and_never_more() -> None:
    whole = Trials(count=32, steps=90)
    halved = Trials(count=32, steps=90, rungs=(10, 30))
    for devices in (1, 2, 8, 32):
        all_of_it, found = (simulate_search(each, Pace(1.0), devices=devices) for each in (whole, halved))
        assert found.steps < all_of_it.steps
        assert found.seconds <= all_of_it.seconds
    one_by_one = simulate_search(halved, Pace(1.0), devices=1)
    assert one_by_one.seconds == one_by_one.steps


def test_devices_beyond_the_trials_change_nothing() -> None:
    trials = Trials(count=4, steps=20, rungs=(5,))
    assert simulate_search(trials, Pace(1.0), devices=4) == simulate_search(trials, Pace(1.0), devices=400)


def test_every_trial_starts_and_validates() -> None:
    pace = Pace(1.0, start_s=15.0, validation_s=2.0, every=5, end_s=3.0)
    alone = simulate_search(Trials(count=1, steps=12), pace, devices=1)
    assert alone.seconds == 15 + 12 + 3 * 2 + 3, "as a run that is planned for itself"
    assert alone.device_hours == pytest.approx(alone.seconds / 3600)
    halved = simulate_search(Trials(count=1, steps=12, rungs=(5,)), pace, devices=1)
    assert halved.seconds == alone.seconds
    many = simulate_search(Trials(count=8, steps=10, rungs=(5,)), pace, devices=1)
    to_the_end = (many.steps - 8 * 5) // 5
    assert 0 < to_the_end < 8
    assert many.seconds == 8 * 15 + many.steps + many.steps / 5 * 2 + to_the_end * 3, "what is stopped ends at once"
