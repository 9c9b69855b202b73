"""Trials' configs: values by path, checked like a file, and every fault of a space before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from conftest import RECIPES
from voxscale.config.load import identity, make_config, parse_yaml, plain, read_config, render_config
from voxscale.config.schema import Config
from voxscale.errors import ConfigError
from voxscale.search.samplers import propose
from voxscale.search.space import check_space, with_params

DISTMIS_SPACE = {
    "optimizer.lr": {"grid": [1e-4, 5e-4, 1e-3, 5e-3]},
    "model.norm": {"grid": ["batch", "group"]},
    "optimizer.betas": {"grid": [[0.9, 0.99], [0.9, 0.999]]},
    "optimizer.amsgrad": {"grid": [True, False]},
}


def make(space: Any = None, *, base: dict[str, Any] | None = None, **fields: Any) -> Config:
    content: dict[str, Any] = {"data": {"source": "d"}, **(base or {})}
    if space is not None:
        content["search"] = {"space": space, **fields}
    return make_config(content, name="c.yaml", base=Path("/base"))


def complaints(space: Any, **fields: Any) -> list[str]:
    config = make(space, **fields)
    with pytest.raises(ConfigError) as caught:
        check_space(config)
    return caught.value.message.splitlines()


def test_values_are_set_by_path_and_the_rest_stays() -> None:
    base = make({"optimizer.lr": {"grid": [1e-3]}}, base={"optimizer": {"name": "adam", "weight_decay": 0.1}})
    trial = with_params(base, {"optimizer.lr": 0.02, "optimizer.betas.1": 0.99, "augment.0.p": 0.25})
    assert trial.search is None
    assert (trial.optimizer.name, trial.optimizer.lr, trial.optimizer.weight_decay) == ("adam", 0.02, 0.1)
    assert plain(trial)["optimizer"]["betas"] == [0.9, 0.99]
    assert plain(trial)["augment"][0]["p"] == 0.25
    expected = plain(make(base={"optimizer": {"name": "adam", "weight_decay": 0.1, "lr": 0.02, "betas": [0.9, 0.99]}}))
    expected["augment"][0]["p"] = 0.25
    assert plain(trial) == expected
    assert plain(base)["augment"][0]["p"] == 0.5


def test_no_params_give_the_run_of_the_base_config() -> None:
    assert identity(with_params(make({"optimizer.lr": {"grid": [1]}}), {})) == identity(make())


def test_a_mapping_replaces_a_whole_section() -> None:
    trial = with_params(make(), {"model": {"name": "segresnet", "dropout": 0.1}})
    assert trial.model == make(base={"model": {"name": "segresnet", "dropout": 0.1}}).model


def test_seeds_of_a_configuration_are_params_like_others() -> None:
    assert with_params(make(), {"train.seed": 7}).train.seed == 7


def test_a_path_may_go_where_the_config_has_nothing() -> None:
    assert plain(with_params(make(), {"data.slices.z": [2, -1]}))["data"]["slices"]["z"] == [2, -1]


def test_params_are_not_shared_with_the_config() -> None:
    betas = [0.9, 0.99]
    trial = with_params(make(), {"optimizer.betas": betas})
    betas[1] = 0.5
    assert plain(trial)["optimizer"]["betas"] == [0.9, 0.99]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("optimizer.betas.2", "optimizer.betas.2: found '2', expected an index into a list of 2, the first being 0"),
        ("optimizer.betas.second", "found 'second', expected an index into a list of 2"),
        ("optimizer.betas.-1", "found '-1', expected an index into a list of 2"),
        ("optimizer.lrr", "optimizer.lrr: unknown key; did you mean 'lr'?"),
        ("optimizer.momentum", "optimizer.momentum: unknown key"),
        ("optimzer.lr", "optimzer: unknown key; did you mean 'optimizer'?"),
        ("augment.7.p", "augment.7.p: found '7', expected an index into a list of 3"),
        ("model.norm.kind", "model.norm: found {'kind': 0.5}"),
    ],
)
def test_paths_that_lead_nowhere(path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_params(make(), {path: 0.5})
    assert expected in caught.value.message
    assert all(line.startswith("search.space: ") for line in caught.value.message.splitlines())


def test_a_config_without_a_search() -> None:
    with pytest.raises(ConfigError, match="search: missing"):
        check_space(make())


def test_trials_that_would_all_be_stopped_are_refused() -> None:
    """They would count as lost, be started again, and fail."""
    config = make({"optimizer.lr": {"grid": [1e-3]}}, base={"train": {"stop_after": {"steps": 3}}})
    with pytest.raises(ConfigError, match="train.stop_after: found in the config of a search"):
        check_space(config)


def test_all_faults_of_a_space_come_at_once() -> None:
    assert complaints(
        {
            "optimizer.lr": {"choice": [-1, 1e-3, 0]},
            "optimizer.lrr": {"loguniform": [1e-4, 1e-2]},
            "train.epochs": {"uniform": [1, 9]},
            "train.micro_batch": {"randint": [0, 4]},
            "optimizer.betas.1": {"uniform": [0.9, 1]},
            "model.norm": {"choice": ["groups", "layers"]},
        }
    ) == [
        "search.space: optimizer.lr=-1: found -1, expected greater than 0",
        "search.space: optimizer.lr=0: found 0, expected greater than 0",
        "search.space: optimizer.lrr: unknown key; did you mean 'lr'?",
        "search.space: train.epochs=4.055728090000841: found 4.055728090000841, expected a valid integer, got a number "
        "with a fractional part",
        "search.space: train.micro_batch=0: found 0, expected greater than or equal to 1",
        "search.space: optimizer.betas.1=1.0: found 1.0, expected less than 1",
        "search.space: model.norm=\"groups\": found 'groups', expected 'instance' or 'batch'",
        "search.space: model.norm=\"layers\": found 'layers', expected 'instance' or 'batch'",
    ]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_the_end_of_randint_is_not_tried(sampler: str) -> None:
    check_space(make({"patches.per_case": {"randint": [1, 4]}}, sampler=sampler))
    check_space(make({"loss.gamma": {"randint": [0, 11]}}, base={"loss": {"name": "dice_focal"}}, sampler=sampler))
    assert complaints({"loss.gamma": {"randint": [0, 12]}}, base={"loss": {"name": "dice_focal"}}, sampler=sampler) == [
        "search.space: loss.gamma=11: found 11, expected less than or equal to 10"
    ]


def test_a_name_alone_keeps_the_other_keys_and_says_so() -> None:
    lines = complaints({"model.name": {"choice": ["unet", "segresnet"]}})
    assert len(lines) == 2
    for key, line in zip(("residual_units", "norm"), lines, strict=True):
        assert line.startswith(f'search.space: model.name="segresnet": model.{key}: unknown key')
        assert line.endswith("(model is unet in the config, and its other keys stay; search model as a whole)")


def test_a_section_as_a_whole_may_be_searched() -> None:
    config = make({"model": {"grid": [{"name": "unet"}, {"name": "segresnet"}]}})
    check_space(config)
    assert config.search is not None
    names = [with_params(config, propose(config.search, index, ())).model.name for index in range(2)]
    assert names == ["unet", "segresnet"]


def test_values_that_do_not_go_together() -> None:
    space = {
        "patches.size": {"grid": [[40, 40, 40], [96, 96, 96]]},
        "model.channels": {"grid": [[8, 16], [8, 16, 32, 64, 128]]},
        "optimizer.lr": {"grid": [1e-3, 1e-4]},
    }
    assert complaints(space) == [
        "search.space: patches.size=[40, 40, 40], model.channels=[8, 16, 32, 64, 128], optimizer.lr=0.001 and in 1 "
        "more points: patches.size [40, 40, 40] does not fit the model's strides (16); nearest: [32, 32, 32]"
    ]


def test_values_that_only_go_together() -> None:
    sizes = {"patches.size": {"grid": [[40, 40, 40], [24, 24, 24]]}, "model.channels": {"grid": [[8, 16], [8, 16, 32]]}}
    check_space(make(sizes))


def test_many_faults_together_are_not_all_listed() -> None:
    space = {
        "train.epochs": {"grid": [2, *range(10, 50)]},
        "schedule.warmup": {"grid": [0, *range(9, 90)]},
    }
    lines = complaints(space, base={"train": {"epochs": 100}})
    assert len(lines) == 21
    assert lines[-1].startswith("search.space: and ")


def test_the_distmis_grid_gives_32_runs() -> None:
    content = parse_yaml((RECIPES / "distmis_unet.yaml").read_text(), "recipe")
    config = make_config({**content, "search": {"space": DISTMIS_SPACE}}, name="c.yaml", base=RECIPES)
    check_space(config)
    assert config.search is not None
    assert config.search.num_points == 32
    trials = [with_params(config, propose(config.search, index, ())) for index in range(32)]
    assert len({identity(trial) for trial in trials}) == 32
    found = {json.dumps([plain(t)["optimizer"], plain(t)["model"]["norm"]]) for t in trials}
    expected = {
        json.dumps([{"name": "adam", "lr": lr, "betas": [0.9, b], "weight_decay": 0.0, "amsgrad": ams}, norm])
        for lr in (1e-4, 5e-4, 1e-3, 5e-3)
        for norm in ("batch", "group")
        for b in (0.99, 0.999)
        for ams in (True, False)
    }
    assert found == expected
    assert {trial.search for trial in trials} == {None}


@settings(max_examples=60, deadline=None)
@given(
    lr=some.floats(1e-12, 1e3),
    beta=some.floats(0, 1, exclude_max=True),
    epochs=some.integers(1, 10**6),
    norm=some.sampled_from(["instance", "batch"]),
    spacing=some.none() | some.lists(some.floats(1e-3, 1000), min_size=3, max_size=3),
    clip=some.none() | some.floats(1e-300, 1e300),
)
def test_params_survive_the_file(tmp_path_factory: pytest.TempPathFactory, clip: Any, **drawn: Any) -> None:
    params = {
        "optimizer.lr": drawn["lr"],
        "optimizer.betas.1": drawn["beta"],
        "train.epochs": drawn["epochs"],
        "model.norm": drawn["norm"],
        "data.spacing": drawn["spacing"],
        "train.clip_norm": clip,
    }
    trial = with_params(make(), params)
    path = tmp_path_factory.mktemp("trial") / "best.yaml"
    path.write_text(render_config(trial))
    again = read_config(path)
    assert again == trial
    assert identity(again) == identity(trial)
    content = plain(again)
    assert (content["optimizer"]["lr"], content["optimizer"]["betas"][1]) == (drawn["lr"], drawn["beta"])
    assert (content["data"]["spacing"], content["train"]["clip_norm"]) == (drawn["spacing"], clip)
