"""Faults that launchers have to tell of alike: a rank that hangs, and a case that only one rank reads."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from conftest import Finished
from lab.ray import kill, ranks_in
from lab.slurm import until
from voxscale.data.cases import TRAIN
from voxscale.data.split import recorded_cases
from voxscale.plan.plan import Plan


def stop_one(run: Path, timeout_s: float) -> tuple[float, str]:
    """SIGSTOP rank 1; how long after the time-out another one has said so, and what."""
    kill(ranks_in(run)[1], signal.SIGSTOP)
    stopped = time.monotonic()

    def said() -> str:
        found = [path.read_text() for path in run.glob("logs/*/error-rank-*.json")]
        return next((text for text in found if "did not answer" in text), "")

    until(lambda: bool(said()), 5 * timeout_s, lambda: "nobody noticed")
    return time.monotonic() - stopped - timeout_s, said()


def poison_one(cli: Callable[..., Finished], config: Path, run: Path) -> str:
    """Make the run, and damage one of its training cases in its store; which one."""
    done = cli("train", config, "--devices", 1, "--run", run, "--no-start")
    assert done.code == 0, done.err
    case = recorded_cases(run / "split.csv", TRAIN)[4].id
    (path,) = (run.parent).glob(f"*/{Plan.read(run / 'plan.json').store}/cases/{case}/image.b2nd")
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)
    return case
