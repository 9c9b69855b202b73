"""What measured worlds say about scaling: speed-up, efficiency, and what keeps it from being perfect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from voxscale.plan.costs import Costs
from voxscale.plan.predict import Layout

Kind = Literal["strong", "weak"]
_GOOD = 0.9  # of perfect speed-up: nothing to look for
ADVICE = {
    "none": "nothing: it is used to the full",
    "data": "patches come too slowly: raise loader.workers, bring the store near (data.stage), or augment less",
    "communication": "sharing gradients: a faster network (the site's interface), fewer nodes, or a larger train.batch",
    "compute": "devices slow each other down, or compute small batches badly: CPUs or memory that ranks share, or a "
    "larger train.batch",
    "unknown": "with train.deterministic: exact ranks work in turn, and sharing cannot be told from computing: "
    "measure with train.deterministic=true",
}


@dataclass(frozen=True)
class Row:
    """One measured world. The first of its kind is what it is compared with."""

    kind: Kind
    layout: Layout
    global_batch: int
    costs: Costs
    speedup: float

    @property
    def patches_per_s(self) -> float:
        return self.global_batch / self.costs.step_s

    @property
    def efficiency(self) -> float:
        return self.speedup / self.layout.world_size

    def as_json(self) -> dict[str, Any]:
        step_s = self.costs.step_s
        return {
            "world": str(self.layout),
            "kind": self.kind,
            "global_batch": self.global_batch,
            "step_s": step_s,
            "patches_per_s": self.patches_per_s,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "data_share": self.costs.data_s / step_s,
            "compute_share": self.costs.compute_s / step_s,
            "communication_share": None if self.costs.communication_s is None else self.costs.communication_s / step_s,
        }


def make_rows(measured: Sequence[tuple[Kind, Layout, Costs]]) -> list[Row]:
    """A row of each measured world, its speed-up over the first of its kind; that one is taken as perfectly used."""
    rows: list[Row] = []
    first: dict[Kind, tuple[float, int]] = {}
    for kind, layout, costs in measured:
        speed = costs.global_batch / costs.step_s
        base, ranks = first.setdefault(kind, (speed, layout.world_size))
        rows.append(Row(kind, layout, costs.global_batch, costs, speed / base * ranks))
    return rows


def find_bottleneck(rows: Sequence[Row]) -> str:
    """What takes most of the time that perfect scaling would not: none, data, communication or compute.

    Where worlds scale, or there is one alone, what its ranks wait for, if that is much. Unknown where it is one of the
    last two, and nobody can tell which.
    """
    strong = [row for row in rows if row.kind == "strong"] or list(rows)
    first, last = strong[0], strong[-1]
    if first is last or last.efficiency >= _GOOD:
        waits = {"data": last.costs.data_s, "communication": last.costs.sharing_s}
        longest = max(waits, key=lambda name: waits[name])
        if waits[longest] > (1 - _GOOD) * last.costs.step_s:
            return longest
        return "unknown" if first is last and last.costs.communication_s is None else "none"

    def lost(seconds: float, at_first: float) -> float:
        per_patch = last.layout.world_size / last.global_batch
        return seconds * per_patch - at_first * first.layout.world_size / first.global_batch

    losses = {
        "data": lost(last.costs.data_s, first.costs.data_s),
        "communication": lost(last.costs.sharing_s, first.costs.sharing_s),
        "compute": lost(last.costs.compute_s, first.costs.compute_s),
    }
    most = max(losses, key=lambda name: losses[name])
    return "unknown" if most == "compute" and last.costs.communication_s is None else most
