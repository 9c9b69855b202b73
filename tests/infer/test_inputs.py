"""Which images are predicted: files, folders, and the unlabelled images of every known format."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from layouts import LAYOUTS, Layout, save_volume
from voxscale.config.data import Columns, Data
from voxscale.data.cases import Case
from voxscale.errors import ConfigError, DataError
from voxscale.infer.inputs import find_inputs

ANY = Data(source="trained-on")


def named(cases: list[Case]) -> dict[str, list[str]]:
    assert all(case.label is None for case in cases)
    return {case.id: [path.name for path in case.images] for case in cases}


def find(*paths: Path, data: Data = ANY, channels: int = 0) -> dict[str, list[str]]:
    cases, findings = find_inputs(paths, data, paths[0].parent / "scratch", channels=channels)
    assert findings == []
    return named(cases)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_dataset_in_any_known_format_gives_its_images(layout: Layout, tmp_path: Path) -> None:
    cases, findings = find_inputs([layout.make(tmp_path / "data")], ANY, tmp_path / "scratch")
    if layout.format == "pairs":  # outputs are named as images are, not as what pairs them with labels
        assert [case.id for case in cases] == [case.images[0].name.partition(".")[0] for case in cases]
        assert len(cases) == len(layout.ids)
    else:
        expected = layout.ids if layout.format != "list" else ("img9",)  # its test entry
        assert tuple(case.id for case in cases) == expected
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
    assert find(tmp_path) == {"img2": ["img2.nii.gz"]}
    (tmp_path / "seg2.nii.gz").write_bytes((tmp_path / "seg1.nii.gz").read_bytes())
    assert find(tmp_path) == {"img1": ["img1.nii.gz"], "img2": ["img2.nii.gz"]}, "all, as each has a label"


@pytest.mark.parametrize("name", ["img\x1b[31m", "img two\nlines", os.fsdecode(b"img\xff"), "other \u200b"])
def test_of_pairs_an_image_with_an_unprintable_name_is_found(tmp_path: Path, name: str) -> None:
    for each in ("img1", "seg1", name):
        save_volume(tmp_path / f"{each}.nii.gz")
    cases, findings = find_inputs([tmp_path], ANY, tmp_path / "scratch")
    assert findings == []
    assert [(case.id, case.images) for case in cases] == [(name, (tmp_path / f"{name}.nii.gz",))]


def test_folders_are_read_with_the_pattern_of_the_run(tmp_path: Path) -> None:
    pattern = {"image": ["{patient}/{case}_t1.nii.gz", "{patient}/t2/{case}.nii.gz"], "label": "{patient}/{case}.nii"}
    data = Data.model_validate({"source": "x", "pattern": pattern})
    for case in ("a", "b"):
        for part in pattern["image"]:
            save_volume(tmp_path / "in" / part.format(patient=f"p-{case}", case=case))
    both = {case: [f"{case}_t1.nii.gz", f"{case}.nii.gz"] for case in ("a", "b")}
    assert find(tmp_path / "in", data=data, channels=2) == both
    save_volume(tmp_path / "in" / "p-a" / "a.nii")
    assert find(tmp_path / "in", data=data, channels=2) == {"b": both["b"]}, "only a has a label"
    (tmp_path / "in" / "p-b" / "t2" / "b.nii.gz").unlink()
    cases, findings = find_inputs([tmp_path / "in"], data, tmp_path / "scratch", channels=2)
    assert "missing-modality" in {finding.code for finding in findings if finding.case == "b"}
    assert "b" not in named(cases)
    save_volume(tmp_path / "plain" / "scan.nii.gz")
    assert find(tmp_path / "plain", data=data) == {"scan": ["scan.nii.gz"]}, "a pattern that finds nothing is no bar"


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


def test_to_a_model_of_one_channel_numbered_files_are_single_images(tmp_path: Path) -> None:
    for name in ("scan_0000", "scan_0001", "scan_0005", "lone_0000", "late_0003", "a"):
        save_volume(tmp_path / f"{name}.nii.gz")
    expected = {
        "a": ["a.nii.gz"],
        "late_0003": ["late_0003.nii.gz"],
        "lone": ["lone_0000.nii.gz"],
        **{f"scan_{number}": [f"scan_{number}.nii.gz"] for number in ("0000", "0001", "0005")},
    }
    assert find(tmp_path, channels=1) == find(*sorted(tmp_path.glob("*")), channels=1) == expected


@pytest.mark.parametrize(
    ("numbers", "channels", "said"),
    [
        ((0, 2), 0, "no g_0001.nii.gz"),
        ((0, 2), 3, "no g_0001.nii.gz"),
        ((0, 1), 3, "no g_0002.nii.gz"),
        ((0, 1, 2), 2, "g_0002.nii.gz beside them"),
        ((0, 2021), 0, "no g_0001.nii.gz, g_0002.nii.gz, g_0003.nii.gz and 2017 more"),
    ],
)
def test_no_other_channel_takes_the_place_of_a_missing_one(
    tmp_path: Path, numbers: tuple[int, ...], channels: int, said: str
) -> None:
    for number in numbers:
        save_volume(tmp_path / f"g_{number:04}.nii.gz")
    for name in ("h_0000", "h_0001", "h_0002")[: channels or 2]:
        save_volume(tmp_path / f"{name}.nii.gz")
    for paths in ([tmp_path], sorted(tmp_path.glob("*.nii.gz"))):
        cases, (finding,) = find_inputs(paths, ANY, tmp_path / "scratch", channels=channels)
        assert [case.id for case in cases] == ["h"]
        assert (finding.level, finding.case, finding.file) == ("error", "g", "g_0000.nii.gz")
        assert said in finding.found


def test_two_files_for_one_channel_are_refused(tmp_path: Path) -> None:
    for name in ("g_0000.nii", "g_0000.nii.gz", "g_0001.nii.gz"):
        save_volume(tmp_path / name)
    cases, (finding,) = find_inputs([tmp_path], ANY, tmp_path / "scratch", channels=2)
    assert cases == []
    assert "g_0000.nii, g_0000.nii.gz for one channel" in finding.found


def test_many_files_take_no_longer_than_their_number(tmp_path: Path) -> None:
    """Each path is looked at once, not sought among all the others."""
    paths = [tmp_path / f"gone{number}.nii.gz" for number in range(20000)]
    start = time.process_time()
    assert len(find(*paths)) == 20000
    assert time.process_time() - start < 8


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
