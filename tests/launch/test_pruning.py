"""Old runs that came to nothing go; what is done, claimed or queued stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Cli
from report.test_listing import make_run
from voxscale.launch.pruning import prune_runs
from voxscale.runs import RunFolder

OWN = """
import sys; from pathlib import Path; from voxscale.files import locked
with locked(Path(sys.argv[1])):
    print(flush=True)
    input()
"""
TRAINED = [{"event": "train", "step": 10}]
MONTH_S = 30 * 86400


def make_old(root: Path, state: str | None) -> Path:
    """A run that ended so, or was killed, a month ago."""
    run = make_run(root, TRAINED, None if state is None else {"state": state, "best": None})
    long_ago = run.stat().st_mtime - MONTH_S
    for name in ("config.yaml", "events.jsonl"):
        os.utime(run / name, (long_ago, long_ago))
    return run


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_came_to_nothing_goes_once_it_is_old(tmp_path: Path, cli_here: Cli) -> None:
    for state in ("done", "failed", "stopped"):
        make_old(tmp_path / state, state)
    make_old(tmp_path / "killed", None)
    make_old(tmp_path / "done.old-1", "done")
    make_run(tmp_path / "today", TRAINED, {"state": "failed", "best": None})
    assert cli_here("runs", tmp_path, "--prune", 40, "--json").json == {"deleted": []}
    done = cli_here("runs", tmp_path, "--prune", 7, "--json")
    assert done.code == 0, done.err
    gone = {Path(row["run"]).name: row["state"] for row in done.json["deleted"]}
    assert gone == {"failed": "failed", "stopped": "stopped", "killed": "interrupted", "done.old-1": "done"}
    assert all(row["bytes"] > 0 for row in done.json["deleted"])
    assert left(tmp_path) == {"done", "today"}
    assert "deleted: 1, 0.0 MB; kept: 1" in cli_here("runs", tmp_path, "--prune", 0).out
    assert left(tmp_path) == {"done"}


def test_a_run_that_someone_owns_stays(tmp_path: Path, cli_here: Cli) -> None:
    run = make_old(tmp_path / "run", "stopped")
    with subprocess.Popen(
        [sys.executable, "-c", OWN, str(RunFolder(run).owner_lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        assert cli_here("runs", tmp_path, "--prune", 0, "--json").json == {"deleted": []}
        assert prune_runs([(run, "stopped")], {}) == [], "also where it was claimed after it was listed"
        owner.kill()
    assert cli_here("runs", tmp_path, "--prune", 0, "--json").json["deleted"]


@pytest.mark.parametrize("above", [False, True])
def test_a_run_whose_job_cannot_be_asked_for_stays(
    above: bool, tmp_path: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait in the queue of another cluster; an array's job stands above its folds."""
    run = make_old(tmp_path / "cv" / "fold-1", "stopped")
    jobs = RunFolder(run.parent if above else run).jobs
    jobs.parent.mkdir(parents=True)
    job = {"id": 7, "kind": "train", "file": "f", "logs": ["1", "2"]}
    jobs.write_text(json.dumps({"jobs": [job]}))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli_here("runs", tmp_path / "cv", "--prune", 0, "--json").json == {"deleted": []}
    jobs.unlink()
    assert cli_here("runs", tmp_path / "cv", "--prune", 0, "--json").json["deleted"]


def test_a_search_that_was_stopped_stays(tmp_path: Path, cli_here: Cli) -> None:
    search = tmp_path / "search"
    search.mkdir()
    (search / "search.yaml").write_text("data: {source: d}\nsearch: {space: {optimizer.lr: {grid: [1e-3]}}}\n")
    (search / "metrics.json").write_text(json.dumps({"state": "stopped"}))
    make_old(search / "trials" / "0000", "done")
    assert cli_here("runs", tmp_path, "--prune", 0, "--json").json == {"deleted": []}
    search.rename(tmp_path / "search.old-1")
    assert cli_here("runs", tmp_path, "--prune", 0, "--json").json["deleted"]
    assert left(tmp_path) == set()
