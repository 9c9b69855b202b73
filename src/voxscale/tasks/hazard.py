"""Step functions fitted on training rows: the censoring distribution and the baseline hazard.

Both are known up to the end of the training rows' follow-up and no further: beyond it they give NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from voxscale.tasks.resampling import Array


@dataclass(frozen=True)
class CensoringCurve:
    """G(t), the probability to be still followed after t, by Kaplan and Meier with events and censoring exchanged.

    `survival[i]` holds from `times[i]`, a time at which someone was censored, to the next; before the first it is 1.
    """

    times: tuple[float, ...]
    survival: tuple[float, ...]
    follow_up: float

    def __post_init__(self) -> None:
        _check_steps(self.times, self.survival)

    @classmethod
    def fit(cls, time: ArrayLike, event: ArrayLike) -> CensoringCurve:
        times, censored = _rows(time, np.logical_not(np.asarray(event, dtype=bool)))
        steps, num_censored = np.unique(times[censored], return_counts=True)
        # Who has an event at the very time at which another is censored leaves before that one.
        later = len(times) - np.searchsorted(np.sort(times), steps, side="right")
        survival = np.cumprod(later / (later + num_censored))
        return cls(tuple(steps.tolist()), tuple(survival.tolist()), _follow_up(times))

    def at(self, time: ArrayLike) -> Array:
        """G at each time. Beyond the follow-up it is NaN, or 0 if it has come down to 0 by then."""
        times = np.asarray(time, dtype=np.float64)
        survival = _step(self.times, self.survival, times, before=1.0)
        return np.where((times > self.follow_up) & (survival > 0), np.nan, survival)

    @property
    def known_to(self) -> float:
        """The last time at which G is known and above 0."""
        gone = self.survival and self.survival[-1] == 0
        return float(np.nextafter(self.times[-1], -np.inf)) if gone else self.follow_up

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CensoringCurve:
        return cls(_floats(record["times"]), _floats(record["survival"]), float(record["follow_up"]))


@dataclass(frozen=True)
class BaselineHazard:
    """H(t), Breslow's cumulative hazard of a case with risk 0; with risk r it is H(t) · exp(r).

    `log_hazard[i]` is log H from `times[i]`, a time with an event, to the next; before the first H is 0. Kept as a
    logarithm, since a network is free to put all its risks at 1000 or at -1000.
    """

    times: tuple[float, ...]
    log_hazard: tuple[float, ...]
    follow_up: float

    def __post_init__(self) -> None:
        _check_steps(self.times, self.log_hazard)

    @classmethod
    def fit(cls, time: ArrayLike, event: ArrayLike, risk: ArrayLike) -> BaselineHazard:
        times, events = _rows(time, event)
        order = np.argsort(times, kind="stable")
        at_risk = np.logaddexp.accumulate(np.asarray(risk, dtype=np.float64)[order][::-1])[::-1]
        steps, num_events = np.unique(times[events], return_counts=True)
        first = np.searchsorted(times[order], steps, side="left")
        log_hazard = np.logaddexp.accumulate(np.log(num_events) - at_risk[first])
        return cls(tuple(steps.tolist()), tuple(log_hazard.tolist()), _follow_up(times))

    def survival(self, time: ArrayLike, risk: ArrayLike) -> Array:
        """(n, m) probabilities that each of n risks has no event up to each of m times; NaN beyond the follow-up."""
        times, risks = np.asarray(time, dtype=np.float64), np.asarray(risk, dtype=np.float64)
        log_hazard = _step(self.times, self.log_hazard, times, before=-np.inf)
        with np.errstate(over="ignore"):  # a hazard too large to be a number leaves a survival of 0
            survival = np.exp(-np.exp(log_hazard[None, :] + risks[:, None]))
        return np.where(times[None, :] > self.follow_up, np.nan, survival)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> BaselineHazard:
        return cls(_floats(record["times"]), _floats(record["log_hazard"]), float(record["follow_up"]))


def _rows(time: ArrayLike, flag: ArrayLike) -> tuple[Array, NDArray[np.bool_]]:
    return np.asarray(time, dtype=np.float64), np.asarray(flag, dtype=bool)


def _follow_up(times: Array) -> float:
    return float(times.max()) if len(times) else 0.0


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _step(steps: tuple[float, ...], values: tuple[float, ...], times: Array, *, before: float) -> Array:
    """The value of the last step at or before each time."""
    found = np.array((before, *values))[np.searchsorted(np.array(steps), times, side="right")]
    return np.asarray(found, dtype=np.float64)


def _check_steps(steps: tuple[float, ...], values: tuple[float, ...]) -> None:
    if len(steps) != len(values) or not (np.diff(steps) > 0).all():
        raise ValueError(f"{len(steps)} rising times must have a value each; there are {len(values)} values")
