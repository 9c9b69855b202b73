"""The ledger of a search: what was proposed, started, lost, judged and ended, one JSON object a line.

It and the trials' own run folders are all that a search is continued from. Only the driver writes it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from voxscale.errors import InfrastructureError
from voxscale.search.asha import Verdict

SCHEMA_VERSION = 1
WAITING, RUNNING, DONE, PRUNED, NAN, FAILED = "waiting", "running", "done", "pruned", "nan", "failed"
ENDED = (DONE, PRUNED, NAN, FAILED)


@dataclass
class Trial:
    """One run of one configuration, as far as it is known."""

    index: int
    configuration: int
    seed: int  # added to train.seed
    params: dict[str, Any]
    state: str = WAITING
    losses: int = 0  # starts that were lost
    was_lost: bool = False  # what ended it for good
    value: float | None = None
    steps: int = 0
    wall_s: float = 0.0
    why: str = ""

    @property
    def name(self) -> str:
        return str(self.index)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def may_be_tried_again(self, retries: int) -> bool:
        """Whether it failed for being lost too often, and may now be lost more often."""
        return self.state == FAILED and self.was_lost and self.losses < retries

    def try_again(self) -> None:
        self.state, self.why, self.was_lost = WAITING, "", False


@dataclass
class Record:
    """What a ledger says."""

    trials: list[Trial] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


class Ledger:
    """Appends to the file; a line is on disk before `write` returns."""

    def __init__(self, path: Path) -> None:
        is_new = not any(_rows(path))
        self._lines = path.open("ab")
        if not _ends_whole(path):
            self._lines.write(b"\n")  # after what a killed driver left half
        if is_new:
            self.write("search", version=SCHEMA_VERSION)

    def write(self, event: str, **fields: Any) -> None:
        self._lines.write(json.dumps({"event": event, **fields}, allow_nan=False).encode() + b"\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()


def read_ledger(path: Path) -> Record:
    """The trials so far, in order, each with the last that is known of it, and all verdicts of the scheduler.

    One that ended has done so once: what was written of it afterwards, by two drivers at once, does not count.
    """
    record = Record()
    for number, row in _rows(path):
        try:
            _take_in(record, row, path)
        except (KeyError, IndexError, TypeError) as error:
            raise InfrastructureError(
                f"{path} line {number}: found {str(row)[:80]}, which does not fit the lines before it",
                fix="restore the file, or start the search anew with --fresh",
            ) from error
    return record


def _take_in(record: Record, row: dict[str, Any], path: Path) -> None:
    match row["event"]:
        case "search" if row["version"] != SCHEMA_VERSION:
            raise InfrastructureError(
                f"{path}: written in version {row['version']}, expected {SCHEMA_VERSION}",
                fix="use the voxscale that wrote it, or start the search in another folder with --run",
            )
        case "trial" if row["trial"] == len(record.trials):
            record.trials.append(Trial(row["trial"], row["configuration"], row["seed"], row["params"]))
        case "verdict":
            value = math.nan if row["value"] is None else row["value"]
            record.verdicts.append(Verdict(str(row["trial"]), row["rung"], value, row["stopped"]))
        case "lost" if not record.trials[row["trial"]].has_ended:
            record.trials[row["trial"]].losses += 1
        case "again" if record.trials[row["trial"]].was_lost:
            record.trials[row["trial"]].try_again()
        case "end" if not record.trials[row["trial"]].has_ended:
            trial = record.trials[row["trial"]]
            trial.state, trial.value, trial.why = row["state"], row["value"], row["why"]
            trial.steps, trial.wall_s, trial.was_lost = row["steps"], row["wall_s"], row.get("lost", False)


def stopped_trials(verdicts: Sequence[Verdict]) -> set[str]:
    return {verdict.trial for verdict in verdicts if verdict.stopped}


def best_trial(trials: Sequence[Trial], mode: str) -> Trial | None:
    """Of those that ran to their end, else of those that were stopped; the first of equals."""
    for state in (DONE, PRUNED):
        found = [trial for trial in trials if trial.state == state and trial.value is not None]
        if found:
            sign = 1 if mode == "max" else -1
            return max(found, key=lambda trial: (sign * (trial.value or 0.0), -trial.index))
    return None


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a line that a killed driver left half
        if isinstance(row, dict) and "event" in row:
            yield number, row


def _ends_whole(path: Path) -> bool:
    content = path.read_bytes()
    return not content or content.endswith(b"\n")
