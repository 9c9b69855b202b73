"""Which images are predicted: files, folders, and the unlabelled images of every known format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from layouts import LAYOUTS, Layout, save_volume
from voxscale.config.schema import Columns, Data
from voxscale.data.cases import Case
from voxscale.errors import ConfigError, DataError
from voxscale.infer.inputs import find_inputs

ANY = Data(source="trained-on")


def named(cases: list[Case]) -> dict[str, list[str]]:
    assert all(case.label is None for case in cases)
    return {case.id: [path.name for path in case.images] for case in cases}


def find(*paths: Path, data: Data = ANY) -> dict[str, list[str]]:
    cases, findings = find_inputs(paths, data, paths[0].parent / "scratch")
    assert findings == []
    return named(cases)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_dataset_in_any_known_format_gives_its_images(layout: Layout, tmp_path: Path) -> None:
    cases, findings = find_inputs([layout.make(tmp_path / "data")], ANY, tmp_path / "scratch")
    assert tuple(case.id for case in cases) == (layout.ids if layout.format != "list" else ("img9",))  # its test entry
    assert findings == []
    assert all(case.label is None or case.record is not None for case in cases)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith(("decathlon", "nnunet"))])
def test_images_ts_are_what_is_predicted(name: str, tmp_path: Path) -> None:
    source = LAYOUTS[name].make(tmp_path / "data")
    folder = next(source.rglob("imagesTr")).with_name("imagesTs")
    for name in ("t1_0000.nii.gz", "t1_0001.nii.gz", "._t1_0000.nii.gz"):
        save_volume(folder / name)
    assert find(source) == {"t1": ["t1_0000.nii.gz", "t1_0001.nii.gz"]}


def test_the_test_entries_of_a_list_are_what_is_predicted(tmp_path: Path) -> None:
    for name in ("a", "la", "t", "t2"):
        save_volume(tmp_path / f"{name}.nii.gz")
    content = {
        "training": [{"image": "a.nii.gz", "label": "la.nii.gz"}],
        "test": ["t.nii.gz", {"image": ["t2.nii.gz", "t.nii.gz"]}],
    }
    (tmp_path / "list.json").write_text(json.dumps(content))
    expected = {"t": ["t.nii.gz"], "t2": ["t2.nii.gz", "t.nii.gz"]}
    assert find(tmp_path / "list.json") == find(tmp_path) == expected
    content["test"] = ["../t.nii.gz"]
    (tmp_path / "list.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="leads out"):
        find(tmp_path)


def test_of_pairs_only_the_images_without_a_label_are_predicted(tmp_path: Path) -> None:
    for name in ("img1", "seg1", "img2", "._img3", "seg9"):
        save_volume(tmp_path / f"{name}.nii.gz")
    assert find(tmp_path) == {"2": ["img2.nii.gz"]}


def test_a_table_is_read_with_the_columns_of_the_run(tmp_path: Path) -> None:
    save_volume(tmp_path / "a.nii.gz")
    (tmp_path / "cohort.csv").write_text("which,strange\nc1,a.nii.gz\n")
    data = Data(source="x", format="table", columns=Columns(image="strange", case="which"))
    assert find(tmp_path / "cohort.csv", data=data) == {"c1": ["a.nii.gz"]}


def test_rows_of_a_table_without_their_file_are_findings_and_the_others_stay(tmp_path: Path) -> None:
    save_volume(tmp_path / "a.nii.gz")
    (tmp_path / "cohort.csv").write_text("case,image\nc1,a.nii.gz\nc2,gone.nii.gz\n")
    cases, findings = find_inputs([tmp_path / "cohort.csv"], ANY, tmp_path / "scratch")
    assert named(cases) == {"c1": ["a.nii.gz"]}
    assert [(finding.case, finding.code) for finding in findings] == [("c2", "missing-file")]


def test_files_of_a_folder_and_channels_by_their_numbers(tmp_path: Path) -> None:
    names = ("b_0000.nii.gz", "b_0001.nii.gz", "a.nii", "scan_2021.nii.gz", "._a.nii", "c_0000.nii.gz", "notes.txt")
    for name in names:
        save_volume(tmp_path / name) if ".nii" in name else (tmp_path / name).write_text("")
    expected = {
        "a": ["a.nii"],
        "b": ["b_0000.nii.gz", "b_0001.nii.gz"],
        "c": ["c_0000.nii.gz"],
        "scan_2021": ["scan_2021.nii.gz"],
    }
    assert find(tmp_path) == expected
    files = [tmp_path / name for name in names if ".nii" in name and not name.startswith(".")]
    assert find(*reversed(files), files[0], tmp_path) == expected, "what is given twice counts once"


def test_every_path_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError) as refused:
        find(tmp_path / "gone", tmp_path / "empty", tmp_path / "notes.txt")
    assert all(name in refused.value.message for name in ("gone", "empty", "notes.txt"))
    assert len(refused.value.message.splitlines()) == 3


def test_two_images_for_one_output_are_refused(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        save_volume(tmp_path / folder / "a.nii.gz")
        save_volume(tmp_path / folder / f"{folder}.nii.gz")
    shutil.copy(tmp_path / "x" / "a.nii.gz", tmp_path / "y" / "x.nii")
    with pytest.raises(ConfigError) as refused:
        find(tmp_path / "x", tmp_path / "y")
    assert len(refused.value.message.splitlines()) == 2
