"""The speed-up of worlds that nobody has here, simulated from steps measured on one device or a few."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxscale.errors import ConfigError
from voxscale.plan.costs import Costs
from voxscale.plan.links import Links
from voxscale.plan.predict import Layout
from voxscale.plan.simulate import StepTime, Work, simulate_step

_MOST = 65536


@dataclass(frozen=True)
class Point:
    """A simulated world: every device has as many patches as those that were measured."""

    layout: Layout
    step: StepTime
    speedup: float

    def as_json(self) -> dict[str, Any]:
        return {
            "devices": self.layout.world_size,
            "world": str(self.layout),
            "step_s": self.step.step_s,
            "communication_s": self.step.communication_s,
            "speedup": self.speedup,
            "efficiency": self.speedup / self.layout.world_size,
        }


def parse_range(text: str) -> list[int]:
    """`devices=8..4096`: those and every doubling between them."""
    match = re.fullmatch(r"devices=([1-9]\d{0,5})(?:\.\.([1-9]\d{0,5}))?", text)
    count, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not match or count > last or last > _MOST:
        raise ConfigError(
            f"--simulate: found {text!r}, expected devices=FIRST..LAST, at most {_MOST}",
            fix="e.g. --simulate devices=8..4096",
        )
    found = []
    while count < last:
        found.append(count)
        count *= 2
    return [*found, last]


def refuse_plot(plot: Path | None, simulated: str | None) -> None:
    """Refuse a drawing of nothing, or one that its name would not say."""
    if plot is not None and simulated is None:
        raise ConfigError(
            "--plot: there is nothing to draw without --simulate", fix="add --simulate devices=8..4096, or leave it out"
        )
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(
            f"--plot: found {str(plot)!r}, expected a name that ends in .svg", fix="e.g. --plot curve.svg"
        )


def simulate_curve(costs: Costs, links: Links, worlds: Sequence[int], *, per_node: int) -> list[Point]:
    """Weak scaling over nodes of so many devices, or of fewer where a world does not divide: the speed-up is that of
    patches a second over one device."""
    compute_s = costs.computing_s(costs.micro_batch, costs.accumulate)
    work = Work(compute_s, costs.data_s, costs.gradient_bytes, costs.spread)
    alone = simulate_step(work, links, nodes=1, devices=1).step_s
    points = []
    for world in worlds:
        devices = next(each for each in range(min(world, per_node), 0, -1) if world % each == 0)
        layout = Layout(world // devices, devices)
        step = simulate_step(work, links, nodes=layout.nodes, devices=layout.devices)
        points.append(Point(layout, step, layout.world_size * alone / step.step_s))
    return points
