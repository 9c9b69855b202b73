"""GPUs that are not here: what the table says of them, and that it never passes for a measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from voxscale.config.site import Interconnect, Site
from voxscale.errors import ConfigError
from voxscale.launch.target import Room, choose_target
from voxscale.plan.curve import simulate_curve
from voxscale.plan.devices import (
    Network,
    as_precision,
    find_device,
    known_devices,
    named_device,
    precision_warnings,
    table_costs,
)
from voxscale.plan.links import choose_links
from voxscale.plan.plan import Plan
from voxscale.plan.predict import Layout, predict_memory, predict_times
from voxscale.plan.resources import Machine

NETWORK = Network(
    forward_operations=1e12,
    backward_operations=2e12,
    calls=100,
    kept_bytes=4 << 30,
    kept_half_bytes=2 << 30,
    largest_bytes=1 << 20,
    passing_bytes=2 << 30,
    passing_half_bytes=1 << 30,
    weights_bytes=100 << 20,
    gradient_bytes=100 << 20,
    optimizer_bytes=200 << 20,
)
PLAN = Plan(1, 4, 2, 2, 40, 5, 10, 100, 20, (96, 96, 96), "global", 1, (0, 1), "", "", "")


def test_every_row_is_whole_and_names_its_source() -> None:
    assert {name.split("-")[0] for name in known_devices()} == {"v100", "a100", "h100", "l40s"}
    for device in known_devices().values():
        assert "data sheet" in device.source
        assert device.tflops["fp32"] < device.tflops["fp16"]
        assert device.memory_gb * 1e9 == device.memory_bytes
        assert f"{device.memory_gb:g} GB" in device.title


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("a100", "a100-40gb"),
        ("A100", "a100-40gb"),
        ("a100-80gb", "a100-80gb"),
        ("nvidia_a100_80gb", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("v100", "v100-16gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("a100_1g.5gb", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("h100-94gb", None),
        ("l40", None),
        ("", None),
        ("k80", None),
    ],
)
def test_a_name_means_one_row_or_none(said: str, meant: str | None) -> None:
    found = find_device(said)
    assert (found.name if found else None) == meant


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="--device: found 'k80', expected one of v100-16gb, .*l40s-48gb"):
        named_device("k80")


def test_the_slowest_of_arithmetic_memory_and_calls_counts() -> None:
    a100 = named_device("a100")
    costs, assumed = table_costs(a100, NETWORK, PLAN, precision="bf16", windows=8, cpus=4)
    assert costs.compute_s == pytest.approx(4 * 3e12 / (0.1 * 312e12))
    assert (costs.basis, costs.device_bytes) == ("table", 40_000_000_000)
    assert "10% of it reached" in assumed[0]
    moved = replace(NETWORK, kept_half_bytes=100 << 30)
    assert table_costs(a100, moved, PLAN, precision="bf16", windows=8, cpus=4)[0].compute_s == pytest.approx(
        4 * 6 * (100 << 30) / (0.6 * 1555e9)
    )
    tiny = replace(NETWORK, forward_operations=1, backward_operations=2, kept_half_bytes=1)
    assert table_costs(a100, tiny, PLAN, precision="bf16", windows=8, cpus=4)[0].step_s == pytest.approx(2e-3)


def test_calls_take_as_long_however_many_devices_share_the_patches() -> None:
    a100 = named_device("a100")
    tiny = replace(NETWORK, forward_operations=1, backward_operations=2, kept_half_bytes=1, gradient_bytes=1)
    whole = replace(PLAN, micro_batch=4, accumulate=1)
    costs, _ = table_costs(a100, tiny, whole, precision="bf16", windows=8, cpus=4)
    links = choose_links(Interconnect(), measured_gb_s=None, device=a100)
    shared = replace(whole, world_size=4, micro_batch=1)
    assert predict_times(whole, Layout(1, 1), [costs], links).step.compute_s == pytest.approx(1e-3)
    assert predict_times(shared, Layout(1, 4), [costs], links).step.compute_s == pytest.approx(1e-3)
    (alone,) = simulate_curve(costs, links, [1], per_node=1)
    assert alone.step.compute_s == pytest.approx(1e-3)


def test_memory_is_that_of_the_precision_and_with_auto_that_of_float32() -> None:
    v100 = named_device("v100-32gb")
    assert [as_precision(asked, v100) for asked in ("auto", "fp32", "bf16", "fp16")] == ["fp16", "fp32", "fp16", "fp16"]
    assert (
        precision_warnings("auto", v100) == precision_warnings("fp32", v100) == precision_warnings("fp16", v100) == ()
    )
    assert "so fp16 is planned" in precision_warnings("bf16", v100)[0]
    half, auto = (table_costs(v100, NETWORK, PLAN, precision=p, windows=1, cpus=4)[0] for p in ("fp16", "auto"))
    assert half.compute_s == auto.compute_s
    assert (auto.device_training_bytes or 0) - (half.device_training_bytes or 0) == 2 * (2 << 30)
    memory = predict_memory(PLAN, Layout(1, 1), [half])
    assert memory.workspace == 1 << 30
    assert memory.device == (400 << 20) + 2 * ((2 << 30) + (2 << 20)) + (1 << 30)
    fewer = predict_memory(replace(PLAN, micro_batch=1), Layout(1, 1), [half])
    assert fewer.device == (400 << 20) + ((2 << 30) + (2 << 20)) + (1 << 30), (
        "the driver takes no less for fewer patches"
    )


def test_a_window_is_held_as_it_passes_through_the_network() -> None:
    a100 = named_device("a100")
    found = {
        (precision, window): predict_memory(
            PLAN,
            Layout(1, 1),
            [table_costs(a100, NETWORK, PLAN, precision=precision, windows=8, cpus=4, window=window)[0]],
        )
        for precision, window in (("bf16", 1.0), ("bf16", 30.0), ("fp32", 30.0))
    }
    assert found["bf16", 1.0].window == 1 << 30
    assert found["bf16", 30.0].window == 30 << 30
    assert found["fp32", 30.0].window == 60 << 30
    assert found["fp32", 30.0].device == (400 << 20) + (60 << 30) + (1 << 30)


def test_what_rests_on_the_table_is_never_trusted() -> None:
    h100 = named_device("h100")
    costs, _ = table_costs(h100, NETWORK, PLAN, precision="auto", windows=8, cpus=4)
    links = choose_links(Interconnect(bandwidth_gb_s=25), measured_gb_s=None, device=h100)
    assert (links.within.gb_s, links.within.basis) == (pytest.approx(315), "table")
    for layout in (Layout(1, 1), Layout(1, 2), Layout(2, 2)):
        plan = replace(PLAN, world_size=layout.world_size, micro_batch=1, accumulate=4 // layout.world_size)
        assert predict_times(plan, layout, [costs], links).confidence == "low"


def test_a_plan_is_for_the_gpus_that_are_named_else_those_of_the_site_else_this_machine() -> None:
    here = Machine(gpus=0, cpus=8)
    assert choose_target(None, Site(), here).is_here
    site = Site.model_validate({"gpus": {"ask": "gres", "type": "a100", "per_node": 4}, "cpus_per_device": 6})
    of_site = choose_target(None, site, here)
    assert of_site.device == named_device("a100")
    costs, _ = table_costs(named_device("a100"), NETWORK, PLAN, precision="auto", windows=1, cpus=4)
    assert of_site.given(Layout(1, 4), costs, Room(0, 0, 0)).is_elsewhere
    assert not choose_target(None, Site(), here).given(Layout(1, 4), costs, Room(0, 0, 0)).is_elsewhere
    assert of_site.node(4) == Machine(gpus=4, cpus=24)
    assert of_site.is_such("NVIDIA A100-SXM4-40GB")
    assert not of_site.is_such("NVIDIA A100-SXM4-80GB")
    assert choose_target("h100", site, here).device == named_device("h100")
    assert of_site.warnings == ()
    unasked = choose_target(None, Site.model_validate({"gpus": {"type": "a100", "per_node": 4}}), here)
    assert unasked.is_here
    assert "gpus.ask: none" in unasked.warnings[0], "CPUs are not planned without a word"
    other = choose_target(None, Site.model_validate({"gpus": {"ask": "gres", "type": "rtx6000"}}), here)
    assert other.device is None
    assert other.is_such("NVIDIA RTX 6000 Ada Generation")
    assert not other.is_such("NVIDIA A100-SXM4-40GB")
