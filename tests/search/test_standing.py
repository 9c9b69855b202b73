"""What is known of a search while it runs: who leads, and how long it may take yet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from voxscale.search.ledger import DONE, RUNNING, Trial
from voxscale.search.progress import Progress
from voxscale.search.standing import Pace, leader, time_left_s


def progress_of(folder: Path, index: int, *values: float) -> Progress:
    events = folder / f"{index}.jsonl"
    rows = [{"event": "validate", "step": step, "m": value} for step, value in enumerate(values, start=1)]
    events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = Progress(events, "m")
    progress.look()
    return progress


def test_before_a_trial_has_ended_those_that_run_say_who_leads_and_how_long_it_takes(tmp_path: Path) -> None:
    trials = [Trial(0, 0, 0, {}, RUNNING), Trial(1, 1, 0, {}, RUNNING), Trial(2, 2, 0, {}, RUNNING)]
    progress = {0: progress_of(tmp_path, 0, 0.5, 0.2), 1: progress_of(tmp_path, 1, 0.4), 2: progress_of(tmp_path, 2)}
    assert leader(trials, progress, "max") == (0, 0.5)
    assert leader(trials, progress, "min") == (0, 0.2)
    assert leader(trials[2:], progress, "max") is None
    paces = [Pace(0.75, 0.25, 10.0), Pace(0.25, 0.25, 10.0), Pace(0.0, 0.0, 10.0)]  # the first goes on from a half
    assert time_left_s(4, trials, paces) == pytest.approx(40.0 * 3 / 3)
    assert time_left_s(4, trials, paces[2:]) is None


def test_trials_that_have_ended_say_how_long_the_others_take(tmp_path: Path) -> None:
    trials = [Trial(0, 0, 0, {}, DONE, value=0.5, wall_s=20.0), Trial(1, 1, 0, {}, RUNNING)]
    progress = {0: progress_of(tmp_path, 0, 0.5), 1: progress_of(tmp_path, 1, 0.6)}
    assert leader(trials, progress, "max") == (1, 0.6)
    assert leader(trials, progress, "min") == (0, 0.5)
    assert time_left_s(3, trials, [Pace(0.5, 0.5, 99.0)]) == pytest.approx(20.0 * 1.5)
