"""What a run will take, from what a step costs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from measured import COSTS
from voxscale.config.data import Cache
from voxscale.config.site import Interconnect
from voxscale.errors import ConfigError
from voxscale.plan.curve import simulate_curve
from voxscale.plan.fitting import GB, Given, Problem, idle_problem, refuse_unfit
from voxscale.plan.links import Link, Links, buckets_of, choose_links, exposed_s
from voxscale.plan.plan import Plan
from voxscale.plan.predict import LAUNCHER_BYTES, AtEnd, Cached, Layout, predict_memory, predict_times
from voxscale.plan.simulate import Work, simulate_step

FAST = Links(Link(1e6, 1e-6, "measured"), Link(1e6, 1e-6, "site"))
PLAN = Plan(
    world_size=1,
    global_batch=4,
    micro_batch=4,
    accumulate=1,
    num_train=40,
    num_val=5,
    steps_per_epoch=10,
    num_steps=100,
    validate_every_steps=20,
    patch=(16, 16, 16),
    stream="global",
    channels=1,
    labels=(0, 1),
    store="",
    config_sha256="",
    data_sha256="",
)


def on(world_size: int) -> Plan:
    return replace(PLAN, world_size=world_size, micro_batch=4 // world_size)


def test_what_was_measured_is_taken_as_it_is() -> None:
    times = predict_times(PLAN, Layout(1, 1), [COSTS], FAST)
    assert times.step.step_s == pytest.approx(2.1)
    assert times.confidence == "high"
    assert times.epoch_s == pytest.approx(21.0)
    assert times.validation_s == 15.0
    assert times.total_s == pytest.approx(15 + 210 + 6 * 15)
    assert times.device_hours == pytest.approx(times.total_s / 3600)


def test_the_end_and_the_start_of_a_run_are_part_of_its_time() -> None:
    """Test cases, what a task learns from the training cases, how the best is measured, and the first tries."""
    slow_end = replace(COSTS, full_case_s=10.0, settle_s=100.0)
    times = predict_times(PLAN, Layout(1, 1), [slow_end], FAST, at_end=AtEnd(test=3, learnt_from=40))
    assert (times.start_s, times.end_s) == (115.0, 40 * 3 + (5 + 3) * 10)
    assert times.total_s == pytest.approx(115 + 210 + 5 * 15 + 200)
    shared = predict_times(on(4), Layout(1, 4), [slow_end], FAST, at_end=AtEnd(test=3, learnt_from=40))
    assert shared.end_s == 10 * 3 + 2 * 10, "ranks share them"


def test_other_cpus_than_those_that_were_measured_are_not_fully_trusted() -> None:
    def confidence(**changed: object) -> str:
        costs = replace(COSTS, **changed)  # type: ignore[arg-type]
        return predict_times(PLAN, Layout(1, 1), [costs], FAST, cpus_each=64).confidence

    assert confidence() == "medium"
    assert confidence(on_gpu=True, device_training_bytes=1200, device_validating_bytes=900) == "high"
    assert confidence(basis="table") == "low"


def test_ranks_share_the_batch_and_the_validation() -> None:
    times = predict_times(on(4), Layout(1, 4), [COSTS], FAST)
    assert times.step.compute_s == pytest.approx(0.5)
    assert times.step.communication_s == pytest.approx(0.0, abs=1e-6)
    assert times.validation_s == 6.0
    assert times.confidence == "medium"


def test_the_nearest_measurement_counts() -> None:
    two = replace(COSTS, world_size=2, micro_batch=2, compute_s=1.2, communication_s=0.3, data_s=0.0)
    times = predict_times(on(2), Layout(1, 2), [COSTS, two], FAST)
    assert (times.step.compute_s, times.step.communication_s, times.confidence) == (1.2, 0.3, "high")
    other_nodes = predict_times(on(2), Layout(2, 1), [COSTS, two], FAST)
    assert other_nodes.confidence == "medium"
    assert other_nodes.step.compute_s == pytest.approx(1.2), "with what ranks beside each other lose"


def test_ranks_that_share_cpus_are_slower() -> None:
    two_cpus = replace(COSTS, cpus=2)
    times = predict_times(on(4), Layout(1, 4), [two_cpus], FAST)
    assert times.step.compute_s == pytest.approx(1.0)
    elsewhere = predict_times(on(4), Layout(1, 4), [two_cpus], FAST, cpus_each=4)
    assert elsewhere.step.compute_s == pytest.approx(0.5), "nodes of a site have CPUs of their own"


def test_far_worlds_and_unknown_networks_are_little_trusted() -> None:
    assert predict_times(on(4), Layout(1, 4), [COSTS], FAST).confidence == "medium"
    wide = replace(PLAN, world_size=16, global_batch=16, micro_batch=1)
    assert predict_times(wide, Layout(1, 16), [COSTS], FAST).confidence == "low"
    unknown = choose_links(Interconnect(), measured_gb_s=None)
    assert predict_times(on(2), Layout(2, 1), [COSTS], unknown).confidence == "low"
    assert predict_times(PLAN, Layout(1, 1), [replace(COSTS, basis="table")], FAST).confidence == "low"


def test_a_gpu_waits_only_for_what_loading_takes_longer_than_computing() -> None:
    gpu = replace(COSTS, on_gpu=True, device_training_bytes=1200, device_validating_bytes=900, load_s=2.5)
    assert predict_times(on(2), Layout(1, 2), [gpu], FAST).step.data_s == pytest.approx(0.25)
    quick = replace(gpu, load_s=1.0)
    assert predict_times(on(2), Layout(1, 2), [quick], FAST).step.data_s == 0.0


def test_memory_grows_with_the_patches_and_not_below_what_validating_takes() -> None:
    whole = predict_memory(PLAN, Layout(1, 1), [COSTS])
    assert (whole.activations, whole.device, whole.node) == (800, 1200, 2200)
    half = predict_memory(on(2), Layout(1, 2), [COSTS], cached=Cached(of_node=50))
    assert (half.activations, half.node) == (500, 2 * (1000 + 900) + 50 + LAUNCHER_BYTES)
    seen = predict_memory(on(2), Layout(1, 2), [replace(COSTS, launcher_bytes=7)], cached=Cached(of_node=50))
    assert seen.node == half.node - LAUNCHER_BYTES + 7, "a launcher that was looked at counts as it was"
    gpu = replace(COSTS, on_gpu=True, device_training_bytes=1200, device_validating_bytes=900)
    of_gpu = predict_memory(PLAN, Layout(1, 1), [gpu])
    assert (of_gpu.activations, of_gpu.device, of_gpu.node) == (800, 1200, 2200)


def test_cases_on_the_device_are_counted_and_do_not_grow_with_the_patches() -> None:
    cache = Cached.of(Cache(where="device"), 3000)
    assert predict_memory(PLAN, Layout(1, 1), [COSTS], cached=cache).device == 1200 + 3000
    assert predict_memory(on(2), Layout(1, 2), [COSTS], cached=cache).device == 900 + 3000
    by_rank = Cached.of(Cache(where="device", share="rank"), 3000)
    assert predict_memory(on(2), Layout(1, 2), [COSTS], cached=by_rank).cached == 1500
    of_node = predict_memory(PLAN, Layout(1, 1), [COSTS], cached=Cached.of(Cache(where="host"), 3000))
    assert (of_node.device, of_node.shared) == (1200, 3000)
    seen = replace(COSTS, training_bytes=1000 + 400 + 800 + 600, validating_bytes=1000 + 400 + 600, cached_bytes=600)
    assert predict_memory(PLAN, Layout(1, 1), [seen], cached=cache).device == 1200 + 3000, "not what a probe held of it"
    full = predict_memory(PLAN, Layout(1, 1), [COSTS], cached=cache)
    with pytest.raises(ConfigError) as refused:
        refuse_unfit(PLAN, Layout(1, 1), full, Given(3500, None, None, 4))
    assert refused.value.fix == "use data.cache.where=host, or lower data.cache.rate"


def test_a_process_beside_a_gpu_holds_what_training_or_validating_takes() -> None:
    gpu = replace(COSTS, on_gpu=True, device_training_bytes=1200, device_validating_bytes=900, validating_bytes=9000)
    assert predict_memory(PLAN, Layout(1, 1), [gpu]).process == 9000


def test_what_does_not_fit_is_refused_all_at_once_with_the_change_that_would() -> None:
    memory = predict_memory(PLAN, Layout(1, 8), [COSTS], cached=Cached(of_node=3 * GB))
    given = Given(device_bytes=900, node_bytes=GB, shared_bytes=GB, cpus_per_device=4)
    with pytest.raises(ConfigError) as refused:
        refuse_unfit(PLAN, Layout(1, 8), memory, given)
    text = refused.value.as_text()
    for said in (
        "4 patches of 16 × 16 × 16 at once",
        "train.micro_batch=2, which gives the same result",
        "data.cache.where host needs 3.0 GB",
    ):
        assert said in text
    refuse_unfit(PLAN, Layout(1, 1), predict_memory(PLAN, Layout(1, 1), [COSTS]), replace(given, device_bytes=1200))
    before = Problem("the batch does not divide", "take another")
    with pytest.raises(ConfigError) as both:
        refuse_unfit(PLAN, Layout(1, 8), memory, replace(given, devices_per_node=4), others=[before])
    assert both.value.message.startswith("the batch does not divide\n--devices 8: found 4 on each node")
    assert both.value.fix.startswith("take another; ask for --nodes 2 --devices 4; ")


@given(
    batch=some.integers(1, 200),
    devices=some.sampled_from([1, 2, 3, 8]),
    held=some.integers(0, 10**6),
    workspace=some.integers(0, 10**4),
    room=some.integers(1, 3 * 10**6),
    on_gpu=some.booleans(),
)
def test_every_change_that_is_offered_is_accepted(
    batch: int, devices: int, held: int, workspace: int, room: int, on_gpu: bool
) -> None:
    held += COSTS.model_bytes + workspace
    of_gpu = {"device_training_bytes": held, "device_validating_bytes": COSTS.model_bytes + workspace}
    costs = replace(
        COSTS,
        on_gpu=on_gpu,
        micro_batch=batch,
        workspace_bytes=workspace,
        training_bytes=1000 + held,
        launcher_bytes=0,
        **(of_gpu if on_gpu else {}),
    )
    given = Given(room, None, None, 4) if on_gpu else Given(None, room, None, 4)

    def refused(plan: Plan) -> str:
        try:
            refuse_unfit(plan, Layout(1, devices), predict_memory(plan, Layout(1, devices), [costs]), given)
        except ConfigError as error:
            return error.fix or ""
        return ""

    plan = replace(PLAN, micro_batch=batch)
    if offered := re.search(r"train.micro_batch=(\d+)", refused(plan)):
        fewer = int(offered[1])
        assert refused(replace(plan, micro_batch=fewer, accumulate=batch // fewer)) == ""


def test_checkpoints_that_do_not_fit_the_disk_are_refused() -> None:
    memory = predict_memory(PLAN, Layout(1, 1), [COSTS])
    given = Given(None, None, None, 4, disk_bytes=GB)
    refuse_unfit(PLAN, Layout(1, 1), memory, given, run_bytes=GB)
    with pytest.raises(
        ConfigError, match=r"checkpoints need 2.0 GB, expected at most the 1.0 GB that are free"
    ) as full:
        refuse_unfit(PLAN, Layout(1, 1), memory, given, run_bytes=2 * GB)
    assert "checkpoint.keep" in (full.value.fix or "")


def test_nodes_that_are_offered_have_the_ranks_that_were_asked_for() -> None:
    given = Given(None, None, None, 4, devices_per_node=4)
    with pytest.raises(ConfigError) as refused:
        refuse_unfit(PLAN, Layout(1, 10), predict_memory(PLAN, Layout(1, 10), [COSTS]), given)
    assert refused.value.fix == "ask for --nodes 5 --devices 2"


def test_a_window_that_does_not_fit_is_named_rather_than_the_batch() -> None:
    wide = replace(COSTS, validating_bytes=1000 + 400 + 5000)
    memory = predict_memory(PLAN, Layout(1, 1), [wide])
    given = Given(device_bytes=2000, node_bytes=None, shared_bytes=None, cpus_per_device=4)
    with pytest.raises(ConfigError, match="for validating a case") as refused:
        refuse_unfit(PLAN, Layout(1, 1), memory, given)
    assert "smaller validate.window" in refused.value.fix


def test_hosts_of_gpus_need_no_less_with_a_smaller_batch() -> None:
    gpu = replace(COSTS, on_gpu=True, training_bytes=4 * GB, device_training_bytes=1200, device_validating_bytes=900)
    memory = predict_memory(PLAN, Layout(1, 2), [gpu])
    given = Given(device_bytes=2000, node_bytes=2 * GB, shared_bytes=None, cpus_per_device=4)
    with pytest.raises(ConfigError, match=r"a node needs 8.2 GB for 2 ranks, expected at most the 2.0 GB") as refused:
        refuse_unfit(PLAN, Layout(1, 2), memory, given)
    assert refused.value.fix == "ask for fewer --devices on each node, or set site.memory.per_node=9G"


def test_devices_without_a_case_to_validate_are_refused() -> None:
    assert idle_problem(PLAN, Layout(1, 4)) is None
    assert idle_problem(replace(PLAN, num_val=0), Layout(1, 8)) is None
    problem = idle_problem(PLAN, Layout(2, 4))
    assert problem is not None
    assert "found 5 validation cases for 8 devices" in problem.what
    assert "at most 5 devices" in problem.fix


def test_a_ring_sends_all_but_its_own_part_twice() -> None:
    link = Link(gb_s=1.0, latency_us=0.0, basis="site")
    assert link.all_reduce_s(1e9, 2) == pytest.approx(1.0)
    assert link.all_reduce_s(1e9, 4) == pytest.approx(1.5)
    assert link.all_reduce_s(1e9, 1) == 0.0
    slow_start = Link(gb_s=1.0, latency_us=1e6, basis="site")
    assert slow_start.all_reduce_s(0, 3) == pytest.approx(4.0)
    inside_first = Links(link, Link(0.1, 0.0, "site"))
    assert inside_first.all_reduce_s(1e9, 2, 4) == pytest.approx(1.5 + 1e9 / 0.1e9), "devices share their node's link"


def test_parts_are_sent_while_the_rest_is_computed() -> None:
    assert buckets_of(60, 25) == [25, 25, 10]
    assert exposed_s([1.0, 2.0, 3.0], [0.5, 0.5, 0.5], 3.0) == pytest.approx(0.5), "only the last is waited for"
    assert exposed_s([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 3.0) == pytest.approx(4.0), "a slow network is always behind"
    assert exposed_s([3.0], [0.0], 3.0) == 0.0


def test_many_ranks_wait_for_the_slowest() -> None:
    even = Work(compute_s=1.0, data_s=0.0, gradient_bytes=1000)
    uneven = replace(even, spread=0.05)
    waits = [simulate_step(uneven, FAST, nodes=1, devices=n).communication_s for n in (1, 2, 8, 512)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(0.15, abs=0.05), "three deviations of a normal distribution"
    assert simulate_step(even, FAST, nodes=1, devices=512).communication_s == pytest.approx(0.0, abs=1e-6)


def test_a_simulated_world_has_the_devices_that_were_asked_for() -> None:
    points = simulate_curve(COSTS, FAST, [1, 3, 4, 6, 10], per_node=4)
    assert [str(point.layout) for point in points] == ["1x1", "1x3", "1x4", "2x3", "5x2"]
