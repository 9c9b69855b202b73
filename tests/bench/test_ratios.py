"""The table of benchmarks is true, and a comparison tells better from worse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "bench"))

from ratios import BENCHES, less, more


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_prints_the_ratios_that_it_is_held_to(name: str) -> None:
    bench = BENCHES[name]
    script = REPOSITORY / "bench" / f"{bench.script}.py"
    assert subprocess.run([sys.executable, script, "--help"], capture_output=True).returncode == 0
    sources = script.read_text() + (REPOSITORY / "bench" / "distmis.py").read_text() * (name == "asha")
    for key in bench.ratios:
        assert all(part in sources for part in key.split(".") if not part.isdigit()), key


def test_a_ratio_knows_its_better_side() -> None:
    assert less(1.03).meets(1.03)
    assert not less(1.03).meets(1.04)
    assert more(10).meets(10)
    assert not more(10).meets(9.9)
    assert less().change(1.0, 1.1) == pytest.approx(-0.1)
    assert more().change(1.0, 1.1) == pytest.approx(0.1)


def test_what_became_slower_is_said(tmp_path: Path) -> None:
    def write(name: str, **ratios: float) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"benches": {"step": {"result": ratios}, "gone": {"result": {"ratio": 1}}}}))
        return path

    old = write("old.json", **{"ratio.1": 1.0, "ratio.2": 1.0, "speedup.kept": 1.0, "ours.1_s": 1.0})
    new = write("new.json", **{"ratio.1": 1.2, "ratio.2": 0.8, "speedup.kept": 1.01, "ours.1_s": 9.0})
    words = [sys.executable, REPOSITORY / "bench" / "compare.py", old, new]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True)
    assert done.returncode == 1
    rows = json.loads(done.stdout)["rows"]
    assert [(row["name"], row["verdict"]) for row in rows] == [
        ("step ratio.1", "worse"),
        ("step speedup.kept", "same"),
        ("step ratio.2", "better"),
    ]
    assert subprocess.run([*words[:3], old, "--least", "0.01"], capture_output=True).returncode == 0
