"""Simulated cohorts, and the same in the form that scikit-survival takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Cohort:
    time: Array
    event: NDArray[np.bool_]
    risk: Array

    def __len__(self) -> int:
        return len(self.time)

    @property
    def structured(self) -> NDArray[Any]:
        return np.array(
            list(zip(self.event.tolist(), self.time.tolist(), strict=True)), dtype=[("event", bool), ("time", float)]
        )

    def take(self, rows: Any) -> Cohort:
        return Cohort(self.time[rows], self.event[rows], self.risk[rows])


def simulate(seed: int, cases: int, *, censored: float = 0.4, time_step: float = 0.0, risk_step: float = 0.0) -> Cohort:
    """Days of follow-up whose hazard grows with the risk; steps above zero round times and risks, which makes ties."""
    random = np.random.default_rng(seed)
    risk = random.normal(size=cases)
    until_event = random.exponential(800 * np.exp(-risk))
    until_censored = random.exponential(1000, size=cases)
    if censored == 0:
        until_censored[:] = np.inf
    else:  # the scale that leaves this share censored
        until_censored *= np.quantile(until_event / until_censored, 1 - censored)
    time = np.minimum(np.minimum(until_event, until_censored), 4000) + 1
    event = until_event <= np.minimum(until_censored, 3999)
    return Cohort(_rounded_up(time, time_step), event, _rounded_up(risk, risk_step))


def with_events(cohort: Cohort, number: int) -> Cohort:
    """All but the first of its events censored."""
    event = np.zeros(len(cohort), dtype=bool)
    event[np.flatnonzero(cohort.event)[:number]] = True
    return Cohort(cohort.time, event, cohort.risk)


def _rounded_up(values: Array, step: float) -> Array:
    return np.ceil(values / step) * step if step else values


KINDS: dict[str, dict[str, float]] = {
    "plain": {},
    "ties in time": {"time_step": 90.0},
    "ties in risk": {"risk_step": 0.5},
    "ties in both": {"time_step": 200.0, "risk_step": 1.0},
    "heavy censoring": {"censored": 0.9},
    "heavy censoring and ties": {"censored": 0.9, "time_step": 120.0, "risk_step": 0.5},
    "no censoring": {"censored": 0.0},
}


@st.composite
def cohorts(draw: st.DrawFn, *, least: int = 1, most: int = 25) -> Cohort:
    """Small ones, full of ties, down to a single case, with or without events."""
    cases = draw(st.integers(least, most))
    times = draw(st.lists(st.integers(1, 12), min_size=cases, max_size=cases))
    events = draw(st.lists(st.booleans(), min_size=cases, max_size=cases))
    risks = draw(st.lists(st.one_of(st.integers(-3, 3), st.floats(-5, 5, width=16)), min_size=cases, max_size=cases))
    return Cohort(np.array(times, dtype=float), np.array(events, dtype=bool), np.array(risks, dtype=float))
