"""A training that is disturbed and started again: how it is started, what it does at a moment, and what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chaos.warm import WarmStart
from conftest import tiny_config
from voxscale.checkpoint import digest_of, load_checkpoint
from voxscale.files import read_json
from voxscale.runs import RunFolder
from voxscale.train.events import read_events

MARK = "VOXSCALE_CHAOS"
FIELDS: dict[str, Any] = {
    "data__cache": {"where": "host"},  # so that there is shared memory to be left behind
    "train__epochs": 6,
    "train__precision": "fp32",  # nothing to be measured first: most of a start would be that
    "train__compile": False,
    "train__channels_last": True,  # what a checkpoint holds lies otherwise in memory then
    "train__batch": 2,
    "checkpoint": {"every_steps": 2, "keep": 2},
    "log": "quiet",
}
Started = subprocess.Popen[bytes] | WarmStart
STARTING, PREPARING, TRAINING, SAVING, VALIDATING = "starting", "preparing", "training", "saving", "validating"


@dataclass(frozen=True)
class Training:
    """One training on so many ranks, with files of its own; `place` is the run folder's, where that is elsewhere."""

    root: Path
    dataset: Path
    devices: int
    environ: Mapping[str, str]
    place: Path | None = None
    fields: tuple[tuple[str, Any], ...] = ()  # of the config, beside those of all
    is_warm: bool = False  # forked, where this process may be

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.place or self.root / "run")

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def start(self, mark: str, *words: str) -> Started:
        """Start it as users do; what it says is added to what it said before."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        config = self.root / "config.yaml"
        fields = {**FIELDS, **dict(self.fields), "data__store": str(self.store)}
        config.write_text(yaml.safe_dump(tiny_config(self.dataset, **fields)))
        command = ["train", str(config), "--run", str(self.run.root), "--devices", str(self.devices), *words]
        environ = {**self.environ, MARK: mark, "TMPDIR": str(self.temporary)}
        if self.is_warm:
            return WarmStart(command, environ, self.root / "err")
        with (self.root / "err").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "voxscale", *command],
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )

    def said(self, since: int = 0) -> str:
        path = self.root / "err"
        return path.read_bytes()[since:].decode(errors="replace") if path.exists() else ""

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

    def heard(self) -> list[dict[str, Any]]:
        """Every event that was ever written, also of steps that were taken again."""
        lines = self.run.events.read_text(errors="replace").splitlines() if self.run.events.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def is_prepared(self) -> bool:
        return any(self.store.glob("*/index.json"))

    def does(self, known: int) -> str:
        """What it is at, as far as its files tell; `known` is how many events were heard before it was started."""
        if any(self.run.checkpoints.glob(".*.tmp")):
            return SAVING
        if self.store.exists() and not self.is_prepared():
            return PREPARING
        new = self.heard()[known:]
        steps = [event["step"] for event in new if event["event"] in ("train", "start")]
        if not steps:
            return STARTING
        plan = read_json(self.run.plan)
        at_step = {event["event"] for event in new if event["step"] == steps[-1]}
        validates = "train" in at_step and steps[-1] % plan["validate_every_steps"] == 0 and "validate" not in at_step
        return VALIDATING if validates or steps[-1] == plan["num_steps"] else TRAINING


def train_undisturbed(training: Training) -> dict[str, Any]:
    assert training.start("undisturbed").wait(timeout=300) == 0, training.said()
    return training.outcome()


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


def rank_of(pid: int) -> int | None:
    """The rank that a process is; None for the launcher, and for one that is gone."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [int(each.partition(b"=")[2]) for each in variables if each.startswith(b"RANK=")]
    return ranks[0] if ranks else None
