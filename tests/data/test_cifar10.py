"""CIFAR-10 in its binary form: read as its page describes it, every fault named."""

from __future__ import annotations

import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from voxscale.config.data import Data
from voxscale.data.build import prepare
from voxscale.data.cases import Manifest
from voxscale.data.formats import detect_format, find_cases, load_manifest
from voxscale.data.formats.cifar10 import BATCHES
from voxscale.data.synthetic.cifar10 import CLASSES, make_picture, write_cifar10
from voxscale.data.volumes import examine_case, read_case
from voxscale.errors import DataError

RECORD = 3073


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_cifar10(tmp_path / "cifar", per_batch=20, seed=1)
    return tmp_path / "cifar"


def load(source: Path, scratch: Path | None = None) -> Manifest:
    return load_manifest(Data(source=str(source)), scratch or source.parent / "scratch")


def test_every_record_is_a_case_and_the_test_batch_the_test_set(folder: Path) -> None:
    assert detect_format(folder) == "cifar10"
    manifest = load(folder)
    assert manifest.findings == ()
    assert Counter(case.role for case in manifest.cases) == {"train": 100, "test": 20}
    assert {case.id for case in manifest.cases if case.role == "test"} == {f"test_batch-{n:05d}" for n in range(20)}
    assert Counter(case.row["class"] for case in manifest.cases) == dict.fromkeys(CLASSES, 12)
    assert manifest.cases[7].where == "data_batch_1.bin record 7"


def test_planes_are_red_green_blue_row_by_row(folder: Path) -> None:
    """Looked up byte by byte, as the page of CIFAR-10 says."""
    content = (folder / "data_batch_2.bin").read_bytes()
    case = next(case for case in load(folder).cases if case.id == "data_batch_2-00003")
    raw = read_case(case)
    assert raw.image_cxyz.shape == (3, 32, 32, 1)
    assert case.row["class"] == CLASSES[content[3 * RECORD]]
    for c, x, y in ((0, 0, 0), (1, 5, 20), (2, 31, 30), (0, 31, 0), (2, 0, 31)):
        assert raw.image_cxyz[c, x, y, 0] == content[3 * RECORD + 1 + 1024 * c + 32 * y + x]


def test_the_archive_and_the_folder_above_are_read_alike(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-bin")
    folder.rename(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "above").mkdir()
    (tmp_path / "cifar-10-batches-bin").rename(tmp_path / "above" / "cifar-10-batches-bin")
    packed = load(tmp_path / "cifar-10-binary.tar.gz", tmp_path / "scratch")
    above = load(tmp_path / "above")
    assert [case.id for case in packed.cases] == [case.id for case in above.cases]
    assert len(packed.cases) == 120
    assert read_case(packed.cases[5]).sha256 == read_case(above.cases[5]).sha256


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda content: content[:-1], "61459 bytes, which are 19 records and 3072 bytes"),
        (lambda content: content + b"\0", "61461 bytes, which are 20 records and 1 bytes"),
        (lambda content: b"", "0 bytes"),
        (lambda content: b"\x0a" + content[1:], "class 10 in record 0"),
        (lambda content: content[: 2 * RECORD] + 3 * (b"\xff" + bytes(3072)), "class 255 in record 2 and 2 more"),
    ],
)  # fmt: skip
def test_a_batch_that_is_not_whole_records_of_ten_classes(folder: Path, damage: object, found: str) -> None:
    path = folder / "data_batch_4.bin"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    (folder / "test_batch.bin").unlink()
    manifest = load(folder)
    batch, test = manifest.findings
    assert (batch.level, batch.code, batch.file) == ("error", "damaged-batch", "data_batch_4.bin")
    assert batch.found.startswith(found)
    assert (test.level, test.code, test.file) == ("error", "missing-file", "test_batch.bin")
    assert len(manifest.cases) == 80, "the others are kept"
    with pytest.raises(DataError, match=r"(?s)data_batch_4.bin: .*test_batch.bin: found no such file"):
        find_cases(Data(source=str(folder)), folder.parent)


@pytest.mark.parametrize(
    "text", [None, "", "cat\n", "cat\n" * 10, "\n".join("abcdefghijk"), "a\x1b\n" + "\n".join("bcdefghij")]
)
def test_names_of_classes_that_are_not_ten(folder: Path, text: str | None) -> None:
    (folder / "batches.meta.txt").unlink()
    if text is not None:
        (folder / "batches.meta.txt").write_text(text)
    manifest = load(folder)
    (finding,) = manifest.findings
    assert (finding.level, finding.file) == ("error", "batches.meta.txt")
    assert str(finding).isprintable()
    assert {case.row["class"] for case in manifest.cases} == set("0123456789")


def test_the_pickled_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for name in ("batches.meta", "data_batch_1"):
        (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(DataError, match="pickled") as refusal:
        load(tmp_path)
    assert "cifar-10-binary.tar.gz" in refusal.value.fix


def test_a_batch_that_is_cut_after_it_was_listed(folder: Path) -> None:
    cases = load(folder).cases
    path = folder / "data_batch_1.bin"
    path.write_bytes(path.read_bytes()[: 5 * RECORD + 100])
    raw, (finding,) = examine_case(cases[5])
    assert raw is None
    assert (finding.code, finding.case, finding.file) == ("unreadable", "data_batch_1-00005", "data_batch_1.bin")
    assert read_case(cases[4]).image_cxyz.shape == (3, 32, 32, 1)


def test_records_reach_the_store(folder: Path, tmp_path: Path) -> None:
    data = Data.model_validate({"source": str(folder), "intensity": {"window": [0, 255]}})
    manifest = find_cases(data, tmp_path)
    store = prepare(manifest, data, tmp_path / "store", patch=(32, 32, 1), threads=2)
    assert (len(store), store.channels) == (120, 3)


def test_the_generator_is_pure_and_its_classes_differ_in_shape_and_colour(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_cifar10(tmp_path / name, per_batch=10, seed=3)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()
    }
    assert {p.name for p in (tmp_path / "a").iterdir()} == {*BATCHES, "batches.meta.txt"}
    means = np.stack(
        [
            np.mean([make_picture(np.random.default_rng([n, k]), n) for k in range(80)], axis=0).ravel()
            for n in range(len(CLASSES))
        ]
    )
    rng = np.random.default_rng(5)
    right = 0
    for _ in range(400):
        n = int(rng.integers(len(CLASSES)))
        right += int(np.argmin(((make_picture(rng, n).ravel() - means) ** 2).sum(1)) == n)
    assert 0.2 < right / 400 < 0.95, "above chance (0.1), but not for the nearest mean to solve"
