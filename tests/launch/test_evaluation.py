"""`voxscale evaluate`: the run's own cases, others that it has never seen, and what does not fit the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import yaml

from conftest import Cli, tiny_config
from voxscale.files import read_csv


@pytest.fixture(scope="module")
def train(cli_here: Cli, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("runs")

    def start(name: str, **fields: object) -> Path:
        if not (root / name).exists():
            config = root / f"{name}.yaml"
            config.write_text(yaml.safe_dump(tiny_config(dataset, log="quiet", **fields)))
            done = cli_here("train", config, "--devices", 1, "--run", root / name)
            assert done.code == 0, done.err
        return root / name

    return start


@pytest.fixture
def run(train: Callable[..., Path]) -> Path:
    return train("run")


def scores(folder: Path, column: str = "dice/mean") -> dict[str, str]:
    return {row["case"]: row[column] for row in read_csv(folder / "cases.csv")}


def test_own_cases_score_as_at_the_end_of_training(run: Path, cli_here: Cli) -> None:
    done = cli_here("evaluate", run, "--json")
    assert done.code == 0, done.err
    assert (run / "evaluations" / "val" / "cases.csv").read_text() == (run / "cases.csv").read_text()
    assert set(done.json["summary"]) >= {"dice/ball", "iou/mean", "hd95/ball", "surface_dice/ball", "volume/ball"}
    mirrored = cli_here("evaluate", run, "--mirror", "--name", "mirrored")
    assert mirrored.code == 0, mirrored.err
    assert "surface_dice" in mirrored.out
    assert scores(run / "evaluations" / "mirrored") != scores(run)


def test_other_data_is_prepared_as_the_runs_own(run: Path, dataset: Path, tmp_path: Path, cli_here: Cli) -> None:
    """The very voxels under other names, in another format: the scores are those of the run."""
    for name in ("imagesTr", "labelsTr"):
        (tmp_path / "Dataset001_New" / name).mkdir(parents=True)
    for case in scores(run):
        shutil.copy(dataset / f"img{case}.nii.gz", tmp_path / "Dataset001_New" / "imagesTr" / f"new{case}_0000.nii.gz")
        shutil.copy(dataset / f"seg{case}.nii.gz", tmp_path / "Dataset001_New" / "labelsTr" / f"new{case}.nii.gz")
    (tmp_path / "Dataset001_New" / "dataset.json").write_text(
        '{"channel_names": {"0": "CT"}, "labels": {"background": 0, "ball": 1}, '
        '"file_ending": ".nii.gz", "numTraining": 3}'
    )
    done = cli_here("evaluate", run, "--data", tmp_path / "Dataset001_New", "--json")
    assert done.code == 0, done.err
    assert (done.json["data"], "split" in done.json) == ("Dataset001_New", False)
    found = scores(run / "evaluations" / "Dataset001_New")
    assert {f"new{case}": score for case, score in scores(run).items()} == found


@pytest.mark.parametrize(
    ("channels", "label", "message"),
    [
        (2, 1, "found 2 channels, expected the 1 that the model was trained on"),
        (1, 7, "found labels [7], expected [0, 1]"),
        (1, None, "found an image that has no label"),
    ],
    ids=["channels", "labels", "no label"],
)
def test_data_that_does_not_fit_the_run(
    run: Path, tmp_path: Path, cli_here: Cli, channels: int, label: int | None, message: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    rng = np.random.default_rng(0)
    shape = (24, 24, 16) if channels == 1 else (24, 24, 16, channels)
    for number in range(2):
        image = rng.normal(size=shape).astype(np.float32)
        nib.save(nib.Nifti1Image(image, np.eye(4)), folder / f"img{number}.nii.gz")
        if label is not None or number == 0:
            mask = np.zeros(shape[:3], np.uint8)
            mask[4:9, 4:9, 4:9] = label or 1
            nib.save(nib.Nifti1Image(mask, np.eye(4)), folder / f"seg{number}.nii.gz")
    done = cli_here("evaluate", run, "--data", folder, "--name", "misfit")
    assert not (run / "evaluations" / "misfit").exists()
    assert (done.code, message in done.err) == (3, True), done.err


def test_a_checkpoint_of_another_model_is_refused(
    run: Path, train: Callable[..., Path], tmp_path: Path, cli_here: Cli
) -> None:
    other = train("wider", model__channels=[6, 8])
    mixed = tmp_path / "mixed"
    shutil.copytree(run, mixed, symlinks=True)
    shutil.rmtree(mixed / "checkpoints")
    shutil.copytree(other / "checkpoints", mixed / "checkpoints", symlinks=True)
    done = cli_here("evaluate", mixed)
    assert done.code == 2
    assert "is of another task, model or number of channels" in done.err
    assert "found [6, 1, 3, 3, 3], expected [4, 1, 3, 3, 3]" in done.err


def test_a_class_that_no_training_case_has_is_refused(dataset: Path, tmp_path: Path, cli_here: Cli) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    lines = ["image,label,fold"]
    for number in range(4):
        shutil.copy(dataset / f"img{number}.nii.gz", folder / f"i{number}.nii.gz")
        label = np.asarray(nib.load(dataset / f"seg{number}.nii.gz").dataobj).astype(np.uint8)
        label[:3] = 2 if number == 3 else 0
        nib.save(nib.Nifti1Image(label, np.eye(4)), folder / f"l{number}.nii.gz")
        lines.append(f"i{number}.nii.gz,l{number}.nii.gz,{'val' if number == 3 else 'train'}")
    (folder / "cases.csv").write_text("\n".join(lines) + "\n")
    split = {"column": "fold", "train": "train", "val": "val"}
    content = tiny_config(folder / "cases.csv", data__split=split, data__regions={"ball": [1], "slab": [2]})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    done = cli_here("train", tmp_path / "c.yaml", "--devices", 1, "--run", tmp_path / "run")
    assert done.code == 3
    assert "found class slab (label 2) in no training case, expected at least one" in done.err
    assert not (tmp_path / "run").exists()
