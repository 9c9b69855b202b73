"""Pairs by pattern: channels, patients, and cases that lack a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import save_volume
from voxscale.config.data import Data
from voxscale.data.cases import Manifest
from voxscale.data.formats import load_manifest
from voxscale.errors import DataError


def _load(folder: Path, image: Any, label: str) -> Manifest:
    data = Data.model_validate({"source": str(folder), "pattern": {"image": image, "label": label}})
    return load_manifest(data, folder)


def test_several_patterns_are_channels(tmp_path: Path) -> None:
    for case in ("x1", "x2"):
        for name in ("t1", "t2", "truth"):
            save_volume(tmp_path / case / f"{case}_{name}.nii")
    (tmp_path / "x2" / "x2_t1.nii").unlink()
    save_volume(tmp_path / "x2" / "x1_t1.nii")  # of another case than its folder's
    save_volume(tmp_path / "x1" / "._x1_t1.nii")
    manifest = _load(tmp_path, ["{case}/{case}_t1.nii", "{case}/{case}_t2.nii"], "{case}/{case}_truth.nii")
    assert [case.id for case in manifest.cases] == ["x1"]
    assert [path.name for path in manifest.cases[0].files] == ["x1_t1.nii", "x1_t2.nii", "x1_truth.nii"]
    (finding,) = manifest.findings
    assert (finding.code, finding.case, finding.found) == ("missing-modality", "x2", "no image 1")


def test_patients_are_named_by_folders(tmp_path: Path) -> None:
    for patient, case in (("p1", "v1"), ("p1", "v2"), ("p2", "v1")):
        save_volume(tmp_path / patient / f"{case}.nii.gz")
        save_volume(tmp_path / patient / f"{case}_label.nii.gz")
    manifest = _load(tmp_path, "{patient}/{case}.nii.gz", "{patient}/{case}_label.nii.gz")
    assert [case.id for case in manifest.cases] == ["p1-v1", "p1-v2", "p2-v1"]
    assert not manifest.findings, "a label that fits the image's pattern too is still a label"
    manifest = _load(tmp_path, "{patient}/v{case}.nii.gz", "{patient}/v{case}_label.nii.gz")
    assert [(case.id, case.patient) for case in manifest.cases] == [("p1-1", "p1"), ("p1-2", "p1"), ("p2-1", "p2")]


def test_patients_in_the_image_names_only(tmp_path: Path) -> None:
    for patient, case in (("p1", "v1"), ("p2", "v2")):
        save_volume(tmp_path / "i" / f"{patient}_{case}.nii.gz")
        save_volume(tmp_path / "l" / f"{case}.nii.gz")
    manifest = _load(tmp_path, "i/{patient}_{case}.nii.gz", "l/{case}.nii.gz")
    assert [(case.id, case.patient) for case in manifest.cases] == [("v1", "p1"), ("v2", "p2")]
    save_volume(tmp_path / "i" / "p3_v1.nii.gz")
    (finding,) = _load(tmp_path, "i/{patient}_{case}.nii.gz", "l/{case}.nii.gz").findings
    assert (finding.code, finding.case) == ("two-files", "v1")


def test_lone_files_and_no_file_at_all(tmp_path: Path) -> None:
    save_volume(tmp_path / "a-i.nii")
    save_volume(tmp_path / "b-l.nii")
    manifest = _load(tmp_path, "{case}-i.nii", "{case}-l.nii")
    assert [(finding.code, finding.case) for finding in manifest.findings] == [
        ("missing-label", "a"),
        ("missing-image", "b"),
    ]
    with pytest.raises(DataError, match=r"no file matches '\{case\}.x', '\{case\}.y'"):
        _load(tmp_path, "{case}.x", "{case}.y")


def test_two_files_for_one_case_and_unknown_volumes_are_named(tmp_path: Path) -> None:
    for name in ("img0.nii.gz", "scan0.nii", "seg0.nii.gz", "foo.nii.gz"):
        save_volume(tmp_path / name)
    findings = load_manifest(Data(source=str(tmp_path)), tmp_path).findings
    assert [(finding.code, finding.case, finding.file) for finding in findings] == [
        ("stray-file", "", "foo.nii.gz"),
        ("two-files", "0", "img0.nii.gz"),
    ]
    assert findings[1].found == "2 images: 'img0.nii.gz', 'scan0.nii'"


plain = st.text(alphabet="ab.+*[(\\^$ ", min_size=1, max_size=6).filter(lambda text: not text.startswith("."))


@settings(max_examples=60)
@given(prefix=plain, suffix=plain)
def test_all_else_in_a_pattern_stands_for_itself(
    prefix: str, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pattern")
    for name in (f"{prefix}7{suffix}", f"{prefix}7{suffix}L"):
        (folder / name).write_bytes(b"")
    manifest = _load(folder, prefix + "{case}" + suffix, prefix + "{case}" + suffix + "L")
    assert [case.id for case in manifest.cases] == ["7"]
