"""Every recipe says what it should and trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from conftest import RECIPES, Cli
from voxscale.config.load import make_config, read_config
from voxscale.config.schema import PerDevice
from voxscale.launch.demo import DEMO

ALL = sorted(RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_recipe_is_valid(path: Path) -> None:
    assert read_config(path).data.source.startswith(str(RECIPES.parent / "data"))


def test_synthetic_unet_has_the_settings_of_row_0() -> None:
    config = read_config(RECIPES / "synthetic_unet.yaml")
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


def test_synthetic_unet_trains_on_shrunken_sizes(cli_here: Cli, tmp_path: Path) -> None:
    shrunk = [
        f"data.source={tmp_path / 'data'}",
        "data.synthetic={cases: 5, size: [40, 40, 40]}",
        "patches.size=[32, 32, 32]",
        "train.epochs=1",
    ]
    done = cli_here(
        "train", RECIPES / "synthetic_unet.yaml", *shrunk, "--devices", "1", "--run", tmp_path / "run", "--json"
    )
    assert done.code == 0, done.err
    assert done.json["steps"] == 2
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["train"]["batch"] == 8


def test_demo_is_quick() -> None:
    """The demo is the recipe: what a newcomer saw is what they find in recipes/."""
    quick = yaml.safe_load((RECIPES / "quick.yaml").read_text())
    quick["optimizer"]["lr"] = float(quick["optimizer"]["lr"])  # plain YAML reads 1e-3 as text
    quick["data"]["source"] = DEMO["data"]["source"]
    assert quick == DEMO
    assert make_config(DEMO, name="demo", base=Path()).train.epochs > 1
