"""What to ask a cluster for: what is worth it, and what a node has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_prediction import FAST, PLAN, on

from measured import COSTS
from voxscale.config.schema import Config
from voxscale.plan.fitting import GB, Given
from voxscale.plan.forecast import Forecast, make_forecast
from voxscale.plan.links import Link, Links
from voxscale.plan.predict import Layout
from voxscale.plan.scaling import ADVICE, find_bottleneck, make_rows
from voxscale.report.forecast import render_forecast
from voxscale.report.scale_page import scale_page
from voxscale.report.scaling import render_scaling
from voxscale.runs import ScaleFolder

GIVEN = Given(device_bytes=None, node_bytes=None, shared_bytes=None, cpus_per_device=4)
WORLDS = {Layout(1, 1): PLAN, Layout(1, 2): on(2), Layout(2, 2): on(4)}


@pytest.fixture
def config() -> Config:
    return Config.model_validate({"data": {"source": "data"}, "model": {"name": "unet"}})


def forecast(config: Config, links: Links, given: Given, *, held: int = 0) -> Forecast:
    costs = replace(COSTS, gradient_bytes=10**9, rest_bytes=1000 + held, training_bytes=COSTS.training_bytes + held)
    return make_forecast(config, WORLDS, [costs], links, given, store_bytes=0)


def test_the_request_is_that_of_the_devices_that_are_worth_it(config: Config) -> None:
    found = forecast(config, replace(FAST, between=Link(0.01, 50.0, "site")), GIVEN)
    assert (str(found.recommended), str(found.layout)) == ("1x2", "2x2")
    assert (found.request.nodes, found.request.devices) == (1, 2)
    assert (found.as_asked.nodes, found.as_asked.devices) == (2, 2)
    text = render_forecast(found)
    assert "ask for   --nodes 1 --devices 2, --cpus-per-task=8" in text
    assert "as asked  --nodes 2 --devices 2, --cpus-per-task=8" in text
    fast = forecast(config, FAST, GIVEN)
    assert fast.request == fast.as_asked
    assert "as asked" not in render_forecast(fast)


def test_no_more_memory_is_asked_for_than_a_node_has(config: Config) -> None:
    free = forecast(config, FAST, GIVEN, held=4 * GB)
    assert int(free.request.memory.removesuffix("G")) > 13
    whole = forecast(config, FAST, replace(GIVEN, node_bytes=12 * GB + GB // 2), held=4 * GB)
    assert whole.request.memory == f"{12 * 1024 + 512}M"


def test_the_cpus_of_a_site_count_and_not_those_of_this_machine(config: Config) -> None:
    worlds, here = {Layout(1, 1): PLAN, Layout(1, 4): on(4)}, replace(COSTS, cpus=2)
    for given, compute_s in ((GIVEN, 1.0), (replace(GIVEN, is_elsewhere=True), 0.5)):
        found = make_forecast(config, worlds, [here], FAST, given, store_bytes=0)
        assert found.times.step.compute_s == pytest.approx(compute_s)


def test_sharing_that_nobody_could_tell_from_computing_is_not_called_free(config: Config) -> None:
    costs = [replace(COSTS, communication_s=seconds) for seconds in (0.0, None)]
    told, untold = (make_forecast(config, WORLDS, [each], FAST, GIVEN, store_bytes=0) for each in costs)
    assert told.as_json()["step_s"]["communication"] is not None
    assert untold.as_json()["step_s"]["communication"] is None
    assert "communication not known" in render_forecast(untold)
    two = replace(COSTS, world_size=2, micro_batch=2, compute_s=2.0)
    for shared_s, bottleneck, said in ((0.0, "compute", "0%"), (None, "unknown", "not known")):
        rows = make_rows(
            [("strong", Layout(1, 1), COSTS), ("strong", Layout(1, 2), replace(two, communication_s=shared_s))]
        )
        assert find_bottleneck(rows) == bottleneck
        shown = [row.as_json() for row in rows]
        assert said in render_scaling(shown, bottleneck).splitlines()[2]
        assert shown[1]["communication_share"] == shared_s
        page = scale_page(ScaleFolder(Path("scaling")), {"rows": shown, "bottleneck": bottleneck})
        assert f"What holds it back: {ADVICE[bottleneck]}" in json.dumps(page)


@pytest.mark.parametrize(
    ("costs", "holds_it_back"),
    [
        ({"data_s": 0.1}, "none"),
        ({"data_s": 2.0}, "data"),
        ({"data_s": 0.1, "communication_s": 1.0}, "communication"),
        ({"data_s": 0.5, "communication_s": 1.0}, "communication"),
        ({"data_s": 0.1, "communication_s": None}, "unknown"),
    ],
)
def test_one_world_is_held_back_by_what_its_ranks_wait_for(costs: dict[str, float | None], holds_it_back: str) -> None:
    only = make_rows([("strong", Layout(1, 2), replace(COSTS, world_size=2, micro_batch=2, **costs))])  # type: ignore[arg-type]
    assert find_bottleneck(only) == holds_it_back


def test_worlds_that_scale_and_wait_for_their_data_are_not_called_used_to_the_full() -> None:
    """Each rank waits as long as the one alone: twice the ranks are twice as fast, and could be faster."""
    for data_s, holds_it_back in ((0.01, "none"), (1.0, "data")):
        alone = replace(COSTS, data_s=data_s, compute_s=1.0)
        two = replace(alone, world_size=2, micro_batch=2, data_s=data_s / 2, compute_s=0.5)
        rows = make_rows([("strong", Layout(1, 1), alone), ("strong", Layout(1, 2), two)])
        assert rows[-1].efficiency == pytest.approx(1.0)
        assert find_bottleneck(rows) == holds_it_back
