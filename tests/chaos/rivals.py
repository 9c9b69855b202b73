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
from chaos.training import STARTING, TRAINING, Started, Training, marked, rank_of, train_undisturbed

_LONG = (("train__epochs", 60), ("validate__every", 20))  # so that the first is not done when the second comes


def start_twice(
    root: Path, dataset: Path, environ: Mapping[str, str], *, pairs: int, seed: int, is_warm: bool = False
) -> Report:
    """Start a training twice, at once and later on; kill the one that owns the folder, and take it over.

    With two ranks a run is there already, so that both of two starts find it free; of the owner only rank 0 is killed.
    """
    report = Report("two runs in one folder")
    chance = random.Random(f"{seed} rivals")
    with report.timed():

        def make(name: str, devices: int) -> Training:
            return Training(root / name, dataset, devices, environ, fields=_LONG, is_warm=is_warm)

        expected = {devices: train_undisturbed(make(f"undisturbed-{devices}", devices)) for devices in (1, 2)}
        for number in range(pairs):
            devices = 1 + number % 2
            training = make(f"run-{number}", devices)
            if devices > 1:
                with training.start("begun", "train.stop_after={steps: 2}") as begun:
                    report.expect(begun.wait(timeout=300) == 75, f"{training.root.name}: does not stop early")
            later_s = chance.choice([0.0, chance.uniform(0, 3), None] if devices == 1 else [0.0, 0.0, None])
            _rival(training, later_s, report)
            with training.start("heir") as heir:
                code = heir.wait(timeout=300)
            count_left(training, "heir", report, has_launcher=True, is_over=True)
            if code == 0:
                report.compare(training.outcome(), expected[devices], training.root.name)
            else:
                report.wrong.append(f"{training.root.name}: a dead owner's claim stays: {training.said()[-300:]}")
            shutil.rmtree(training.root)
    return report


def _rival(training: Training, later_s: float | None, report: Report) -> None:
    """Start two, the second so much later, or when the first trains; end with the death of the one that is left."""
    known = len(training.heard())
    with training.start("first") as first:
        if later_s is None:
            while first.poll() is None and training.does(known) != TRAINING:
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
            pid = winner.pid if training.devices == 1 else r"\d+"
            owner = rf"in use by pid {pid} on {re.escape(socket.gethostname())}"
            pattern = rf"{owner}|was made by another process while this one prepared"  # which does not own it yet
            report.expect(
                loser.returncode == 4, f"{name}: the refused one ended with {loser.returncode}: {said[-300:]}"
            )
            report.expect(re.search(pattern, said) is not None, f"{name}: the owner is not named: {said[-300:]}")
            _kill_owner(training, winner, "first" if winner is first else "second", report)
    for mark in ("first", "second"):
        count_left(training, mark, report, has_launcher=training.devices > 1)


def _kill_owner(training: Training, winner: Started, mark: str, report: Report) -> None:
    """Once it trains: it, or its rank 0, which then has to be named, whatever the other start left behind."""
    known = len(training.heard())
    while winner.poll() is None and training.does(known) == STARTING:
        time.sleep(0.01)
    before = len(training.said().encode())
    owner = [winner.pid] if training.devices == 1 else [pid for pid in marked(mark) if rank_of(pid) == 0]
    if winner.poll() is None and owner:
        os.kill(owner[0], signal.SIGKILL)
        report.count("owners killed" if training.devices == 1 else "their ranks 0 killed")
    code, said = winner.wait(timeout=300), training.said(before)
    is_as_killed = code == -signal.SIGKILL or (code == 1 and "error: rank 0 was killed by signal 9" in said)
    report.expect(code == 0 or is_as_killed, f"{training.root.name}: the owner ended with {code}: {said[-300:]}")
