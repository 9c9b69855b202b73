"""How long a search takes on so many devices: its trials, simulated event by event.

Those that ASHA judges are judged as in a real search.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from voxscale.config.search import Search
from voxscale.plan.plan import Plan
from voxscale.plan.predict import Times
from voxscale.search.asha import is_stopped, rungs

ASSUMPTIONS = (
    "every trial of the search takes the same time per step, on devices of its own, as soon as some are free",
    "it starts as a run does, validates as often as the config says and, unless stopped, measures its best at its end",
    "how good each trial is is drawn at random and does not change on the way",
)


@dataclass(frozen=True)
class Trials:
    """The trials of a search: their steps, and the rungs, in steps, at which some are stopped."""

    count: int
    steps: int
    rungs: Sequence[int] = ()
    reduction: int = 3


def trials_of(search: Search, plan: Plan) -> Trials:
    """The trials of a config's search, each of which is a run as planned."""
    every = plan.validate_every_steps
    at = rungs(search.scheduler, -(-plan.num_steps // every))
    reduction = search.scheduler.reduction if search.scheduler != "none" else 1
    return Trials(search.num_points * search.seeds, plan.num_steps, [rung * every for rung in at], reduction)


@dataclass(frozen=True)
class Pace:
    """Seconds of one trial: of its start, a step, a validation, which comes after `every` steps, and of its end."""

    step_s: float
    start_s: float = 0.0
    validation_s: float = 0.0
    every: int = 1
    end_s: float = 0.0

    @classmethod
    def of(cls, times: Times, plan: Plan) -> Self:
        return cls(times.step.step_s, times.start_s, times.validation_s, plan.validate_every_steps, times.end_s)

    def until_s(self, steps: int) -> float:
        """From the start to the validation after so many steps."""
        return self.start_s + steps * self.step_s + -(-steps // self.every) * self.validation_s

    def stages_s(self, trials: Trials) -> list[float]:
        """When each rung is reached, and when a trial ends that none has stopped: its best is measured once more."""
        return [*map(self.until_s, trials.rungs), self.until_s(trials.steps) + self.end_s]


@dataclass(frozen=True)
class Makespan:
    """What a search takes: until its last trial ends, and of all trials together."""

    seconds: float
    steps: int
    device_hours: float


def simulate_search(trials: Trials, pace: Pace, *, devices: int, per_trial: int = 1, seed: int = 0) -> Makespan:
    """Run the trials on the devices. Raises ValueError where these are fewer than one trial needs."""
    slots = devices // per_trial
    if slots < 1:
        raise ValueError(f"{devices} devices, and a trial needs {per_trial}")
    waiting = np.random.default_rng(seed).random(trials.count).tolist()  # how good each will be
    at_rung: list[list[float]] = [[] for _ in trials.rungs]
    stages, ends_s = [*trials.rungs, trials.steps], pace.stages_s(trials)
    order = itertools.count()
    arrivals: list[tuple[float, int, int, float]] = []  # when, in which order of equals, at which stage, how good
    now, steps, busy_s = 0.0, 0, 0.0
    while waiting or arrivals:
        while waiting and len(arrivals) < slots:
            heapq.heappush(arrivals, (now + ends_s[0], next(order), 0, waiting.pop()))
            steps, busy_s = steps + stages[0], busy_s + ends_s[0]
        now, _, stage, value = heapq.heappop(arrivals)
        if stage == len(trials.rungs):
            continue
        at_rung[stage].append(value)
        if not is_stopped(value, at_rung[stage], reduction=trials.reduction, mode="max"):
            more_s = ends_s[stage + 1] - ends_s[stage]
            heapq.heappush(arrivals, (now + more_s, next(order), stage + 1, value))
            steps, busy_s = steps + stages[stage + 1] - stages[stage], busy_s + more_s
    return Makespan(now, steps, busy_s * per_trial / 3600)


def devices_of_trial(search: Search, *, per_node: int) -> int:
    """Those of one node at most. Trials that share a device are taken as one after another: together they are no
    faster."""
    asked = search.per_trial.devices
    return per_node if asked == "all" else max(1, int(asked))


def simulate_trials(search: Search, plan: Plan, times: Times, worlds: Sequence[int]) -> list[dict[str, Any]]:
    """What a config's search takes on so many devices, with its early stopping; `plan` and `times` are of one trial."""
    each, trials, pace = times.layout.world_size, trials_of(search, plan), Pace.of(times, plan)
    whole = trials.count * trials.steps
    rows = []
    for devices in (world for world in worlds if world >= each):
        found = simulate_search(trials, pace, devices=devices, per_trial=each)
        rows.append(
            {
                "devices": devices,
                "trials": trials.count,
                "seconds": found.seconds,
                "device_hours": found.device_hours,
                "steps_share": found.steps / whole,
                "speedup": simulate_search(trials, pace, devices=each, per_trial=each).seconds / found.seconds,
            }
        )
    return rows
