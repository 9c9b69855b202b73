"""Tables as people save them: any spelling of the columns, any separator and encoding; every faulty row named."""

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
from voxscale.data.formats.table import read_table
from voxscale.errors import DataError


def _load(folder: Path, content: str | bytes, name: str = "cohort.csv", **fields: Any) -> Manifest:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return load_manifest(Data.model_validate({"source": str(folder / name), **fields}), folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a_img", "a_seg", "b_img", "b_seg"):
        save_volume(tmp_path / f"{name}.nii.gz")
    return tmp_path


PLAIN = "case,image,label,age\na,a_img.nii.gz,a_seg.nii.gz,61\nb,b_img.nii.gz,b_seg.nii.gz,47\n"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (PLAIN, "cohort.csv"),
        (PLAIN.replace("\n", "\r\n"), "cohort.csv"),
        (PLAIN.replace("\n", "\r"), "cohort.csv"),
        (PLAIN.rstrip("\n"), "COHORT.CSV"),
        (PLAIN.replace("\n", "\n\n,,,\n"), "cohort.csv"),
        (PLAIN.replace(",", ";").replace("61", "61,5"), "cohort.csv"),
        (PLAIN.replace(",", "\t"), "cohort.tsv"),
        (PLAIN.replace(",", "\t"), "cohort.csv"),
        (PLAIN.encode("utf-8-sig"), "cohort.csv"),
        (PLAIN.encode("utf-16"), "cohort.csv"),
        (PLAIN.replace("61", '"sixty\none, ""or"" so"'), "cohort.csv"),
        (PLAIN.replace("a,a_img", " a , a_img"), "cohort.csv"),
        (PLAIN.replace("case", "Case ID").replace("image", "NIFTI Path").replace("label", "Mask"), "cohort.csv"),
        (PLAIN.replace("case", "ID").replace("image", "image_path").replace("label", "SEG"), "cohort.csv"),
        (PLAIN.replace("case,", ",case,").replace("\na,", "\n0,a,").replace("\nb,", "\n1,b,"), "cohort.csv"),
    ],
)
def test_tables_as_people_save_them(folder: Path, content: str | bytes, name: str) -> None:
    manifest = _load(folder, content, name)
    assert manifest.findings == ()
    assert [case.id for case in manifest.cases] == ["a", "b"]
    assert [path.name for path in manifest.cases[0].files] == ["a_img.nii.gz", "a_seg.nii.gz"]
    assert manifest.cases[1].row["age"] == "47"


def test_the_whole_row_is_kept_as_it_stands(folder: Path) -> None:
    manifest = _load(folder, PLAIN.replace("61", '" x\n=1"'))
    assert manifest.cases[0].row == {
        "case": "a",
        "image": "a_img.nii.gz",
        "label": "a_seg.nii.gz",
        "age": " x\n=1",
    }


def test_patients_own_their_cases(folder: Path) -> None:
    manifest = _load(folder, PLAIN.replace(",age", ",Subject_ID").replace("61", "p1").replace("47", "p1"))
    assert [case.patient for case in manifest.cases] == ["p1", "p1"]


def test_paths_may_lead_anywhere_since_the_user_wrote_them(folder: Path) -> None:
    (folder / "tables").mkdir()
    content = PLAIN.replace("a_img", f"{folder}/a_img").replace("a_seg", "../a_seg").replace("b_", "../b_")
    manifest = _load(folder / "tables", content)
    assert manifest.findings == ()
    assert len(manifest.cases) == 2


def test_a_table_without_labels_has_none(folder: Path) -> None:
    for content in ("NIFTI path,time,event\na_img.nii.gz,300,1\n", "NIFTI path,label\na_img.nii.gz,1\n"):
        (case,) = _load(folder, content).cases
        assert (case.id, case.label) == ("a_img", None)
        assert case.row["NIFTI path"] == "a_img.nii.gz"


def test_several_image_columns_are_channels(folder: Path) -> None:
    content = "name,t1,t2,truth\nx,a_img.nii.gz,b_img.nii.gz,a_seg.nii.gz\ny,a_img.nii.gz,,b_seg.nii.gz\n"
    manifest = _load(folder, content, columns={"image": ["t1", "t2"], "label": "truth", "case": "name"})
    assert manifest.channels == ("t1", "t2")
    assert [(case.id, len(case.images)) for case in manifest.cases] == [("x", 2)]
    (finding,) = manifest.findings
    assert (finding.code, finding.case, finding.file) == ("missing-modality", "y", "cohort.csv row 3")


def test_every_faulty_row_is_named_by_its_number(folder: Path) -> None:
    rows = [
        "case,image,label,patient",
        "a,a_img.nii.gz,a_seg.nii.gz,p1",
        "b,gone.nii.gz,b_seg.nii.gz,p2",
        "c,b_img.nii.gz,,p3",
        '"d',
        'e",,b_seg.nii.gz,p4',
        "a,b_img.nii.gz,b_seg.nii.gz,p5",
        "f,b_img.nii.gz,b_seg.nii.gz",
        ",b_img.nii.gz,b_seg.nii.gz,p6",
        "g,.,b_seg.nii.gz,",
        f"h,{'x' * 300},b_seg.nii.gz,p7",
        "i/j,b_img.nii.gz,b_seg.nii.gz,p8",
    ]
    manifest = _load(folder, "\n".join(rows))
    assert [case.id for case in manifest.cases] == ["a"]
    assert sorted((finding.file, finding.code) for finding in manifest.findings) == [
        ("b_img.nii.gz", "bad-name"),
        ("cohort.csv row 10", "missing-file"),
        ("cohort.csv row 3", "missing-file"),
        ("cohort.csv row 4", "missing-label"),
        ("cohort.csv row 5", "missing-image"),
        ("cohort.csv row 6", "duplicate-case"),
        ("cohort.csv row 7", "bad-row"),
        ("cohort.csv row 8", "bad-row"),
        ("cohort.csv row 9", "bad-row"),
        ("cohort.csv row 9", "missing-file"),
    ]


@pytest.mark.parametrize(
    ("content", "fields", "match"),
    [
        (PLAIN, {"image": "imgae"}, "data.columns.image: found no column 'imgae'; did you mean 'image'?"),
        (PLAIN.replace(",age", ",Label"), {"label": "LABEL"}, "label: found no column 'LABEL'; did you mean 'Label'?"),
        (PLAIN, {"image": "x1", "label": "y2"}, "image: found no column 'x1'\n.*label: found no column 'y2'"),
        (PLAIN.replace("image", "NIFTI path").replace(",age", ",nifti_path"), {}, "'NIFTI path' and 'nifti_path'"),
        (PLAIN.replace("image", "scan of"), {}, "found no column of images among 'case', 'scan of', 'label', 'age'"),
        (PLAIN.replace(",age", ",case"), {}, "found column 'case' more than once"),
        ("", {}, "found no header"),
        ("case,image,label\n", {}, "found no row"),
        (PLAIN.replace("61", '"61'), {}, "cannot be read as a table: unexpected end of data"),
        (PLAIN.replace("61", "6\xe9").encode("latin-1"), {}, "'utf-8' codec can't decode byte 0xe9"),
        (PLAIN.replace("61", "\0"), {}, "found binary content"),
        (PLAIN.replace("61", "6" * 200_000), {}, "field larger than field limit"),
    ],
)
def test_what_makes_a_table_unusable_is_said(
    folder: Path, content: str | bytes, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(DataError, match=f"(?s)cohort.csv.*{match}") as caught:
        _load(folder, content, columns=fields)
    assert caught.value.fix


@settings(max_examples=150)
@given(content=st.binary(max_size=80) | st.text(alphabet='a,;\t"\n\r image.', max_size=80).map(str.encode))
def test_any_bytes_are_a_table_or_an_error(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(content)
    try:
        table = read_table(path)
    except DataError as error:
        assert error.message.startswith("any.csv: ")
    else:
        assert all(set(row) == set(table.columns) for row in table.rows.values())
        assert table.rows or table.faults


def test_a_column_of_classes_does_not_hide_the_one_of_volumes(folder: Path) -> None:
    manifest = _load(folder, "image,label,mask\na_img.nii.gz,1,a_seg.nii.gz\n")
    assert [case.label for case in manifest.cases] == [folder / "a_seg.nii.gz"]


def test_naming_a_column_settles_which_of_two_counts(folder: Path) -> None:
    content = "Image,image,label\nx.nii.gz,a_img.nii.gz,a_seg.nii.gz\n"
    with pytest.raises(DataError, match="could both be the image"):
        _load(folder, content)
    (case,) = _load(folder, content, columns={"image": "image"}).cases
    assert case.images == (folder / "a_img.nii.gz",)


def test_columns_are_found_in_any_spelling_of_their_names_where_that_is_clear(folder: Path) -> None:
    content = "nifti_path,PATIENT,Age,sex,SEX\na_img.nii.gz,p1,61,f,m\n"
    named = {"image": "NIFTI path", "patient": "patient", "features": ["age", "Sex"]}
    (case,) = _load(folder, content, columns=named).cases
    assert (case.images, case.patient) == ((folder / "a_img.nii.gz",), "p1")
    assert case.row == {"NIFTI path": "a_img.nii.gz", "patient": "p1", "age": "61", "sex": "f", "SEX": "m"}
    (case,) = _load(folder, content, columns={"image": "nifti_path", "features": ["AGE", "age"]}).cases
    assert case.row["Age"] == "61", "one column cannot have two names"
