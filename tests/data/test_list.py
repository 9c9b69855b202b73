"""List files: roles from the lists, names made distinct, an image on both sides refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from layouts import save_volume
from voxscale.config.data import Data
from voxscale.data.cases import Manifest
from voxscale.data.formats import load_manifest
from voxscale.data.formats.sources import distinct_names


def _load(folder: Path, **lists: Any) -> Manifest:
    for entry in (entry for entries in lists.values() for entry in entries or () if isinstance(entry, dict)):
        images = entry["image"] if isinstance(entry["image"], list) else [entry["image"]]
        for path in (*images, entry["label"]):
            save_volume(folder / path)
    (folder / "dataset_0.json").write_text(json.dumps(lists))
    return load_manifest(Data(source=str(folder / "dataset_0.json")), folder)


def _entry(case: str, **more: Any) -> dict[str, Any]:
    return {"image": f"images/{case}.nii.gz", "label": f"labels/{case}.nii.gz", **more}


def test_the_lists_are_the_split(tmp_path: Path) -> None:
    manifest = _load(tmp_path, training=[_entry("a"), _entry("c")], validation=[_entry("b")], test=["images/x.nii.gz"])
    assert [(case.id, case.role) for case in manifest.cases] == [("a", "train"), ("b", "val"), ("c", "train")]


def test_without_a_validation_list_there_are_no_roles(tmp_path: Path) -> None:
    for validation in (None, []):
        manifest = _load(tmp_path, training=[_entry("a", fold=2)], validation=validation)
        assert [(case.role, case.row) for case in manifest.cases] == [("", {"fold": "2"})]


def test_several_images_are_channels_and_names_come_from_the_folders(tmp_path: Path) -> None:
    entries = [
        {"image": [f"{case}/flair.nii.gz", f"{case}/t1.nii.gz"], "label": f"{case}/seg.nii.gz"} for case in ("p1", "p2")
    ]
    manifest = _load(tmp_path, training=entries)
    assert [case.id for case in manifest.cases] == ["p1-flair", "p2-flair"]
    assert [path.name for path in manifest.cases[0].images] == ["flair.nii.gz", "t1.nii.gz"]


def test_an_image_in_both_lists_is_an_error(tmp_path: Path) -> None:
    manifest = _load(tmp_path, training=[_entry("a"), _entry("b")], validation=[_entry("b"), _entry("c")])
    (finding,) = manifest.findings
    assert (finding.level, finding.code, finding.file) == ("error", "split-overlap", "images/b.nii.gz")
    again = {"image": "images/./b.nii.gz", "label": "labels/b.nii.gz"}
    assert _load(tmp_path, training=[_entry("b")], validation=[again]).findings[0].code == "split-overlap"


folders = st.lists(st.sampled_from("pqr"), max_size=3)


@given(st.lists(st.tuples(folders, st.sampled_from("xyz")), max_size=12))
def test_distinct_files_get_distinct_names(places: list[tuple[list[str], str]]) -> None:
    files = [PurePosixPath(*above, f"{name}.nii.gz") for above, name in places]
    names = dict(zip(files, distinct_names(files), strict=True))
    counts = Counter(file.name for file in names)
    assert len(set(names.values())) == len(names)
    for file, name in names.items():
        assert name.endswith(file.name.removesuffix(".nii.gz"))
        assert counts[file.name] > 1 or name == file.name.removesuffix(".nii.gz")
