"""The benchmarks of searches measure what they say, and run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import REPOSITORY
from voxscale.config.load import read_config
from voxscale.search.samplers import propose

BENCH = REPOSITORY / "bench"
HOLDS_200_MB = """
import subprocess, sys, time
if len(sys.argv) > 1:
    held = bytearray(b"x") * 200 * 2**20
    time.sleep(3)
else:
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""


@pytest.fixture
def distmis(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import distmis

    return distmis


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("way", ["experiments", "data"])
def test_points_are_the_first_of_the_recipe(distmis: Any, way: str, count: int) -> None:
    recipe = distmis.WAYS[way]
    whole = read_config(REPOSITORY / "recipes" / recipe)
    part = read_config(
        REPOSITORY / "recipes" / recipe, [f"search.space={json.dumps(distmis.first_points(recipe, count))}"]
    )
    assert whole.search is not None and part.search is not None
    assert part.search.num_points == count
    assert [propose(part.search, index, ()) for index in range(count)] == [
        propose(whole.search, index, ()) for index in range(count)
    ]


def test_memory_of_descendants_is_seen(distmis: Any, tmp_path: Path) -> None:
    script = tmp_path / "holds.py"
    script.write_text(HOLDS_200_MB)
    watched = distmis.watch([sys.executable, str(script)], tmp_path, lambda: ["begun"])
    assert 200 <= watched.peak_mb < 400
    assert watched.wall_s >= 3
    assert 0 <= watched.marks["begun"] < watched.wall_s


def test_a_command_that_fails_is_told(distmis: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such thing"):
        distmis.watch([sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path)


@pytest.mark.cluster
def test_both_ways_of_distmis_are_compared() -> None:
    found = run_bench("distmis.py", "--points", "2", "--epochs", "1")
    assert [found[way]["trials"] for way in ("experiments", "data")] == [2, 2]
    assert found["experiments"]["steps"] >= found["data"]["steps"] > 0
    assert found["ratio"] > 0


@pytest.mark.cluster
def test_trials_are_timed_beside_the_peer() -> None:
    found = run_bench("search.py", "--scale", "small", "--trials", "2")
    assert found["search.makespan_s"] + found["search.ray_start_s"] == pytest.approx(found["search.wall_s"], abs=0.01)
    parts = ("to_ray_s", "opening_s", "trials_s", "ending_s")
    assert sum(found[f"search.stage.{part}"] for part in parts) == pytest.approx(found["search.makespan_s"], abs=0.01)
    assert found["ratio.speed"] > 0
    assert found["ratio.memory"] > 0


@pytest.mark.cluster
def test_asha_is_compared() -> None:
    found = run_bench("search.py", "--asha", "--points", "4", "--epochs", "4", "--seeds", "1")
    assert 0 < found["mean.share_of_steps"] <= 1
    assert found["mean.difference"] <= 0


def run_bench(name: str, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *words, "--json"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
