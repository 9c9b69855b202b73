"""How a search stands: which trial leads, and how long it may take yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from voxscale.search.asha import Mode
from voxscale.search.ledger import Trial, best_trial
from voxscale.search.progress import Progress, best_value


@dataclass(frozen=True)
class Pace:
    """How far a trial that runs has come, as shares of all its steps: in all, and in the time since it was started."""

    done: float
    done_since: float
    elapsed_s: float


def leader(trials: Sequence[Trial], progress: Mapping[int, Progress], mode: Mode) -> tuple[int, float] | None:
    """(Trial, value) of the best so far, each that has not ended with the best of its validations."""
    best = best_trial(trials, mode)
    found = [] if best is None or best.value is None else [(best.index, best.value)]
    for trial in trials:
        if not trial.has_ended and (value := best_value(progress[trial.index].values, mode)) is not None:
            found.append((trial.index, value))
    sign = 1 if mode == "max" else -1
    return max(found, key=lambda each: (sign * each[1], -each[0]), default=None)


def time_left_s(num_trials: int, trials: Sequence[Trial], running: Sequence[Pace]) -> float | None:
    """By what trials took so far and how many run at once; None where nothing is known yet.

    Until one has ended, by how fast those are that run.
    """
    took = [trial.wall_s for trial in trials if trial.has_ended and trial.wall_s > 0]
    took = took or [pace.elapsed_s / pace.done_since for pace in running if pace.done_since > 0]
    if not took:
        return None
    left = num_trials - sum(trial.has_ended for trial in trials) - sum(pace.done for pace in running)
    return mean(took) * max(0.0, left) / max(1, len(running))


def described(params: Mapping[str, object]) -> str:
    return ", ".join(f"{path} {_short(value)}" for path, value in params.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
