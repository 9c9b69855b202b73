"""Steps that nobody has taken yet: many ranks, each waiting for the slowest.

Assumed: every rank's computing takes the measured time, drawn anew for each step with the measured spread; two thirds
of it are the backward pass, in which gradients become ready evenly; parts of 25 MB are summed over all ranks one after
another, each once the last rank has it; the stream of patches keeps up as measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from voxscale.plan.links import Links, buckets_of, exposed_s

BACKWARD = 2 / 3  # of the computing of a step
_STEPS = 25
ASSUMPTIONS = (
    "every device has as many patches as the one that was measured",
    "computing time per patch as measured, with its spread from step to step",
    "two thirds of it are the backward pass, in which gradients become ready evenly",
    "parts of 25 MB are summed one after another, each once the slowest rank has it",
    "the file system feeds any number of nodes as it feeds one",
)


@dataclass(frozen=True)
class Work:
    """What one rank does in a step."""

    compute_s: float
    data_s: float
    gradient_bytes: int
    spread: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Of the step of a world."""

    data_s: float
    compute_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        return self.data_s + self.compute_s + self.communication_s


def simulate_step(work: Work, links: Links, *, nodes: int, devices: int, seed: int = 0) -> StepTime:
    """The mean of some steps. What others are waited for counts as communication, as it does where it is measured."""
    ranks, parts = nodes * devices, buckets_of(work.gradient_bytes)
    if ranks == 1:
        return StepTime(work.data_s, work.compute_s, 0.0)
    sending = [links.all_reduce_s(part, nodes, devices) for part in parts]
    drawn = 1 + work.spread * np.random.default_rng(seed).standard_normal((_STEPS, ranks)).max(axis=1)
    waited = []
    for slowest in work.compute_s * np.maximum(drawn, 1.0):
        backward = slowest * BACKWARD
        ready = [slowest - backward * (1 - (k + 1) / len(parts)) for k in range(len(parts))]
        waited.append(slowest - work.compute_s + exposed_s(ready, sending, slowest))
    return StepTime(work.data_s, work.compute_s, float(np.mean(waited)))
