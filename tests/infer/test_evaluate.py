"""Sharing cases out, and summarising their rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from voxscale.data.cases import Case
from voxscale.infer.evaluate import share_cases, summarise


@given(some.lists(some.integers(1, 50), max_size=30), some.integers(1, 9))
def test_each_case_goes_to_one_rank_and_the_load_is_even(sizes: list[int], num_ranks: int) -> None:
    cases = [Case(f"{n:02d}", (Path(),), None, "p") for n in range(len(sizes))]
    store = SimpleNamespace(row=int, shape=lambda row: (sizes[row], 1, 1))
    shares = share_cases(cases, store, num_ranks)  # type: ignore[arg-type]
    assert sorted(case.id for share in shares for case in share) == [case.id for case in cases]
    loads = [sum(sizes[int(case.id)] for case in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_absent_values_do_not_count() -> None:
    rows = [{"dice/a": 0.5}, {"dice/a": 1.0, "dice/b": 0.25}, {}]
    summary = summarise(rows, ["dice/a", "dice/b", "dice/c"])
    assert summary["dice/a"]["mean"] == 0.75
    assert summary["dice/a"]["median"] == 0.75
    assert np.isclose(summary["dice/a"]["std"], np.std([0.5, 1.0], ddof=1))
    assert summary["dice/b"] == {"mean": 0.25, "median": 0.25, "std": 0.0, "ci95": [0.25, 0.25]}
    assert "dice/c" not in summary


def test_interval_holds_the_mean() -> None:
    values = np.random.default_rng(1).beta(8, 2, 40)
    summary = summarise([{"d": float(value)} for value in values], ["d"])["d"]
    low, high = summary["ci95"]
    assert low < summary["mean"] < high
    assert high - low < 4 * values.std() / np.sqrt(40) * 1.2
