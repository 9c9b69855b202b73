"""Two runs in one folder: one goes on as if it were alone, the other is refused and told of it."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from chaos.left import count_left
from chaos.report import Report
from chaos.training import STARTING, TRAINING, Training, train_undisturbed

_LONG = (("train__epochs", 60), ("validate__every", 20))  # so that the first is not done when the second comes


def start_twice(
    root: Path, dataset: Path, environ: Mapping[str, str], *, pairs: int, seed: int, is_warm: bool = False
) -> Report:
    """Start a training twice, at once and later on; kill the one that owns the folder, and take it over."""
    report = Report("two runs in one folder")
    chance = random.Random(f"{seed} rivals")
    with report.timed():
        alone = Training(root / "undisturbed", dataset, 1, environ, fields=_LONG, is_warm=is_warm)
        expected = train_undisturbed(alone)
        for number in range(pairs):
            training = Training(root / f"run-{number}", dataset, 1, environ, fields=_LONG, is_warm=is_warm)
            _rival(training, chance.choice([0.0, chance.uniform(0, 3), None]), report)
            with training.start("heir") as heir:
                code = heir.wait(timeout=300)
            count_left(training, "heir", report, is_over=True)
            if code == 0:
                report.compare(training.outcome(), expected, training.root.name)
            else:
                report.wrong.append(f"{training.root.name}: a dead owner's claim stays: {training.said()[-300:]}")
            shutil.rmtree(training.root)
    return report


def _rival(training: Training, later_s: float | None, report: Report) -> None:
    """Start two, the second so much later, or when the first trains; end with the death of the one that is left."""
    with training.start("first") as first:
        if later_s is None:
            while first.poll() is None and training.does(0) != TRAINING:
                time.sleep(0.01)
        time.sleep(later_s or 0)
        report.begin()
        report.count("at the same moment" if later_s == 0 else "later")
        with training.start("second") as second:
            both = {first.pid: first, second.pid: second}
            while all(process.poll() is None for process in both.values()):
                time.sleep(0.01)
            loser = next(process for process in both.values() if process.poll() is not None)
            winner = next(process for process in both.values() if process is not loser)
            said, name = training.said(), training.root.name
            owner = rf"in use by pid {winner.pid} on {re.escape(socket.gethostname())}"
            pattern = rf"{owner}|was made by another process while this one prepared"  # which does not own it yet
            report.expect(
                loser.returncode == 4, f"{name}: the refused one ended with {loser.returncode}: {said[-300:]}"
            )
            report.expect(re.search(pattern, said) is not None, f"{name}: the owner is not named: {said[-300:]}")
            while winner.poll() is None and training.does(0) == STARTING:
                time.sleep(0.01)
            if winner.poll() is None:
                os.kill(winner.pid, signal.SIGKILL)
                report.count("owners killed")
            report.expect(winner.wait() in (0, -signal.SIGKILL), f"{name}: the owner ended with {winner.returncode}")
    for mark in ("first", "second"):
        count_left(training, mark, report, is_over=False)
