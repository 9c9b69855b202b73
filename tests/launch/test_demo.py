"""Demos of the datasets: the data in its format, the config, the run, and what is said of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from conftest import RECIPES, Cli
from voxscale.cli.training import demo
from voxscale.config.load import read_config
from voxscale.data.formats import detect_format
from voxscale.data.synthetic import LIKE
from voxscale.errors import ConfigError, DataError
from voxscale.launch.demo import DEMOS, read_recipe, render_scores, write_demo

SMALLER = {
    "brats": (
        "data.synthetic={cases: 5, size: [16, 16, 16]}",
        "patches.size=[16, 16, 16]",
        "validate.window=[16, 16, 16]",
        "model={name: segresnet, channels: [8, 16], blocks_down: [1, 2], blocks_up: [1]}",
        "train.epochs=2",
    ),
    "btcv": (
        "data.synthetic={cases: 5, size: [24, 24, 20]}",
        "data.spacing=[20, 20, 12]",
        "patches={size: [16, 16, 32], per_case: 1, foreground: 0.5}",
        "model={name: unetr, feature_size: 2, hidden: 12, mlp: 12, heads: 2}",
        "validate.window=[16, 16, 32]",
        "train.epochs=1",
    ),
    "distmis": ("data.synthetic={cases: 6, size: [16, 16, 16]}", "train.epochs=1"),
    "mace": (
        "data.synthetic={cases: 40, size: [16, 16, 12]}",
        "data.size=[16, 16, 12]",
        "train.epochs=2",
        "validate.every=2",
    ),
}
PLAINLY = (
    "train.threads=1",
    "train.precision=fp32",
    "train.compile=false",
    "train.channels_last=false",
    "track=none",
)
FORMATS = {"brats": "decathlon", "btcv": "list", "distmis": "tfrecord", "mace": "table"}
CLASSES = {"brats": {"TC", "WT", "ET"}, "distmis": {"tumour"}}


@pytest.mark.parametrize("like", [like for like in DEMOS if like != "mace"])
def test_demo_makes_data_trains_and_scores(like: str, cli_here: Cli, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = cli_here("demo", "--like", like, *SMALLER[like], *PLAINLY, "--out", out, "--devices", "1", "--json")
    assert done.code == 0, done.err
    assert {path.name for path in out.iterdir() if path.name[0] != "."} == {"data", "run", "config.yaml"}
    assert Path(done.json["run"]) == out / "run"
    metrics = json.loads((out / "run" / "metrics.json").read_text())
    split = "test" if like == "distmis" else "val"
    summary = metrics["test"] if split == "test" else metrics["summary"]
    assert done.json["split"] == split
    assert done.json[f"num_{split}"] == 1
    assert done.json["dice"] == summary["dice/mean"]["mean"]
    scored = done.json["dice_per_class"]
    assert scored == {
        name[5:]: row["mean"] for name, row in summary.items() if name.startswith("dice/") and name != "dice/mean"
    }
    if like in CLASSES:
        assert set(scored) == CLASSES[like]


def test_demo_of_outcomes_trains_and_scores_cases_that_chose_nothing(cli_here: Cli, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    place = ["--out", out, "--devices", "1"]
    done = cli_here("demo", "--like", "mace", *SMALLER["mace"], *PLAINLY, *place, "--json")
    assert done.code == 0, done.err
    assert {path.name for path in out.iterdir() if path.name[0] != "."} == {"data", "run", "config.yaml"}
    metrics = json.loads((out / "run" / "metrics.json").read_text())
    test, val = (metrics[part]["cindex/harrell"] for part in ("test", "summary"))
    found = {name: done.json[name] for name in ("metric", "score", "ci95", "score_val")}
    assert found == {"metric": "cindex/harrell", "score": test["mean"], "ci95": test["ci95"], "score_val": val["mean"]}
    assert val["mean"] == metrics["best"]["value"]
    assert (done.json["split"], done.json["num_test"], done.json["num_val"]) == ("test", 16, 8)
    assert "dice" not in done.json
    outcomes = (out / "run" / "outcomes.csv").read_text().splitlines()[0]
    assert "age" in outcomes, "features are fused"


def test_what_is_said_of_outcomes() -> None:
    scores = {"metric": "cindex/harrell", "score": 0.8125, "ci95": [0.7, 0.9], "split": "test", "num_test": 72}
    of_test = "Harrell's C-index on 72 held-out cases 0.812 (95 % interval 0.700–0.900)"
    assert render_scores(scores) == of_test
    both = {**scores, "score_val": 0.875, "num_val": 48}
    assert render_scores(both) == f"{of_test}, 0.875 on the 48 validation cases that chose the model"
    assert render_scores({**scores, "score": None, "ci95": None}).endswith("held-out cases undefined")
    assert render_scores({**scores, "metric": "auc/1y", "split": "val", "num_val": 9}).startswith("auc/1y on 9 valid")


@pytest.mark.cluster
@pytest.mark.parametrize(("features", "least"), [((), 0.70), (("data.columns.features=[]",), 0.60)])
def test_demo_of_outcomes_as_it_is(features: tuple[str, ...], least: float, cli_here: Cli, tmp_path: Path) -> None:
    """Takes a minute or two: the network finds the lesion by itself, whether or not the table helps."""
    done = cli_here("demo", "--like", "mace", *features, "--out", tmp_path / "demo", "--json")
    assert done.code == 0, done.err
    assert done.json["split"] == "test"
    assert done.json["score"] >= least


@pytest.mark.parametrize("like", DEMOS)
def test_the_config_does_the_same_wherever_the_folder_is(like: str, tmp_path: Path) -> None:
    config, run = write_demo(like, tmp_path / "here", SMALLER[like])
    assert run == tmp_path / "here" / "run"
    (tmp_path / "here").rename(tmp_path / "there")
    moved = read_config(tmp_path / "there" / "config.yaml")
    source = Path(moved.data.source)
    assert source == tmp_path / "there" / Path(config.data.source).relative_to(tmp_path / "here")
    assert detect_format(source) == FORMATS[like]
    same = {"source": config.data.source}
    assert moved.model_copy(update={"data": moved.data.model_copy(update=same)}) == config


@pytest.mark.parametrize("like", DEMOS)
def test_demo_is_its_recipe_shrunk(like: str, tmp_path: Path) -> None:
    """Whatever is not a size, a rate or a count is as the recipe has it."""
    config, _ = write_demo(like, tmp_path / "demo", SMALLER[like])
    recipe = read_config(RECIPES / f"{DEMOS[like].recipe}.yaml")
    for name in ("augment", "loss", "schedule"):
        assert getattr(config, name) == getattr(recipe, name)
    assert (config.model.name, config.optimizer.name) == (recipe.model.name, recipe.optimizer.name)
    for name in ("format", "orientation", "intensity", "regions", "crop_foreground"):
        assert getattr(config.data, name) == getattr(recipe.data, name)


def test_the_command_line_offers_every_likeness() -> None:
    hints = get_type_hints(demo)
    offered = {choice for part in get_args(hints["like"]) for choice in get_args(part)}
    assert offered == set(DEMOS) == set(LIKE)


def test_text_for_people(cli_here: Cli, tmp_path: Path) -> None:
    quick = [*SMALLER["distmis"], *PLAINLY, "log=quiet", "--devices", "1"]
    done = cli_here("demo", "--like", "distmis", *quick, "--out", tmp_path / "demo")
    assert done.code == 0, done.err
    assert done.out.startswith("Dice on 1 held-out cases 0.")
    run = tmp_path / "demo" / "run"
    assert done.out.rstrip().endswith(f"run folder {run}\nreport {run / 'report.html'}")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not a demo's folder"):
        write_demo("distmis", tmp_path, SMALLER["distmis"])
    with pytest.raises(ConfigError, match="not a demo's folder"):
        write_demo("distmis", tmp_path / "notes.txt", SMALLER["distmis"])
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_another_demo_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    write_demo("distmis", tmp_path / "demo", SMALLER["distmis"])
    before = (tmp_path / "demo" / "config.yaml").read_text()
    with pytest.raises(DataError, match="'like': 'distmis'"):
        write_demo("brats", tmp_path / "demo", SMALLER["brats"])
    with pytest.raises(ConfigError, match="another config"):
        write_demo("distmis", tmp_path / "demo", [*SMALLER["distmis"], "optimizer.lr=1e-2"])
    assert (tmp_path / "demo" / "config.yaml").read_text() == before


def test_recipes_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_recipe("brats_unet")["model"]["name"] == "unet"
