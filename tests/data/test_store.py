"""The store: prepared once, whole or not at all, shared, checked, and never stale."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import blosc2
import nibabel as nib
import numpy as np
import pytest

from conftest import Cli, tiny_config
from voxscale.config.data import Data, Intensity, Slices
from voxscale.config.load import make_config
from voxscale.data import build
from voxscale.data.build import (
    PLACES_PER_LABEL,
    _find_places,
    choose_chunks,
    prepare,
    rebuild_damaged,
    store_key,
)
from voxscale.data.cases import Case, Manifest
from voxscale.data.formats import find_cases
from voxscale.data.preprocess import preprocess
from voxscale.data.shelf import list_stores, prune_stores, stage_store
from voxscale.data.store import Checksums, DamagedStore, Store, open_store
from voxscale.data.volumes import read_case
from voxscale.errors import DataError, InfrastructureError
from voxscale.files import read_json

PATCH = (16, 16, 16)


def data_of(source: Path, **fields: Any) -> Data:
    return make_config(tiny_config(source), name="tiny", base=Path()).data.model_copy(update=fields)


@pytest.fixture
def data(dataset: Path) -> Data:
    return data_of(dataset)


@pytest.fixture
def manifest(data: Data, tmp_path: Path) -> Manifest:
    return find_cases(data, tmp_path)


@pytest.fixture
def store(manifest: Manifest, data: Data, tmp_path: Path) -> Store:
    return prepare(manifest, data, tmp_path, patch=PATCH, threads=2)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"spacing": (2.0, 1.0, 0.8), "crop_foreground": True},
        {"size": (20, 30, 10), "slices": Slices(z=(2, -1)), "orientation": "LPI"},
        {"intensity": Intensity(window=(-100, 100))},
        {"intensity": Intensity()},
    ],
    ids=["as it is", "spacing", "size", "window", "raw"],
)
def test_what_is_read_is_what_was_prepared(fields: dict[str, Any], dataset: Path, tmp_path: Path) -> None:
    data = data_of(dataset, **fields)
    manifest = find_cases(data, tmp_path)
    store = prepare(manifest, data, tmp_path, patch=PATCH)
    for row, case in enumerate(manifest.cases[:3]):
        expected = preprocess(read_case(case), data)
        assert store.id(row) == case.id
        assert store.row(case.id) == row
        assert store.shape(row) == expected.geometry.size
        assert store.geometry(row) == expected.geometry
        image, label = store.read_image(row), store.read_label(row)
        assert np.array_equal(image, expected.image_cxyz.astype(store.dtype))
        np.testing.assert_allclose(image, expected.image_cxyz, rtol=2**-11, atol=1e-6)
        assert np.array_equal(label, expected.label_xyz)  # type: ignore[arg-type]
        x, y, z = (slice(n // 5, n - n // 3) for n in store.shape(row))
        assert np.array_equal(store.read_image(row, (x, y, z)), image[:, x, y, z])
        memory = np.empty(10_000_000, np.uint8)
        assert np.array_equal(store.read_label(row, (x, y, z), into=memory), label[x, y, z])
    assert store.channels == 1
    assert store.labels == (0, 1)
    assert store.dtype == (np.float32 if data.intensity == Intensity() else np.float16)


def test_the_index_of_places_needs_no_label_scan(store: Store) -> None:
    for row in range(len(store)):
        label = store.read_label(row)
        places = store.places(row, 1)
        assert (label[tuple(places.T)] == 1).all()
        assert min(int((label == 1).sum()), PLACES_PER_LABEL) >= len(places) > 0
        assert store.labels_at(row) == (1,)
        assert len(store.places(row, 2)) == 0


def test_chunks_follow_the_patch() -> None:
    assert choose_chunks((240, 240, 155), (128, 128, 128)) == ((64, 64, 155), (16, 16, 155))
    assert choose_chunks((240, 240, 155), (32, 32, 32)) == ((32, 32, 78), (16, 16, 78))
    assert choose_chunks((512, 512, 700), (96, 96, 96)) == ((64, 64, 234), (16, 16, 234))
    assert choose_chunks((20, 10, 3), None) == ((20, 10, 3), (16, 10, 3))


def test_key_follows_inputs_and_preprocessing(data: Data, manifest: Manifest, tmp_path: Path) -> None:
    key = store_key(manifest, data)
    assert store_key(manifest, data) == key
    assert store_key(Manifest(manifest.cases[1:]), data) != key
    for changed in ({"intensity": Intensity(zscore="all")}, {"spacing": (1.0, 1.0, 2.0)}, {"crop_foreground": True}):
        assert store_key(manifest, data.model_copy(update=changed)) != key
    assert store_key(manifest, data.model_copy(update={"store": "elsewhere", "regions": None})) == key
    for path in manifest.cases[0].files:
        os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    assert store_key(manifest, data) != key


def test_the_digest_follows_contents_alone(dataset: Path, data: Data, tmp_path: Path) -> None:
    """Files of one name, size and time of change but other voxels are another dataset; a copy is the same one."""
    for name in ("copy", "other"):
        shutil.copytree(dataset, tmp_path / name)
    changed = tmp_path / "other" / "seg1.nii.gz"
    changed.write_bytes((tmp_path / "other" / "seg2.nii.gz").read_bytes())
    stores = []
    for folder in (dataset, tmp_path / "copy", tmp_path / "other"):
        here = data_of(folder)
        stores.append(prepare(find_cases(here, tmp_path), here, tmp_path / "store", patch=PATCH))
    assert stores[0].digest == stores[1].digest != stores[2].digest
    assert len({store.folder for store in stores}) == 3


@pytest.mark.parametrize("damage", ["{", "[]", '{"schema": 2}', "null", ""])
def test_a_damaged_index_is_named_and_rebuilt(damage: str, store: Store, manifest: Manifest, data: Data) -> None:
    (store.folder / "index.json").write_text(damage)
    with pytest.raises(DamagedStore, match="its index is damaged"):
        open_store(store.folder)
    again = prepare(manifest, data, store.folder.parent, patch=PATCH)
    assert again.digest == store.digest


@pytest.mark.parametrize("name", ["image.b2nd", "label.b2nd", "places.npy", "case.json"])
def test_a_cut_or_lost_file_is_noticed_on_open_and_its_case_rebuilt(
    name: str, store: Store, manifest: Manifest, data: Data
) -> None:
    path = store.folder / "cases" / store.id(0) / name
    image = store.read_image(0)
    untouched = (store.folder / "cases" / store.id(1)).stat().st_mtime_ns
    for spoil in (lambda: path.write_bytes(path.read_bytes()[:-1]), path.unlink):
        spoil()
        with pytest.raises(DamagedStore, match=f"files of 1 cases are cut or gone, e.g. {store.id(0)}"):
            open_store(store.folder)
        again = prepare(manifest, data, store.folder.parent, patch=PATCH)
        assert np.array_equal(again.read_image(0), image)
    assert (store.folder / "cases" / store.id(1)).stat().st_mtime_ns == untouched, "sound cases were rebuilt"


def test_no_flipped_bit_goes_unnoticed(store: Store) -> None:
    """Anywhere in an array file: the read fails and names the case, or what it returns is right."""
    rng = random.Random(5)
    noticed = 0
    for name in ("image.b2nd", "label.b2nd"):
        path = store.folder / "cases" / store.id(0) / name
        sound = path.read_bytes()
        expected = store.read_image(0), store.read_label(0)
        for _ in range(150):
            broken = bytearray(sound)
            broken[rng.randrange(len(sound))] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
            reader = open_store(store.folder)  # one that has not verified anything yet
            try:
                found = reader.read_image(0), reader.read_label(0)
            except DataError as error:
                noticed += 1
                assert f"case {store.id(0)}: {name} is damaged" in error.message
                assert "--verify" in error.fix
            else:
                assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
        path.write_bytes(sound)
    assert noticed == 300


@pytest.mark.parametrize("name", ["places.npy", "case.json"])
def test_no_flipped_bit_in_the_small_files_goes_unnoticed(name: str, store: Store) -> None:
    rng = random.Random(6)
    path = store.folder / "cases" / store.id(0) / name
    sound = path.read_bytes()
    for _ in range(100):
        broken = bytearray(sound)
        broken[rng.randrange(len(sound))] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        reader = open_store(store.folder)
        with pytest.raises(DataError, match=f"case {store.id(0)}: {name} is damaged"):
            reader.places(0, 1) if name == "places.npy" else reader.geometry(0)
        with pytest.raises(DataError, match=f"{name} is damaged"):
            reader.verify(0)


def test_an_array_that_holds_code_is_not_run(store: Store, tmp_path: Path) -> None:
    """In a shared folder others may put any file in the place of one; after its first read, no sum stands before it."""
    image = store.read_image(0)
    path, ran = store.folder / "cases" / store.id(0) / "image.b2nd", tmp_path / "ran"
    hostile = blosc2.asarray(image, chunks=image.shape, meta={"LazyArray": 2})
    code = f"def run(inputs, output, offset):\n    open({str(ran)!r}, 'w')"
    hostile.schunk.vlmeta["_LazyArray"] = {"UDF": code, "name": "run", "operands": {}, "dtype": "float32"}
    path.write_bytes(hostile.to_cframe())
    with pytest.raises(DataError, match=f"case {store.id(0)}: image.b2nd is damaged: found a file of another kind"):
        store.read_image(0)
    with pytest.raises(ValueError, match="another kind"):
        Checksums.of(path)
    assert not ran.exists()


def test_index_json_cannot_be_altered(store: Store) -> None:
    content = read_json(store.folder / "index.json")
    (store.folder / "index.json").write_text(json.dumps({**content, "labels": [0, 9]}))
    with pytest.raises(DamagedStore, match="index.json is not the one that was written"):
        open_store(store.folder)


def test_one_rank_of_a_node_checks_index_and_sizes_for_all(store: Store) -> None:
    assert store.ids(slice(1, 3)) == [store.id(1), store.id(2)]
    assert store.ids() == sorted(path.name for path in (store.folder / "cases").iterdir())
    index, label = store.folder / "index.npy", store.folder / "cases" / store.id(1) / "label.b2nd"
    content = index.read_bytes()
    label.write_bytes(b"")
    index.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert open_store(store.folder, check="header").ids() == store.ids()
    with pytest.raises(DamagedStore, match="index.npy is not the one that was written"):
        open_store(store.folder, check="index")
    index.write_bytes(content[:-1])
    with pytest.raises(DamagedStore, match="its index is damaged"):
        open_store(store.folder, check="header")
    index.write_bytes(content)
    open_store(store.folder, check="index")
    with pytest.raises(DamagedStore, match="files of 1 cases are cut or gone"):
        open_store(store.folder)


def test_a_damaged_case_of_an_unfinished_build_is_built_again(store: Store, manifest: Manifest, data: Data) -> None:
    (store.folder / "index.json").unlink()
    (store.folder / "cases" / store.id(3) / "case.json").write_text('{"sh')
    again = prepare(manifest, data, store.folder.parent, patch=PATCH)
    assert again.digest == store.digest


def test_damage_is_not_taken_over_when_the_index_is_written_anew(store: Store, manifest: Manifest, data: Data) -> None:
    places = store.folder / "cases" / store.id(0) / "places.npy"
    sound = places.read_bytes()
    places.write_bytes(sound[:-6] + b"\xff\x7f" * 3)
    details = store.folder / "cases" / store.id(2) / "case.json"
    details.write_text(details.read_text().replace('"sha256"', '"sha257"'))
    cut = store.folder / "cases" / store.id(1) / "image.b2nd"
    cut.write_bytes(cut.read_bytes()[:-10])
    again = prepare(manifest, data, store.folder.parent, patch=PATCH)
    assert places.read_bytes() == sound
    assert all(again.verify(row) is None for row in range(len(again)))


@pytest.mark.parametrize("box", [(64, 64, 64), (32, 32, 64), (48, 64, 96)])
def test_places_are_spread_over_the_whole_label(box: tuple[int, int, int]) -> None:
    label = np.zeros((100, 100, 120), np.uint8)
    label[tuple(slice(10, 10 + n) for n in box)] = 1
    places = _find_places(label, [0, 1])[:, 1:]
    assert len(places) == PLACES_PER_LABEL
    assert len(np.unique(places, axis=0)) == len(places)
    for axis, n in enumerate(box):
        spread = np.bincount(places[:, axis] - 10, minlength=n)
        assert len(spread) == n
        assert spread.min() > 0.4 * spread.mean()
        assert spread.max() < 1.8 * spread.mean()


@pytest.mark.parametrize(("edge", "kind"), [(32_767, np.int16), (40_000, np.int32)])
def test_places_along_a_long_axis_are_kept(edge: int, kind: type) -> None:
    label = np.zeros((edge, 2, 1), np.uint8)
    label[edge - 1, 1, 0] = 3
    places = _find_places(label, [0, 3])
    assert places.dtype == kind
    assert places.tolist() == [[3, edge - 1, 1, 0]]


def test_a_full_disk_is_named_with_what_is_needed(dataset: Path, tmp_path: Path, small_disk: Path) -> None:
    data = data_of(dataset)
    with pytest.raises(InfrastructureError, match="no room: found 0 MB free, expected about"):
        prepare(find_cases(data, tmp_path), data, small_disk / "store", patch=PATCH)


def test_only_chunks_that_are_read_are_checked_and_only_once(dataset: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    rng = np.random.default_rng(0)
    image = rng.normal(size=(100, 40, 40)).astype(np.float32)
    nib.save(nib.Nifti1Image(image, np.eye(4)), big / "img0.nii.gz")
    nib.save(nib.Nifti1Image((image > 1).astype(np.uint8), np.eye(4)), big / "seg0.nii.gz")
    data = data_of(big)
    store = prepare(find_cases(data, tmp_path), data, tmp_path / "store", patch=PATCH)
    path = store.folder / "cases" / "0" / "image.b2nd"
    broken = bytearray(path.read_bytes())
    broken[-2000] ^= 1  # in the last chunk
    path.write_bytes(broken)
    near, far = (slice(0, 10),) * 3, (slice(90, 100), slice(30, 40), slice(30, 40))
    reader = open_store(store.folder)
    assert np.isfinite(reader.read_image(0, near)).all()
    with pytest.raises(DataError, match="chunk .* differs"):
        reader.read_image(0, far)
    reader.read_image(0, near)


def test_verify_finds_and_rebuilds_what_is_damaged(
    cli_here: Cli, write_config: Any, dataset: Path, tmp_path: Path
) -> None:
    config = write_config(data__store=str(tmp_path / "store"))
    store = open_store(Path(cli_here("prepare", config, "--json").json["store"]))
    for row in (2, 5):
        path = store.folder / "cases" / store.id(row) / "label.b2nd"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    done = cli_here("prepare", config, "--verify", "--json")
    assert done.json["rebuilt"] == [store.id(2), store.id(5)]
    assert cli_here("prepare", config, "--verify", "--json").json["rebuilt"] == []
    assert rebuild_damaged(open_store(store.folder), tmp_path / "store") == []


def _prepare_elsewhere(source: str, root: str) -> Store:
    data = data_of(Path(source))
    return prepare(find_cases(data, Path(root)), data, Path(root), patch=PATCH)


def _prepare_together(source: str, root: str, barrier: Any, queue: multiprocessing.Queue[dict[str, Any]]) -> None:
    """Prepare in step with another process, slowly, and tell what was done here and when."""
    read, cases = build.read_case, []

    def read_slowly(case: Case, **declared: Any) -> Any:
        cases.append(case.id)
        time.sleep(0.05)
        return read(case, **declared)

    build.read_case = read_slowly
    barrier.wait(60)
    began = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        store = _prepare_elsewhere(source, root)
    told = {"began": began, "ended": time.monotonic(), "said": said.getvalue()}
    queue.put({**told, "store": store.folder.name, "ids": store.ids(), "read": cases})


def test_two_may_prepare_at_once(dataset: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[dict[str, Any]] = context.Queue()
    given = (str(dataset), str(tmp_path), context.Barrier(2), queue)
    both = [context.Process(target=_prepare_together, args=given) for _ in range(2)]
    for process in both:
        process.start()
    first, second = sorted((queue.get(timeout=60) for _ in both), key=lambda told: told["began"])
    for process in both:
        process.join(60)
    assert second["began"] + 0.3 < first["ended"], "one had begun long before the other had ended"
    assert [first["store"]] == [second["store"]] == [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert first["ids"] == second["ids"] == open_store(tmp_path / first["store"]).ids()
    waits, builds = sorted([first, second], key=lambda told: len(told["read"]))
    assert (waits["read"], builds["read"]) == ([], first["ids"]), "one builds, the other waits"
    assert builds["said"] == ""
    assert waits["said"] == f"waiting for whoever prepares these cases in {tmp_path / first['store']}\n"


def test_a_killed_build_goes_on_where_it_was(dataset: Path, tmp_path: Path, data: Data, manifest: Manifest) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from test_store import _prepare_elsewhere\nimport time, voxscale.data.build as build\n"
        "slow = build.read_case\n"
        "build.read_case = lambda *a, **k: (time.sleep(0.2), slow(*a, **k))[1]\n"
        "_prepare_elsewhere(sys.argv[1], sys.argv[2])"
    )
    paths = [str(dataset), str(tmp_path), str(Path(__file__).parent)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    folder = tmp_path / store_key(manifest, data)
    with subprocess.Popen([sys.executable, "-c", code, *paths], env=environ) as build:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("cases/[!.]*"))) < 3:
            assert time.monotonic() < deadline
            assert build.poll() is None
            time.sleep(0.01)
        build.kill()
    finished = {path.name: path.stat().st_mtime_ns for path in folder.glob("cases/[!.]*")}
    assert 3 <= len(finished) < len(manifest.cases)
    assert not (folder / "index.json").exists()
    assert [shelved.state for shelved in list_stores(tmp_path)] == ["unfinished"]
    store = prepare(manifest, data, tmp_path, patch=PATCH)
    assert len(store) == len(manifest.cases)
    assert {name: (folder / "cases" / name).stat().st_mtime_ns for name in finished} == finished, "done work was redone"
    assert not list(folder.glob("cases/.*")), "left over"


def test_cases_with_other_channels_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for case, channels in (("a", 2), ("b", 2), ("c", 1)):
        nib.save(nib.Nifti1Image(np.random.rand(8, 8, 8, channels), np.eye(4)), folder / f"img{case}.nii.gz")
        nib.save(nib.Nifti1Image(np.eye(8, dtype=np.uint8)[None].repeat(8, 0), np.eye(4)), folder / f"seg{case}.nii.gz")
    data = data_of(folder)
    with pytest.raises(DataError, match="case c: found 1 channels, expected 2 as in most cases"):
        prepare(find_cases(data, tmp_path), data, tmp_path / "store", patch=PATCH)


def test_listed_and_pruned_unless_read(store: Store, tmp_path: Path, cli_here: Cli, write_config: Any) -> None:
    (shelved,) = list_stores(tmp_path)
    assert (shelved.key, shelved.cases, shelved.source) == (store.folder.name, len(store), "pairs")
    on_disk = sum(path.stat().st_size for path in store.folder.rglob("cases/*/*"))
    assert shelved.bytes == on_disk
    reading = (
        "import sys; from pathlib import Path; from voxscale.data.store import open_store\n"
        "store = open_store(Path(sys.argv[1])); print('reading', flush=True); input()"
    )
    command = [sys.executable, "-c", reading, str(store.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        reader.stdout.readline()
        assert [shelved.state for shelved in list_stores(tmp_path)] == ["in use"]
        assert prune_stores(tmp_path, idle_days=0) == []
        reader.stdin.write(b"\n")
        reader.stdin.close()
        reader.wait(20)
    assert prune_stores(tmp_path, idle_days=1) == [], "it was read a moment ago"
    config = write_config(data__store=str(tmp_path))
    assert "deleted: 1, " in cli_here("prepare", config, "--prune", "0").out
    assert cli_here("prepare", config, "--list", "--json").json["stores"] == []
    assert not store.folder.exists()


def test_stores_in_the_scratch_of_a_site_are_listed_and_pruned_there(
    store: Store, tmp_path: Path, cli_here: Cli, write_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(store.folder, tmp_path / "scratch" / "voxscale" / store.folder.name)
    (tmp_path / "site.yaml").write_text(f"scratch: {tmp_path}/scratch\n")
    monkeypatch.chdir(tmp_path)
    for config in ([], [write_config()]):
        found = cli_here("prepare", *config, "--list", "--json", "--on", "slurm", "--site", "site.yaml").json
        assert [each["key"] for each in found["stores"]] == [store.folder.name]
    assert "deleted: 1, " in cli_here("prepare", "--prune", "0", "--on", "slurm").out
    assert list((tmp_path / "scratch" / "voxscale").glob("*/index.json")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="being another user needs root")
def test_stores_of_others_do_not_keep_ones_own_from_being_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a scratch that users share; the largest come first."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o1777)
    theirs, own = (Path(f"{n:024x}") for n in range(2))
    for folder, owner, size in ((theirs, 0, 2000), (own, 4711, 10)):
        (folder / "cases").mkdir(parents=True)
        (folder / "cases" / "a").write_bytes(bytes(size))
        for made in (folder / "in-use", Path(f".{folder.name}.lock")):
            made.touch()
            os.chown(made, owner, owner)
        for made in (folder, *folder.rglob("*")):
            os.chown(made, owner, owner)
    os.seteuid(4711)
    try:
        pruned = prune_stores(Path(), idle_days=0)
    finally:
        os.seteuid(0)
    assert [shelved.key for shelved in pruned] == [own.name]
    assert (theirs / "cases" / "a").stat().st_size == 2000
    assert not own.exists()


@pytest.mark.parametrize("others", [["--list"], ["--verify"], ["--list", "--verify"]])
def test_pruning_comes_alone(others: list[str], store: Store, cli_here: Cli, write_config: Any) -> None:
    done = cli_here("prepare", write_config(data__store=str(store.folder.parent)), "--prune", "0", *others)
    assert done.code == 2
    assert "and --prune: expected one of them" in done.err
    assert store.folder.exists()


def test_what_is_no_store_is_neither_listed_nor_pruned(store: Store, tmp_path: Path) -> None:
    """`data.store` may be a folder in which people keep other things."""
    foreign = [tmp_path / name / "cases" / "scan.nii.gz" for name in ("mystudy", "0123456789abcdef01234567")]
    foreign.append(tmp_path / "study" / "index.json")
    for path in foreign:
        path.parent.mkdir(parents=True)
        path.touch()
    killed = tmp_path / f"{0:024x}"
    killed.mkdir()
    (killed / "in-use").touch()  # as the first thing of a build
    assert {shelved.key for shelved in list_stores(tmp_path)} == {store.folder.name, killed.name}
    assert {shelved.key for shelved in prune_stores(tmp_path, idle_days=0)} == {store.folder.name, killed.name}
    assert all(path.exists() for path in foreign)


def test_a_build_marks_its_folder_before_anything_else(
    manifest: Manifest, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "full", str(folder))

    monkeypatch.setattr("voxscale.data.build.remove_temporaries", full)
    with pytest.raises(InfrastructureError):
        prepare(manifest, data, tmp_path, patch=PATCH)
    assert [shelved.state for shelved in list_stores(tmp_path)] == ["unfinished"]


def test_a_reader_that_has_copied_the_store_still_holds_it(store: Store, tmp_path: Path) -> None:
    staged = stage_store(store, tmp_path / "node")
    code = "import sys; from pathlib import Path; from voxscale.files import is_locked\n"
    code += "print([is_locked(Path(folder) / 'in-use') for folder in sys.argv[1:]])"
    asked = [sys.executable, "-c", code, str(store.folder), str(staged.folder)]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "[True, True]\n"


def test_staged_to_the_nodes_own_disk(store: Store, tmp_path: Path) -> None:
    staged = stage_store(store, tmp_path / "node")
    assert staged.folder == tmp_path / "node" / store.folder.name
    assert np.array_equal(staged.read_image(3), store.read_image(3))
    before = (staged.folder / "index.json").stat().st_mtime_ns
    assert (stage_store(store, tmp_path / "node").folder / "index.json").stat().st_mtime_ns == before
    path = staged.folder / "cases" / store.id(0) / "image.b2nd"
    path.write_bytes(b"cut")
    (tmp_path / "node" / f".{store.folder.name}.0123abcd.tmp").mkdir()
    mended = stage_store(store, tmp_path / "node")
    assert np.array_equal(mended.read_image(0), store.read_image(0))
    assert not list((tmp_path / "node").glob("*.tmp")), "what a killed copy left"
    (tmp_path / "file").write_text("")
    with pytest.raises(InfrastructureError, match="data.stage"):
        stage_store(store, tmp_path / "file")


def test_what_a_reader_holds_does_not_grow_with_the_cases(store: Store) -> None:
    """The index is mapped, not read: its rows are shared by all readers through the page cache."""
    assert isinstance(store._rows, np.memmap)
    assert read_json(store.folder / "index.json").keys() == {
        "schema", "source", "cases", "channels", "labels", "dtype", "digest", "bytes", "index_sha256", "seal",
    }  # fmt: skip
