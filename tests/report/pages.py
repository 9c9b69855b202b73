"""Runs to make pages of: small, real, trained once for all tests of a module."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from conftest import Cli, tiny_config
from voxscale.data.synthetic import write_cohort
from voxscale.files import read_csv, write_csv
from voxscale.search.ledger import DONE, FAILED, Ledger

HOSTILE = '</script><img src=x onerror="document.title=1">&amp;"\'{{7*7}}\u2028‮name'
OUTCOMES: dict[str, dict[str, Any]] = {
    "survival": {"data": {"columns": {"features": ["age"]}}, "validate": {"horizons": ["2y"]}},
    "regression": {"data": {"columns": {"targets": ["age", "calcium"]}}},
    "classification": {"data": {"columns": {"classes": "smoker"}}},
}


def train_segmentation(cli_here: Cli, folder: Path, dataset: Path, name: str, **fields: Any) -> Path:
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(tiny_config(dataset, log="quiet", **fields)))
    done = cli_here("train", config, "--devices", 1, "--run", folder / name)
    assert done.code == 0, done.err
    return folder / name


def train_outcome(cli_here: Cli, folder: Path, task: str) -> Path:
    if not (folder / "cohort").exists():
        write_cohort(folder / "cohort", cases=36, size=(8, 8, 8), seed=3, threads=2)
    own = OUTCOMES[task]
    source = {"source": str(folder / "cohort" / "cohort.csv"), "split": {"val": 0.6}}
    content = {
        "task": task,
        **own,
        "data": {**source, "intensity": {"window": [-1000, 1000]}, **own["data"]},
        "model": {"name": "resnet", "depth": 18, "width": 4, "stem": "small", "groups": 2},
        "train": {"epochs": 2, "batch": 8, "threads": 1},
        "track": "none",
        "log": "quiet",
    }
    (folder / f"{task}.yaml").write_text(yaml.safe_dump(content))
    done = cli_here("train", folder / f"{task}.yaml", "--devices", 1, "--run", folder / task)
    assert done.code == 0, done.err
    return folder / task


def with_hostile_names(run: Path, to: Path) -> Path:
    """A copy of a run in which a case and a class have names that try to become markup, script and formulas."""
    shutil.copytree(run, to)
    case = (run / "cases.csv").read_text().splitlines()[1].split(",")[0]
    index = json.loads((to / "previews" / "index.json").read_text())
    index["classes"] = [HOSTILE for _ in index["classes"]]
    for each in index["cases"]:
        each["case"] = HOSTILE if each["case"] == case else each["case"]
    (to / "previews" / "index.json").write_text(json.dumps(index))
    lines = (to / "cases.csv").read_text().replace("/ball", "/<b>ball")
    cells = [line.split(",") for line in lines.splitlines()]
    rows = [dict(zip(cells[0], [HOSTILE if cell == case else cell for cell in row], strict=True)) for row in cells[1:]]
    write_csv(to / "cases.csv", cells[0], rows)
    return to


def write_search(folder: Path, runs: Mapping[float, Path], *, why: str = HOSTILE, **params: Any) -> Path:
    """A search whose trials are these runs, by their learning rates, and one that failed, in the files that `voxscale
    search` leaves."""
    best = max(runs, key=lambda rate: _best(runs[rate]))
    folder.mkdir()
    with Ledger(folder / "trials.jsonl") as ledger:
        for number, (rate, run) in enumerate(runs.items()):
            shutil.copytree(run, folder / "trials" / f"{number:04d}")
            chosen = {"optimizer.lr": rate, "train.batch": (2, 4)[number % 2], **params}
            ledger.write("trial", trial=number, configuration=number, seed=0, params=chosen)
            ledger.write("start", trial=number, attempt=1)
            ledger.write("end", trial=number, state=DONE, value=_best(run), steps=10, wall_s=1.5, why="")
        lost = len(runs)
        chosen = {"optimizer.lr": 1.0, "train.batch": 2, **params}
        ledger.write("trial", trial=lost, configuration=lost, seed=0, params=chosen)
        ledger.write("start", trial=lost, attempt=1)
        ledger.write("end", trial=lost, state=FAILED, value=None, steps=0, wall_s=0.0, why=why)
    config = yaml.safe_load((runs[best] / "config.yaml").read_text())
    (folder / "best.yaml").write_text(yaml.safe_dump(config))
    config["search"] = {"space": {"optimizer.lr": {"loguniform": [1e-4, 1.0]}}, "trials": lost + 1}
    config["search"]["metric"] = "dice/mean"
    (folder / "search.yaml").write_text(yaml.safe_dump(config))
    found = {"trial": list(runs).index(best), "metric": "dice/mean", "value": _best(runs[best])}
    metrics = {"task": "search", "state": "done", "metric": "dice/mean", "mode": "max", "steps": 20, "wall_s": 9.0}
    counts = {"all": lost + 1, "done": lost, "failed": 1}
    metrics |= {"best": {**found, "params": {"optimizer.lr": best}}, "trials": counts}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def killed_search(run: Path, folder: Path) -> Path:
    """As it is while it goes on, or once it was killed: no table, no metrics; one trial has ended, one has not."""
    write_search(folder, {0.002: run})
    for name in ("metrics.json", "best.yaml", "trials.jsonl"):
        (folder / name).unlink()
    with Ledger(folder / "trials.jsonl") as ledger:
        for number, rate in enumerate((0.002, 0.02)):
            chosen = {"optimizer.lr": rate}
            ledger.write("trial", trial=number, configuration=number, seed=0, params=chosen)
            ledger.write("start", trial=number, attempt=1)
        ledger.write("end", trial=0, state="done", value=0.5, steps=10, wall_s=1.5, why="")
    ended_after_a_step(run, folder / "trials" / "0001")
    return folder


def write_folds(folder: Path, runs: Sequence[Path]) -> Path:
    """A cross-validation whose folds are these runs, in the files that `voxscale train --folds all` leaves."""
    rows: list[dict[str, Any]] = []
    for number, run in enumerate(runs, start=1):
        shutil.copytree(run, folder / f"fold-{number}", symlinks=True)
        index = json.loads((folder / f"fold-{number}" / "previews" / "index.json").read_text())
        held_out = {"case": f"{number}-{index['cases'][0]['case']}"}
        index["cases"] = [{**index["cases"][0], **held_out}]
        (folder / f"fold-{number}" / "previews" / "index.json").write_text(json.dumps(index))
        rows.append({**next(iter(read_csv(run / "cases.csv"))), **held_out, "fold": number})
    write_csv(folder / "cases.csv", list(rows[0]), rows)
    summary = json.loads((runs[0] / "metrics.json").read_text())["summary"]
    folds = [{"fold": number, "run": f"fold-{number}"} for number in range(1, len(runs) + 1)]
    metrics = {"task": "segmentation", "state": "done", "summary": summary, "folds": folds}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def ended_after_a_step(run: Path, to: Path) -> Path:
    """A copy of a run as it would be had its loss been no number in the second step."""
    to.mkdir()
    for name in ("config.yaml", "plan.json", "split.csv"):
        shutil.copy(run / name, to)
    start, first, *_ = (run / "events.jsonl").read_text().splitlines()
    error = {"event": "error", "step": 2, "epoch": 1, "message": "the loss is nan at step 2", "time_s": 0.5}
    (to / "events.jsonl").write_text("\n".join([start, first, json.dumps(error), ""]))
    (to / "metrics.json").write_text(json.dumps({"task": "segmentation", "state": "failed", "steps": 2}))
    return to


def write_scale(folder: Path) -> Path:
    shares = {"data_share": 0.1, "compute_share": 0.8, "communication_share": 0.1, "global_batch": 4, "step_s": 0.5}
    rows = [
        {"kind": kind, "world": world, "patches_per_s": 31.52 * gain, "speedup": gain, "efficiency": gain / devices}
        | shares
        for kind in ("strong", "weak")
        for world, devices, gain in (("1x1", 1, 1.0), ("1x2", 2, 1.8), ("2x2", 4, 3.1))
    ]
    folder.mkdir()
    (folder / "scale.json").write_text(json.dumps({"rows": rows, "bottleneck": "communication"}))
    return folder


def _best(run: Path) -> float:
    return float(json.loads((run / "metrics.json").read_text())["best"]["value"])
