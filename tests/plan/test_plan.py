"""The plan's arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from voxscale.config.load import make_config
from voxscale.config.schema import PerDevice
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.plan.plan import make_plan, split_batch
from voxscale.plan.resources import Machine, choose_devices


@given(some.integers(1, 64), some.integers(1, 16), some.integers(1, 64))
def test_batch_splits_without_rest(per_rank: int, world_size: int, fits: int) -> None:
    micro, accumulate = split_batch(per_rank * world_size, world_size, fits)
    assert micro * accumulate == per_rank
    assert micro <= fits


def test_batch_that_does_not_divide_names_what_would() -> None:
    with pytest.raises(ConfigError, match="train.batch 6 does not divide over 4 ranks") as caught:
        split_batch(6, 4)
    assert caught.value.fix == "use 1, 2, 3 or 6 devices, or train.batch=8"


def test_validates_every_so_many_epochs_and_always_at_the_end() -> None:
    content = {"data": {"source": "d"}, "train": {"epochs": 5, "batch": 2}, "validate": {"every": 2}}
    plan = make_plan(make_config(content, name="c", base=Path()), num_train=7, num_val=1, world_size=2)
    assert (plan.steps_per_epoch, plan.num_steps) == (4, 20)
    assert [step for step in range(1, 21) if plan.validates(step)] == [8, 16, 20]


def test_a_run_shorter_than_the_interval_still_validates() -> None:
    content = {"data": {"source": "d"}, "train": {"epochs": 1}, "validate": {"every": 20}}
    plan = make_plan(make_config(content, name="c", base=Path()), num_train=3, num_val=1, world_size=1)
    assert [step for step in (1, 2) if plan.validates(step)] == [2]


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ({}, ["global"]),
        ({"share": "rank"}, ["data.cache.share"]),
        ({"rate": 0.5, "replace": 0.5}, ["data.cache.replace"]),
        ({"share": "rank", "rate": 0.5, "replace": 0.5}, ["data.cache.share", "data.cache.replace"]),
    ],
)
def test_the_plan_names_all_that_samples_depend_on(cache: dict[str, object], words: list[str]) -> None:
    content = {"data": {"source": "d", "cache": {"where": "host", **cache}}, "train": {"epochs": 9, "batch": 2}}
    plan = make_plan(make_config(content, name="c", base=Path()), num_train=8, num_val=1, world_size=2)
    known = ("global", "data.cache.share", "data.cache.replace")
    assert [word for word in known if word in plan.stream] == words


@pytest.mark.parametrize(
    ("machine", "batch", "devices", "why"),
    [
        (Machine(gpus=0, cpus=8), 6, 6, "6 of 8 CPUs, the most that train.batch 6 divides over"),
        (Machine(gpus=4, cpus=64), 6, 3, "3 of 4 GPUs, the most that train.batch 6 divides over"),
        (Machine(gpus=4, cpus=64), 8, 4, "4 GPUs"),
        (Machine(gpus=0, cpus=1), 5, 1, "1 CPU"),
        (Machine(gpus=3, cpus=8), PerDevice(per_device=2), 3, "3 GPUs"),
    ],
)
def test_auto_takes_the_largest_count_that_divides(machine: Machine, batch: int, devices: int, why: str) -> None:
    assert choose_devices("auto", machine, batch) == (devices, why)


def test_more_devices_than_gpus_are_refused() -> None:
    with pytest.raises(InfrastructureError, match="--devices 5: this machine has 2 GPUs to use") as caught:
        choose_devices("5", Machine(gpus=2, cpus=8), 10)
    assert caught.value.exit_code == 4


def test_more_ranks_than_cpus_are_the_users_choice() -> None:
    assert choose_devices("4", Machine(gpus=0, cpus=2), 4) == (4, "4 CPUs")


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5", "", "9" * 5000])
def test_devices_must_be_a_number(asked: str) -> None:
    with pytest.raises(ConfigError, match="--devices"):
        choose_devices(asked, Machine(gpus=0, cpus=2), 2)
