"""The list of runs, from folders alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from voxscale.errors import InfrastructureError
from voxscale.files import write_json
from voxscale.launch.cancel import cancel_run
from voxscale.report.listing import list_runs
from voxscale.runs import RunFolder


def make_run(root: Path, events: list[dict[str, Any]], metrics: dict[str, Any] | None = None) -> Path:
    root.mkdir(parents=True)
    (root / "config.yaml").write_text("data: {source: d}\n")
    (root / "plan.json").write_text(json.dumps({"schema": 1, "num_steps": 40}))
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if metrics is not None:
        (root / "metrics.json").write_text(json.dumps(metrics))
    return root


def test_a_killed_run_shows_how_far_it_came(tmp_path: Path) -> None:
    events = [
        {"event": "train", "step": 10},
        {"event": "checkpoint", "step": 10, "best": True, "metric": "dice/mean", "value": 0.5},
        {"event": "train", "step": 14},
    ]
    run = make_run(tmp_path / "a", events)
    with (run / "events.jsonl").open("a") as lines:
        lines.write('{"event": "train", "st')  # cut by the kill
    (row,) = list_runs(tmp_path)
    assert (row.state, row.step, row.steps, row.metric, row.best) == ("interrupted", 14, 40, "dice/mean", 0.5)


def test_steps_that_a_resume_took_back_do_not_count(tmp_path: Path) -> None:
    steps = [{"event": "train", "step": step} for step in range(1, 9)]
    make_run(tmp_path / "a", [*steps, {"event": "resume", "step": 5}, {"event": "train", "step": 6}])
    assert list_runs(tmp_path)[0].step == 6


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_an_ended_run_shows_how_it_ended(tmp_path: Path, state: str) -> None:
    make_run(tmp_path / "a" / "b", [{"event": "train", "step": 40}], {"state": state, "best": None})
    (row,) = list_runs(tmp_path)
    assert (row.state, row.best) == (state, None)


def test_a_scheduler_that_cannot_be_asked_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = RunFolder(make_run(tmp_path / "a", [], {"state": "done"}))
    run.launch.mkdir()
    job = {"kind": "train", "id": 7, "file": "job.sbatch", "logs": ["out"]}
    write_json(run.jobs, {"jobs": [job]})
    assert (list_runs(tmp_path)[0].state, capsys.readouterr().err) == ("done", "")
    run.metrics.unlink()
    assert (list_runs(tmp_path)[0].state, list_runs(tmp_path)[0].job) == ("new", 7)
    assert "warning: what is queued is not known: no SLURM on this machine" in capsys.readouterr().err
    with pytest.raises(InfrastructureError, match="no SLURM on this machine"):
        cancel_run(run.root, {"PATH": str(tmp_path)})


def test_a_trial_that_is_tried_again_has_not_ended(tmp_path: Path) -> None:
    search = "{space: {optimizer.lr: {grid: [0.001, 0.01]}}}"
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "search.yaml").write_text(f"data: {{source: d}}\nsearch: {search}\n")
    events = [("end", 0), ("end", 1), ("again", 1), ("end", 1), ("end", 0), ("again", 0)]
    lines = [json.dumps({"event": event, "trial": trial, "state": "done"}) for event, trial in events]
    for count, ended in ((2, 2), (3, 1), (5, 2), (6, 1)):
        (tmp_path / "s" / "trials.jsonl").write_text("\n".join(lines[:count]) + '\n{"event": "end", "tri')
        (row,) = list_runs(tmp_path)
        assert (row.kind, row.step, row.steps) == ("search", ended, 2)


def test_other_folders_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.yaml").write_text("not: a run")
    assert list_runs(tmp_path) == []
    assert list_runs(tmp_path / "absent") == []
