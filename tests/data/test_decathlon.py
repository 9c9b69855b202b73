"""A Decathlon task with four modalities and overlapping regions, from files to a table of cases."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from conftest import Cli
from voxscale.checkpoint import load_checkpoint
from voxscale.config.data import Data
from voxscale.data.formats import find_cases
from voxscale.errors import DataError


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "Task01_BrainTumour"
    training = []
    for number in range(6):
        rng = np.random.default_rng(number)
        label = np.zeros((20, 20, 16), np.uint8)
        for value, edge in ((2, 12), (1, 8), (3, 4)):
            label[4 : 4 + edge, 4 : 4 + edge, 2 : 2 + edge] = value
        image = rng.normal(size=(*label.shape, 4)) + label[..., None] * np.array([1, 0.5, -1, 2])
        entry = {"image": f"./imagesTr/BRATS_{number:03d}.nii.gz", "label": f"./labelsTr/BRATS_{number:03d}.nii.gz"}
        for path, voxels in ((entry["image"], image.astype(np.float32)), (entry["label"], label)):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(voxels, np.eye(4)), folder / path)
        training.append(entry)
    content = {
        "name": "BRATS",
        "modality": {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"},
        "labels": {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"},
        "training": training,
    }
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def test_labels_and_modalities_are_those_of_dataset_json(task: Path, tmp_path: Path) -> None:
    manifest = find_cases(Data(source=str(task)), tmp_path)
    assert manifest.channels == ("FLAIR", "T1w", "t1gd", "T2w")
    assert manifest.labels == {0: "background", 1: "edema", 2: "non-enhancing tumor", 3: "enhancing tumour"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels", [0, 1]),
        ("labels", {"tumour": 256}),
        ("labels", {"tumour": 10**30}),
        ("labels", {"tumour": True}),
        ("labels", {"-1": "tumour"}),
        ("modality", {"1": "CT"}),
        ("modality", {"0": 3}),
        ("modality", "CT"),
    ],
)
def test_odd_declarations_are_named(task: Path, tmp_path: Path, field: str, value: object) -> None:
    content = json.loads((task / "dataset.json").read_text())
    (task / "dataset.json").write_text(json.dumps({**content, field: value}))
    with pytest.raises(DataError, match=rf"dataset.json: {field}: found .*, expected "):
        find_cases(Data(source=str(task)), tmp_path)


def test_four_modalities_and_three_regions(cli_here: Cli, task: Path, tmp_path: Path) -> None:
    small = ["patches.size=[16,16,16]", "model.channels=[4,8]", "train.epochs=2", "track=none", "--devices", "1"]
    regions = "data.regions={TC: [2, 3], WT: [1, 2, 3], ET: [3]}"
    done = cli_here("train", task, *small, regions, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["summary"].keys() >= {"dice/TC", "dice/WT", "dice/ET", "dice/mean"}
    weights = load_checkpoint(tmp_path / "run" / "checkpoints" / "best").model
    assert {tensor.shape[1] for tensor in weights.values() if tensor.dim() == 5} >= {4}, "all modalities go in"
    (row,) = csv.DictReader((tmp_path / "run" / "cases.csv").open())
    assert row["case"].startswith("BRATS_")
    assert float(row["dice/mean"]) == pytest.approx(
        np.mean([float(row[f"dice/{name}"]) for name in ("TC", "WT", "ET")])
    )


def test_exclusive_classes_without_regions(cli_here: Cli, task: Path, tmp_path: Path) -> None:
    small = ["patches.size=[16,16,16]", "model.channels=[4,8]", "train.epochs=1", "track=none", "--devices", "1"]
    done = cli_here("train", task.parent, *small, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["summary"].keys() >= {"dice/1", "dice/2", "dice/3", "dice/mean"}


def test_brackets_without_end_are_refused_in_words(task: Path, tmp_path: Path) -> None:
    (task / "dataset.json").write_text('{"training": ' + "[" * 100_000)
    with pytest.raises(DataError, match="dataset.json: cannot be read: brackets nested too deep"):
        find_cases(Data(source=str(task)), tmp_path)
