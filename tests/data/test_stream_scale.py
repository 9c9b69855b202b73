"""A million cases over 1 to 4096 ranks: every position once, every case once, nothing per rank but its range."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from voxscale.data.sampler import Stream

MILLION = 1_000_000
WORLDS = [2**n for n in range(13)]
BENCH = Path(__file__).resolve().parents[2] / "bench" / "stream.py"


@pytest.mark.parametrize("own_cases", [False, True], ids=["all cases", "own cases"])
@pytest.mark.parametrize("world_size", [*WORLDS, 3, 1000, 4095])
def test_an_epoch_is_covered_without_overlap(world_size: int, own_cases: bool) -> None:
    batch = world_size * 64
    stream = Stream(7, MILLION, 1, batch, parts=world_size if own_cases else 1)
    visits = np.zeros(stream.samples_per_epoch, np.uint8)
    for step in range(1, stream.steps_per_epoch + 1):
        for rank in range(world_size):
            share = stream.share(step, rank, world_size)
            visits[share.start : share.stop] += 1
    assert visits.size == MILLION
    assert (visits == 1).all()
    assert (np.bincount(stream.cases(1), minlength=MILLION) == 1).all()


@settings(deadline=None, max_examples=60)
@given(some.integers(1, 4096), some.integers(1, 10**7), some.integers(1, 100_000), some.booleans())
def test_any_world_and_step(world_size: int, step: int, batch: int, own_cases: bool) -> None:
    batch = batch * world_size if own_cases else batch
    stream = Stream(7, MILLION, 2, batch, parts=world_size if own_cases else 1)
    shares = [stream.share(step, rank, world_size) for rank in range(world_size)]
    assert sum(map(len, shares)) == stream.size(step)
    assert max(map(len, shares)) == stream.largest_share(step, world_size)
    ends = [(share.start, share.stop) for share in shares if share]
    assert all(before[1] <= after[0] for before, after in pairwise(ends))
    if not own_cases:
        assert ends[-1][1] - ends[0][0] == stream.size(step), "ranks leave a gap"


def test_the_benchmark_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--cases", "5000", "--files", "50", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert [row["world"] for row in found["positions"]] == WORLDS
    rank = found["rank"]
    assert rank["num_train"] == 4000
    parts = (rank[name] for name in ("open_s", "read_s", "shuffle_s", "positions_s"))
    assert rank["total_s"] == pytest.approx(sum(parts))
    assert 0 <= rank["peak_mb"] < 200
    assert min(found["first_rank_of_node"].values()) > 0
