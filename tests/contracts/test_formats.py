"""What every format must keep to."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from layouts import LAYOUTS, Layout, mutants, save_volume
from voxscale.config.data import Data
from voxscale.data.cases import Manifest
from voxscale.data.formats import FORMATS, detect_format, find_cases, load_manifest
from voxscale.errors import ConfigError, DataError


@dataclass(frozen=True)
class Dataset:
    """A layout as it lies in `folder`; `source` is what a user names."""

    layout: Layout
    folder: Path
    source: Path

    def load(self, format: str = "auto", **fields: object) -> Manifest:
        data = Data.model_validate({"source": str(self.source), "format": format, **fields})
        return load_manifest(data, self.folder.parent / "scratch")

    def find(self, format: str = "auto") -> Manifest:
        data = Data.model_validate({"source": str(self.source), "format": format})
        return find_cases(data, self.folder.parent / "scratch")

    @property
    def manifest(self) -> Path:
        assert self.layout.manifest is not None
        return self.folder / self.layout.manifest


@pytest.fixture(params=LAYOUTS, ids=LAYOUTS.keys())
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    layout = LAYOUTS[request.param]
    return Dataset(layout, tmp_path / "data set", layout.make(tmp_path / "data set"))


def _make(name: str, tmp_path: Path) -> Dataset:
    return Dataset(LAYOUTS[name], tmp_path / "data set", LAYOUTS[name].make(tmp_path / "data set"))


def test_every_format_is_covered_and_complete() -> None:
    assert {layout.format for layout in LAYOUTS.values()} == FORMATS.keys()
    for module in FORMATS.values():
        assert "\n" not in module.LAYOUT
        assert callable(module.detect)
        assert callable(module.read_manifest)


def test_detected_and_found_in_order(dataset: Dataset) -> None:
    assert detect_format(dataset.source) == dataset.layout.format
    manifest = dataset.find()
    assert manifest.findings == ()
    assert tuple(case.id for case in manifest.cases) == dataset.layout.ids
    assert manifest == dataset.find(dataset.layout.format)
    for case in manifest.cases:
        assert (case.label is not None) == dataset.layout.labelled
        assert dataset.layout.labelled or case.row.keys() == {"class"}
        assert all(path.is_file() for path in case.files)
        name = case.id.split("-")[0].removeprefix("img")
        assert all(name in path.name for path in case.files)
        assert case.patient == case.id


def test_hidden_files_do_not_count(dataset: Dataset) -> None:
    for path in [path for path in dataset.folder.rglob("*") if path.is_file()]:
        (path.parent / f"._{path.name}").write_bytes(b"junk")
    manifest = dataset.find()
    assert tuple(case.id for case in manifest.cases) == dataset.layout.ids
    assert manifest.findings == ()


def test_all_faults_are_named_at_once_and_the_rest_is_kept(dataset: Dataset) -> None:
    """The label of one case and the image of another are gone; files of many cases are cut off."""
    if dataset.layout.format in ("tfrecord", "cifar10"):
        gone = sorted(path for path in dataset.folder.rglob("*") if path.suffix in (".tfrecord", ".bin"))
        for path in gone:
            path.write_bytes(path.read_bytes()[:-1])
        kept: tuple[str, ...] = ()
    elif dataset.layout.format == "classes":
        gone = [path for path in dataset.folder.rglob("*.*") if "a1" in path.name or "b2" in path.name]
        for path in gone:
            path.unlink()
            path.symlink_to("nowhere")
        kept = dataset.layout.ids[2:]
    else:
        files = list(dataset.folder.rglob("*.nii*"))
        gone = [p for p in files if ("a1" in p.name and _is_label(p)) or ("b2" in p.name and not _is_label(p))]
        for path in gone:
            path.unlink()
        kept = dataset.layout.ids[2:]
    manifest = dataset.load()
    assert tuple(case.id for case in manifest.cases) == kept
    errors = [finding for finding in manifest.findings if finding.level == "error"]
    with pytest.raises(DataError) as caught:
        dataset.find()
    lines = caught.value.message.splitlines()
    assert len(lines) == len(errors) >= 2
    keys = {"tfrecord": ("train_0", "valid_0"), "cifar10": ("data_batch_2", "test_batch")}
    for key in keys.get(dataset.layout.format, ("a1", "b2")):
        assert [line for line in lines if re.search(rf"{key}.*: found .*, expected ", line)], (key, lines)
    assert caught.value.fix


def _is_label(path: Path) -> bool:
    return any(word in f"{path.parent.name}/{path.name}" for word in ("seg", "mask", "labels"))


def test_findings_do_not_tell_where_the_data_lies(dataset: Dataset) -> None:
    endings = (".nii", ".nii.gz", ".png", ".jpg", ".tif", ".bin")
    for path in [path for path in dataset.folder.rglob("*") if path.name.endswith(endings)]:
        if path.name != "data_batch_1.bin":  # without any it would be no CIFAR-10
            path.unlink()
            path.mkdir()
    for finding in dataset.load().findings if dataset.layout.format != "tfrecord" else ():
        assert str(dataset.folder) not in "".join(finding.as_json().values())
        assert "a folder" in finding.found or finding.code == "missing-label"
        assert finding.file


def test_patients_are_a_part_of_the_id(dataset: Dataset) -> None:
    first, *others = dataset.layout.ids
    manifest = dataset.load(patient=f"^({first[:-1]}){first[-1]}$")
    assert {case.id: case.patient for case in manifest.cases} == {first: first[:-1]}
    assert [(finding.code, finding.case) for finding in manifest.findings] == [("no-patient", id) for id in others]


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.manifest])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\x80\x81\xfe\0rubbish", b"[" * 100_000], ids=range(5))
def test_a_damaged_manifest_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    dataset = _make(name, tmp_path)
    dataset.manifest.write_bytes(content)
    if dataset.layout.format == "tfrecord" and not content:
        assert [finding.code for finding in dataset.load().findings] == ["empty-shard"]
        return
    with pytest.raises(DataError, match=re.escape(dataset.manifest.name)):
        dataset.find(dataset.layout.format)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.manifest])
def test_damage_of_any_kind_never_gives_a_traceback(name: str, tmp_path: Path) -> None:
    dataset = _make(name, tmp_path)
    sound = dataset.manifest.read_bytes()
    refused = 0
    for damaged in mutants(sound, 240, seed=len(name)):
        dataset.manifest.write_bytes(damaged)
        for format in ("auto", dataset.layout.format):
            try:
                manifest = dataset.find(format)
                assert all(
                    path.is_file() and path.is_relative_to(dataset.folder) for c in manifest.cases for path in c.files
                )
            except DataError as error:
                refused += 1
                assert error.message
                assert error.fix
    assert refused > 40


@pytest.mark.parametrize("name", ["decathlon: the task", "decathlon: its parent", "list: the file", "list: its folder"])
@pytest.mark.parametrize(
    "listed", ["../out.nii.gz", "/etc/passwd", "imagesTr/../../x.nii.gz", 3, None, "", [], ["../x"]]
)
@pytest.mark.parametrize("key", ["image", "label"])
def test_a_manifest_cannot_lead_out_of_its_folder(name: str, listed: object, key: str, tmp_path: Path) -> None:
    dataset = _make(name, tmp_path)
    content = json.loads(dataset.manifest.read_text())
    content["training"][1][key] = listed
    dataset.manifest.write_text(json.dumps(content))
    (finding,) = dataset.load().findings
    leads_out = (listed == ["../x"] and key == "image") or (isinstance(listed, str) and listed != "")
    assert finding.code == ("outside-root" if leads_out else "bad-row")
    assert finding.found.startswith("training case 2: ")
    assert dataset.manifest.name in finding.file
    assert len(dataset.load().cases) == 2


@pytest.mark.parametrize("name", ["decathlon: the task", "list: the file"])
def test_a_case_listed_twice_is_named(name: str, tmp_path: Path) -> None:
    dataset = _make(name, tmp_path)
    content = json.loads(dataset.manifest.read_text())
    content["training"].append(content["training"][0])
    dataset.manifest.write_text(json.dumps(content))
    (finding,) = dataset.load().findings
    assert (finding.code, finding.case) == ("duplicate-case", dataset.layout.ids[1])
    assert tuple(case.id for case in dataset.load().cases) == dataset.layout.ids


@pytest.mark.parametrize("case", ["..", "a\nb", "a\udcffb", "x" * 201], ids=["dots", "newline", "not UTF-8", "long"])
def test_what_cannot_name_a_case_is_refused(tmp_path: Path, case: str) -> None:
    for kind in ("img", "seg"):
        save_volume(tmp_path / "v.nii")
        (tmp_path / "v.nii").rename(tmp_path / f"{kind}_{case}.nii")
    manifest = load_manifest(Data(source=str(tmp_path), format="pairs"), tmp_path)
    (finding,) = manifest.findings
    assert (finding.code, manifest.cases) == ("bad-name", [])
    assert str(finding).isprintable()
    with pytest.raises(DataError, match="cannot name a case"):
        find_cases(Data(source=str(tmp_path), format="pairs"), tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_missing_empty_and_foreign_sources(name: str, tmp_path: Path) -> None:
    def find(source: Path, format: str = "auto") -> Manifest:
        return find_cases(Data.model_validate({"source": str(source), "format": format}), tmp_path / "scratch")

    for format in ("auto", name):
        with pytest.raises(DataError, match="no such file or folder"):
            find(tmp_path / "absent", format)
        with pytest.raises(DataError, match="cannot be read: File name too long"):
            find(tmp_path / ("x" * 300), format)
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(DataError, match="the folder is empty"):
        find(folder)
    (folder / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="found no known layout"):
        find(folder)
    for source in (folder, folder / "notes.txt", Path("/dev/null")):
        with pytest.raises(DataError):
            find(source, name)


def test_folders_in_place_of_files(dataset: Dataset) -> None:
    if dataset.layout.manifest is not None:
        dataset.manifest.unlink()
        dataset.manifest.mkdir()
    if dataset.layout.format in ("tfrecord", "cifar10"):
        assert [finding.code for finding in dataset.load().findings] == ["missing-file"]
    elif dataset.layout.manifest is not None:
        with pytest.raises(DataError):
            dataset.find(dataset.layout.format)
    else:
        volume = min(path for path in dataset.folder.rglob("*") if path.is_file())
        volume.unlink()
        volume.mkdir()
        (finding,) = dataset.load().findings
        assert (finding.code, finding.found, finding.file) == (
            "missing-file",
            "a folder",
            volume.relative_to(dataset.folder).as_posix(),
        )


def test_settings_of_another_format_are_refused(dataset: Dataset) -> None:
    if dataset.layout.format != "pairs":
        with pytest.raises(ConfigError, match="data.pattern"):
            dataset.load(dataset.layout.format, pattern={"image": "{case}_i.nii", "label": "{case}_l.nii"})
    if dataset.layout.format != "table":
        with pytest.raises(ConfigError, match="data.columns"):
            dataset.load(columns={"image": "scan"})


@pytest.mark.parametrize("name", ["decathlon: its parent", "nnunet: its parent"])
def test_several_datasets_side_by_side_are_named(name: str, tmp_path: Path) -> None:
    dataset = _make(name, tmp_path)
    second = dataset.manifest.parent.rename(dataset.folder / "Second")
    LAYOUTS[name].make(dataset.folder)
    for format in ("auto", dataset.layout.format):
        with pytest.raises(DataError, match=f"found 2 datasets: .*{second.name}"):
            dataset.find(format)


def test_a_damaged_list_is_named_where_nothing_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "dataset_0.json").write_text('{"training": [{"image"')
    with pytest.raises(DataError, match="dataset_0.json: cannot be read"):
        detect_format(tmp_path)
