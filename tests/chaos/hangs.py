"""A rank that hangs: SIGSTOP at any moment. The others name it in time, and the run goes on to the same end."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from chaos.left import count_left
from chaos.report import Report
from chaos.training import SAVING, TRAINING, VALIDATING, Started, Training, marked, rank_of, train_undisturbed

_TIMEOUT_S = 15  # ranks start so far apart on a busy machine
_NAMED_S = 2.0  # after the time-out
_SLOW = (("train__timeout_s", _TIMEOUT_S),)


def stop_ranks(
    root: Path, dataset: Path, environ: Mapping[str, str], *, stops: int, seed: int, is_warm: bool = False
) -> Report:
    """Stop one of two ranks in each of so many runs, then let the run go on."""
    report = Report(f"SIGSTOP of a rank, train.timeout_s: {_TIMEOUT_S}")
    chance = random.Random(f"{seed} hangs")
    with report.timed():
        expected = train_undisturbed(Training(root / "undisturbed", dataset, 2, environ, fields=_SLOW, is_warm=is_warm))
        for number in range(stops):
            training = Training(root / f"run-{number}", dataset, 2, environ, fields=_SLOW, is_warm=is_warm)
            wanted = (TRAINING, VALIDATING, SAVING)[number % 3]
            with training.start("hangs") as process:
                _stop_one(training, process, wanted, report, chance)
            count_left(training, "hangs", report, has_launcher=True)
            again = uuid.uuid4().hex
            with training.start(again) as process:
                code = process.wait(timeout=300)
            count_left(training, again, report, has_launcher=True, is_over=True)
            if code == 0:
                report.compare(training.outcome(), expected, training.root.name)
            else:
                report.wrong.append(f"{training.root.name} does not go on: {training.said()[-300:]}")
            shutil.rmtree(training.root)
    return report


def _stop_one(training: Training, process: Started, wanted: str, report: Report, chance: random.Random) -> None:
    while process.poll() is None and training.does(0) != wanted:
        time.sleep(0.002)
    moment, name = training.does(0), training.root.name
    ranks = {rank: pid for pid in marked("hangs") if (rank := rank_of(pid)) is not None}
    if process.poll() is not None or len(ranks) != 2:
        report.wrong.append(f"{name}: over before a rank could be stopped: {training.said()[-300:]}")
        return
    rank = chance.choice(sorted(ranks))
    os.kill(ranks[rank], signal.SIGSTOP)
    stopped = time.monotonic()
    report.begin()
    report.count(f"while {moment}")
    expected = rf"rank {rank} did not answer within {_TIMEOUT_S} s (while evaluating )?at step \d+, with cases \S+"
    try:
        while process.poll() is None and "did not answer" not in training.said():
            if time.monotonic() > stopped + 5 * _TIMEOUT_S:
                raise subprocess.TimeoutExpired("voxscale", 5 * _TIMEOUT_S)
            time.sleep(0.01)
        took_s = time.monotonic() - stopped
        code = process.wait(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        report.wrong.append(f"{name}: nobody noticed that rank {rank} hung while {moment}")
        process.kill()
        os.kill(ranks[rank], signal.SIGKILL)
        return
    report.slowest("s from the time-out to its name", took_s - _TIMEOUT_S, limit=_NAMED_S)
    said = training.said()
    report.expect(
        code == 1 and re.search(expected, said) is not None, f"{name}, {moment}: {code}, not named: {said[-300:]}"
    )
