"""What `init` writes: a valid config, with only those fields in which the defaults do not fit the data."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from conftest import Cli
from layouts import LAYOUTS, example_bytes, mutants, save_volume, tensor_bytes, write_shard
from voxscale.config.load import make_config
from voxscale.config.models import UNetOptions
from voxscale.data.formats import find_cases
from voxscale.data.guess import guess_config
from voxscale.data.synthetic import write_cifar10
from voxscale.errors import DataError
from voxscale.models.networks import build_plain


def _guess(source: Path, scratch: Path) -> dict[str, Any]:
    """The guess, after a check that it is a config whose data can be found."""
    content = guess_config(source, scratch).content
    config = make_config(json.loads(json.dumps(content)), name="guess", base=Path())
    assert find_cases(config.data, scratch).cases
    return content


def _write_pairs(folder: Path, *volumes: NDArray[Any]) -> Path:
    for number, voxels in enumerate(volumes):
        save_volume(folder / f"img{number}.nii.gz", voxels)
        save_volume(folder / f"seg{number}.nii.gz", np.zeros(voxels.shape[:3], np.uint8))
    return folder


def _noise(*shape: int) -> NDArray[np.int16]:
    return np.random.default_rng(0).integers(-200, 900, shape).astype(np.int16)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_format_gets_a_valid_config(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    source = layout.make(tmp_path / "data")
    patch = [16, 16, 32] if name == "tfrecord" else [32, 16, 16]  # its records are longest along z
    fields: dict[str, Any] = {"source": str(source), "format": layout.format}
    others = {"patches": {"size": patch}} if layout.labelled else {"task": "classification", "train": {"batch": 8}}
    if name in ("classes: images", "classes: split") or layout.format == "cifar10":
        fields |= {"orientation": None, "intensity": {"window": [0.0, 255.0]}}
        others["model"] = {"dims": 2, "stem": "small"}
    if layout.format == "cifar10":
        fields["split"] = {"val": 0.1, "test": 0.0, "keep_test": True}
    assert _guess(source, tmp_path) == {"data": fields, **others}


def test_patches_for_tiny_volumes_can_be_trained_by_the_default_model(tmp_path: Path) -> None:
    content = _guess(_write_pairs(tmp_path / "d", _noise(5, 20, 6)), tmp_path)
    assert content["patches"] == {"size": [16, 32, 16]}
    options = make_config(content, name="guess", base=Path()).model
    assert isinstance(options, UNetOptions)
    patch = content["patches"]["size"]
    build_plain(options, 1, 2, patch).train()(torch.zeros(1, 1, *patch))


def test_patches_fill_the_median_volume(tmp_path: Path) -> None:
    source = _write_pairs(tmp_path / "d", _noise(200, 20, 70), _noise(100, 50, 60), _noise(90, 40, 10))
    assert _guess(source, tmp_path)["patches"] == {"size": [96, 32, 48]}  # of 100, 40, 60


def test_what_the_defaults_fit_is_not_written(tmp_path: Path) -> None:
    source = _write_pairs(tmp_path / "d", np.zeros((96, 100, 97), np.uint8))
    assert _guess(source, tmp_path) == {"data": {"source": str(source), "format": "pairs"}}


def test_patches_follow_the_orientation_in_which_volumes_are_trained(tmp_path: Path) -> None:
    turned = np.array([[0, 0, -1, 0], [1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 1.0]])  # file axes: y, z, -x
    (tmp_path / "d").mkdir()
    for kind in ("img", "seg"):
        nib.save(nib.Nifti1Image(np.zeros((32, 48, 64), np.uint8), turned), tmp_path / "d" / f"{kind}0.nii")
    assert _guess(tmp_path / "d", tmp_path)["patches"] == {"size": [64, 32, 48]}


@pytest.mark.parametrize(
    ("low", "dtype", "is_ct"),
    [(-1024, np.int16, True), (-1024, np.float32, True), (-1024.5, np.float32, False), (-400, np.int16, False)],
)
def test_hounsfield_units_get_a_window(low: float, dtype: type, is_ct: bool, tmp_path: Path) -> None:
    voxels = np.full((16, 16, 16), 40, dtype)
    voxels[0] = low
    data = _guess(_write_pairs(tmp_path / "d", voxels, voxels), tmp_path)["data"]
    assert data.get("intensity") == ({"window": [-1000.0, 1000.0]} if is_ct else None)


def test_the_shape_of_records_is_that_of_one_of_them(tmp_path: Path) -> None:
    image, label = np.zeros((4, 40, 35, 100), np.float32), np.zeros((1, 40, 35, 100), np.float32)
    write_shard(
        tmp_path / "d" / "train_0.tfrecord", [example_bytes(img=tensor_bytes(image), label=tensor_bytes(label))]
    )
    content = _guess(tmp_path / "d", tmp_path)
    assert content["patches"] == {"size": [32, 32, 96]}


def test_an_archive_is_its_own_source(tmp_path: Path) -> None:
    folder = LAYOUTS["nnunet: its parent"].make(tmp_path / "data")
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(folder, ".")
    data = _guess(tmp_path / "data.tar", tmp_path / "scratch")["data"]
    assert data == {"source": str(tmp_path / "data.tar"), "format": "nnunet"}


@pytest.mark.parametrize("name", ["pairs: row 0", "tfrecord", "list: its folder"])
def test_an_archive_may_hold_everything_in_one_folder(name: str, tmp_path: Path) -> None:
    folder = LAYOUTS[name].make(tmp_path / "data")
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(folder, "top")
    assert _guess(tmp_path / "data.tar", tmp_path / "scratch")["data"]["format"] == LAYOUTS[name].format


def test_regions_that_the_dataset_declares_are_trained(tmp_path: Path) -> None:
    source = LAYOUTS["nnunet: the dataset"].make(tmp_path / "data")
    content = json.loads((source / "dataset.json").read_text())
    content["labels"] = {"background": 0, "whole tumor": [1, 2, 3], "mean": [1, 2], "é": 3, "ET": [3]}
    (source / "dataset.json").write_text(json.dumps(content))
    assert _guess(source, tmp_path)["data"]["regions"] == {
        "whole_tumor": [1, 2, 3],
        "region_1_2": [1, 2],
        "region_3": [3],
        "ET": [3],
    }


def _table(folder: Path, header: str, *cells: str) -> Path:
    lines = [f"case,image,label{header}"]
    for number, cell in enumerate(cells):
        save_volume(folder / f"{number}.nii")
        lines.append(f"c{number},{number}.nii,{number}.nii{cell}")
    (folder / "t.csv").write_text("\n".join(lines))
    return folder / "t.csv"


@pytest.mark.parametrize(
    ("header", "cells", "split"),
    [
        (",Fold_1", (",train", ",val"), {"column": "Fold_1"}),
        (",Fold_1,Fold_2,x", (",train,val,1", ",val,train,2"), {"column": ["Fold_1", "Fold_2"]}),
        (",s", (",Training", ",valid", ",TEST"), {"column": "s", "train": "training", "val": "valid"}),
        (",s", (", train", ",val "), {"column": "s"}),
        (",s", (",train", ",test"), {"column": "s"}),
        (",s", (",train", ",Train", ",val"), {"column": "s"}),
        (",s", (",train", ",train"), None),
        (",s", (",train", ",val", ",other"), None),
        ("", ("", ""), None),
    ],
)
def test_fold_columns_become_the_split(header: str, cells: tuple[str, ...], split: object, tmp_path: Path) -> None:
    assert _guess(_table(tmp_path, header, *cells), tmp_path)["data"].get("split") == split


@pytest.mark.parametrize(
    ("header", "cells", "complaint"),
    [
        (",s", (",train", ",val", ","), "column 's' states the split, but not everywhere: found no entry in row 4"),
        (
            ",fold",
            (",train", ",val", ",vall", ","),
            "states the split, but not everywhere: found 'vall' in row 4, no entry in row 5, expected train, val",
        ),
        (
            ",s",
            (",train", ",val", ",valid"),
            "column 's' has several words for one part of the split: train, val, valid",
        ),
        (",a,b", (",train,train", ",val,valid"), "column 'b' spells the split otherwise than 'a'"),
    ],
)
def test_what_is_almost_a_split_is_not_passed_over(
    header: str, cells: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=complaint):
        _guess(_table(tmp_path, header, *cells), tmp_path)


def test_an_override_of_the_fold_keeps_the_split_that_the_table_states(tmp_path: Path) -> None:
    path = _table(tmp_path, ",Fold_1,Fold_2", ",train,val", ",val,train", ",test,test")
    stated = {"column": ["Fold_1", "Fold_2"]}
    assert guess_config(path, tmp_path, {"split": {"fold": 2}}).content["data"]["split"] == {**stated, "fold": 2}
    assert guess_config(path, tmp_path, {"split": {"val": 0.5}}).content["data"]["split"] == {"val": 0.5}
    gap = _table(tmp_path, ",s", ",train", ",val", ",")
    assert guess_config(gap, tmp_path, {"split": {"val": 0.5}}).content["data"]["split"] == {"val": 0.5}
    assert guess_config(gap, tmp_path, strict=False).content["data"]["split"] == {"column": "s"}
    odd = _table(tmp_path, ",fold", ",0", ",1")
    assert guess_config(odd, tmp_path, strict=False).content["data"]["split"] == {"column": "fold"}
    with pytest.raises(DataError, match="column 'fold': found '0', '1', expected train, and val or test"):
        guess_config(odd, tmp_path)


def test_what_the_user_states_holds(tmp_path: Path) -> None:
    save_volume(tmp_path / "a.nii", _noise(5, 6, 7))
    (tmp_path / "t.csv").write_text("who,picture,truth\np1,a.nii,a.nii\n")
    given = {"columns": {"image": "picture", "label": "truth", "patient": "who"}, "intensity": {"zscore": "all"}}
    guessed = guess_config(tmp_path / "t.csv", tmp_path, given).content
    assert guessed["data"].items() >= given.items()


@pytest.mark.parametrize("header", ["NIFTI path,time,sex", "NIFTI path,event,sex", "NIFTI path,mean HU,sex"])
def test_a_table_of_outcomes_says_what_is_missing(header: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"{header}\ngone.nii.gz,1,f\n")
    columns = ", ".join(f"'{name}'" for name in header.split(","))
    expected = f"t.csv: found columns {columns}, expected paths of labels .*, time and event, or a class"
    with pytest.raises(DataError, match=expected) as caught:
        guess_config(tmp_path / "t.csv", tmp_path)
    assert "data.columns: label, time and event, classes, or the targets of a regression" in caught.value.fix


def test_damaged_volumes_are_named(tmp_path: Path) -> None:
    source = _write_pairs(tmp_path / "d", _noise(5, 6, 7))
    path, refused = source / "img0.nii", 0
    (source / "img0.nii.gz").unlink()
    save_volume(path, _noise(5, 6, 7))
    for damaged in mutants(path.read_bytes()[:120], 300):
        path.write_bytes(damaged + bytes(700))
        try:
            guess_config(source, tmp_path)
        except DataError as error:
            refused += 1
            assert error.message.startswith("img0.nii: ")
    assert refused > 100


def _pictures(folder: Path, *places: str, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> Path:
    """An image of noise at each place."""
    rng = np.random.default_rng(0)
    for place in places:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes(mode, size, rng.bytes(size[0] * size[1] * len(mode))).save(folder / place)
    return folder


QUICKLY = (
    *("train.epochs=1", "model.width=8", "train.threads=1", "train.precision=fp32", "train.compile=false"),
    *("track=none", "log=quiet", "--devices", "1"),
)


def test_a_folder_of_pictures_is_trained_as_it_is(cli_here: Cli, tmp_path: Path) -> None:
    folder = _pictures(tmp_path / "pets", *(f"{kind}/{number}.png" for kind in ("cat", "dog") for number in range(5)))
    written = cli_here("init", folder, "--out", tmp_path / "c.yaml", "--json")
    assert written.code == 0, written.err
    assert "task classification: 2 classes in 10 images" in written.json["said"]
    done = cli_here("train", tmp_path / "c.yaml", *QUICKLY, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "done"
    assert "accuracy" in done.json["summary"]


def test_cifar10_is_trained_as_it_is_and_its_test_set_stays_that(cli_here: Cli, tmp_path: Path) -> None:
    write_cifar10(tmp_path / "c10", per_batch=10)
    done = cli_here("train", tmp_path / "c10", *QUICKLY, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    rows = [line.split(",") for line in (tmp_path / "run" / "split.csv").read_text().splitlines()[1:]]
    assert {case for case, _, split in rows if split == "test"} == {f"test_batch-{number:05d}" for number in range(10)}
    assert sum(split == "val" for _, _, split in rows) == 5
    assert "accuracy" in done.json["test"]


def test_a_table_may_name_pictures(cli_here: Cli, tmp_path: Path) -> None:
    _pictures(tmp_path, *(f"{number}.png" for number in range(8)), size=(70, 30), mode="L")
    rows = [f"{number}.png,{'ab'[number % 2]}" for number in range(8)]
    (tmp_path / "t.csv").write_text("\n".join(["image,class", *rows]))
    content = guess_config(tmp_path / "t.csv", tmp_path).content
    assert content["model"] == {"dims": 2, "stem": "large"}
    assert content["data"].items() >= {"orientation": None, "intensity": {"window": [0.0, 255.0]}}.items()
    done = cli_here("train", tmp_path / "t.csv", *QUICKLY, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "done"


@pytest.mark.parametrize(
    ("sizes", "whole"),
    [(((12, 10), (12, 10)), None), (((12, 10), (14, 8)), [13, 9, 1]), (((2048, 512),), [1024, 256, 1])],
)
def test_pictures_get_one_size(sizes: tuple[tuple[int, int], ...], whole: list[int] | None, tmp_path: Path) -> None:
    for number, size in enumerate(sizes):
        for kind in ("a", "b"):
            _pictures(tmp_path / "d", f"{kind}/{number}.png", size=size, mode="L")
    content = guess_config(tmp_path / "d", tmp_path).content
    assert content["data"].get("size") == whole
    assert content["model"]["stem"] == ("large" if whole == [1024, 256, 1] else "small")


def test_what_is_deeper_than_bytes_has_no_window_of_bytes(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 60000, (9, 8)).astype(np.uint16)
    for place in ("a/1.png", "b/1.png"):
        (tmp_path / "d" / place).parent.mkdir(parents=True)
        Image.fromarray(deep).save(tmp_path / "d" / place)
    data = guess_config(tmp_path / "d", tmp_path).content["data"]
    assert "intensity" not in data and data["orientation"] is None


def test_what_is_stated_as_test_is_kept_unless_the_split_is_given(tmp_path: Path) -> None:
    places = [f"{part}/{kind}/{number}.png" for part in ("train", "test") for kind in "ab" for number in range(2)]
    folder = _pictures(tmp_path / "d", *places)
    guessed = guess_config(folder, tmp_path)
    kept = {"val": 0.1, "test": 0.0, "keep_test": True}
    assert guessed.content["data"]["split"] == kept
    assert any("stays so" in line for line in guessed.said)
    assert guess_config(folder, tmp_path, {"split": {"seed": 3}}).content["data"]["split"] == {**kept, "seed": 3}
    assert guess_config(folder, tmp_path, {"split": {"val": 0.5}}).content["data"]["split"] == {"val": 0.5}
    _pictures(folder, "val/a/1.png")
    assert "split" not in guess_config(folder, tmp_path).content["data"]


def test_of_many_outcomes_a_few_are_looked_at_and_damaged_ones_passed_over(tmp_path: Path) -> None:
    """What is wrong with them is for whoever prepares the data to list as a whole."""
    folder = _pictures(tmp_path / "d", *(f"{kind}/{number:03d}.png" for kind in "ab" for number in range(100)))
    (folder / "a" / "000.png").write_bytes(b"no picture")
    content = guess_config(folder, tmp_path).content
    assert content["model"] == {"dims": 2, "stem": "small"}
    assert content["train"] == {"batch": 32}
