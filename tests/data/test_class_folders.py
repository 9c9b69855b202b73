"""A folder per class: its images found with their class, and nobody else's folders taken for one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from layouts import LAYOUTS, save_volume
from voxscale.config.data import Data
from voxscale.data.build import prepare
from voxscale.data.cases import Manifest
from voxscale.data.formats import class_folders, detect_format, load_manifest
from voxscale.errors import DataError


def picture(path: Path, value: int = 7, mode: str = "L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new(mode, (5, 4))
    image.putpixel((1, 2), value if mode == "L" else (value, 0, 0))
    image.save(path)
    return path


def load(source: Path, format: str = "classes") -> Manifest:
    return load_manifest(Data.model_validate({"source": str(source), "format": format}), source.parent / "scratch")


def test_classes_are_named_by_their_folders(tmp_path: Path) -> None:
    for name in ("cat/2.png", "cat/1.JPG", "dog/3.bmp", "eel/4.tif", "eel/5.jpeg"):
        picture(tmp_path / name)
    save_volume(tmp_path / "dog" / "6.nii.gz")
    manifest = load(tmp_path, "auto")
    assert manifest.findings == ()
    assert all(case.row.keys() == {"class"} and case.label is None for case in manifest.cases)
    names = {"1": "cat", "2": "cat", "3": "dog", "6": "dog", "4": "eel", "5": "eel"}
    assert {case.id: case.row["class"] for case in manifest.cases} == names
    assert {case.where for case in manifest.cases} >= {"cat/1.JPG", "dog/6.nii.gz"}
    assert {case.role for case in manifest.cases} == {""}


@pytest.mark.parametrize(
    ("names", "roles"),
    [(("train", "val", "test"), ("train", "val", "test")), (("Training", "valid"), ("train", "val"))],
)
def test_trees_as_of_imagenet_state_the_split(tmp_path: Path, names: tuple[str, ...], roles: tuple[str, ...]) -> None:
    for part in names:
        for each in ("cat/1.png", "dog/1.png"):
            picture(tmp_path / part / each)
    assert detect_format(tmp_path) == "classes"
    manifest = load(tmp_path)
    assert manifest.findings == ()
    assert {case.id: (case.role, case.row["class"]) for case in manifest.cases} == {
        f"{part}-{each}-1": (role, each) for part, role in zip(names, roles, strict=True) for each in ("cat", "dog")
    }


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("train/1.png", "car/2.png", "test/3.png"):
        picture(tmp_path / name)
    assert detect_format(tmp_path) == "classes"
    assert sorted(case.row["class"] for case in load(tmp_path).cases) == ["car", "test", "train"]
    assert {case.role for case in load(tmp_path).cases} == {""}


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.format != "classes"])
def test_the_layouts_of_other_formats_are_left_to_them(name: str, tmp_path: Path) -> None:
    LAYOUTS[name].make(tmp_path / "d")
    assert not class_folders.detect(tmp_path / "d")


@pytest.mark.parametrize(
    "files",
    [
        ("images/1.png", "masks/1.png"),
        ("imagesTr/1.nii.gz", "imagesTs/2.nii.gz"),
        ("train/images/1.png", "train/labels/1.png", "val/images/2.png"),
        ("s1/img.nii.gz", "s1/seg.nii.gz", "s2/img.nii.gz", "s2/seg.nii.gz"),
        ("siteA/img1.nii.gz", "siteA/seg1.nii.gz", "siteB/img2.nii.gz", "siteB/seg2.nii.gz"),
        ("B_001/B_001_flair.nii.gz", "B_001/B_001_t1.nii.gz", "B_002/B_002_flair.nii.gz", "B_002/B_002_t1.nii.gz"),
        ("p1/ct.nii", "p2/ct.nii", "p3/ct.nii"),
        ("scans/1.nii.gz", "scans/2.nii.gz"),
        ("cat/1.png",),
        ("notes/a.txt", "more/b.txt"),
    ],
)
def test_what_may_be_a_segmentation_or_patients_is_not_guessed_to_be_classes(
    files: tuple[str, ...], tmp_path: Path
) -> None:
    write = {"png": picture, "txt": _text}
    for name in files:
        write.get(name[-3:], save_volume)(tmp_path / name)
    assert not class_folders.detect(tmp_path)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (("cat/1.png",), "one folder of images, 'cat', where classes are two or more"),
        (("train/cat/1.png", "val/cat/2.png"), "one folder of images, 'cat'"),
        (("cat/1.png", "mask/2.png"), "called 'mask' may be a segmentation's; if they are classes, say data.format"),
        (("p1/ct.nii", "p2/ct.nii"), "may be patients; if they are classes, say data.format=classes"),
        (("cat/1.png", "dog/2.png"), ""),
        (("notes/a.txt",), ""),
    ],
)
def test_why_folders_of_images_are_not_classes_is_said(files: tuple[str, ...], why: str, tmp_path: Path) -> None:
    write = {"png": picture, "txt": _text}
    for name in files:
        write.get(name[-3:], save_volume)(tmp_path / name)
    found = class_folders.why_not(tmp_path)
    assert why in found
    assert bool(found) == bool(why)
    if why:
        with pytest.raises(DataError) as refusal:
            detect_format(tmp_path)
        assert refusal.value.message.endswith(f"found no known layout: {found}")


def _text(path: Path) -> object:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_text("x")


def test_volumes_that_are_counted_class_by_class_are_classes(tmp_path: Path) -> None:
    for name in ("benign/1.nii.gz", "benign/2.nii.gz", "malignant/1.nii.gz", "malignant/2.nii.gz"):
        save_volume(tmp_path / name)
    assert detect_format(tmp_path) == "classes"
    assert [case.id for case in load(tmp_path).cases] == ["benign-1", "benign-2", "malignant-1", "malignant-2"]


def test_what_no_case_comes_from_is_said_once_for_a_folder(tmp_path: Path) -> None:
    for name in (
        "train/cat/1.png",
        "train/dog/1.png",
        "train/2.png",
        "extra/cat/1.png",
        "3.png",
        "train/cat/deep/4.png",
    ):
        picture(tmp_path / name)
    for name in ("a.gif", "b.gif", "Thumbs.db"):
        (tmp_path / "train" / "dog" / name).write_bytes(b"x")
    (tmp_path / "train" / "eel").mkdir()
    manifest = load(tmp_path)
    assert [case.where for case in manifest.cases] == ["train/cat/1.png", "train/dog/1.png"]
    assert {
        (finding.level, finding.code, finding.file, finding.found.split(",")[0]) for finding in manifest.findings
    } == {
        ("warning", "stray-folder", "", "'extra'"),
        ("warning", "stray-file", "", "'3.png'"),
        ("warning", "stray-file", "train", "'2.png'"),
        ("warning", "stray-folder", "train/cat", "'deep'"),
        ("warning", "stray-file", "train/dog", "'Thumbs.db' and 2 more"),
        ("warning", "empty-class", "train/eel", "no image"),
    }


def test_the_same_image_in_two_files_of_a_class_is_a_duplicate(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/1.jpg", "dog/2.png"):
        picture(tmp_path / name)
    manifest = load(tmp_path)
    assert [(finding.code, finding.case) for finding in manifest.findings] == [("duplicate-case", "1")]


def test_pictures_reach_the_store(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/2.png", "dog/3.png"):
        picture(tmp_path / "d" / name, value=int(name[4]), mode="RGB")
    data = Data.model_validate({"source": str(tmp_path / "d"), "intensity": {"window": [0, 255]}})
    store = prepare(load_manifest(data, tmp_path), data, tmp_path / "store", patch=None, threads=2)
    assert len(store) == 3
    assert store.channels == 3
    assert {store.id(row) for row in range(3)} == {"1", "2", "3"}


def test_images_that_cannot_be_read_are_all_named_when_preparing(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/2.png", "dog/3.png", "dog/4.png"):
        picture(tmp_path / "d" / name)
    (tmp_path / "d" / "cat" / "2.png").write_bytes((tmp_path / "d" / "cat" / "2.png").read_bytes()[:60])
    (tmp_path / "d" / "dog" / "4.png").write_bytes(b"rubbish")
    data = Data.model_validate({"source": str(tmp_path / "d")})
    with pytest.raises(DataError) as refusal:
        prepare(load_manifest(data, tmp_path), data, tmp_path / "store", patch=None)
    assert refusal.value.exit_code == 3
    lines = refusal.value.message.splitlines()
    assert len(lines) == 2
    assert "2.png" in lines[0]
    assert "4.png" in lines[1]


def test_grey_and_colour_do_not_mix(tmp_path: Path) -> None:
    colours = {"cat/1.png": "L", "cat/2.png": "L", "cat/5.png": "L", "dog/3.png": "RGB", "dog/4.png": "RGB"}
    for name, mode in colours.items():
        picture(tmp_path / "d" / name, mode=mode)
    data = Data.model_validate({"source": str(tmp_path / "d")})
    with pytest.raises(DataError) as refusal:
        prepare(load_manifest(data, tmp_path), data, tmp_path / "store", patch=None)
    assert refusal.value.message == "case 3 and 1 more: found 3 channels, expected 1 as in most cases"
    assert "all as grey or all as RGB" in refusal.value.fix


def test_names_that_repeat_in_every_class_are_told_apart(tmp_path: Path) -> None:
    content = picture(tmp_path / "one.png").read_bytes()
    for number in range(100):
        (tmp_path / "d" / f"class{number}").mkdir(parents=True)
        for each in range(20):
            (tmp_path / "d" / f"class{number}" / f"{each}.png").write_bytes(content)
    manifest = load(tmp_path / "d")
    assert len({case.id for case in manifest.cases}) == 2000
    assert np.unique([case.row["class"] for case in manifest.cases]).size == 100
