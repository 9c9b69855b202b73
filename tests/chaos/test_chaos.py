"""A few of the faults that `make chaos` injects by the hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.kills import kill_at_random
from chaos.saves import damage_checkpoints, kill_in_saves


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_kills_lose_nothing(devices: int, dataset: Path, session_environ: dict[str, str], tmp_path: Path) -> None:
    report = kill_at_random(tmp_path, dataset, session_environ, kills=3, devices=devices, seed=1)
    assert not report.wrong
    assert report.tried == 3
    assert report.seen["runs ended alike"] >= 1


def test_a_save_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    report = kill_in_saves(tmp_path)
    assert not report.wrong
    assert report.tried > 20
    assert report.seen.keys() == {"left step 4", "left step 6"}, "before the rename the old one is the last"


def test_damage_is_noticed(tmp_path: Path) -> None:
    report = damage_checkpoints(tmp_path, mutations=1000, seed=1)
    assert not report.wrong
    assert report.tried == 1000
