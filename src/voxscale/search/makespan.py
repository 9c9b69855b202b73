"""How long a search takes on so many devices: its trials, simulated event by event.

Those that ASHA judges are judged as in a real search.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from voxscale.config.search import Search
from voxscale.plan.forecast import Forecast
from voxscale.plan.plan import Plan
from voxscale.search.asha import is_stopped, rungs

ASSUMPTIONS = (
    "every trial of the search takes the same time per step, on devices of its own, as soon as some are free",
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
class Makespan:
    """What a search takes: until its last trial ends, and of all trials together."""

    seconds: float
    steps: int
    device_hours: float


def simulate_search(trials: Trials, step_s: float, *, devices: int, per_trial: int = 1, seed: int = 0) -> Makespan:
    """Run the trials on the devices. Raises ValueError where these are fewer than one trial needs."""
    slots = devices // per_trial
    if slots < 1:
        raise ValueError(f"{devices} devices, and a trial needs {per_trial}")
    waiting = np.random.default_rng(seed).random(trials.count).tolist()  # how good each will be
    at_rung: list[list[float]] = [[] for _ in trials.rungs]
    stages = [*trials.rungs, trials.steps]
    order = itertools.count()
    arrivals: list[tuple[float, int, int, float]] = []  # when, in which order of equals, at which stage, how good
    now, steps = 0.0, 0
    while waiting or arrivals:
        while waiting and len(arrivals) < slots:
            heapq.heappush(arrivals, (now + stages[0] * step_s, next(order), 0, waiting.pop()))
            steps += stages[0]
        now, _, stage, value = heapq.heappop(arrivals)
        if stage == len(trials.rungs):
            continue
        at_rung[stage].append(value)
        if not is_stopped(value, at_rung[stage], reduction=trials.reduction, mode="max"):
            more = stages[stage + 1] - stages[stage]
            heapq.heappush(arrivals, (now + more * step_s, next(order), stage + 1, value))
            steps += more
    return Makespan(now, steps, steps * step_s * per_trial / 3600)


def simulate_trials(
    search: Search, forecast: Forecast, worlds: Sequence[int], *, per_node: int
) -> list[dict[str, Any]]:
    """What a config's search takes on so many devices, with its early stopping; a trial has those of one node at most.

    Trials that share a device are taken as one after another: together they are no faster.
    """
    asked = search.per_trial.devices
    each = per_node if asked == "all" else max(1, int(asked))
    trials, step_s = trials_of(search, forecast.plan), forecast.step_s_on(each)
    whole = trials.count * trials.steps
    rows = []
    for devices in (world for world in worlds if world >= each):
        found = simulate_search(trials, step_s, devices=devices, per_trial=each)
        rows.append(
            {
                "devices": devices,
                "trials": trials.count,
                "seconds": found.seconds,
                "device_hours": found.device_hours,
                "steps_share": found.steps / whole,
                "speedup": simulate_search(trials, step_s, devices=each, per_trial=each).seconds / found.seconds,
            }
        )
    return rows
