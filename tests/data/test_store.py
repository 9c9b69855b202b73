"""The store: prepared once, whole or not at all, shared, and never stale."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from conftest import tiny_config
from voxscale.config.load import make_config
from voxscale.config.schema import Data, Intensity
from voxscale.data.cases import Case
from voxscale.data.formats import find_cases
from voxscale.data.store import open_store, prepare, store_key
from voxscale.data.volumes import normalise, read_case
from voxscale.errors import DataError


@pytest.fixture
def data(dataset: Path) -> Data:
    return make_config(tiny_config(dataset), name="tiny", base=Path()).data


@pytest.fixture
def cases(dataset: Path) -> list[Case]:
    return find_cases(dataset, "pairs")


def test_what_is_read_is_what_was_prepared(tmp_path: Path, data: Data, cases: list[Case]) -> None:
    store = prepare(cases, data, tmp_path, threads=2)
    for case in cases[:3]:
        image_cxyz, label_xyz = read_case(case.images, case.label, data.orientation)
        stored_image, stored_label = store.read_whole(case.id)
        assert np.array_equal(stored_image, normalise(image_cxyz, data.intensity))
        assert label_xyz is not None
        assert np.array_equal(stored_label, label_xyz)
        places = store.voxels(case.id, 1)
        assert (label_xyz[tuple(places.T)] == 1).all()
        box = (slice(3, 11), slice(0, 24), slice(5, 6))
        assert np.array_equal(store.read_image(case.id, box), stored_image[(slice(None), *box)])
    assert store.channels == 1
    assert store.labels == (0, 1)


def test_key_follows_inputs_and_preprocessing(dataset: Path, data: Data, cases: list[Case], tmp_path: Path) -> None:
    key = store_key(cases, data)
    assert store_key(cases, data) == key
    assert store_key(cases[1:], data) != key
    assert store_key(cases, data.model_copy(update={"intensity": Intensity(zscore="all")})) != key
    copied = tmp_path / cases[0].images[0].name
    shutil.copy2(cases[0].images[0], copied)
    moved = Case(cases[0].id, (copied,), cases[0].label, cases[0].patient)
    assert store_key([moved, *cases[1:]], data) != key


def test_the_digest_follows_contents_alone(dataset: Path, data: Data, cases: list[Case], tmp_path: Path) -> None:
    """Files of one name, size and time of change but other voxels are another dataset; a copy is the same one."""
    for name in ("copy", "other"):
        shutil.copytree(dataset, tmp_path / name)
    changed = tmp_path / "other" / "seg1.nii.gz"
    changed.write_bytes((tmp_path / "other" / "seg2.nii.gz").read_bytes())
    stores = [
        prepare(find_cases(folder, "pairs"), data, tmp_path / "store")
        for folder in (dataset, tmp_path / "copy", tmp_path / "other")
    ]
    assert stores[0].digest == stores[1].digest != stores[2].digest
    assert len({store.folder for store in stores}) == 3


def test_a_damaged_index_is_named(data: Data, cases: list[Case], tmp_path: Path) -> None:
    store = prepare(cases, data, tmp_path)
    for damaged in ("{", "[]", '{"schema": 1}', "null"):
        (store.folder / "index.json").write_text(damaged)
        with pytest.raises(DataError, match="its index is damaged"):
            open_store(store.folder)


def _prepare_elsewhere(source: str, root: str, queue: multiprocessing.Queue[tuple[int, str]]) -> None:
    config = make_config(tiny_config(Path(source)), name="tiny", base=Path())
    store = prepare(find_cases(Path(source), "pairs"), config.data, Path(root))
    queue.put((len(store.entries), store.folder.name))


def test_two_may_prepare_at_once(dataset: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[tuple[int, str]] = context.Queue()
    both = [context.Process(target=_prepare_elsewhere, args=(str(dataset), str(tmp_path), queue)) for _ in range(2)]
    for process in both:
        process.start()
    results = {queue.get(timeout=60) for _ in both}
    for process in both:
        process.join(60)
    assert len(results) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [results.pop()[1]]


def test_a_killed_build_goes_on_where_it_was(dataset: Path, tmp_path: Path, data: Data, cases: list[Case]) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from test_store import _prepare_elsewhere\nimport queue, time, voxscale.data.store as store\n"
        "slow = store.read_case\n"
        "store.read_case = lambda *a: (time.sleep(0.2), slow(*a))[1]\n"
        "_prepare_elsewhere(sys.argv[1], sys.argv[2], queue.Queue())"
    )
    paths = [str(dataset), str(tmp_path), str(Path(__file__).parent)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    folder = tmp_path / store_key(cases, data)
    with subprocess.Popen([sys.executable, "-c", code, *paths], env=environ) as build:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("cases/[!.]*"))) < 3:
            assert time.monotonic() < deadline
            assert build.poll() is None
            time.sleep(0.01)
        build.kill()
    finished = {path.name: path.stat().st_mtime_ns for path in folder.glob("cases/[!.]*")}
    assert 3 <= len(finished) < len(cases)
    assert not (folder / "index.json").exists()
    store = prepare(cases, data, tmp_path)
    assert len(store.entries) == len(cases)
    assert {name: (folder / "cases" / name).stat().st_mtime_ns for name in finished} == finished, "done work was redone"
    assert not list(folder.glob("cases/.*")), "left over"


def test_a_cut_file_is_noticed_on_open(tmp_path: Path, data: Data, cases: list[Case]) -> None:
    store = prepare(cases, data, tmp_path)
    path = store.folder / "cases" / cases[0].id / "image.b2nd"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"case {cases[0].id}: image.b2nd has"):
        open_store(store.folder)


def test_all_bad_cases_are_named_at_once(dataset: Path, tmp_path: Path, data: Data) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    for path in dataset.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "img1.nii.gz").write_bytes((dataset / "img1.nii.gz").read_bytes()[:-100])
    image = nib.load(dataset / "img2.nii.gz")
    holes = np.asarray(image.dataobj, dtype=np.float32)
    holes[0, 0, 0] = np.nan
    nib.save(nib.Nifti1Image(holes, image.affine), folder / "img2.nii.gz")
    nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), np.uint8), image.affine), folder / "seg3.nii.gz")
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj, np.uint8), image.affine * 2), folder / "seg4.nii.gz")
    damaged = bytearray((dataset / "seg5.nii.gz").read_bytes())
    damaged[-6] ^= 1
    (folder / "seg5.nii.gz").write_bytes(damaged)
    with pytest.raises(DataError) as caught:
        prepare(find_cases(folder, "pairs"), data, tmp_path / "store")
    lines = caught.value.message.splitlines()
    expected = {
        "1": "img1.nii.gz: cannot be read",
        "2": "holds NaN",
        "3": "seg3.nii.gz: shape (4, 4, 4), expected (24, 24, 16)",
        "4": "affine differs",
        "5": "seg5.nii.gz: cannot be read",
    }
    assert len(lines) == len(expected)
    for line in lines:
        case = line.split(":")[0].removeprefix("case ")
        assert expected[case] in line
    assert not list((tmp_path / "store").glob("*/index.json"))


def test_index_is_plain_json(tmp_path: Path, data: Data, cases: list[Case]) -> None:
    index = json.loads((prepare(cases, data, tmp_path).folder / "index.json").read_text())
    assert index["schema"] == 1
    assert {row["id"] for row in index["cases"]} == {case.id for case in cases}
