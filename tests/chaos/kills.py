"""`kill -9` at any moment of a training: nothing that was committed is lost, and the end is that of an undisturbed run.

A training is killed and started again until it is done, then the next begins, until there were enough kills. Each kill
comes while the run starts, or trains, or as soon as it is seen to prepare its data, save, or validate; it hits
everything, one rank, or the launcher. After each no process may be left, and the dead owner's claim must be free.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chaos.report import Report
from conftest import tiny_config
from voxscale.checkpoint import digest_of, load_checkpoint, load_last
from voxscale.files import is_locked, read_json
from voxscale.runs import RunFolder
from voxscale.train.events import read_events

MARK = "VOXSCALE_CHAOS"
FIELDS: dict[str, Any] = {
    "train__epochs": 6,
    "train__batch": 2,
    "checkpoint": {"every_steps": 2, "keep": 2},
    "log": "quiet",
}
_START_S = 5.0  # about as long as a start takes
_LONGEST_S = 20.0  # after which a kill comes at the latest
_GONE_S = 20.0


@dataclass(frozen=True)
class Training:
    """One training that is killed again and again."""

    root: Path
    dataset: Path
    devices: int
    environ: Mapping[str, str]
    place: Path | None = None  # of the run folder, where that is elsewhere

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.place or self.root / "run")

    @property
    def store(self) -> Path:
        return self.root / "store"

    def start(self, mark: str) -> subprocess.Popen[bytes]:
        self.root.mkdir(parents=True, exist_ok=True)
        config = self.root / "config.yaml"
        config.write_text(yaml.safe_dump(tiny_config(self.dataset, data__store=str(self.store), **FIELDS)))
        words = ["train", str(config), "--run", str(self.run.root), "--devices", str(self.devices)]
        return subprocess.Popen(
            [sys.executable, "-m", "voxscale", *words],
            env={**self.environ, MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=(self.root / "err").open("ab"),
            start_new_session=True,
        )

    def outcome(self) -> dict[str, Any]:
        """All that must not depend on what happened on the way."""
        last = load_checkpoint(self.run.last)
        metrics = read_json(self.run.metrics)
        return {
            "weights": digest_of(last.model),
            "optimizer": digest_of(last.optimizer),
            "metrics": {name: metrics[name] for name in ("state", "best", "summary", "steps", "weights_sha256")},
            "cases": self.run.cases.read_bytes(),
            "losses": [event["loss"] for event in read_events(self.run.events) if event["event"] == "train"],
        }


def kill_at_random(
    root: Path, dataset: Path, environ: Mapping[str, str], *, kills: int, devices: int, seed: int
) -> Report:
    """Kill trainings on so many ranks; report what was lost."""
    report = Report(f"kill -9, {devices} rank{'s' if devices > 1 else ''}")
    chance = random.Random(f"{seed} {devices}")
    with report.timed():
        expected = train_undisturbed(Training(root / "undisturbed", dataset, devices, environ))
        number = 0
        while report.tried < kills:
            training = Training(root / f"run-{number}", dataset, devices, environ)
            _disturb(training, report, chance, kills)
            found = training.outcome()
            differing = [name for name in expected if found[name] != expected[name]]
            report.expect(not differing, f"run {number}: {', '.join(differing)} differ")
            report.count("runs ended alike" if not differing else "runs ended otherwise")
            shutil.rmtree(training.root)
            number += 1
    return report


def train_undisturbed(training: Training) -> dict[str, Any]:
    assert training.start("undisturbed").wait(timeout=300) == 0, (training.root / "err").read_text()
    return training.outcome()


def _disturb(training: Training, report: Report, chance: random.Random, kills: int) -> None:
    """Start a training again and again, each time killed, until it ends by itself or there were kills enough."""
    committed = 0
    while True:
        mark = uuid.uuid4().hex
        enough = report.tried >= kills
        with training.start(mark) as process:
            moment = "the end" if enough else _await_moment(training, process, chance)
            if process.poll() is None and not enough:
                whom = _kill(process, mark, chance)
                report.tried += 1
                report.count(f"while {moment}")
                report.count(f"of {whom}")
            code = process.wait(timeout=300)
        _await_gone(training, mark, report)
        last = load_last(training.run, lambda text: report.wrong.append(f"a damaged checkpoint: {text}"))
        step = last.step if last is not None else 0
        report.expect(step >= committed, f"{training.root.name}: step {committed} was committed, {step} is left")
        committed = step
        if code == 0:
            return
        if enough:
            report.wrong.append(f"{training.root.name} ended with {code}: {(training.root / 'err').read_text()[-500:]}")
            return


def _await_moment(training: Training, process: subprocess.Popen[bytes], chance: random.Random) -> str:
    """Wait for when to kill; what the run does then, as far as it can be seen."""
    known = _num_lines(training.run.events)
    moments: dict[str, Callable[[], bool]] = {
        "training": lambda: _num_lines(training.run.events) > known + 2,
        "preparing": lambda: any(training.store.glob("**/.*.tmp")) or any(training.store.glob("**/*.lock")),
        "saving": lambda: any(training.run.checkpoints.glob(".*.tmp")),
        "validating": lambda: _validates(training.run),
    }
    wanted = chance.choice(["starting", "training", "training", "preparing", "saving", "saving", "validating"])
    until = time.monotonic() + (chance.uniform(0.3, _START_S) if wanted == "starting" else _LONGEST_S)
    while process.poll() is None and time.monotonic() < until:
        if wanted in moments and moments[wanted]():
            time.sleep(
                chance.uniform(0, 1.0) if wanted == "training" else chance.choice([0.0, chance.uniform(0, 0.05)])
            )
            return wanted
        time.sleep(0.001)
    return "starting"


def _num_lines(events: Path) -> int:
    return events.read_bytes().count(b"\n") if events.exists() else 0


def _validates(run: RunFolder) -> bool:
    """Whether the last thing that was heard is the step before a validation."""
    if not run.plan.exists() or not run.events.exists():
        return False
    events = run.events.read_text(errors="replace").splitlines()[-1:]
    every = read_json(run.plan)["validate_every_steps"]
    return any('"event": "train"' in line and f'"step": {every}' in line for line in events)


def _kill(process: subprocess.Popen[bytes], mark: str, chance: random.Random) -> str:
    everyone = [pid for pid in marked(mark) if pid != process.pid]
    whom = chance.choice(["everything", "one rank", "the launcher"]) if everyone else "everything"
    victims = {"everything": [process.pid, *everyone], "the launcher": [process.pid]}
    for pid in victims.get(whom) or [chance.choice(everyone)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return whom


def _await_gone(training: Training, mark: str, report: Report) -> None:
    """Nothing of a killed training may stay: no process, no lock that is held, no shared memory."""
    until = time.monotonic() + _GONE_S
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in marked(mark):
        report.wrong.append(f"{training.root.name}: process {pid} is left")
        os.kill(pid, signal.SIGKILL)
    lock = training.run.owner_lock
    report.expect(not lock.exists() or not is_locked(lock), f"{training.root.name}: still owned")


def marked(mark: str) -> list[int]:
    """The living processes that were started with this mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
