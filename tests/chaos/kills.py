"""`kill -9` at any moment of a training: nothing that was committed is lost, and the end is that of an undisturbed run.

A training is killed and started again until it is done, then the next begins, until there were enough kills. Each kill
comes as soon as the run is seen to prepare its data, save, validate or train, or while it starts; it hits everything,
one rank, or the launcher. What it came upon is what the run's files show at that moment. At least one comes after a
checkpoint was committed, so that what follows goes on from it.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from chaos.left import count_left
from chaos.report import Report
from chaos.training import (
    PREPARING,
    SAVING,
    STARTING,
    TRAINING,
    VALIDATING,
    Started,
    Training,
    marked,
    rank_of,
    train_undisturbed,
)
from voxscale.checkpoint import load_last

_START_S = 5.0  # about as long as a start takes
_LONGEST_S = 60.0  # after which a kill comes at the latest
_NAMED_S = 2.0  # until the launcher has named a rank that died
_AFTER_COMMIT = "after a commit"


def kill_at_random(
    root: Path,
    dataset: Path,
    environ: Mapping[str, str],
    *,
    kills: int,
    devices: int,
    seed: int,
    is_warm: bool = False,
) -> Report:
    """Kill trainings on so many ranks; report what was lost."""
    report = Report(f"kill -9, {devices} rank{'s' if devices > 1 else ''}")
    chance = random.Random(f"{seed} {devices}")

    def make(name: str) -> Training:
        return Training(root / name, dataset, devices, environ, is_warm=is_warm)

    with report.timed():
        expected = train_undisturbed(make("undisturbed"))
        number = 0
        while report.tried < kills:
            training = make(f"run-{number}")
            if _disturb(training, report, chance, kills):
                report.compare(training.outcome(), expected, training.root.name)
            shutil.rmtree(training.root)
            number += 1
        report.expect(_AFTER_COMMIT in report.seen, "no kill came after a commit")
    return report


def _disturb(training: Training, report: Report, chance: random.Random, kills: int) -> bool:
    """Start a training again and again, each time killed, until it ends by itself or there were kills enough."""
    while True:
        committed = _committed(training)
        mark, enough = uuid.uuid4().hex, report.tried >= kills
        before = len(training.said().encode())
        known = len(training.heard())
        with training.start(mark) as process:
            if report.tried == kills - 1 and _AFTER_COMMIT not in report.seen:
                _await_commit(training, process)
            elif not enough:
                _await_moment(training, process, chance, known)
            if not enough and process.poll() is None:
                committed = _kill(training, process, mark, report, chance, known, before)
            code = process.wait(timeout=300)
        count_left(training, mark, report, has_launcher=code >= 0, is_over=code == 0)
        last = load_last(training.run, lambda text: report.wrong.append(f"a damaged checkpoint: {text}"))
        step = last.step if last is not None else 0
        report.expect(step >= committed, f"{training.root.name}: step {committed} was committed, {step} is left")
        if code == 0 or enough:
            report.expect(code == 0, f"{training.root.name} ended with {code}: {training.said(before)[-500:]}")
            return code == 0


def _committed(training: Training) -> int:
    """The step of the last checkpoint that was published; 0: there is none."""
    return int(training.run.last.readlink().name.partition("-")[2]) if training.run.last.is_symlink() else 0


def _await_commit(training: Training, process: Started) -> None:
    while process.poll() is None and not training.run.last.exists():
        time.sleep(0.005)


def _await_moment(training: Training, process: Started, chance: random.Random, known: int) -> None:
    """Wait for when to kill."""
    wanted = chance.choice([STARTING, TRAINING, TRAINING, SAVING, SAVING, VALIDATING])
    if not training.is_prepared() and chance.random() < 0.7:
        wanted = PREPARING
    longest = chance.uniform(0.3, _START_S) if wanted == STARTING else _LONGEST_S
    until = time.monotonic() + longest
    while process.poll() is None and time.monotonic() < until:
        if wanted != STARTING and training.does(known) == wanted:
            time.sleep(chance.uniform(0, 1.0) if wanted == TRAINING else chance.choice([0.0, chance.uniform(0, 0.05)]))
            return
        time.sleep(0.005)


def _kill(
    training: Training,
    process: Started,
    mark: str,
    report: Report,
    chance: random.Random,
    known: int,
    before: int,
) -> int:
    """Kill all of it or a part; the step that was committed when the kill came."""
    moment = training.does(known)
    everyone = [pid for pid in marked(mark) if pid != process.pid]
    ranks = {pid: rank for pid in everyone if (rank := rank_of(pid)) is not None}
    whom = chance.choice(["everything", "one rank", "the launcher"]) if ranks else "everything"
    one = chance.choice(list(ranks)) if ranks else process.pid
    committed = _committed(training)
    for pid in {"everything": [process.pid, *everyone], "one rank": [one]}.get(whom, [process.pid]):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    killed = time.monotonic()
    report.begin()
    report.count(f"while {moment}")
    report.count(f"of {whom}")
    if committed:
        report.count(_AFTER_COMMIT)
    if whom == "one rank":
        place = "" if moment in (STARTING, PREPARING) else r"( while evaluating)? (at|after) step \d+"
        name = rf"rank {ranks[one]} was killed by signal 9{place}"
        while process.poll() is None and re.search(name, training.said(before)) is None:
            time.sleep(0.01)
        report.slowest("s until a dead rank was named", time.monotonic() - killed, limit=_NAMED_S)
        code = process.wait(timeout=300)
        said = training.said(before)
        is_named = code == 1 and re.search(name, said) is not None
        report.expect(is_named, f"{training.root.name}, {moment}: {code} without {name!r}: {said[-300:]}")
    return committed
