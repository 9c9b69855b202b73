"""Reading configs: numbers, overrides, paths, and every error at once."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from voxscale.config.load import differences, identity, make_config, parse_yaml, plain, read_config, render_config
from voxscale.config.schema import Config, PerDevice
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.plan.resources import Machine, resolve


def make(content: dict[str, Any], *overrides: str) -> Config:
    return make_config({"data": {"source": "d"}, **content}, overrides, name="c.yaml", base=Path("/base"))


def complaint(content: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make(content, *overrides)
    return caught.value.message


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "1.e-4", "+1e-4"])
def test_scientific_notation_is_a_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"data: {{source: d}}\noptimizer: {{lr: {text}}}\n")
    assert read_config(path).optimizer.lr == 1e-4


def test_json_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"data": {"source": "d"}, "optimizer": {"name": "sgd", "lr": 1e-2}}')
    assert read_config(path).optimizer.name == "sgd"


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "c.yaml"
    path.write_text("data: {source: ../d}\ntrain: {init_from: ../runs/first}\n")
    config = read_config(path)
    assert config.data.source == str(tmp_path / "d")
    assert config.train.init_from == str(tmp_path / "runs" / "first")


def test_overrides_reach_any_field() -> None:
    config = make({}, "optimizer.name=sgd", "optimizer.lr=2e-4", "patches.size=[32, 32, 32]", "augment=none")
    assert (config.optimizer.name, config.optimizer.lr) == ("sgd", 2e-4)
    assert config.patches.size == (32, 32, 32)
    assert config.augment == ()


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        make({}).train.epochs = 3  # type: ignore[misc]


def test_written_config_reads_back_the_same(tmp_path: Path) -> None:
    config = make({"augment": "light", "model": {"name": "segresnet"}, "train": {"stop_after": {"minutes": 1.5}}})
    path = tmp_path / "config.yaml"
    path.write_text(render_config(config))
    assert read_config(path) == config


def test_every_default_is_written_out() -> None:
    def leaves(section: Any) -> int:
        return sum(leaves(value) for value in section.values()) if isinstance(section, dict) else 1

    assert leaves(plain(make({}))) > 40
    assert plain(make({}))["augment"][0] == {"name": "flip", "p": 0.5, "axes": [0, 1, 2]}


def test_all_errors_come_at_once_with_the_nearest_name() -> None:
    message = complaint(
        {
            "optimzer": {},
            "model": {"name": "unnet"},
            "train": {"epoch": 3, "batch": "two"},
            "validate": {"evry": 1},
            "loss": {"name": "dice", "batc": True},
            "augment": [{"name": "flip", "prob": 1}],
        },
        "loader.workers=-1",
        "data.split.vall=.1",
    )
    assert message.splitlines() == [
        "c.yaml: data.split.vall: unknown key; did you mean 'val'?",
        "c.yaml: augment.0.prob: unknown key; expected one of name, p, axes",
        "c.yaml: loader.workers: found -1, expected 'auto' or greater than or equal to 0",
        "c.yaml: model: found name 'unnet', expected unet, segresnet, unetr, swin_unetr, dynunet, distmis_unet, "
        "resnet, package.module:function; did you mean 'unet'?",
        "c.yaml: loss.batc: unknown key; did you mean 'batch'?",
        "c.yaml: train.batch: found 'two', expected a valid integer, unable to parse string as an integer",
        "c.yaml: train.epoch: unknown key; did you mean 'epochs'?",
        "c.yaml: validate.evry: unknown key; did you mean 'every'?",
        "c.yaml: optimzer: unknown key; did you mean 'optimizer'?",
    ]


def test_missing_source_is_named() -> None:
    with pytest.raises(ConfigError, match=r"c.yaml: data: missing; expected a value"):
        make_config({}, name="c.yaml", base=Path())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"patches": {"size": [100, 96, 96]}},
            "c.yaml: patches.size [100, 96, 96] does not fit the model's strides (16); nearest: [96, 96, 96]",
        ),
        (
            {"patches": {"size": [32, 32, 16]}, "augment": [{"name": "rotate90", "axes": [0, 2]}]},
            "c.yaml: augment: rotate90 in axes [0, 2] needs equal patches.size there, found 32 and 16",
        ),
        (
            {"model": {"name": "segresnet", "blocks_up": [1]}},
            "c.yaml: model: found 4 blocks_down and 1 blocks_up, expected 4 and 3 for 4 channels",
        ),
        (
            {"data": {"source": "d", "intensity": {"window": [3, 1]}}},
            "window [3.0, 1.0]: expected the lower bound first",
        ),
        ({"data": {"source": "d", "regions": {"mean": [1]}}}, "region 'mean': expected letters"),
        ({"augment": "heavy"}, "c.yaml: augment: found 'heavy'; expected none, light, full or a list of transforms"),
    ],
)
def test_rules_across_fields(content: dict[str, Any], expected: str) -> None:
    assert expected in complaint(content)


def test_override_without_equals_sign() -> None:
    assert complaint({}, "train.epochs") == "'train.epochs': expected key=value"
    assert complaint({}, "=1") == "'=1': expected key=value"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {source: d\ntrain: [", "not valid YAML"),
        ("data: {source: d}\ndata: {source: e}", "key 'data' stands twice"),
        ("- a\n- b", "found list, expected a mapping"),
        ("", "found nothing, expected a mapping"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_corrupt_yaml(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="c.yaml") as caught:
        read_config(path)
    assert expected in caught.value.message
    assert caught.value.exit_code == 2


def test_an_image_is_no_config_and_the_whole_data_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "img0.nii.gz").write_bytes(gzip.compress(b"voxels"))
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "img0.nii.gz")
    assert caught.value.message.endswith("img0.nii.gz: cannot be read as text, expected a config in YAML")
    assert "for data, the whole: a folder" in caught.value.fix


def test_per_device_batch_becomes_global() -> None:
    config = make({"train": {"batch": {"per_device": 3}}})
    assert config.train.batch == PerDevice(per_device=3)
    settled = resolve(config, Machine(gpus=0, cpus=8), devices=4)
    assert settled.train.global_batch == 12
    assert settled.train.threads == 2


def test_nccl_needs_gpus() -> None:
    with pytest.raises(InfrastructureError, match="nccl needs GPUs"):
        resolve(make({"train": {"backend": "nccl"}}), Machine(gpus=0, cpus=8), devices=2)


def test_differences_name_fields_that_change_the_result() -> None:
    asked, held = make({"log": "quiet", "train": {"stop_after": {"steps": 3}}}), make({"optimizer": {"lr": 1e-3}})
    assert differences(asked, held) == ["optimizer.lr is 0.001 there, 0.0001 here"]
    assert identity(asked) == identity(make({})) != identity(held)
    staged = make({"data": {"source": "x", "stage": "$TMPDIR"}})
    without = make({"data": {"source": "x"}})
    assert not differences(staged, without)
    assert identity(staged) == identity(without)


def test_a_bomb_of_aliases_is_answered_at_once() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    assert "unknown key" in complaint(parse_yaml(text, "bomb"))


def test_segresnet_takes_channels_of_any_depth() -> None:
    model = make({"model": {"name": "segresnet", "channels": [16, 32, 64, 128, 256]}}).model
    assert (model.blocks_down, model.blocks_up, model.stride) == ((1, 2, 2, 2, 4), (1, 1, 1, 1), 16)


@pytest.mark.parametrize(
    "overrides",
    [("data.source=here", "train.init_from=first"), ("data={source: here}", "train={init_from: first}")],
    ids=["fields", "whole sections"],
)
def test_paths_on_the_command_line_are_relative_to_where_it_runs(
    overrides: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make({}, *overrides)
    assert (config.data.source, make({}).data.source) == (str(tmp_path / "here"), "/base/d")
    assert (config.train.init_from, make({}).train.init_from) == (str(tmp_path / "first"), None)


def test_what_is_found_is_quoted_in_a_line_that_can_be_read() -> None:
    said = complaint({"augment": "(" * 3000})
    assert len(said) < 700
    assert said.startswith("c.yaml: augment: found '(((")
    assert said.endswith("expected none, light, full or a list of transforms")
