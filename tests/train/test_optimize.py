"""Schedules against torch's own over whole runs; optimizers saved and restored to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch.optim import lr_scheduler

from voxscale.config.load import make_config
from voxscale.config.schema import Config
from voxscale.config.training import check_schedule
from voxscale.errors import ConfigError
from voxscale.train.optimize import (
    OPTIMIZERS,
    build_optimizer,
    can_skip,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    skip_when,
)

Scheduler = Callable[[torch.optim.Optimizer], Any]
BASE = 3e-3


def make(**sections: Any) -> Config:
    return make_config({"data": {"source": "d"}, **sections}, name="c.yaml", base=Path("/base"))


def our_rates(schedule: dict[str, Any], num_steps: int, steps_per_epoch: int = 1) -> list[float]:
    config = make(optimizer={"lr": BASE}, schedule=schedule, train={"epochs": 1000})
    return [learning_rate(config, step, num_steps, steps_per_epoch) for step in range(1, num_steps + 1)]


def torch_rates(scheduler: Scheduler, num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)
    moving = scheduler(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        moving.step()
    return rates


@settings(max_examples=25, deadline=None)
@given(num_steps=st.integers(2, 120), final=st.floats(0, 1), power=st.floats(0.1, 3))
def test_falling_schedules_are_those_of_torch(num_steps: int, final: float, power: float) -> None:
    cosine = torch_rates(lambda o: lr_scheduler.CosineAnnealingLR(o, num_steps, eta_min=final * BASE), num_steps)
    assert our_rates({"name": "cosine", "final": final}, num_steps) == pytest.approx(cosine, rel=1e-6, abs=1e-12)
    poly = torch_rates(lambda o: lr_scheduler.PolynomialLR(o, num_steps, power=power), num_steps)
    assert our_rates({"name": "poly", "power": power}, num_steps) == pytest.approx(poly, rel=1e-6, abs=1e-12)
    assert our_rates({"name": "none"}, num_steps) == [BASE] * num_steps


@settings(max_examples=25, deadline=None)
@given(
    num_steps=st.integers(2, 120),
    warm=st.floats(0.02, 0.98),
    start=st.floats(0.001, 1),
    final=st.floats(1e-6, 1),
)
def test_one_cycle_is_that_of_torch(num_steps: int, warm: float, start: float, final: float) -> None:
    if abs(warm * num_steps - 1) < 1e-6:  # torch divides by zero
        warm += 1e-3
    expected = torch_rates(
        lambda o: lr_scheduler.OneCycleLR(
            o, BASE, num_steps, pct_start=warm, div_factor=1 / start, final_div_factor=1 / final
        ),
        num_steps,
    )
    found = our_rates({"name": "one_cycle", "warm": warm, "start": start, "final": final}, num_steps)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(num_steps=st.integers(1, 200), first=st.integers(1, 12), factor=st.integers(1, 3), each=st.integers(1, 5))
def test_restarts_are_those_of_torch(num_steps: int, first: int, factor: int, each: int) -> None:
    expected = torch_rates(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, first * each, factor), num_steps)
    found = our_rates({"name": "restarts", "first": first, "factor": factor}, num_steps, each)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    schedule=st.sampled_from(
        [{"name": "none"}, {"name": "cosine"}, {"name": "poly"}, {"name": "restarts", "first": 3}]
    ),
    warm_epochs=st.integers(1, 4),
    each=st.integers(1, 6),
)
def test_warm_up_climbs_in_a_line_and_the_schedule_follows_whole(
    schedule: dict[str, Any], warm_epochs: int, each: int
) -> None:
    warm_steps, rest = warm_epochs * each, 7 * each
    rates = our_rates({**schedule, "warmup": warm_epochs}, warm_steps + rest, each)
    assert rates[:warm_steps] == pytest.approx([BASE * n / warm_steps for n in range(1, warm_steps + 1)])
    assert rates[warm_steps:] == pytest.approx(our_rates(schedule, rest, each))


def test_warm_up_may_take_part_of_an_epoch() -> None:
    assert our_rates({"name": "none", "warmup": 0.5}, 20, 10)[:6] == pytest.approx(
        [BASE * share for share in (0.2, 0.4, 0.6, 0.8, 1, 1)]
    )


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(["none", "cosine", "poly", "one_cycle", "restarts"]),
    num_steps=st.integers(1, 50),
    warmup=st.floats(0, 60),
)
def test_a_rate_is_never_above_the_stated_one_nor_below_zero(name: str, num_steps: int, warmup: float) -> None:
    schedule = {"name": name} if name == "one_cycle" else {"name": name, "warmup": warmup}
    for rate in our_rates(schedule, num_steps, 2):
        assert math.isfinite(rate)
        assert 0 <= rate <= BASE * (1 + 1e-9)


def test_a_warm_up_as_long_as_the_run_is_found() -> None:
    schedule = make(schedule={"name": "poly", "warmup": 5}).schedule
    assert check_schedule(schedule, 6) == []
    assert check_schedule(schedule, 5) == [
        "schedule.warmup 5: expected fewer epochs than train.epochs, 5, so that training follows"
    ]
    assert check_schedule(make(schedule={"name": "one_cycle"}).schedule, 1) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"schedule": {"name": "cosin"}}, "did you mean 'cosine'?"),
        ({"schedule": {"name": "one_cycle", "warmup": 1}}, "schedule.warmup: unknown key"),
        ({"schedule": {"name": "poly", "powr": 1}}, "schedule.powr: unknown key; did you mean 'power'?"),
        ({"optimizer": {"name": "sgd", "momentum": 0}}, "expected a momentum above 0, or nesterov false"),
        ({"optimizer": {"name": "novogrd"}}, "did you mean 'novograd'?"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1: found 1.0, expected less than 1"),
    ],
)
def test_what_cannot_be_is_refused(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**sections)
    assert expected in caught.value.message


VARIANTS = [
    {"name": "adam"},
    {"name": "adam", "amsgrad": True, "weight_decay": 0.1},
    {"name": "adamw"},
    {"name": "adamw", "amsgrad": True},
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0, "nesterov": False},
    {"name": "novograd"},
    {"name": "novograd", "amsgrad": True, "averaging": True, "weight_decay": 0.1},
]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=["plain", "channels last"])
@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_restored_optimizer_goes_on_to_the_last_bit(options: dict[str, Any], layout: torch.memory_format) -> None:
    config = make(optimizer={"lr": 0.01, **options})

    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv3d(2, 2, 3), torch.nn.GroupNorm(1, 2), torch.nn.Conv3d(2, 1, 1))
        model = model.to(memory_format=layout)  # type: ignore[call-overload]
        return model, build_optimizer(config, model.parameters())

    def go(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            image = torch.randn(1, 2, 4, 4, 4, generator=torch.Generator().manual_seed(step))
            model(image).square().mean().backward()
            optimizer.step()

    straight, optimizer = start()
    go(straight, optimizer, range(6))
    paused, before = start()
    go(paused, before, range(3))
    saved = load(save({name: tensor.contiguous() for name, tensor in optimizer_tensors(before).items()}))
    resumed, after = start()
    resumed.load_state_dict(paused.state_dict())
    restore_optimizer(after, saved)
    go(resumed, after, range(3, 6))
    for expected, found in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, found)
    tensors = optimizer_tensors(optimizer)
    assert tensors.keys() == optimizer_tensors(after).keys()
    assert all(torch.equal(tensors[key], value) for key, value in optimizer_tensors(after).items())


def test_every_optimizer_is_tried() -> None:
    assert {options["name"] for options in VARIANTS} == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_device_leaves_steps_out_by_itself(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name]([parameter], lr=0.1)
    assert can_skip(optimizer)
    parameter.grad = torch.full((3,), float("nan"))
    skip_when(optimizer, torch.tensor(True))
    optimizer.step()
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    parameter.grad = torch.ones(3)
    skip_when(optimizer, torch.tensor(False))
    optimizer.step()
    assert max(parameter.tolist()) < 1.0
