"""ASHA, asynchronous successive halving, as pure arithmetic: which trials are not worth going on with.

A rung is a number of validations. A trial that reaches one is judged there, once, against those that came before it:
it goes on if it is among the best n // reduction of the n values known at that moment, its own included. While fewer
than `reduction` are known there is no such share, and everyone goes on; so does whoever equals the last of the best.
Nobody is waited for and nobody is judged again when better ones come later. (Li et al., A System for Massively
Parallel Hyperparameter Tuning, 2020, in the form that stops trials instead of pausing them.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from voxscale.config.search import Asha

Mode = Literal["max", "min"]


def rungs(scheduler: Asha | Literal["none"], validations: int) -> tuple[int, ...]:
    """After how many validations trials are judged: grace · reduction^k below the total; none at its end."""
    if scheduler == "none":
        return ()
    found = []
    rung = scheduler.grace
    while rung < validations:
        found.append(rung)
        rung *= scheduler.reduction
    return tuple(found)


def is_stopped(value: float, at_rung: Sequence[float], *, reduction: int, mode: Mode) -> bool:
    """Whether a trial with this value is stopped at a rung; `at_rung` holds all values known there, its own included.

    A value that is not a number is worse than any other.
    """
    kept = len(at_rung) // reduction
    if kept == 0:
        return False
    own = _score(value, mode)
    return sum(_score(other, mode) > own for other in at_rung) >= kept


def best_so_far(values: Sequence[float], mode: Mode) -> float:
    """The best of a trial's values; at least one is given."""
    return max(values, key=lambda value: _score(value, mode))


def _score(value: float, mode: Mode) -> float:
    if math.isnan(value):
        return -math.inf
    return value if mode == "max" else -value


@dataclass(frozen=True)
class Verdict:
    """What was decided about a trial at a rung; the ledger keeps it."""

    trial: str
    rung: int
    value: float
    stopped: bool


class Halving:
    """The state of one search's ASHA: what every rung has seen.

    Only the order in which trials reach each rung matters: the same order gives the same verdicts, however many
    arrivals are looked at together. `recorded` verdicts of an earlier driver are taken as they are.
    """

    def __init__(self, scheduler: Asha, validations: int, mode: Mode, recorded: Iterable[Verdict] = ()) -> None:
        self._rungs = rungs(scheduler, validations)
        self._reduction = scheduler.reduction
        self._mode = mode
        self._at: dict[int, list[float]] = {}
        self._judged: set[tuple[str, int]] = set()
        self._stopped: set[str] = set()
        for verdict in recorded:
            self._keep(verdict)

    def judge(self, values: Mapping[str, Sequence[float]], running: Collection[str]) -> list[Verdict]:
        """New verdicts, in order of arrival, over each trial's values by validation, best so far at a rung.

        Trials that reached a rung between two calls count as having come in the order of `values`. One that is no
        longer `running` is counted where it has been and never stopped; one that was stopped comes to no later rung.
        """
        return [verdict for trial in values for verdict in self._judge_trial(trial, values[trial], trial in running)]

    def _judge_trial(self, trial: str, values: Sequence[float], is_running: bool) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for rung in self._rungs:
            if rung > len(values) or trial in self._stopped:
                break
            if (trial, rung) in self._judged:
                continue
            value = best_so_far(values[:rung], self._mode)
            known = [*self._at.get(rung, ()), value]
            stopped = is_running and is_stopped(value, known, reduction=self._reduction, mode=self._mode)
            verdicts.append(Verdict(trial, rung, value, stopped))
            self._keep(verdicts[-1])
        return verdicts

    def _keep(self, verdict: Verdict) -> None:
        self._at.setdefault(verdict.rung, []).append(verdict.value)
        self._judged.add((verdict.trial, verdict.rung))
        if verdict.stopped:
            self._stopped.add(verdict.trial)
