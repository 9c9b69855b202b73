"""What a run will take: time, memory and disk, from what a step costs. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from voxscale.config.data import Cache
from voxscale.plan.costs import Costs
from voxscale.plan.links import Links
from voxscale.plan.plan import Plan
from voxscale.plan.simulate import StepTime, Work, simulate_step

Confidence = Literal["high", "medium", "low"]
START_S = 15.0  # imports, the meeting of the ranks, opening the store
# Of the process on each node that starts several ranks, where it was not looked at: Python, torch and its agent. 199 MB
# in each of three runs with torch 2.13, whatever the network.
LAUNCHER_BYTES = 200 << 20
_FAR = 8  # times the measured ranks: beyond, a figure is little more than a guess


@dataclass(frozen=True)
class Layout:
    """Nodes × devices of each."""

    nodes: int
    devices: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices}"


@dataclass(frozen=True)
class AtEnd:
    """Cases that are looked at when training is over, beside those of a validation."""

    test: int = 0
    learnt_from: int = 0  # of the training cases, which some tasks go through before they are measured


NO_MORE = AtEnd()


@dataclass(frozen=True)
class Times:
    """Seconds of a run on one layout; `step_s` by what they are spent on."""

    layout: Layout
    step: StepTime
    epoch_s: float
    validation_s: float  # each
    start_s: float
    end_s: float  # the best model, measured in full
    total_s: float
    patches_per_s: float
    confidence: Confidence

    @property
    def device_hours(self) -> float:
        return self.total_s * self.layout.world_size / 3600


@dataclass(frozen=True)
class Memory:
    """Bytes: of one device, and of a node. On CPUs the devices' memory is the node's."""

    weights: int
    gradients: int
    optimizer: int
    workspace: int  # the same for any number of patches
    cached: int  # cases that a device holds
    patches: int  # of a micro-batch, on its way through the network and back
    window: int  # of validating a case
    activations: int  # the larger of both
    device: int
    process: int  # of one rank, beside the network
    shared: int  # of a node, for all its ranks
    node: int


@dataclass(frozen=True)
class Cached:
    """Bytes of the cases that a cache holds at a time: once on each node, or on each device, or a part on each."""

    of_node: int = 0
    of_device: int = 0
    by_rank: bool = False

    @classmethod
    def of(cls, options: Cache, num_bytes: int) -> Self:
        return cls(
            of_node=num_bytes if options.where == "host" else 0,
            of_device=num_bytes if options.where == "device" else 0,
            by_rank=options.share == "rank",
        )

    def on_device(self, layout: Layout) -> int:
        return -(-self.of_device // layout.world_size) if self.by_rank else self.of_device


NO_CACHE = Cached()


def predict_times(
    plan: Plan,
    layout: Layout,
    measured: Sequence[Costs],
    links: Links,
    *,
    cpus_each: int | None = None,
    at_end: AtEnd = NO_MORE,
) -> Times:
    """Of a run as `plan` has it on that layout; `measured` are costs of the same config, of any worlds.

    `cpus_each` are the CPUs of each device of a node elsewhere; None: its devices share as many as there were when
    measured.
    """
    step, confidence = _step_of(plan, layout, measured, links, cpus_each)
    costs = closest(layout, measured)
    case_s = costs.validate_case_s or 0.0
    full_case_s = case_s if costs.full_case_s is None else costs.full_case_s

    def each_rank(cases: int) -> int:
        return -(-cases // layout.world_size)

    start_s, validation_s = START_S + costs.settle_s, each_rank(plan.num_val) * case_s
    end_s = each_rank(at_end.learnt_from) * case_s + each_rank(plan.num_val + at_end.test) * full_case_s
    validations = -(-plan.num_steps // plan.validate_every_steps)
    return Times(
        layout=layout,
        step=step,
        epoch_s=plan.steps_per_epoch * step.step_s,
        validation_s=validation_s,
        start_s=start_s,
        end_s=end_s,
        total_s=start_s + plan.num_steps * step.step_s + validations * validation_s + end_s,
        patches_per_s=plan.global_batch / step.step_s,
        confidence=confidence,
    )


def predict_memory(plan: Plan, layout: Layout, measured: Sequence[Costs], *, cached: Cached = NO_CACHE) -> Memory:
    """Of a run as `plan` has it on that layout, and of what it holds of its cases."""
    costs = closest(layout, measured)
    each = -(-costs.activation_bytes // costs.micro_batch)
    patches = plan.micro_batch * each
    activations = max(patches, costs.window_bytes)
    device = costs.model_bytes + costs.workspace_bytes + cached.on_device(layout) + activations
    of_gpu = max(costs.training_bytes, costs.validating_bytes)
    process = costs.rest_bytes if costs.device_training_bytes is None else of_gpu
    of_rank = process + (0 if costs.on_gpu else device)
    seen = [each.launcher_bytes for each in measured if each.launcher_bytes is not None]
    launcher = max(seen, default=LAUNCHER_BYTES) if layout.world_size > 1 else 0
    return Memory(
        weights=costs.weights_bytes,
        gradients=costs.gradient_bytes,
        optimizer=costs.optimizer_bytes,
        workspace=costs.workspace_bytes,
        cached=cached.on_device(layout),
        patches=patches,
        window=costs.window_bytes,
        activations=activations,
        device=device,
        process=process,
        shared=cached.of_node,
        node=layout.devices * of_rank + cached.of_node + launcher,
    )


def closest(layout: Layout, measured: Sequence[Costs]) -> Costs:
    """The costs that say most of a layout: of as many ranks, or else of the most."""
    same = [costs for costs in measured if costs.world_size == layout.world_size and costs.nodes == layout.nodes]
    return same[0] if same else max(measured, key=lambda costs: costs.world_size)


def _step_of(
    plan: Plan, layout: Layout, measured: Sequence[Costs], links: Links, cpus_each: int | None
) -> tuple[StepTime, Confidence]:
    costs = closest(layout, measured)
    crowding = _crowding(layout, costs, cpus_each)
    scale = plan.micro_batch * plan.accumulate / costs.patches
    computing_s = costs.computing_s(plan.micro_batch, plan.accumulate)
    if (costs.world_size, costs.nodes, scale, crowding) == (layout.world_size, layout.nodes, 1.0, 1.0):
        step = StepTime(costs.data_s, computing_s, costs.sharing_s)
        is_same = costs.on_gpu or cpus_each is None  # CPUs elsewhere may be of another kind
        return step, "low" if costs.basis == "table" else "high" if is_same else "medium"
    compute_s = computing_s * crowding
    data_s = max(0.0, costs.load_s * scale - compute_s) if costs.on_gpu else costs.data_s * scale
    work = Work(compute_s, data_s, costs.gradient_bytes, costs.spread)
    step = simulate_step(work, links, nodes=layout.nodes, devices=layout.devices)
    is_near = layout.world_size <= _FAR * costs.world_size and (layout.nodes == 1 or links.between.basis != "assumed")
    return step, "medium" if costs.basis == "probe" and is_near else "low"


def _crowding(layout: Layout, costs: Costs, cpus_each: int | None) -> float:
    """How much slower ranks are that have to share CPUs."""
    if costs.on_gpu:
        return 1.0
    before = max(1.0, costs.world_size / costs.nodes * costs.threads / costs.cpus)
    cpus = costs.cpus if cpus_each is None else layout.devices * cpus_each
    return max(1.0, layout.devices * costs.threads / cpus) / before
