"""The forecast that `voxscale plan` gives: what a run will need and take, and what to ask a cluster for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from voxscale.config.schema import Config
from voxscale.plan.costs import Costs
from voxscale.plan.fitting import GB, Given, Problem, refuse_unfit
from voxscale.plan.links import Links
from voxscale.plan.plan import Plan
from voxscale.plan.predict import (
    NO_CACHE,
    NO_MORE,
    AtEnd,
    Cached,
    Confidence,
    Layout,
    Memory,
    Times,
    predict_memory,
    predict_times,
)

_WORTH = 0.7  # of perfect speed-up: fewer devices are better shared with others
# Asked for beyond what is expected, the less sure that is.
_SPARE_MEMORY: Mapping[Confidence, float] = {"high": 1.25, "medium": 1.5, "low": 2.0}
_SPARE_TIME: Mapping[Confidence, float] = {"high": 1.5, "medium": 2.0, "low": 4.0}


@dataclass(frozen=True)
class Request:
    """What to ask a cluster for."""

    nodes: int
    devices: int
    cpus_per_task: int
    memory: str
    time: str


@dataclass(frozen=True)
class Forecast:
    layout: Layout
    plans: Mapping[Layout, Plan]
    times: Times
    curve: tuple[Times, ...]  # of 1, 2, 4 … devices up to the layout
    memory: Memory
    disk: Mapping[str, int]
    request: Request  # of the recommended layout
    as_asked: Request  # of the one that was asked for
    recommended: Layout
    costs: Costs
    links: Links
    is_here: bool = True  # what the costs were measured on
    is_kept: bool = False  # that was done before
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.plans[self.layout]

    @property
    def tells_sharing(self) -> bool:
        """Whether what sharing gradients adds is known; else it is part of computing."""
        return self.costs.communication_s is not None

    def times_on(self, layout: Layout) -> Times:
        """Of a layout that there is a plan of."""
        return next(times for times in self.curve if times.layout == layout)

    @property
    def speedup(self) -> dict[str, float]:
        first = self.curve[0].patches_per_s
        return {str(times.layout.world_size): times.patches_per_s / first for times in self.curve}

    def _step_as_json(self, times: Times) -> dict[str, float | None]:
        step = times.step
        return {
            "data": step.data_s,
            "compute": step.compute_s,
            "communication": step.communication_s if self.tells_sharing else None,
        }

    def _times_as_json(self, times: Times) -> dict[str, Any]:
        """A row of the curve."""
        return {
            "world": str(times.layout),
            "step_s": self._step_as_json(times),
            "patches_per_s": times.patches_per_s,
            "total_s": times.total_s,
            "device_hours": times.device_hours,
            "confidence": times.confidence,
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": str(self.layout),
            "memory": {f"{name}_bytes": value for name, value in asdict(self.memory).items()},
            "disk_bytes": dict(self.disk),
            "step_s": self._step_as_json(self.times),
            "steps": self.plan.num_steps,
            "epoch_s": self.times.epoch_s,
            "validation_s": self.times.validation_s,
            "end_s": self.times.end_s,
            "total_s": self.times.total_s,
            "device_hours": self.times.device_hours,
            "speedup": self.speedup,
            "efficiency": {world: gain / int(world) for world, gain in self.speedup.items()},
            "curve": [self._times_as_json(times) for times in self.curve],
            "request": asdict(self.request),
            "as_asked": asdict(self.as_asked),
            "recommended": str(self.recommended),
            "basis": self.costs.basis,
            "kept": self.is_kept,
            "confidence": self.times.confidence,
            "rests_on": asdict(self.costs),
            "links": asdict(self.links),
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
        }


def make_forecast(
    config: Config,
    plans: Mapping[Layout, Plan],
    measured: Sequence[Costs],
    links: Links,
    given: Given,
    *,
    store_bytes: int,
    cached: Cached = NO_CACHE,
    signal_s: int = 0,
    at_end: AtEnd = NO_MORE,
    assumptions: tuple[str, ...] = (),
    is_here: bool = True,
    is_kept: bool = False,
    problems: Sequence[Problem] = (),
    warnings: Sequence[str] = (),
) -> Forecast:
    """`plans` are of 1, 2, 4 … devices, the last of the layout asked for. Raises all that cannot work.

    `signal_s` seconds before its end a job is told to save: these are asked for, too. `problems` and `warnings` were
    found before.
    """
    cpus_each = given.cpus_per_device if given.is_elsewhere else None
    times_of = partial(predict_times, measured=measured, links=links, cpus_each=cpus_each, at_end=at_end)
    curve = tuple(times_of(plan, each) for each, plan in plans.items())
    layout, plan = list(plans.items())[-1]

    def memory_of(each: Layout) -> Memory:
        return predict_memory(plans[each], each, measured, cached=cached)

    memory = memory_of(layout)
    # Beside the last and the best.
    checkpoints = (config.checkpoint.keep + 2) * (memory.weights + memory.optimizer)
    refuse_unfit(plan, layout, memory, given, run_bytes=checkpoints, others=problems)
    first = curve[0]
    worth = [times for times in curve if times.patches_per_s >= _WORTH * times.layout.world_size * first.patches_per_s]
    recommended = worth[-1].layout
    found = list(warnings)
    if recommended != layout:
        found.append(
            f"{layout} uses {curve[-1].patches_per_s / first.patches_per_s / layout.world_size:.0%} of its devices; "
            f"{recommended} is the most that is used by {_WORTH:.0%}"
        )
    return Forecast(
        layout=layout,
        plans=plans,
        times=curve[-1],
        curve=curve,
        memory=memory,
        disk={"store": store_bytes, "checkpoints": checkpoints},
        request=_request(worth[-1], memory_of(recommended), given, signal_s),
        as_asked=_request(curve[-1], memory, given, signal_s),
        recommended=recommended,
        costs=measured[-1],
        links=links,
        is_here=is_here,
        is_kept=is_kept,
        assumptions=assumptions,
        warnings=tuple(found),
    )


def _request(times: Times, memory: Memory, given: Given, signal_s: int) -> Request:
    layout, spare = times.layout, memory.node * _SPARE_MEMORY[times.confidence]
    minutes = math.ceil((times.total_s * _SPARE_TIME[times.confidence] + signal_s) / 60 / 5) * 5
    days, rest = divmod(minutes, 24 * 60)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return Request(
        nodes=layout.nodes,
        devices=layout.devices,
        cpus_per_task=layout.devices * given.cpus_per_device,
        memory=_as_memory(spare, given.node_bytes),
        time=f"{days}-{clock}" if days else clock,
    )


def _as_memory(amount: float, most: int | None) -> str:
    """In whole GB, or all that a node has where that is less."""
    gigabytes = math.ceil(amount / GB)
    return f"{gigabytes}G" if most is None or gigabytes * GB <= most else f"{most >> 20}M"
