"""The `search` section: what it takes, what it refuses, and that runs without one do not know of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from voxscale.config.load import identity, make_config, parse_yaml, plain, read_config, render_config
from voxscale.config.schema import Config
from voxscale.config.search import Asha, Search
from voxscale.errors import ConfigError

RATE = {"optimizer.lr": {"loguniform": [1e-4, 1e-2]}}
NORMS = {"model.norm": {"grid": ["instance", "batch"]}}


def make(space: Any = RATE, **fields: Any) -> Config:
    content = {"data": {"source": "d"}, "search": {"space": space, **fields}}
    return make_config(content, name="c.yaml", base=Path("/base"))


def search(space: Any = RATE, **fields: Any) -> Search:
    found = make(space, **fields).search
    assert found is not None
    return found


def complaints(space: Any = RATE, **fields: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make(space, **fields)
    return caught.value.message.splitlines()


def test_the_design_s_example() -> None:
    text = """{metric: dice/mean, mode: max, trials: 24, sampler: random, scheduler: asha, per_trial: {devices: 1},
               space: {optimizer.lr: {loguniform: [1e-4, 1e-2]}}}"""
    found = search(**parse_yaml(text, "design"))
    assert (found.metric, found.mode, found.num_points, found.chosen_sampler) == ("dice/mean", "max", 24, "random")
    assert found.scheduler == Asha(reduction=3, grace=1)
    assert (found.per_trial.devices, found.per_trial.cpus) == (1, "auto")
    assert found.space["optimizer.lr"].loguniform == (1e-4, 1e-2)


def test_defaults() -> None:
    found = search()
    assert (found.metric, found.mode, found.trials, found.seeds, found.retries) == (None, "auto", None, 1, 2)
    assert (found.scheduler, found.max_concurrent) == ("none", "auto")


@pytest.mark.parametrize(
    ("space", "sampler", "points"),
    [
        (NORMS, "grid", 2),
        ({**NORMS, "optimizer.lr": {"grid": [1e-4, 1e-3, 1e-2]}}, "grid", 6),
        ({**NORMS, **RATE}, "random", 24),
        ({"model.norm": {"choice": ["instance", "batch"]}}, "random", 24),
    ],
)
def test_auto_is_grid_where_every_dimension_is_one(space: Any, sampler: str, points: int) -> None:
    assert (search(space).chosen_sampler, search(space).num_points) == (sampler, points)


def test_a_grid_takes_all_that_can_be_counted() -> None:
    space = {"model.norm": {"choice": ["instance", "batch"]}, "train.epochs": {"randint": [3, 8]}}
    assert search(space, sampler="grid").num_points == 10
    assert search(space, sampler="grid", trials=10).num_points == 10
    assert search(space, sampler="random", trials=3).num_points == 3


def test_a_grid_refuses_another_number_of_trials() -> None:
    assert complaints(NORMS, trials=3) == [
        "c.yaml: search: trials: found 3, expected null or 2, the number of points of the grid; "
        "sampler random takes some of them"
    ]


@pytest.mark.parametrize("kind", ["uniform", "loguniform"])
def test_a_grid_refuses_a_continuum(kind: str) -> None:
    (line,) = complaints({**NORMS, "optimizer.lr": {kind: [1, 2]}}, sampler="grid")
    assert f"sampler grid with optimizer.lr ({kind}), which has no end of values" in line


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [
        ({}, "found none; expected one of grid, choice, uniform, loguniform, randint"),
        ({"grid": [1], "choice": [2]}, "found grid and choice; expected one of grid,"),
        ({"grid": []}, "grid: found [], expected at least one value"),
        ({"choice": [1e-3, 2, 0.001]}, "choice: found 0.001 more than once; expected each value once"),
        ({"choice": [1, 1.0]}, "found 1 more than once"),
        ({"choice": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]}, "more than once"),
        ({"choice": [float("nan")]}, "choice.0: found nan, expected a finite number"),
        ({"choice": [[float("inf")]]}, "choice.0.0: found inf, expected a finite number"),
        ({"choice": "abc"}, "choice: found 'abc', expected a list in brackets, as [abc]"),
        ({"uniform": [2, 1]}, "uniform: found [2.0, 1.0]; expected [low, high] with low < high"),
        ({"uniform": [1, 1]}, "expected [low, high] with low < high"),
        ({"uniform": [float("-inf"), 1]}, "uniform.0: found -inf, expected a finite number"),
        ({"uniform": [-1.7e308, 1.7e308]}, "expected a range whose width is a finite number"),
        ({"uniform": [False, True]}, "found False, expected a number"),
        ({"loguniform": [0, 1]}, "loguniform: found [0.0, 1.0]; expected both above 0"),
        ({"loguniform": [1e-4]}, "loguniform"),
        ({"randint": [3, 3]}, "expected [low, high] with low < high"),
        ({"randint": [1, 2.5]}, "randint.1: found 2.5, expected a valid integer"),
        ({"randint": [0, 2**60]}, "randint.1"),
        ({"unifrom": [1, 2]}, "unifrom: unknown key; did you mean 'uniform'?"),
        (3, "found 3, expected a mapping of fields"),
    ],
)
def test_bad_dimensions(dimension: Any, expected: str) -> None:
    lines = complaints({"optimizer.lr": dimension})
    assert all(line.startswith("c.yaml: search.space.optimizer.lr") for line in lines)
    assert any(expected in line for line in lines)


def test_one_and_true_are_two_values() -> None:
    assert len(search({"optimizer.amsgrad": {"choice": [1, True, "1", None, [1], {"a": 1}]}}).space) == 1


@pytest.mark.parametrize("space", [{}, None, [1]])
def test_an_empty_space_is_refused(space: Any) -> None:
    (line,) = complaints(space)
    assert line.startswith("c.yaml: search.space: found ")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("search.mode", "a search does not vary itself"),
        ("data.split", "one split"),
        ("data.split.val", "one split"),
        ("data.source", "one split"),
        ("data", "as data.split is in it"),
        ("train", "as train.seed is in it"),
        ("train.seed", "expected search.seeds"),
        ("train.stop_after.steps", "expected search.scheduler"),
        ("train.devices", "expected search.per_trial.devices"),
        ("validate.metric", "expected search.metric"),
        ("log", "does not change a result"),
        ("track", "does not change a result"),
        ("loader.workers", "does not change a result"),
        ("checkpoint.keep", "does not change a result"),
        ("data.store", "does not change a result"),
        ("optimizer..lr", "expected the path of a field"),
        ("", "expected the path of a field"),
    ],
)
def test_fields_that_are_not_searched(path: str, reason: str) -> None:
    (line,) = complaints({path: {"grid": [1]}})
    assert line.startswith("c.yaml: search.space: ")
    assert reason in line


def test_a_field_within_another_is_refused() -> None:
    assert complaints({"optimizer.betas": {"grid": [[0.9, 0.99]]}, "optimizer.betas.1": {"grid": [0.9]}}) == [
        "c.yaml: search.space: optimizer.betas.1: found optimizer.betas too, which contains it; expected one of them"
    ]


def test_all_faults_come_at_once() -> None:
    lines = complaints(
        {"optimizer.lr": {"grid": []}, "model.norm": {"uniform": [2, 1]}},
        mode="maximum",
        trials=True,
        sampler="optuna",
        seed=-1,
        seeds=0,
        retries=-1,
        max_concurrent=0,
        metrc="dice/mean",
        per_trial={"devices": 1.5, "cpus": 0},
    )
    fields = ["mode", "trials", "sampler", "seed", "seeds", "retries", "max_concurrent", "per_trial.devices"]
    fields += ["per_trial.cpus", "space.optimizer.lr.grid", "space.model.norm.uniform", "metrc"]
    assert [line.split(": ")[1] for line in lines] == [f"search.{field}" for field in fields]


@pytest.mark.parametrize(("given", "expected"), [(1, 1), (4, 4), (2.0, 2), (0.5, 0.5), ("all", "all")])
def test_devices_of_a_trial(given: Any, expected: Any) -> None:
    devices = search(per_trial={"devices": given}).per_trial.devices
    assert devices == expected
    assert type(devices) is type(expected)


@pytest.mark.parametrize(
    "given", [0, -1, 1.5, True, "al", None, float("inf"), float("nan"), [1], 0.0, pytest.param(10**400, id="huge")]
)
def test_devices_that_no_trial_can_have(given: Any) -> None:
    (line,) = complaints(per_trial={"devices": given})
    assert "expected a whole number of devices, a share of one such as 0.5, or 'all'" in line


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("none", "none"),
        (None, "none"),
        ({"name": "none"}, "none"),
        ("asha", Asha()),
        ({"name": "asha", "grace": 2}, Asha(grace=2)),
        ({"reduction": 4}, Asha(reduction=4)),
    ],
)
def test_schedulers(given: Any, expected: Any) -> None:
    assert search(scheduler=given).scheduler == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ashaa", "search.scheduler: found 'ashaa', expected none, asha or e.g. {name: asha, reduction: 3, grace: 1}"),
        (3, "search.scheduler: found 3, expected none, asha"),
        ([], "search.scheduler: found [], expected none, asha"),
        ({"name": "hyperband"}, "search.scheduler.name: found 'hyperband', expected 'asha'"),
        ({"name": "asha", "reduction": 1}, "search.scheduler.reduction: found 1, expected greater than or equal to 2"),
        ({"name": "asha", "grace": 0}, "search.scheduler.grace: found 0"),
        ({"name": "asha", "grce": 1}, "search.scheduler.grce: unknown key; did you mean 'grace'?"),
    ],
)
def test_bad_schedulers(given: Any, expected: str) -> None:
    (line,) = complaints(scheduler=given)
    assert expected in line


def test_a_written_search_reads_back_the_same(tmp_path: Path) -> None:
    space = {
        **RATE,
        "model": {"choice": [{"name": "unet"}, {"name": "segresnet"}]},
        "optimizer.betas": {"grid": [[0.9, 0.99], [0.9, 0.999]]},
        "train.micro_batch": {"randint": [1, 5]},
        "data.spacing": {"choice": [None, [1, 1, 2.5]]},
    }
    config = make(space, scheduler={"name": "asha", "grace": 2}, per_trial={"devices": 0.5, "cpus": 2})
    path = tmp_path / "search.yaml"
    path.write_text(render_config(config))
    assert read_config(path) == config
    assert plain(config)["search"]["space"]["optimizer.lr"] == {"loguniform": [1e-4, 1e-2]}


def test_a_run_s_config_does_not_name_the_search() -> None:
    without = make_config({"data": {"source": "d"}}, name="c.yaml", base=Path("/base"))
    null = make_config({"data": {"source": "d"}, "search": None}, name="c.yaml", base=Path("/base"))
    assert "search" not in plain(without)
    assert "search" not in render_config(without)
    assert (plain(null), identity(null)) == (plain(without), identity(without))
    assert list(plain(make()))[-3:] == ["search", "log", "track"]


def test_trials_that_are_halved_are_validated_equally_often() -> None:
    space = {"train.epochs": {"grid": [1, 2]}, "validate.every": {"grid": [1, 2]}}
    (line,) = complaints(space=space, scheduler="asha")
    assert "train.epochs, validate.every" in line
    assert make(space).search is not None
