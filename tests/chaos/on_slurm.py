"""A job on two nodes of a real SLURM that is requeued again and again, and loses nodes on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from chaos.report import Report
from conftest import tiny_config
from lab.ray import all_pids, environ_of, words_of
from lab.slurm import SlurmLab, until
from lab.trained import NETWORKS
from voxscale.files import is_locked, read_json
from voxscale.runs import RunFolder
from voxscale.train.events import read_events

FIELDS: dict[str, Any] = {
    "train__epochs": 20,
    "validate__every": 5,
    "checkpoint": {"every_steps": 1},
    "model": {"name": "networks:build_slow"},
}
_AHEAD = 2  # steps between one disturbance and the next
_PATIENCE_S = 240.0


def disturb_job(root: Path, dataset: Path, environ: Mapping[str, str], *, requeues: int, losses: int) -> Report:
    """Requeue a job, then kill nodes under it; it has to end as one that nobody disturbed."""
    report = Report("SLURM: requeued, nodes lost")
    root.mkdir(parents=True, exist_ok=True)
    (root / "networks.py").write_text(NETWORKS)
    (root / "lab.yaml").write_text("cpus_per_device: 1\nsignal_s: 40\n")
    config = root / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_config(dataset, **FIELDS)))
    with report.timed(), SlurmLab() as slurm:
        own = {**environ, "PYTHONPATH": str(root)}
        _voxscale(own, "train", config, "--devices", 2, "--run", root / "undisturbed")
        run = root / "run"
        where = ["--on", "slurm", "--site", root / "lab.yaml", "--nodes", 2, "--devices", 1, "--run", run, "--detach"]
        _voxscale({**own, **slurm.environ, "SLOW_STEPS": "0.4"}, "train", config, *where)
        job = json.loads((run / "launch" / "jobs.json").read_text())["jobs"][-1]["id"]
        for number in range(requeues + losses):
            committed, known = _await_ahead(run), len(_resumed(run))
            if number < requeues:
                slurm.run("scontrol", "requeue", job)
                report.count("requeues")
            else:
                lost = _node_of(run, job, number % 2)  # the first has the job's shell and rank 0
                slurm.kill_node(lost)
                report.count("nodes lost")
            report.begin()
            until(lambda: slurm.state(job) != "RUNNING", 90, lambda: f"still {slurm.state(job)}")
            if number >= requeues:
                slurm.revive_node(lost)
            until(lambda: slurm.state(job) == "RUNNING", _PATIENCE_S, lambda: f"is {slurm.state(job)}")
            found = _await_resumed(run, known)
            report.expect(found >= committed, f"step {committed} was committed, but it went on from {found}")
            _count_left(report, _ranks_before(run, number + 1), "of the start before")
        slurm.await_state(job, "COMPLETED", timeout=_PATIENCE_S)
        _count_left(report, _ranks_before(run, 1000), "at the end")
        _count_left(report, [path for name in slurm.nodes for path in slurm.shared_memory(name)], "at the end")
        report.expect(not is_locked(RunFolder(run).owner_lock), "still owned")
        _compare(run, root / "undisturbed", report)
    return report


def _ranks_before(run: Path, start: int) -> list[int]:
    """Ranks of the run that live, of an earlier start of its job than this one."""
    found = []
    for pid in all_pids():
        if words_of(pid)[1:4] == ["-m", "voxscale.train.worker", str(run)]:
            restarts = int(dict(environ_of(pid)).get("SLURM_RESTART_COUNT", "0"))
            found += [pid] if restarts < start else []
    return found


def _count_left(report: Report, left: Sequence[object], when: str) -> None:
    report.expect(not left, f"left behind {when}: {left}")
    report.add("left behind", len(left))


def _voxscale(environ: Mapping[str, str], *words: object) -> None:
    command = [sys.executable, "-m", "voxscale", *map(str, words)]
    subprocess.run(command, env=dict(environ), check=True, capture_output=True, timeout=300)


def _last_step(run: Path) -> int:
    return max((event.get("step", 0) for event in read_events(run / "events.jsonl")), default=0)


def _await_ahead(run: Path) -> int:
    """Wait until the run has come on by some steps; the last that is committed."""
    begun = _last_step(run)
    until(lambda: _last_step(run) >= begun + _AHEAD, _PATIENCE_S, lambda: f"does not come beyond step {begun}")
    return int((run / "checkpoints" / "last").resolve().name.partition("-")[2])


def _await_resumed(run: Path, known: int) -> int:
    until(lambda: len(_resumed(run)) > known, _PATIENCE_S, lambda: "does not go on")
    return _resumed(run)[-1]


def _resumed(run: Path) -> list[int]:
    """The step that each start after the first went on from."""
    return [event["step"] for event in read_events(run / "events.jsonl") if event["event"] == "resume"]


def _node_of(run: Path, job: int, index: int) -> str:
    newest = max(
        run.glob(f"logs/{job}-*/node-000{index}.json"), key=lambda path: int(path.parent.name.partition("-")[2])
    )
    return str(json.loads(newest.read_text())["node"])


def _compare(run: Path, undisturbed: Path, report: Report) -> None:
    found, expected = (read_json(each / "metrics.json") for each in (run, undisturbed))
    for name in ("weights_sha256", "best", "summary", "steps"):
        report.expect(found[name] == expected[name], f"{name} differs")
    tables = [(each / "cases.csv").read_bytes() for each in (run, undisturbed)]
    report.expect(tables[0] == tables[1], "cases.csv differs")
