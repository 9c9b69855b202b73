"""What `voxscale plan --simulate` says: the curve of one run, the makespan of a search, and what others published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from voxscale.config.search import Search
from voxscale.plan.curve import simulate_curve
from voxscale.plan.forecast import Forecast
from voxscale.plan.predict import Layout
from voxscale.plan.published import PUBLISHED
from voxscale.plan.simulate import ASSUMPTIONS
from voxscale.search import makespan


def simulate(
    forecast: Forecast,
    search: Search | None,
    worlds: Sequence[int],
    *,
    per_node: int,
    ask: Callable[[Layout], Forecast],
) -> dict[str, Any]:
    """Of so many devices, `per_node` on each node. `ask` is for the devices of a trial, if `forecast` lacks them."""
    curve = simulate_curve(forecast.costs, forecast.links, worlds, per_node=per_node)
    trials: list[dict[str, Any]] = []
    if search is not None:
        layout = Layout(1, makespan.devices_of_trial(search, per_node=per_node))
        known = forecast if layout in forecast.plans else ask(layout)
        trials = makespan.simulate_trials(search, known.plans[layout], known.times_on(layout), worlds)
    of_search = makespan.ASSUMPTIONS if search is not None else ()
    return {
        "assumptions": [*ASSUMPTIONS, *of_search, *forecast.assumptions],
        "rows": [point.as_json() for point in curve],
        "search": trials,
        "published": [vars(point) for point in PUBLISHED],
        "basis": forecast.costs.basis,
        "confidence": "low",
    }
