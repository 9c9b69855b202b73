"""The demos: a recipe at a size that trains in a minute on two CPU cores, on synthetic data, and how well it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from voxscale.config.data import Synthetic
from voxscale.config.load import make_config, parse_yaml, read_config, render_config
from voxscale.config.schema import Config
from voxscale.data.cases import TEST, TRAIN, VAL
from voxscale.data.synthetic import ensure_like
from voxscale.errors import ConfigError
from voxscale.files import read_json, write_text
from voxscale.infer.baseline import threshold_dice
from voxscale.launch.folder import OpenedRun
from voxscale.launch.machine import look_at_machine


@dataclass(frozen=True)
class Demo:
    """A recipe, where its data lies below the folder that is made for it, and the fields that shrink it."""

    recipe: str
    source: str
    overrides: tuple[str, ...]


# Batches of four: two per rank on two cores, as torch convolves single small samples many times slower.
DEMOS: dict[str, Demo] = {
    "brats": Demo(
        "brats_segresnet",
        "Task01_BrainTumour",
        (
            "data.synthetic={cases: 16, size: [40, 40, 32]}",
            "patches.size=[40, 40, 32]",
            "model.channels=[8, 16, 32, 64]",
            "optimizer.lr=2e-2",
            "train.epochs=24",
            "train.batch=4",
            "validate.every=12",
            "validate.window=[40, 40, 32]",
        ),
    ),
    "btcv": Demo(
        "btcv_unetr",
        "dataset_0.json",
        (
            "data.synthetic={cases: 10, size: [64, 64, 48]}",
            "data.spacing=[9.0, 9.0, 9.0]",
            "patches={size: [16, 16, 16], per_case: 16, foreground: 0.7}",
            "model={name: unetr, feature_size: 8, hidden: 48, mlp: 96, heads: 4}",
            "optimizer.lr=4e-3",
            "train.epochs=40",
            "train.batch=8",
            "validate.every=20",
            "validate.window=[16, 16, 16]",
        ),
    ),
    "distmis": Demo(
        "distmis_unet",
        "",
        (
            "data.synthetic={cases: 24, size: [40, 40, 32]}",
            "optimizer.lr=5e-3",
            "train.epochs=30",
            "train.batch=4",
            "validate.every=10",
        ),
    ),
    # Its own folds leave no case untouched by the choice of the best model; these shares do. It is chosen of three: an
    # early model can suit sixty validation cases by chance, and the more often one looks, the likelier.
    "mace": Demo(
        "mace_resnet",
        "cohort.csv",
        (
            "data.synthetic={cases: 300, size: [48, 48, 32]}",
            "data.columns.features=[age, sex, smoker, calcium]",
            "data.split={val: 0.2, test: 0.4}",
            "data.size=[48, 48, 32]",
            "model.width=8",
            "optimizer.lr=1e-3",
            "train.epochs=30",
            "validate.every=10",
        ),
    ),
}

_TITLES = {"cindex/harrell": "Harrell's C-index"}


def read_recipe(name: str) -> dict[str, Any]:
    """One of recipes/, which are shipped within the package."""
    text = files("voxscale").joinpath("recipes", f"{name}.yaml").read_text()
    content: dict[str, Any] = parse_yaml(text, f"recipes/{name}.yaml")
    return content


def make_plain_demo(root: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of the demo without `--like`: recipes/quick.yaml, its data beside the run folder `root`."""
    content = read_recipe("quick")
    content["data"]["source"] = f"{root.name}-data"
    return make_config(content, overrides, name="demo", base=root.parent)


def write_demo(like: str, folder: Path, overrides: Sequence[str] = ()) -> tuple[Config, Path]:
    """Make a dataset in `folder`/data and the config to train it in `folder`/config.yaml.

    Returns that config and where its run belongs. What is there already is kept if it is the same, else refused.
    """
    demo = DEMOS[like]
    _refuse_others(folder)
    config = make_config(
        read_recipe(demo.recipe), [*demo.overrides, *overrides], name=f"demo --like {like}", base=folder
    )
    options = config.data.synthetic or Synthetic()
    ensure_like(folder / "data", like, options, threads=look_at_machine().cpus)
    source = (Path("data") / demo.source).as_posix()  # relative, so that the folder can be moved
    data = config.data.model_copy(update={"source": source, "synthetic": None})
    _write_once(folder / "config.yaml", render_config(config.model_copy(update={"data": data})))
    return read_config(folder / "config.yaml"), folder / "run"


def score_demo(opened: OpenedRun) -> dict[str, Any]:
    """What the best model scores: on the held-out cases, or where the data has none on the validation cases."""
    metrics = read_json(opened.run.metrics)
    split, summary = (TEST, metrics["test"]) if "test" in metrics else (VAL, metrics["summary"])
    chosen_by = {} if split == VAL else metrics["summary"]
    score = _score_outcome if opened.config.predicts_outcomes else _score_dice
    return {
        **score(opened.config.validation.metric, summary, chosen_by),
        "split": split,
        **{f"num_{part}": _num_cases(opened, part) for part in ((split, VAL) if chosen_by else (split,))},
    }


def _score_outcome(metric: str, summary: Mapping[str, Any], chosen_by: Mapping[str, Any]) -> dict[str, Any]:
    """The metric that training was to raise, with its interval; `chosen_by` are the cases that the best model suits."""
    found: dict[str, Any] = {"metric": metric, "score": None, "ci95": None}
    if metric in summary:
        found |= {"score": summary[metric]["mean"], "ci95": summary[metric]["ci95"]}
    return found | ({"score_val": chosen_by[metric]["mean"]} if metric in chosen_by else {})


def _score_dice(_: str, summary: Mapping[str, Any], __: Mapping[str, Any]) -> dict[str, Any]:
    """Mean Dice and that of each class."""
    dice = {name.removeprefix("dice/"): row["mean"] for name, row in summary.items() if name.startswith("dice/")}
    return {"dice": dice.pop("mean"), "dice_per_class": dice}


def _num_cases(opened: OpenedRun, split: str) -> int:
    return sum(case.split == split for case in opened.cases)


def score_threshold(opened: OpenedRun) -> float:
    """The Dice on the held-out cases of the threshold that is best on the training cases."""
    training, held_out = ([case for case in opened.cases if case.split == split] for split in (TRAIN, TEST))
    return threshold_dice(opened.store, training, held_out)


def render_scores(scores: Mapping[str, Any]) -> str:
    split = scores["split"]
    cases = f"{scores[f'num_{split}']} {'held-out' if split == TEST else 'validation'} cases"
    return _render_outcome(scores, cases) if "metric" in scores else _render_dice(scores, cases)


def _render_outcome(scores: Mapping[str, Any], cases: str) -> str:
    text = f"{_TITLES.get(scores['metric'], scores['metric'])} on {cases} "
    if scores["score"] is None:
        return f"{text}undefined"
    low, high = scores["ci95"]
    text += f"{scores['score']:.3f} (95 % interval {low:.3f}–{high:.3f})"
    if "score_val" in scores:
        text += f", {scores['score_val']:.3f} on the {scores['num_val']} validation cases that chose the model"
    return text


def _render_dice(scores: Mapping[str, Any], cases: str) -> str:
    text = f"Dice on {cases} {scores['dice']:.3f}"
    if len(scores["dice_per_class"]) > 1:
        text += f" ({', '.join(f'{name} {value:.3f}' for name, value in scores['dice_per_class'].items())})"
    if "threshold_dice" in scores:
        text += f" (a threshold alone: {scores['threshold_dice']:.3f})"
    return text


def _refuse_others(folder: Path) -> None:
    """Only a new folder, or one that a demo has made, is written to. Locks and what a killed demo left do not count."""
    if not folder.exists() or (folder / "data" / "synthetic.json").is_file():
        return
    if not folder.is_dir() or any(not path.name.startswith(".") for path in folder.iterdir()):
        raise ConfigError(f"--out {folder}: not a demo's folder, and not empty", fix="choose a new folder with --out")


def _write_once(path: Path, text: str) -> None:
    if not path.exists():
        write_text(path, text)
    elif path.read_text() != text:
        raise ConfigError(
            f"{path}: found another config than this demo's",
            fix=f"choose a new folder with --out, or train what is there: voxscale train {path}",
        )
