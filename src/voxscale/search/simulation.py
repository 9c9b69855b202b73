"""What `voxscale plan --simulate` says: the curve of one run, the makespan of a search, and what others published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from voxscale.config.search import Search
from voxscale.plan.curve import simulate_curve
from voxscale.plan.forecast import Forecast
from voxscale.plan.published import PUBLISHED
from voxscale.plan.simulate import ASSUMPTIONS
from voxscale.search import makespan


def simulate(forecast: Forecast, search: Search | None, worlds: Sequence[int], *, per_node: int) -> dict[str, Any]:
    """Of so many devices, `per_node` on each node."""
    curve = simulate_curve(forecast.costs, forecast.links, worlds, per_node=per_node)
    trials = makespan.simulate_trials(search, forecast, worlds, per_node=per_node) if search is not None else []
    of_search = makespan.ASSUMPTIONS if search is not None else ()
    return {
        "assumptions": [*ASSUMPTIONS, *of_search, *forecast.assumptions],
        "rows": [point.as_json() for point in curve],
        "search": trials,
        "published": [vars(point) for point in PUBLISHED],
        "basis": forecast.costs.basis,
        "confidence": "low",
    }
