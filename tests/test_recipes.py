"""Every recipe says what it should and trains."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import RECIPES, REPOSITORY, Cli
from voxscale.config.data import SplitColumns, SplitShares, Synthetic
from voxscale.config.load import plain, read_config
from voxscale.config.schema import Config, PerDevice
from voxscale.data.synthetic import ensure_like, write_cifar10, write_cohort
from voxscale.launch.demo import DEMOS, make_plain_demo, read_recipe
from voxscale.plan.resources import Machine, resolve
from voxscale.search.samplers import propose
from voxscale.search.space import check_space, with_params

ALL = sorted(RECIPES.glob("*.yaml"))
BRATS = ("brats_segresnet", "brats_unet")
DISTMIS_SEARCHES = ("distmis_search", "distmis_data_parallel")
ONE_DEVICE = Machine(gpus=0, cpus=1)


def recipe(name: str) -> Config:
    return read_config(RECIPES / f"{name}.yaml")


def transforms(config: Config) -> list[dict[str, Any]]:
    return [plain(transform) for transform in config.augment]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_recipe_is_valid(path: Path) -> None:
    assert read_config(path).data.source.startswith(str(REPOSITORY / "data"))
    assert read_recipe(path.stem)["data"]["source"].startswith("../data/"), "shipped with the package"


def test_synthetic_unet_has_the_settings_of_row_0() -> None:
    config = recipe("synthetic_unet")
    assert config.data.synthetic is not None
    assert (config.data.synthetic.cases, config.data.synthetic.size) == (64, (128, 128, 128))
    assert (config.data.synthetic.seed, config.train.seed) == (0, 0)
    assert (config.patches.size, config.patches.per_case, config.patches.foreground) == ((96, 96, 96), 4, 0.5)
    (turn,) = config.augment
    assert (turn.name, turn.p, turn.axes) == ("rotate90", 0.5, (0, 2))
    assert (config.model.name, config.model.channels) == ("unet", (16, 32, 64, 128, 256))
    assert config.model.residual_units == 2
    assert (config.loss.name, config.optimizer.name, config.optimizer.lr) == ("dice", "adam", 1e-3)
    assert config.train.epochs == 5
    assert config.train.batch == PerDevice(per_device=2 * 4), "two cases of four crops"


@pytest.mark.parametrize("name", BRATS)
def test_brats_has_the_settings_of_row_0(name: str) -> None:
    config = recipe(name)
    assert (config.data.format, config.data.orientation, config.data.spacing) == ("decathlon", "RAS", (1, 1, 1))
    assert config.data.split is not None
    assert (config.data.split.val, config.data.split.test, config.data.split.seed) == (0.2, 0.0, 0)
    assert config.data.intensity.zscore == "nonzero"
    assert config.data.regions == {"TC": (2, 3), "WT": (1, 2, 3), "ET": (3,)}
    assert (config.patches.size, config.patches.per_case, config.patches.foreground) == ((224, 224, 144), 1, 0)
    assert transforms(config) == [
        {"name": "flip", "p": 0.5, "axes": [0, 1, 2]},
        {"name": "scale", "p": 0.5, "by": 0.1},
        {"name": "shift", "p": 0.5, "by": 0.1},
    ]
    assert (config.loss.name, config.loss.squared, config.loss.batch) == ("dice_focal", True, True)
    assert (config.optimizer.name, config.optimizer.lr, config.schedule.name) == ("novograd", 1e-4, "cosine")
    assert (config.train.epochs, config.train.batch) == (300, PerDevice(per_device=1))
    assert config.train.precision == "auto"
    validate = config.validation
    assert (validate.every, validate.window, validate.overlap) == (20, (240, 240, 160), 0.6)
    assert validate.metric == "dice/mean"


def test_brats_networks() -> None:
    segresnet, unet = (recipe(name).model for name in BRATS)
    assert (segresnet.name, segresnet.channels[0]) == ("segresnet", 16)
    assert (segresnet.blocks_down, segresnet.blocks_up) == ((1, 2, 2, 4), (1, 1, 1))
    assert (unet.name, unet.channels) == ("unet", (16, 32, 64, 128, 256))


def test_btcv_unetr_has_the_settings_of_row_0() -> None:
    config = recipe("btcv_unetr")
    assert (config.data.format, config.data.spacing, config.data.regions) == ("list", (1.5, 1.5, 2.0), None)
    assert config.data.split is None, "the list states it"
    assert (config.data.intensity.window, config.data.crop_foreground) == ((-175, 250), True)
    assert (config.patches.size, config.patches.per_case, config.patches.foreground) == ((96, 96, 96), 4, 0.5)
    assert transforms(config) == [
        {"name": "flip", "p": 0.1, "axes": [0, 1, 2]},
        {"name": "rotate90", "p": 0.1, "axes": [0, 1]},
        {"name": "shift", "p": 0.5, "by": 0.1},
    ]
    model = config.model
    assert (model.name, model.feature_size, model.hidden, model.mlp, model.heads) == ("unetr", 16, 768, 3072, 12)
    assert config.loss.name == "dice_ce"
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", 1e-4, 1e-5)
    steps_per_epoch = 24 * config.patches.per_case // config.train.global_batch
    assert 0 <= config.train.epochs * steps_per_epoch - 25_000 < steps_per_epoch


def test_distmis_unet_has_the_settings_of_row_1() -> None:
    config = recipe("distmis_unet")
    assert (config.data.format, config.data.split, config.data.regions) == ("tfrecord", None, {"tumour": (1,)})
    assert config.patches.size == "full"
    assert (config.model.name, config.model.channels, config.model.norm) == (
        "distmis_unet",
        (8, 16, 32, 64),
        "batch",
    )
    assert (config.loss.name, config.optimizer.name) == ("soft_dice", "adam")
    assert (config.train.epochs, config.train.batch) == (20, PerDevice(per_device=2))


@pytest.mark.parametrize("name", DISTMIS_SEARCHES)
def test_distmis_searches_are_of_distmis_unet(name: str) -> None:
    searched, alone = plain(recipe(name)), plain(recipe("distmis_unet"))
    del searched["search"]
    rate = searched["optimizer"]["lr"]
    searched["optimizer"]["lr"] = rate["per_device"] if isinstance(rate, dict) else rate
    assert searched == alone


@pytest.mark.parametrize("name", DISTMIS_SEARCHES)
def test_distmis_searches_try_the_32_settings_of_row_1(name: str) -> None:
    config = recipe(name)
    search = config.search
    assert search is not None
    assert (search.chosen_sampler, search.num_points, search.scheduler) == ("grid", 32, "none")
    check_space(config)
    tried = set()
    for index in range(32):
        trial = resolve(with_params(config, propose(search, index, ())), ONE_DEVICE, devices=1)
        optimizer = trial.optimizer
        assert (optimizer.name, optimizer.betas[0], trial.search) == ("adam", 0.9, None)
        tried.add((optimizer.lr, trial.model.norm, optimizer.betas[1], optimizer.amsgrad))
    rates, norms, betas = (1e-4, 5e-4, 1e-3, 5e-3), ("batch", "group"), (0.99, 0.999)
    assert tried == set(itertools.product(rates, norms, betas, (True, False)))


def test_distmis_search_is_experiment_parallelism() -> None:
    search = recipe("distmis_search").search
    assert search is not None
    assert (search.per_trial.devices, search.max_concurrent) == (1, "auto")


def test_distmis_data_parallel_trains_one_setting_after_another_on_all_devices() -> None:
    config = recipe("distmis_data_parallel")
    assert config.search is not None
    assert (config.search.per_trial.devices, config.search.max_concurrent) == ("all", 1)
    trial = with_params(config, propose(config.search, 0, ()))
    on_four = resolve(trial, ONE_DEVICE, devices=4)
    assert on_four.optimizer.lr == 4 * resolve(trial, ONE_DEVICE, devices=1).optimizer.lr
    assert on_four.train.global_batch == 4 * 2


def test_distmis_searchs_other_form_draws_24_learning_rates() -> None:
    """The command in the recipe's header, as it stands there."""
    comments = [
        line[1:].strip() for line in (RECIPES / "distmis_search.yaml").read_text().splitlines() if line[:1] == "#"
    ]
    commands = "\n".join(comments).replace("\\\n", " ").splitlines()
    (command,) = [line for line in commands if "search.space" in line]
    verb, path, *words = shlex.split(command)[1:]
    assert (verb, path) == ("search", "recipes/distmis_search.yaml")
    config = read_config(RECIPES / "distmis_search.yaml", [word for word in words if "=" in word])
    search = config.search
    assert search is not None
    assert (search.chosen_sampler, search.num_points, search.per_trial.devices) == ("random", 24, 1)
    check_space(config)
    drawn = {propose(search, index, ())["optimizer.lr"] for index in range(24)}
    assert len(drawn) == 24 and 1e-4 <= min(drawn) < 1e-3 < max(drawn) <= 1e-2


MACE = ("mace_resnet", "mace_pretrain")


@pytest.mark.parametrize("name", MACE)
def test_mace_has_the_settings_of_row_3(name: str) -> None:
    config = recipe(name)
    data = config.data
    assert (data.format, data.orientation, data.spacing, data.size) == ("table", "RAS", None, (256, 256, 64))
    assert data.intensity.window == (-1000, 1000)
    assert isinstance(data.split, SplitColumns)
    assert (data.split.columns[0], data.split.train, data.split.val) == ("Fold_1", "train", "val")
    assert transforms(config) == [
        {"name": "flip", "p": 0.5, "axes": [0, 1, 2]},
        {"name": "rotate90", "p": 0.5, "axes": [0, 1]},
    ]
    assert (config.model.name, config.model.depth, config.model.dims) == ("resnet", 18, 3)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", 1e-4, 1e-5)
    assert (config.schedule.name, config.train.clip_norm) == ("cosine", 1.0)
    assert config.train.batch == 24, "over all devices together"
    assert (config.train.precision, config.train.compile) == ("auto", "auto")


def test_mace_resnet_is_a_survival_at_one_to_five_years() -> None:
    config = recipe("mace_resnet")
    assert (config.task, config.loss.name, config.data.time_unit) == ("survival", "cox", "days")
    assert config.validation.horizons == ("1y", "2y", "3y", "4y", "5y")
    assert config.validation.metric == "cindex/harrell"
    assert config.data.columns.time is config.data.columns.event is None, "found by their names"


def test_mace_pretrain_predicts_columns_for_the_same_network() -> None:
    config = recipe("mace_pretrain")
    assert (config.task, config.loss.name, config.data.columns.targets) == ("regression", "mse", ("age", "calcium"))
    assert config.model == recipe("mace_resnet").model
    assert config.data.model_copy(update={"columns": recipe("mace_resnet").data.columns}) == recipe("mace_resnet").data


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_mace_resnet_comes_in_every_depth(depth: int) -> None:
    config = read_config(RECIPES / "mace_resnet.yaml", [f"model.depth={depth}"])
    assert config.model.depth == depth


def test_mace_resnet_can_be_trained_as_row_3_varies_it() -> None:
    """The optimizers, schedules, cache and frozen encoder that row 3 offers, and the fine-tuning of the header."""
    for optimizer in ("adamw", "adam", "sgd"):
        assert read_config(RECIPES / "mace_resnet.yaml", [f"optimizer={{name: {optimizer}}}"])
    for schedule in ("cosine", "restarts", "one_cycle", "none"):
        assert read_config(RECIPES / "mace_resnet.yaml", [f"schedule={{name: {schedule}}}"])
    smart = "data.cache={where: host, rate: 0.5, replace: 0.5}"
    tuned = ["train.init_from=runs/mace_pretrain", "train.freeze={encoder: 5}"]
    config = read_config(RECIPES / "mace_resnet.yaml", [smart, *tuned])
    assert config.train.freeze is not None and config.train.freeze.encoder == 5
    assert all(word in (RECIPES / "mace_resnet.yaml").read_text() for word in tuned)


def test_cifar10_resnet18_has_the_settings_of_row_4() -> None:
    config = recipe("cifar10_resnet18")
    assert (config.task, config.data.format, config.data.orientation) == ("classification", "cifar10", None)
    split = config.data.split
    assert isinstance(split, SplitShares)
    assert (split.val, split.test, split.keep_test) == (0.1, 0, True), "the true test set is the test set"
    model = config.model
    assert (model.name, model.depth, model.dims, model.stem) == ("resnet", 18, 2, "small")
    assert (config.loss.name, config.loss.label_smoothing) == ("cross_entropy", 0)
    assert (config.optimizer.name, config.optimizer.lr) == ("adam", 1e-3)
    assert config.train.batch == PerDevice(per_device=32)
    assert config.validation.metric == "accuracy"


def test_classification_weighs_and_balances_classes() -> None:
    config = recipe("classification")
    assert (config.task, config.loss.class_weights, config.train.balance) == ("classification", "balanced", True)
    assert isinstance(config.data.split, SplitShares)
    assert config.data.split.val and config.data.split.test, "what chooses the model does not score it"


# What the recipes keep on tiny data: everything but sizes, so one epoch goes through all of their parts.
TINY = {
    "synthetic_unet": (
        "data.synthetic={cases: 3, size: [36, 36, 36]}",
        "patches.size=[32, 32, 32]",
        "train.epochs=1",
    ),
    "brats_segresnet": (
        "patches.size=[16, 16, 16]",
        "model={name: segresnet, channels: [8, 16], blocks_down: [1, 2], blocks_up: [1]}",
        "train.epochs=1",
        "validate.window=[16, 16, 16]",
    ),
    "brats_unet": (
        "patches.size=[16, 16, 16]",
        "model.channels=[4, 8]",
        "train.epochs=1",
        "validate.window=[16, 16, 16]",
    ),
    "btcv_unetr": (
        "data.spacing=[20, 20, 12]",
        "patches.size=[16, 16, 32]",
        "patches.per_case=1",
        "model={name: unetr, feature_size: 2, hidden: 12, mlp: 12, heads: 2}",
        "augment=[{name: flip, p: 0.1}, {name: rotate90, p: 0.1}, {name: shift}]",
        "train.epochs=1",
        "validate.window=[16, 16, 32]",
    ),
    **dict.fromkeys(("distmis_unet", *DISTMIS_SEARCHES), ("model.channels=[4, 8]", "train.epochs=1")),
    **dict.fromkeys(("mace_resnet", "mace_pretrain"), ("data.size=[16, 16, 8]", "model.width=8", "train.epochs=1")),
    "classification": (
        "data.columns.classes=smoker",
        "data.size=[16, 16, 8]",
        "model.width=8",
        "train.epochs=1",
    ),
    "cifar10_resnet18": ("model.width=8", "train.epochs=1"),
}
PLAINLY = (
    "train.threads=1",
    "train.precision=fp32",
    "train.compile=false",
    "train.channels_last=false",
    "track=none",
)
LIKENESS = {
    **{"brats_segresnet": "brats", "brats_unet": "brats", "btcv_unetr": "btcv"},
    **dict.fromkeys(("distmis_unet", *DISTMIS_SEARCHES), "distmis"),
    **dict.fromkeys(("mace_resnet", "mace_pretrain", "classification"), "cohort"),
    "cifar10_resnet18": "cifar10",
}


@pytest.fixture(scope="module")
def likenesses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny dataset of each on-disk format."""
    folder = tmp_path_factory.mktemp("likenesses")
    for like in DEMOS:
        ensure_like(folder / like, like, Synthetic(cases=5, size=(24, 24, 20)))
    write_cohort(folder / "cohort", cases=40, size=(16, 16, 8), seed=0)
    write_cifar10(folder / "cifar10", per_batch=20)
    others = {"cohort": folder / "cohort" / "cohort.csv", "cifar10": folder / "cifar10"}
    return {**others, **{like: folder / like / demo.source for like, demo in DEMOS.items()}}


def test_every_recipe_is_trained_here_or_by_the_demo() -> None:
    assert {path.stem for path in ALL} == {*TINY, "quick"}


@pytest.mark.parametrize("name", TINY)
def test_recipe_trains_on_shrunken_sizes(name: str, likenesses: dict[str, Path], cli_here: Cli, tmp_path: Path) -> None:
    source = likenesses[LIKENESS[name]] if name in LIKENESS else tmp_path / "data"
    shrunk = [f"data.source={source}", *TINY[name], *PLAINLY]
    place = ["--devices", "1", "--run", tmp_path / "run", "--json"]
    done = cli_here("train", RECIPES / f"{name}.yaml", *shrunk, *place)
    assert done.code == 0, done.err
    assert done.json["state"] == "done"
    assert done.json["best"] is not None, "validated although the epochs are fewer than the interval"
    asked = resolve(recipe(name), ONE_DEVICE, devices=1)
    used = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    for section in ("loss", "optimizer", "schedule"):
        assert used[section] == plain(asked)[section]
    assert used["train"]["batch"] == asked.train.global_batch


def test_regions_are_scored_by_name(likenesses: dict[str, Path], cli_here: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shrunk = [f"data.source={likenesses['brats']}", *TINY["brats_unet"], *PLAINLY]
    assert cli_here("train", RECIPES / "brats_unet.yaml", *shrunk, "--devices", "1", "--run", run).code == 0
    columns = (run / "cases.csv").read_text().splitlines()[0].split(",")
    assert {"dice/TC", "dice/WT", "dice/ET", "dice/mean"} <= set(columns)


def test_cifar10_is_scored_on_its_test_set(likenesses: dict[str, Path], cli_here: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shrunk = [f"data.source={likenesses['cifar10']}", *TINY["cifar10_resnet18"], *PLAINLY]
    done = cli_here("train", RECIPES / "cifar10_resnet18.yaml", *shrunk, "--devices", "1", "--run", run, "--json")
    assert done.code == 0, done.err
    parts = [line.split(",")[::2] for line in (run / "split.csv").read_text().splitlines()[1:]]
    assert [case for case, part in parts if part == "test"] == [f"test_batch-{number:05d}" for number in range(20)]
    assert sum(part == "val" for _, part in parts) == 10
    assert {"accuracy", "balanced_accuracy"} <= set(done.json["test"])


def test_demo_is_quick() -> None:
    """The demo is the recipe: what a newcomer saw is what they find in recipes/."""
    demo, quick = plain(make_plain_demo(RECIPES / "x")), plain(recipe("quick"))
    assert demo["data"].pop("source") == str(RECIPES / "x-data")
    quick["data"].pop("source")
    assert demo == quick
