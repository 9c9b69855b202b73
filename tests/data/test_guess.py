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

from layouts import LAYOUTS, example_bytes, mutants, save_volume, tensor_bytes, write_shard
from voxscale.config.load import make_config
from voxscale.config.models import UNetOptions
from voxscale.data.formats import find_cases
from voxscale.data.guess import guess_config
from voxscale.errors import DataError
from voxscale.models.networks import build_unet


def _guess(source: Path, scratch: Path) -> dict[str, Any]:
    """The guess, after a check that it is a config whose data can be found."""
    content = guess_config(source, scratch)
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
    source = LAYOUTS[name].make(tmp_path / "data")
    assert _guess(source, tmp_path) == {
        "data": {"source": str(source), "format": LAYOUTS[name].format},
        "patches": {"size": [16, 16, 32] if name == "tfrecord" else [32, 16, 16]},  # its records are longest along z
    }


def test_patches_for_tiny_volumes_can_be_trained_by_the_default_model(tmp_path: Path) -> None:
    content = _guess(_write_pairs(tmp_path / "d", _noise(5, 20, 6)), tmp_path)
    assert content["patches"] == {"size": [16, 32, 16]}
    options = make_config(content, name="guess", base=Path()).model
    assert isinstance(options, UNetOptions)
    patch = content["patches"]["size"]
    build_unet(options, 1, 2, patch).train()(torch.zeros(1, 1, *patch))


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
        (",s", (",train", ",val", ","), "column 's' states the split, but not in row 4"),
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
    assert guess_config(path, tmp_path, {"split": {"fold": 2}})["data"]["split"] == {**stated, "fold": 2}
    assert guess_config(path, tmp_path, {"split": {"val": 0.5}})["data"]["split"] == {"val": 0.5}
    gap = _table(tmp_path, ",s", ",train", ",val", ",")
    assert guess_config(gap, tmp_path, {"split": {"val": 0.5}})["data"]["split"] == {"val": 0.5}
    assert guess_config(gap, tmp_path, strict=False)["data"]["split"] == {"column": "s"}


def test_what_the_user_states_holds(tmp_path: Path) -> None:
    save_volume(tmp_path / "a.nii", _noise(5, 6, 7))
    (tmp_path / "t.csv").write_text("who,picture,truth\np1,a.nii,a.nii\n")
    given = {"columns": {"image": "picture", "label": "truth", "patient": "who"}, "intensity": {"zscore": "all"}}
    guessed = guess_config(tmp_path / "t.csv", tmp_path, given)
    assert guessed["data"].items() >= given.items()


def test_a_table_of_outcomes_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("NIFTI path,time,event\ngone.nii.gz,100,1\n")
    with pytest.raises(
        DataError, match="found columns 'NIFTI path', 'time', 'event', expected one with .* label"
    ) as caught:
        guess_config(tmp_path / "t.csv", tmp_path)
    assert "come later" in caught.value.fix


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
