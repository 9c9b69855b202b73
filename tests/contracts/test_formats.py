"""What every format must keep to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from voxscale.data.formats import FORMATS, detect_format, find_cases
from voxscale.errors import DataError


def _save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.zeros((2, 2, 2), np.uint8), np.eye(4)), path)


def _pairs(image: str, label: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for case in ("a1", "b2", "c3"):
            _save(folder / image.format(case))
            _save(folder / label.format(case))

    return make


def _decathlon(prefix: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        task = folder / prefix
        pairs = [(f"./imagesTr/{case}.nii.gz", f"./labelsTr/{case}.nii.gz") for case in ("b2", "a1", "c3")]
        for path in (path for pair in pairs for path in pair):
            _save(task / path)
        hidden = [("./imagesTr/._a1.nii.gz", "./labelsTr/._a1.nii.gz")]
        training = [{"image": image, "label": label} for image, label in [*pairs, *hidden]]
        (task / "dataset.json").write_text(json.dumps({"labels": {"0": "background"}, "training": training}))

    return make


LAYOUTS = {
    "decathlon: the task": ("decathlon", _decathlon(".")),
    "decathlon: its parent": ("decathlon", _decathlon("Task09_Spleen")),
    "pairs: row 0": ("pairs", _pairs("img{}.nii.gz", "seg{}.nii.gz")),
    "pairs: suffixes": ("pairs", _pairs("{}_image.nii", "{}_mask.nii")),
    "pairs: folders": ("pairs", _pairs("images/{}.nii.gz", "labels/{}.nii.gz")),
}


@pytest.fixture(params=LAYOUTS, ids=LAYOUTS.keys())
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name, make = LAYOUTS[request.param]
    folder = tmp_path / "data set"
    make(folder)
    return name, folder


def test_every_format_is_covered() -> None:
    assert {name for name, _ in LAYOUTS.values()} == FORMATS.keys()


def test_detected_and_found_in_order(layout: tuple[str, Path]) -> None:
    name, folder = layout
    assert detect_format(folder) == name
    cases = find_cases(folder, "auto")
    assert [case.id for case in cases] == ["a1", "b2", "c3"]
    assert cases == find_cases(folder, name)
    for case in cases:
        assert case.label is not None
        assert case.label.exists()
        assert all(path.exists() for path in case.images)
        assert case.id in case.images[0].name
        assert case.id in case.label.name
        assert case.patient


def test_hidden_files_do_not_count(layout: tuple[str, Path]) -> None:
    _, folder = layout
    for path in list(folder.rglob("*.nii*")):
        (path.parent / f"._{path.name}").write_bytes(b"junk")
    assert len(find_cases(folder, "auto")) == 3


def test_all_strays_are_named_at_once(layout: tuple[str, Path]) -> None:
    _, folder = layout
    files = sorted(path for path in folder.rglob("*.nii*"))
    for path in files:
        if ("a1" in path.name and path in _labels(files)) or ("b2" in path.name and path not in _labels(files)):
            path.unlink()
    with pytest.raises(DataError) as caught:
        find_cases(folder, "auto")
    first, second = sorted(caught.value.message.splitlines(), key=lambda line: "b2" in line)
    assert re.search("a1.* has no label|labelsTr/a1.nii.gz is missing", first)
    assert re.search("b2.* has no image|imagesTr/b2.nii.gz is missing", second)


def _labels(files: list[Path]) -> list[Path]:
    return [
        path
        for path in files
        if any(word in str(path.relative_to(path.parents[1])) for word in ("seg", "mask", "labels"))
    ]


def test_two_files_for_one_case_and_unknown_volumes_are_named(tmp_path: Path) -> None:
    for name in ("img0.nii.gz", "scan0.nii", "seg0.nii.gz", "foo.nii.gz"):
        _save(tmp_path / name)
    with pytest.raises(DataError) as caught:
        find_cases(tmp_path, "pairs")
    assert caught.value.message.splitlines() == [
        f"{tmp_path.name}: foo.nii.gz is neither image nor label",
        f"{tmp_path.name}: case 0 has 2 images: img0.nii.gz, scan0.nii",
    ]


@pytest.mark.parametrize("listed", ["../out.nii.gz", "/etc/passwd", 3, None])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path, listed: object) -> None:
    _decathlon(".")(tmp_path)
    content = json.loads((tmp_path / "dataset.json").read_text())
    content["training"][1]["image"] = listed
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="dataset.json: training case 2"):
        find_cases(tmp_path, "auto")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"training": 3}', '{"training": []}', '{"training": [3]}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    _decathlon(".")(tmp_path)
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(DataError, match="dataset.json"):
        find_cases(tmp_path, "decathlon")


def test_a_case_listed_twice_is_named(tmp_path: Path) -> None:
    _decathlon(".")(tmp_path)
    content = json.loads((tmp_path / "dataset.json").read_text())
    content["training"].append(content["training"][0])
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="case b2 is listed 2 times"):
        find_cases(tmp_path, "auto")


@pytest.mark.parametrize("case", ["..", "a\nb", "a\udcffb"], ids=["dots", "newline", "not UTF-8"])
def test_what_cannot_name_a_case_is_refused(tmp_path: Path, case: str) -> None:
    for kind in ("img", "seg"):
        _save(tmp_path / "v.nii")
        (tmp_path / "v.nii").rename(tmp_path / f"{kind}_{case}.nii")
    with pytest.raises(DataError, match="cannot name a case"):
        find_cases(tmp_path, "pairs")


@pytest.mark.parametrize("name", FORMATS)
def test_missing_empty_and_foreign_folders(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        find_cases(tmp_path / "absent", "auto")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder is empty"):
        find_cases(tmp_path / "empty", "auto")
    (tmp_path / "empty" / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="found no known layout"):
        find_cases(tmp_path / "empty", "auto")
    with pytest.raises(DataError):
        find_cases(tmp_path / "empty", name)
