"""The store: cases prepared once per node, chunked and compressed, read by patch through the page cache.

    STORE/KEY/index.json          written last: a store without it is not used
    STORE/KEY/cases/ID/           image.b2nd (c, x, y, z), label.b2nd (x, y, z), voxels.npy

KEY names the inputs (paths, sizes, times of change), the preprocessing and this module's version, so a store never
has to be asked whether it is stale. `Store.digest` names the contents: the same data elsewhere has the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
from numpy.typing import NDArray

from voxscale.config.load import plain
from voxscale.config.schema import Data
from voxscale.data.cases import Case
from voxscale.data.volumes import Floats, Labels, normalise, read_case
from voxscale.errors import DataError, InfrastructureError
from voxscale.files import locked, publish, read_json, remove_temporaries, sha256_of, write_json
from voxscale.terminal import progress

SCHEMA_VERSION = 1
VOXELS_PER_LABEL = 4096  # places a balanced patch can be centred on, for each case and label
_CHUNK = 32
_FILES = ("image.b2nd", "label.b2nd", "voxels.npy")

Box = tuple[slice, slice, slice]


@dataclass(frozen=True)
class Entry:
    """What the index knows of one case without opening it."""

    id: str
    shape: tuple[int, int, int]
    channels: int
    labels: tuple[int, ...]
    voxels: Mapping[int, tuple[int, int]]  # label → its rows in voxels.npy
    bytes: Mapping[str, int]
    sha256: str  # of the files that the case was made from


class Store:
    """Read access to prepared cases. Safe for threads; holds nothing per case but its index entry."""

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        self.folder = folder
        self.entries = {entry.id: entry for entry in entries}
        self.channels = entries[0].channels
        self.labels = tuple(sorted({label for entry in entries for label in entry.labels}))
        contents = sorted((entry.id, entry.sha256) for entry in entries)
        self.digest = hashlib.sha256(json.dumps(contents).encode()).hexdigest()

    def read_image(self, case: str, box: Box) -> Floats:
        image: Floats = self._open(case, "image.b2nd")[(slice(None), *box)]
        return image

    def read_label(self, case: str, box: Box) -> Labels:
        label: Labels = self._open(case, "label.b2nd")[box]
        return label

    def read_whole(self, case: str) -> tuple[Floats, Labels]:
        everything = (slice(None), slice(None), slice(None))
        return self.read_image(case, everything), self.read_label(case, everything)

    def voxels(self, case: str, label: int) -> NDArray[np.int16]:
        """Places (n, 3) where `label` stands; at most VOXELS_PER_LABEL, spread evenly."""
        start, stop = self.entries[case].voxels[label]
        rows: NDArray[np.int16] = np.load(self._path(case, "voxels.npy"), mmap_mode="r")[start:stop]
        return rows

    def _open(self, case: str, name: str) -> Any:
        return blosc2.open(str(self._path(case, name)), mode="r", mmap_mode="r")

    def _path(self, case: str, name: str) -> Path:
        return self.folder / "cases" / case / name


def default_store(environ: Mapping[str, str]) -> Path:
    """The user's cache folder."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return Path(cache) / "voxscale" / "store"


def prepare(cases: Sequence[Case], data: Data, root: Path, *, threads: int = 1) -> Store:
    """Open the store of these cases; build what is missing of it first.

    Any number of ranks and jobs may call this at once: one builds, the others wait for it. Cases that an
    interrupted build finished are kept.
    """
    folder = root / store_key(cases, data)
    try:
        if not (folder / "index.json").exists():
            with locked(root / f".{folder.name}.lock"):
                if not (folder / "index.json").exists():
                    _build(folder, cases, data, threads)
        return open_store(folder)
    except OSError as error:
        raise InfrastructureError(
            f"store {root}: cannot be used: {error.strerror or error}",
            fix="set data.store to a writable folder with room",
        ) from error


def open_store(folder: Path) -> Store:
    """Open a complete store; its index and the size of every file are checked."""
    try:
        index = read_json(folder / "index.json")
        entries = [_entry(row) for row in index["cases"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"store {folder}: its index is damaged", fix="delete that folder; it is rebuilt") from error
    store = Store(folder, entries)
    for entry in entries:
        for name, expected in entry.bytes.items():
            path = folder / "cases" / entry.id / name
            found = path.stat().st_size if path.exists() else None
            if found != expected:
                raise DataError(
                    f"store: case {entry.id}: {name} has {found} bytes, expected {expected}",
                    fix=f"delete {folder}; it is rebuilt",
                )
    return store


def store_key(cases: Sequence[Case], data: Data) -> str:
    files = [[case.id, [[str(path.resolve()), *_stamp(path)] for path in case.files]] for case in cases]
    preprocessing = {"orientation": data.orientation, "intensity": plain(data.intensity)}
    identity = json.dumps([SCHEMA_VERSION, preprocessing, files]).encode()
    return hashlib.sha256(identity).hexdigest()[:24]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path.name}: cannot be read: {error.strerror}", fix="restore the file") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _build(folder: Path, cases: Sequence[Case], data: Data, threads: int) -> None:
    (folder / "cases").mkdir(parents=True, exist_ok=True)
    remove_temporaries(folder / "cases")
    blosc2.set_nthreads(1)
    with progress("preparing cases", len(cases)) as advance, ThreadPoolExecutor(threads) as pool:

        def build(case: Case) -> dict[str, Any] | DataError:
            try:
                return _prepare_case(folder / "cases" / case.id, case, data)
            except DataError as error:
                return error
            finally:
                advance()

        rows = list(pool.map(build, cases))
    if errors := [row for row in rows if isinstance(row, DataError)]:
        findings = [f"case {case.id}: {row.message}" for case, row in zip(cases, rows, strict=True) if row in errors]
        raise DataError.from_findings(findings, fix=errors[0].fix)
    channels = {row["channels"] for row in rows if isinstance(row, dict)}
    if len(channels) > 1:
        raise DataError(f"cases differ in their number of channels: {sorted(channels)}", fix="give all cases the same")
    write_json(folder / "index.json", {"schema": SCHEMA_VERSION, "cases": rows})


def _prepare_case(folder: Path, case: Case, data: Data) -> dict[str, Any]:
    """Write one case and return its row of the index; a case that is there already is only described."""
    if not folder.exists():
        image_cxyz, label_xyz = read_case(case.images, case.label, data.orientation)
        if label_xyz is None:
            raise DataError("has no label", fix="add the label file, or move the image away")
        with publish(folder) as temporary:
            temporary.mkdir()
            contents = hashlib.sha256(b"".join(bytes.fromhex(sha256_of(path)) for path in case.files)).hexdigest()
            _write_case(temporary, normalise(image_cxyz, data.intensity), label_xyz, contents)
    return {
        **read_json(folder / "case.json"),
        "id": case.id,
        "bytes": {name: (folder / name).stat().st_size for name in _FILES},
    }


def _write_case(folder: Path, image_cxyz: Floats, label_xyz: Labels, contents: str) -> None:
    chunks = tuple(min(_CHUNK, n) for n in label_xyz.shape)
    fast = {"codec": blosc2.Codec.LZ4, "clevel": 5, "nthreads": 1}
    blosc2.asarray(image_cxyz, urlpath=str(folder / "image.b2nd"), chunks=(1, *chunks), cparams=fast)
    blosc2.asarray(label_xyz, urlpath=str(folder / "label.b2nd"), chunks=chunks, cparams=fast)
    labels = [int(label) for label in np.unique(label_xyz)]
    places = [_spread(np.argwhere(label_xyz == label)) for label in labels if label > 0]
    stops = np.cumsum([len(rows) for rows in places])
    np.save(
        folder / "voxels.npy",
        np.concatenate([np.empty((0, 3), np.intp), *places]).astype(np.int16),
        allow_pickle=False,
    )
    write_json(
        folder / "case.json",
        {
            "shape": list(label_xyz.shape),
            "channels": len(image_cxyz),
            "labels": labels,
            "sha256": contents,
            "voxels": {
                label: [int(stop) - len(rows), int(stop)]
                for label, rows, stop in zip([n for n in labels if n > 0], places, stops, strict=True)
            },
        },
    )


def _spread(places: NDArray[np.intp]) -> NDArray[np.intp]:
    step = max(1, -(-len(places) // VOXELS_PER_LABEL))
    return places[::step]


def _entry(row: Mapping[str, Any]) -> Entry:
    x, y, z = row["shape"]
    return Entry(
        id=row["id"],
        shape=(x, y, z),
        channels=row["channels"],
        labels=tuple(row["labels"]),
        voxels={int(label): (start, stop) for label, (start, stop) in row["voxels"].items()},
        bytes=row["bytes"],
        sha256=row["sha256"],
    )
