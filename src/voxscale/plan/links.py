"""Connections between devices, and what sharing gradients over them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from voxscale.config.site import Interconnect
from voxscale.plan.devices import Device

BUCKET_BYTES = 25 << 20  # of DDP: gradients are sent in such parts, while the rest is still computed
_WITHIN_NODE_GB_S = 10.0  # about what PCIe 3 ×16 gives; NVLink is faster
_BETWEEN_NODES_GB_S = 1.25  # 10 Gbit/s, the least that a cluster has
_WITHIN_NODE_US, _BETWEEN_NODES_US = 10.0, 50.0


@dataclass(frozen=True)
class Link:
    """One device's connection to the next, or one node's, which its devices share."""

    gb_s: float
    latency_us: float
    basis: str  # measured, site, table, or assumed

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Summing a message over a ring of ranks."""
        if ranks == 1:
            return 0.0
        rounds = 2 * (ranks - 1)
        return rounds / ranks * num_bytes / (self.gb_s * 1e9) + rounds * self.latency_us * 1e-6


@dataclass(frozen=True)
class Links:
    """Within a node and between nodes."""

    within: Link
    between: Link

    def all_reduce_s(self, num_bytes: float, nodes: int, devices: int) -> float:
        """Within each node first, then each device's part with its like on other nodes, all over their node's link."""
        return self.within.all_reduce_s(num_bytes, devices) + self.between.all_reduce_s(num_bytes, nodes)


def choose_links(interconnect: Interconnect, *, measured_gb_s: float | None, device: Device | None = None) -> Links:
    """Within a node what was measured or the table has, between nodes what the site states; else it is assumed."""
    if measured_gb_s is not None:
        within = Link(measured_gb_s, _WITHIN_NODE_US, "measured")
    elif device is not None:
        within = Link(device.link_gb_s, _WITHIN_NODE_US, "table")
    else:
        within = Link(_WITHIN_NODE_GB_S, _WITHIN_NODE_US, "assumed")
    stated = interconnect.bandwidth_gb_s is not None
    between = Link(
        interconnect.bandwidth_gb_s or _BETWEEN_NODES_GB_S,
        interconnect.latency_us or _BETWEEN_NODES_US,
        "site" if stated else "assumed",
    )
    return Links(within, between)


def buckets_of(num_bytes: int, size: int = BUCKET_BYTES) -> list[int]:
    """The parts that gradients are sent in."""
    full, rest = divmod(num_bytes, size)
    return [size] * full + ([rest] if rest else [])


def exposed_s(ready_s: Sequence[float], sending_s: Sequence[float], computed_s: float) -> float:
    """What is waited for after the computing: parts are sent one after another, each once it is ready."""
    free = 0.0
    for ready, sending in zip(ready_s, sending_s, strict=True):
        free = max(free, ready) + sending
    return max(0.0, free - computed_s)
