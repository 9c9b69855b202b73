"""nnU-Net datasets: channels by number, regions, and what is missing of a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layouts import LAYOUTS, save_volume
from voxscale.config.data import Data
from voxscale.data.cases import Manifest
from voxscale.data.formats import detect_format, load_manifest
from voxscale.data.formats.nnunet import declared_regions
from voxscale.errors import DataError

REGIONS = {"background": 0, "whole tumor": [1, 2, 3], "tumor core": [2, 3], "ET": [3], "ignore": 4}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return LAYOUTS["nnunet: the dataset"].make(tmp_path / "Dataset001_BraTS")


def _load(source: Path) -> Manifest:
    return load_manifest(Data(source=str(source)), source.parent)


def _declare(source: Path, **fields: Any) -> None:
    content = json.loads((source / "dataset.json").read_text())
    (source / "dataset.json").write_text(json.dumps({**content, **fields}))


def test_channels_are_in_the_order_of_their_numbers(source: Path) -> None:
    manifest = _load(source)
    assert manifest.channels == ("T2", "ADC")
    assert manifest.labels == {0: "background", 1: "PZ", 2: "TZ"}
    assert [path.name for path in manifest.cases[0].images] == ["a1_0000.nii.gz", "a1_0001.nii.gz"]


def test_regions_declare_all_their_labels(source: Path) -> None:
    _declare(source, labels=REGIONS)
    assert _load(source).labels == {0: "background", 1: "1", 2: "2", 3: "ET", 4: "ignore"}
    assert declared_regions(source) == {"whole_tumor": [1, 2, 3], "tumor_core": [2, 3], "ET": [3]}


def test_plain_labels_are_no_regions(source: Path) -> None:
    assert declared_regions(source) == {}


def test_everything_that_is_amiss_is_named_by_its_file(source: Path) -> None:
    (source / "imagesTr" / "a1_0001.nii.gz").unlink()
    (source / "labelsTr" / "b2.nii.gz").unlink()
    save_volume(source / "labelsTr" / "d4.nii.gz")
    for stray in ("c3_0002.nii.gz", "c3.nii.gz", "c3_0000.nii"):
        save_volume(source / "imagesTr" / stray)
    manifest = _load(source)
    assert [case.id for case in manifest.cases] == ["c3"]
    assert {(finding.code, finding.case, finding.file) for finding in manifest.findings} == {
        ("stray-file", "", "imagesTr/c3.nii.gz"),
        ("stray-file", "", "imagesTr/c3_0000.nii"),
        ("stray-file", "", "imagesTr/c3_0002.nii.gz"),
        ("missing-modality", "a1", "imagesTr/a1_0001.nii.gz"),
        ("missing-label", "b2", "labelsTr/b2.nii.gz"),
        ("missing-image", "d4", "labelsTr/d4.nii.gz"),
    }


def test_fewer_cases_than_promised_is_a_warning(source: Path) -> None:
    _declare(source, numTraining=9)
    (finding,) = _load(source).findings
    assert (finding.level, finding.found) == ("warning", "3 cases in imagesTr")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"file_ending": ".mha"}, "file_ending: found '.mha', expected .nii.gz or .nii"),
        ({"file_ending": 3}, "file_ending: found 3"),
        ({"channel_names": {}}, "channel_names: found none"),
        ({"channel_names": {"0": "T2", "2": "ADC"}}, "channel_names: .* without a gap"),
        ({"labels": {"tumour": [1, "two"]}}, "labels: found 'two', expected whole numbers"),
    ],
)
def test_odd_declarations_are_named(source: Path, fields: dict[str, Any], match: str) -> None:
    _declare(source, **fields)
    with pytest.raises(DataError, match=match):
        _load(source)


def test_neither_is_taken_for_the_other(source: Path, tmp_path: Path) -> None:
    task = LAYOUTS["decathlon: the task"].make(tmp_path / "Task09_Spleen")
    for folder, name in ((source, "nnunet"), (task, "decathlon")):
        assert detect_format(folder) == name
        (folder / "dataset.json").write_text('{"cut off')
        assert detect_format(folder) == name
        with pytest.raises(DataError, match=r"dataset.json: cannot be read"):
            _load(folder)


def test_version_1_lists_cases_without_the_channel(source: Path) -> None:
    training = [{"image": f"./imagesTr/{case}.nii.gz", "label": f"./labelsTr/{case}.nii.gz"} for case in ("a1", "b2")]
    content = {"modality": {"0": "T2", "1": "ADC"}, "labels": {"0": "background", "1": "PZ"}, "training": training}
    (source / "dataset.json").write_text(json.dumps(content))
    assert detect_format(source) == "nnunet"
    manifest = _load(source)
    assert ([case.id for case in manifest.cases], manifest.findings) == (["a1", "b2", "c3"], ())
    assert (manifest.channels, manifest.labels) == (("T2", "ADC"), {0: "background", 1: "PZ"})
