"""The table of benchmarks is true, and a comparison tells better from worse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import REPOSITORY
from layouts import save_volume

sys.path.insert(0, str(REPOSITORY / "bench"))

from all import BEGIN, END, chosen, render, together, with_table
from ratios import BENCHES, less, more
from step import GOALS, VARIANTS


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_prints_the_ratios_that_it_is_held_to(name: str) -> None:
    bench = BENCHES[name]
    script = REPOSITORY / "bench" / f"{bench.script}.py"
    assert subprocess.run([sys.executable, script, "--help"], capture_output=True).returncode == 0
    sources = script.read_text() + (REPOSITORY / "bench" / "distmis.py").read_text() * (name == "asha")
    for key in bench.ratios:
        assert all(part in sources for part in key.split(".") if not part.isdigit()), key


def test_a_step_is_held_to_its_goals_beside_both_loops() -> None:
    held = {name: ratio.goal for name, ratio in BENCHES["step"].ratios.items() if ratio.goal is not None}
    assert held == GOALS
    assert {"ratio.1", "ratio.2", "overhead.1", "overhead.2"} < set(GOALS)


def test_a_ratio_knows_its_better_side() -> None:
    assert less(1.03).meets(1.03)
    assert not less(1.03).meets(1.04)
    assert more(10).meets(10)
    assert not more(10).meets(9.9)
    assert less().change(1.0, 1.1) == pytest.approx(-0.1)
    assert more().change(1.0, 1.1) == pytest.approx(0.1)
    assert less(0.02).change(0.0, 0.001) == pytest.approx(-0.05), "of what is allowed: of nothing would be endless"


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
    new.write_text(json.dumps({"benches": {"step": {"result": None}}}))
    failed = subprocess.run(words, capture_output=True, text=True)
    assert (failed.returncode, failed.stdout.splitlines()[0]) == (1, "step: failed"), "what failed is no better"
    new.write_text("[]")
    wrong = subprocess.run(words, capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith(f"{new}: expected a file that bench/all.py --out wrote")


TINY = {
    "step": "--rounds 1 --steps 2 --patch 32",
    "variants": "--variants all --rounds 1 --steps 2 --patch 32",
    "plan": "--only quick --ranks 1 --steps 8",
    "startup": "--rounds 1",
    "train_job": "--scale small --rounds 1 --epochs 1 --no-limit",
}


@pytest.mark.cluster
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_prints_all_that_the_table_is_to_hold(name: str) -> None:
    bench = BENCHES[name]
    words = [sys.executable, REPOSITORY / "bench" / f"{bench.script}.py", *TINY[name].split(), "--json"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(bench.found(result)) == set(bench.ratios)
    assert set(bench.beside(result)) == set(bench.told)


def test_every_setting_stands_in_the_table() -> None:
    assert set(BENCHES["variants"].told) == {f"ratio.{name}" for name in VARIANTS if name != "plain"}


def _run(**results: dict[str, Any] | None) -> dict[str, Any]:
    machine = {"processor": "Some CPU", "cpus": 2, "memory_gb": 8, "gpus": 0, "python": "3.11", "torch": "2.13"}
    benches = {
        name: {"command": f"python bench/{name}.py", "exit_code": 0, "took_s": 60.0, "result": result}
        for name, result in results.items()
    }
    return {"machine": {**machine, "load": 0.1}, "benches": benches}


def test_the_table_says_what_was_reached_missed_and_not_measured() -> None:
    table = render(_run(step={"ratio.1": 1.01, "ratio.2": 1.2}, stream={"rank": {"total_s": 1.5}}, plan=None))
    assert "2 CPUs (Some CPU), 8 GB" in table
    for row in (
        "| step | `ratio.1` | 1.01 | ≤ 1.03 | reached |",
        "| step | `ratio.2` | 1.2 | ≤ 1.03 | **missed** |",
        "| step | `speedup.kept` | not measured | ≥ 0.97 | |",
        "| stream | `rank.total_s` | 1.5 | ≤ 2 | reached |",
        "| plan | | **failed with 0** | | |",
        "python bench/step.py  # 60 s",
    ):
        assert row in table.splitlines()
    gains = {"ratio": 1.4, "gain.startup_s": -1.5, "gain.data_s": 2.0, "gain.compute_and_loss_s": 26.7}
    assert "| train_job | `gain.compute_and_loss_s` | 26.7 | | |" in render(_run(train_job=gains)).splitlines()


def test_the_table_on_the_page_is_replaced_and_all_else_kept() -> None:
    page = with_table("# Title\ntext\n", "first")
    assert page == f"# Title\ntext\n\n## The last run\n{BEGIN}\nfirst\n{END}\n"
    assert with_table(f"{page}after\n", "second") == page.replace("first", "second") + "after\n"


def test_missed_goals_and_failures_are_named_and_end_with_1(tmp_path: Path) -> None:
    def end(**results: dict[str, float] | None) -> tuple[int, list[str]]:
        (tmp_path / "run.json").write_text(json.dumps(_run(**results)))
        words = [sys.executable, REPOSITORY / "bench" / "all.py", "--of", tmp_path / "run.json"]
        done = subprocess.run(words, capture_output=True, text=True)
        return done.returncode, done.stderr.splitlines()

    reached = dict.fromkeys(GOALS, 1.0)
    assert end(step=reached, plan={"off": {"step_s": 0.1, "node_mb": 0.1}}) == (0, []), "speedup.ours has no goal"
    assert end(step={**reached, "ratio.1": 1.2, "speedup.kept": 0.9}, plan=None) == (
        1,
        ["missed: step ratio.1: 1.2, expected at most 1.03", "missed: step speedup.kept: 0.9, expected at least 0.97",
         "missed: plan failed"],
    )  # fmt: skip
    assert end(plan={"off": {"step_s": 0.1}}) == (1, ["missed: plan off.node_mb: not measured, expected at most 0.15"])


def test_runs_on_one_machine_make_one_table() -> None:
    quick, long = _run(plan=None, step={"ratio.1": 1.2}), _run(stream={"rank": {"total_s": 1.5}}, step={"ratio.1": 1.0})
    long["machine"] = {**long["machine"], "load": 0.4}
    both = together([quick, long])
    assert list(both["benches"]) == ["step", "plan", "stream"], "in the order of the table"
    assert both["benches"]["step"]["result"] == {"ratio.1": 1.0}, "the last of two"
    assert both["machine"]["load"] == 0.4
    long["machine"] = {**long["machine"], "processor": "Another CPU"}
    with pytest.raises(SystemExit, match="found runs on several machines, expected one"):
        together([quick, long])


@pytest.mark.cluster
def test_patches_are_measured_with_all_that_they_are_held_to(tmp_path: Path) -> None:
    task = {"modality": {"0": "a", "1": "b"}, "labels": {"0": "background", "1": "x"}, "training": []}
    for case in range(2):
        voxels = np.random.default_rng(case).normal(100, 9, (40, 36, 30, 2)).astype(np.int16)
        files = {"image": f"imagesTr/{case}.nii.gz", "label": f"labelsTr/{case}.nii.gz"}
        save_volume(tmp_path / "data" / files["image"], voxels)
        save_volume(tmp_path / "data" / files["label"], (voxels[..., 0] > 110).astype(np.uint8))
        task["training"].append(files)
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(task))
    command = ["bench/patches.py", "--data", tmp_path / "data", "--patch", "32", "32", "16", "--rounds", "2", "--json"]
    done = subprocess.run([sys.executable, *map(str, command)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    found = BENCHES["patches"].found(result)
    assert found.keys() == BENCHES["patches"].ratios.keys()
    assert found["ratio.cache"] == pytest.approx(result["monai.cache_ms"] / result["ours.light_ms"], rel=0.05)
    held = result["memory.second_rank.doubled_mb"] / result["memory.second_rank_mb"]
    assert found["memory.doubled_ratio"] == pytest.approx(held, rel=0.01)
    assert min(found.values()) > 0


def test_an_unknown_benchmark_is_refused() -> None:
    assert chosen("step,plan", full=False) == ["step", "plan"]
    assert "windows" in chosen(None, full=True)
    with pytest.raises(SystemExit, match="found steps, expected some of step, variants, plan"):
        chosen("step,steps", full=False)
