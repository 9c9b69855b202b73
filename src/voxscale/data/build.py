"""Build a store: every case read, checked, preprocessed and written once, whole or not at all.

KEY names the inputs (paths, sizes, times of change), the preprocessing and the schema, so a store never has to be
asked whether it is stale. The shape of chunks follows the patch size; it is a matter of speed and not of the key.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blosc2
import google_crc32c
import numpy as np
from numpy.typing import NDArray

from voxscale.config.data import Data
from voxscale.config.load import plain
from voxscale.data.cases import Case, Manifest
from voxscale.data.geometry import Shape
from voxscale.data.preprocess import PreparedCase, preprocess
from voxscale.data.room import beyond_memory, threads_with_room
from voxscale.data.store import (
    IN_USE,
    ROW,
    SCHEMA_VERSION,
    SUMMED,
    Checksums,
    DamagedStore,
    Store,
    damaged_rows,
    open_store,
    seal,
    sizes_of,
)
from voxscale.data.volumes import Labels, RawCase, count_labels, read_case
from voxscale.errors import DataError, InfrastructureError
from voxscale.files import locked, publish, read_json, remove, remove_temporaries, sha256_of, write_json
from voxscale.terminal import progress

PLACES_PER_LABEL = 4096  # where a balanced patch can be centred, for each case and label
_STORE_TO_INPUT = 1.6  # bytes of a store to those of the compressed files it is made from, or so
_PREPROCESSING = ("slices", "orientation", "crop_foreground", "spacing", "size", "intensity")


def prepare(manifest: Manifest, data: Data, root: Path, *, patch: Shape | None, threads: int = 1) -> Store:
    """Open the store of these cases; build what is missing or damaged of it first.

    Any number of ranks, jobs and trials may call this at once: one builds, the others wait for it. Cases that an
    interrupted build finished are kept.
    """
    folder = root / store_key(manifest, data)
    try:
        if (folder / "index.json").exists():
            try:
                return open_store(folder)
            except DamagedStore:
                pass
        with locked(root / f".{folder.name}.lock", told=f"waiting for whoever prepares these cases in {folder}"):
            if not _is_whole(folder):
                _build(folder, manifest, data, patch, threads)
        return open_store(folder)
    except OSError as error:
        raise InfrastructureError(
            f"store {root}: cannot be used: {_reason(error, manifest, root)}",
            fix="set data.store to a writable folder with room, or free some: voxscale prepare --prune DAYS",
        ) from error


def _reason(error: OSError, manifest: Manifest, root: Path) -> str:
    if error.errno != errno.ENOSPC:
        return error.strerror or str(error)
    inputs = {path for case in manifest.cases for path in case.files}
    needed = _STORE_TO_INPUT * sum(path.stat().st_size for path in inputs)
    return f"no room: found {shutil.disk_usage(root).free >> 20} MB free, expected about {needed / 2**20:.0f} MB in all"


def rebuild_damaged(store: Store, root: Path, *, threads: int = 1) -> list[str]:
    """Check every chunk of every case; take away those that fail, so that `prepare` builds them again."""
    with progress("verifying cases", len(store)) as advance, ThreadPoolExecutor(threads) as pool:

        def fails(row: int) -> bool:
            try:
                store.verify(row)
            except DataError:
                return True
            finally:
                advance()
            return False

        damaged = [store.id(row) for row, failed in enumerate(pool.map(fails, range(len(store)))) if failed]
    if damaged:
        with locked(root / f".{store.folder.name}.lock"):
            remove(store.folder / "index.json")
            for case in damaged:
                remove(store.folder / "cases" / case)
    return damaged


def default_store(environ: Mapping[str, str]) -> Path:
    """The user's cache folder."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return Path(cache) / "voxscale" / "store"


def store_root(data: Data, environ: Mapping[str, str]) -> Path:
    return Path(data.store) if data.store else default_store(environ)


def store_key(manifest: Manifest, data: Data) -> str:
    stamps = {path: _stamp(path) for case in manifest.cases for path in case.files}
    files = [[c.id, c.record, [[str(path.absolute()), *stamps[path]] for path in c.files]] for c in manifest.cases]
    preprocessing = {name: value for name, value in plain(data).items() if name in _PREPROCESSING}
    identity = json.dumps(
        [SCHEMA_VERSION, preprocessing, files, sorted(manifest.labels), len(manifest.channels)]
    ).encode()
    return hashlib.sha256(identity).hexdigest()[:24]


def built_cases(folder: Path) -> list[str]:
    """The cases that are in a store, or in what an interrupted build has left of one."""
    return [path.name for path in (folder / "cases").iterdir() if not path.name.startswith(".")]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path.name}: cannot be read: {error.strerror}", fix="restore the file") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_whole(folder: Path) -> bool:
    """Whether the store can be opened; what is damaged of it is taken away, to be built again."""
    if not (folder / "index.json").exists():
        return False
    try:
        store = open_store(folder, check="index")
    except DamagedStore:
        remove(folder / "index.json")
        remove(folder / "cases")  # without an index no one knows how long the files have to be
        return False
    for row in (damaged := damaged_rows(store)):
        remove(folder / "cases" / store.id(row))
    if damaged:
        remove(folder / "index.json")
    return not damaged


def _build(folder: Path, manifest: Manifest, data: Data, patch: Shape | None, threads: int) -> None:
    cases = manifest.cases
    folder.mkdir(parents=True, exist_ok=True)
    (folder / IN_USE).touch()  # first: it tells a store from other folders
    (folder / "cases").mkdir(exist_ok=True)
    remove_temporaries(folder)
    remove_temporaries(folder / "cases")
    threads = threads_with_room(cases, data, threads)
    with progress("preparing cases", len(cases)) as advance, ThreadPoolExecutor(threads) as pool:

        def build(case: Case) -> dict[str, Any] | DataError:
            try:
                return _prepare_case(folder / "cases" / case.id, case, manifest, data, patch)
            except DataError as error:
                return error
            finally:
                advance()

        details = list(pool.map(build, cases))
    if errors := [detail for detail in details if isinstance(detail, DataError)]:
        lines = [line for error in errors for line in error.message.splitlines()]
        raise DataError.from_findings(lines, fix="; ".join(dict.fromkeys(error.fix for error in errors)))
    _write_index(folder, cases, [detail for detail in details if isinstance(detail, dict)], data)


def _write_index(folder: Path, cases: list[Case], details: list[dict[str, Any]], data: Data) -> None:
    by_channels: dict[int, list[str]] = {}
    for case, detail in zip(cases, details, strict=True):
        by_channels.setdefault(detail["channels"], []).append(case.id)
    if len(by_channels) > 1:
        usual = max(by_channels, key=lambda count: len(by_channels[count]))
        raise DataError.from_findings(
            [
                f"case {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: "
                f"found {count} channels, expected {usual} as in most cases"
                for count, names in sorted(by_channels.items())
                if count != usual
            ],
            fix="add the missing modality, save pictures all as grey or all as RGB, or take the cases out",
        )
    rows = np.zeros(len(cases), ROW)
    labels = np.zeros((len(cases), 256), np.bool_)
    for n, (case, detail) in enumerate(zip(cases, details, strict=True)):
        labels[n, detail["labels"]] = True
        rows[n]["id"], rows[n]["shape"] = case.id.encode(), detail["shape"]
        inside = folder / "cases" / case.id
        rows[n]["bytes"] = sizes_of(inside)
        rows[n]["sums"] = [_sum(inside / name) for name in SUMMED]
        rows[n]["sha256"], rows[n]["image_sha256"] = (bytes.fromhex(detail[k]) for k in ("sha256", "image_sha256"))
    rows["labels"] = np.packbits(labels, axis=1, bitorder="little")
    rows = rows[np.argsort(rows["id"], kind="stable")]
    with publish(folder / "index.npy") as temporary, temporary.open("wb") as file:
        np.save(file, rows, allow_pickle=False)
    contents = hashlib.sha256(b"".join(bytes(row["id"]) + b"\0" + bytes(row["sha256"]) for row in rows))
    header = {
        "schema": SCHEMA_VERSION,
        "source": Path(data.source).name,
        "cases": len(rows),
        "channels": details[0]["channels"],
        "labels": np.flatnonzero(labels.any(axis=0)).tolist(),
        "dtype": stored_dtype(data).name,
        "digest": contents.hexdigest(),
        "bytes": int(np.maximum(rows["bytes"], 0).sum()),
        "index_sha256": sha256_of(folder / "index.npy"),
    }
    write_json(folder / "index.json", {**header, "seal": seal(header)})


def _prepare_case(folder: Path, case: Case, manifest: Manifest, data: Data, patch: Shape | None) -> dict[str, Any]:
    """Write one case and return what the index has to know; a sound one that is there already is only described."""
    if (details := _described(folder)) is not None:
        return details
    remove(folder)
    try:
        raw = read_case(case, channels=len(manifest.channels), labels=manifest.labels)
        prepared = _preprocessed(case, raw, data)
        with publish(folder) as temporary:
            temporary.mkdir()
            return _write_case(temporary, raw, prepared, stored_dtype(data), patch)
    except MemoryError as error:
        raise beyond_memory(case, data) from error


def _described(folder: Path) -> dict[str, Any] | None:
    """What an earlier build wrote of a case, if it is as it was written; chunks are checked when they are read."""
    try:
        details: dict[str, Any] = read_json(folder / "case.json")
        sound = details["seal"] == seal(details) and details["bytes"] == sizes_of(folder)[:-1]
        return details if sound and details["places_sum"] == _sum(folder / "places.npy") else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _preprocessed(case: Case, raw: RawCase, data: Data) -> PreparedCase:
    try:
        return preprocess(raw, data)
    except DataError as error:
        raise DataError(f"case {case.id}: {error.message}", fix=error.fix) from error


def _write_case(
    folder: Path, raw: RawCase, prepared: PreparedCase, dtype: np.dtype[Any], patch: Shape | None
) -> dict[str, Any]:
    image_cxyz, label_xyz = prepared.image_cxyz.astype(dtype), prepared.label_xyz
    shape = image_cxyz.shape[1:]
    chunks, blocks = choose_chunks(shape, patch)
    _write_array(folder / "image.b2nd", image_cxyz, (1, *chunks), (1, *blocks))
    checksums = {"image": Checksums.of(folder / "image.b2nd").as_json()}
    labels: list[int] = []
    if label_xyz is not None:
        _write_array(folder / "label.b2nd", label_xyz, chunks, blocks)
        checksums["label"] = Checksums.of(folder / "label.b2nd").as_json()
        labels = np.flatnonzero(count_labels(label_xyz)).tolist()
        np.save(folder / "places.npy", _find_places(label_xyz, labels), allow_pickle=False)
    details: dict[str, Any] = {
        "shape": list(shape),
        "channels": len(image_cxyz),
        "labels": labels,
        "sha256": raw.sha256,
        "image_sha256": raw.image_sha256,
        "geometry": prepared.geometry.as_json(),
        "checksums": checksums,
        "bytes": sizes_of(folder)[:-1],  # of the files before this one
        "places_sum": _sum(folder / "places.npy"),
    }
    details["seal"] = seal(details)
    write_json(folder / "case.json", details)
    return details


def _sum(path: Path) -> int:
    return int(google_crc32c.value(path.read_bytes())) if path.is_file() else 0


def choose_chunks(shape: tuple[int, ...], patch: Shape | None) -> tuple[Shape, Shape]:
    """Chunk and block edges for reading patches of that size.

    Blocks, which are what is decompressed, are columns along the last axis: long runs of memory are copied fastest,
    even where a patch uses only a part of them. Chunks are what is looked up and checked. docs/adr/0002 has figures.
    """
    x, y, z = shape
    edge = 32 if patch is not None and max(patch[:2]) <= 32 else 64
    longest = 256 if patch is None else min(256, 4 * patch[2])
    column = -(-z // -(-z // longest))  # equal parts, none longer than that
    return (min(x, edge), min(y, edge), column), (min(x, 16), min(y, 16), column)


def _write_array(path: Path, array: NDArray[Any], chunks: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    fast = {"codec": blosc2.Codec.LZ4, "clevel": 1, "nthreads": 1, "filters": [blosc2.Filter.NOFILTER]}
    try:
        blosc2.asarray(np.ascontiguousarray(array), urlpath=str(path), chunks=chunks, blocks=blocks, cparams=fast)
    except RuntimeError as error:  # all that blosc2 says where it cannot write
        raise OSError(errno.ENOSPC, str(error)) from error


def _find_places(label_xyz: Labels, labels: list[int]) -> NDArray[np.int16 | np.int32]:
    """Rows (label, x, y, z), ordered by label; of each at most PLACES_PER_LABEL, spread evenly."""
    kind = np.int16 if max(label_xyz.shape) <= np.iinfo(np.int16).max else np.int32
    found = [np.empty((0, 4), kind)]
    for label in labels:
        if label > 0:
            flat = np.flatnonzero(label_xyz.ravel() == label)
            if len(flat) > PLACES_PER_LABEL:
                # One of each of so many equal parts, at random: a fixed step would keep to planes of the volume.
                edges = np.linspace(0, len(flat), PLACES_PER_LABEL + 1).astype(np.intp)
                flat = flat[np.random.default_rng(label).integers(edges[:-1], edges[1:])]
            places = np.stack(np.unravel_index(flat, label_xyz.shape), axis=1)
            found.append(np.insert(places, 0, label, axis=1).astype(kind))
    return np.concatenate(found)


def stored_dtype(data: Data) -> np.dtype[Any]:
    """Half precision holds what was brought to one scale (11 bits, against the 8 to 12 of scanners); not raw values."""
    intensity = data.intensity
    scaled = any(getattr(intensity, name) is not None for name in type(intensity).model_fields)
    return np.dtype(np.float16 if scaled else np.float32)
