"""A few of the faults that `make chaos` injects by the hundred."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.saves import damage_checkpoints, kill_in_saves
from conftest import REPOSITORY, Finished


@pytest.mark.ranks
def test_kills_lose_nothing(run_python: Callable[..., Finished]) -> None:
    """As `make chaos` does it, in a process of its own from which each start is forked with everything loaded."""
    words = ["--only", "kills", "--kills", 6, "--ranks", "1,2", "--seed", 1, "--json"]
    done = run_python("-m", "chaos", *words, cwd=REPOSITORY / "tests")
    assert done.code == 0, done.err
    for report in done.json:
        assert report["tried"] == 3
        assert report["seen"]["runs ended alike"] >= 1
        assert report["seen"]["after a commit"] >= 1, "else no run had anything to go on from"
    assert len(done.json) == 2


def test_a_save_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    report = kill_in_saves(tmp_path)
    assert not report.wrong
    assert report.tried > 100
    names = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
    parts = {f"left a part of {name}" for name in names}
    left = {"left step 4", "left step 6"}  # before the rename the old one is the last
    assert report.seen.keys() == left | parts | {"moved the best", "deleted old ones"}


def test_damage_is_noticed(tmp_path: Path) -> None:
    report = damage_checkpoints(tmp_path, mutations=1000, seed=1)
    assert not report.wrong
    assert report.tried == 1000
