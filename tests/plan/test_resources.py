"""What `auto` and `per_device` become: devices, batch, learning rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from conftest import Cli
from voxscale.config.load import identity, make_config
from voxscale.config.schema import Config, PerDevice
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.plan.resources import Machine, choose_devices, resolve
from voxscale.train.optimize import OPTIMIZERS

CPUS = Machine(gpus=0, cpus=8)


def make(*overrides: str) -> Config:
    return make_config({"data": {"source": "d"}}, overrides, name="c", base=Path("/base"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizers_rate_may_be_per_device(optimizer: str) -> None:
    config = make(f"optimizer.name={optimizer}", "optimizer.lr.per_device=1e-3", "train.batch.per_device=2")
    settled = resolve(config, CPUS, devices=4, nodes=2)
    assert (settled.optimizer.lr, settled.train.global_batch) == (8e-3, 16)
    assert settled.optimizer.model_dump()["lr"] == 8e-3


def test_a_rate_per_device_is_not_read_before_it_is_settled() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.lr is still per device"):
        _ = make("optimizer.lr.per_device=1e-3").optimizer.lr


@given(some.floats(1e-12, 1e6), some.integers(1, 64), some.integers(1, 64))
def test_a_rate_is_settled_once(rate: float, devices: int, nodes: int) -> None:
    once = resolve(make(f"optimizer.lr.per_device={rate!r}"), CPUS, devices=devices, nodes=nodes)
    assert once.optimizer.lr == rate * (devices * nodes)
    assert resolve(once, CPUS, devices=devices, nodes=nodes) == once


def test_a_rate_over_all_devices_stays() -> None:
    assert resolve(make("optimizer.lr=1e-3"), CPUS, devices=4, nodes=2).optimizer.lr == 1e-3


def test_the_last_override_of_the_rate_counts() -> None:
    each, whole = "optimizer.lr.per_device=2e-3", "optimizer.lr=1e-3"
    assert resolve(make(whole, each), CPUS, devices=2).optimizer.lr == 4e-3
    assert make(each, whole).optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr.per_device=0", "optimizer.lr.per_device: found 0, expected greater than 0"),
        ("optimizer.lr.per_device=.inf", "optimizer.lr.per_device: found inf"),
        ("optimizer.lr.per_devise=1", "optimizer.lr.per_devise: unknown key; did you mean 'per_device'?"),
        ("optimizer.lr=fast", "optimizer.lr: found 'fast', expected a valid number"),
        ("optimizer.rate=1", "optimizer.rate: unknown key"),
        ("train.devices=0", "train.devices: found 0, expected 'auto' or greater than or equal to 1"),
        ("train.devices=true", "train.devices: found True, expected 'auto' or a number"),
        ("train.devices=100000", "train.devices: found 100000"),
    ],
)
def test_wrong_rates_and_devices_are_named(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(override)
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("asked", "nodes", "devices", "why"),
    [
        ("auto", 1, 4, "4 CPUs"),
        ("auto", 2, 2, "2 nodes × 2 CPUs"),
        ("1", 1, 1, "1 CPU"),
        ("3", 2, 3, "2 nodes × 3 CPUs"),
    ],
)
def test_the_config_says_what_auto_means_unless_the_command_line_does(
    asked: str, nodes: int, devices: int, why: str
) -> None:
    for batch in (12, PerDevice(per_device=2)):
        assert choose_devices(asked, CPUS, batch, nodes=nodes, preferred=4) == (devices, why)


def test_more_devices_in_the_config_than_gpus_are_refused() -> None:
    with pytest.raises(InfrastructureError, match=r"train\.devices 4: this machine has 2 GPUs to use"):
        choose_devices("auto", Machine(gpus=2, cpus=8), 4, preferred=4)
    assert choose_devices("auto", Machine(gpus=2, cpus=8), 4, nodes=2, preferred=4)[0] == 2


@pytest.mark.parametrize(("ranks", "nodes", "instead"), [(3, 2, 4), (1, 2, 2), (5, 4, 8)])
def test_devices_in_the_config_divide_over_the_nodes(ranks: int, nodes: int, instead: int) -> None:
    with pytest.raises(ConfigError, match=f"train.devices {ranks} does not divide over {nodes} nodes") as caught:
        choose_devices("auto", CPUS, 8, nodes=nodes, preferred=ranks)
    assert caught.value.fix.endswith(f"train.devices={instead}")


def test_devices_are_no_part_of_a_runs_identity() -> None:
    assert identity(make("train.devices=4")) == identity(make())
    assert identity(make("optimizer.lr.per_device=1e-4")) != identity(make("optimizer.lr=1e-4"))


def test_a_run_has_the_devices_and_the_settled_rate_of_its_config(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(optimizer__lr={"per_device": 1e-3}, train__batch={"per_device": 2}, train__devices=2)
    run = tmp_path / "run"
    made = cli_here("train", config, "--run", run, "--no-start")
    assert made.code == 0, made.err
    assert "--nproc-per-node 2 " in made.out
    held = yaml.safe_load((run / "config.yaml").read_text())
    assert (held["optimizer"]["lr"], held["train"]["batch"], held["train"]["devices"]) == (2e-3, 4, 2)

    again = cli_here("train", config, "train.devices=4", "--run", run, "--no-start")
    assert again.code == 0, "a preference may change"
    assert "--nproc-per-node 4 " in again.out
    held = yaml.safe_load((run / "config.yaml").read_text())
    assert (held["optimizer"]["lr"], held["train"]["batch"], held["train"]["devices"]) == (2e-3, 4, 4)

    other = cli_here("train", config, "optimizer.lr=2e-4", "--run", run, "--no-start")
    assert other.code == 2
    assert 'optimizer.lr is {"per_device": 0.001} there, 0.0002 here' in other.err


def test_the_command_line_wins(cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path) -> None:
    config = write_config(optimizer__lr={"per_device": 1e-3}, train__devices=2, train__epochs=1)
    done = cli_here("train", config, "--devices", "1", "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    held = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (done.json["state"], held["optimizer"]["lr"]) == ("done", 1e-3)


@pytest.mark.ranks
def test_a_settled_config_trains_the_same_numbers_again(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """What a search writes as best.yaml: the trial's own config and its number of ranks."""
    first = write_config(optimizer__lr={"per_device": 1e-3}, train__batch={"per_device": 2}, train__epochs=1)
    assert cli_here("train", first, "--devices", "2", "--run", tmp_path / "one").code == 0
    best = tmp_path / "best.yaml"
    content = yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())
    content["train"]["devices"] = 2
    best.write_text(yaml.safe_dump(content))
    assert cli_here("train", best, "--run", tmp_path / "two").code == 0
    assert (tmp_path / "two" / "cases.csv").read_text() == (tmp_path / "one" / "cases.csv").read_text()
