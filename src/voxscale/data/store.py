"""The store: cases prepared once per node, chunked and compressed, read by patch through the page cache.

    STORE/KEY/index.json        written last: a store without it is not used
    STORE/KEY/index.npy         one row per case, ordered by id, memory-mapped by every reader
    STORE/KEY/cases/ID/         image.b2nd (c, x, y, z), label.b2nd (x, y, z), places.npy, case.json

A reader holds two bytes of its own for each case. Index and sizes are checked on opening, each
chunk against its checksum when it is first read. `build.py` writes stores; `shelf.py` lists, prunes and stages them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
from blosc2 import blosc2_ext
from blosc2.blosc2_ext import NDArray as NDArrayBase
from numpy.typing import NDArray

from voxscale.data.geometry import Geometry, Shape
from voxscale.data.volumes import Labels
from voxscale.errors import DataError
from voxscale.files import hold, read_json, sha256_of

SCHEMA_VERSION = 3
FILES = ("image.b2nd", "label.b2nd", "places.npy", "case.json")
ROW = np.dtype(
    [
        ("id", "S200"),  # UTF-8
        ("shape", "<i4", 3),
        ("labels", "u1", 32),  # one bit per label value that the case has
        ("bytes", "<i8", len(FILES)),  # -1: there is no such file
        ("sums", "<u4", 2),  # checksums of places.npy and case.json; the arrays have theirs by chunk
        ("sha256", "V32"),  # of the case as its files had it
        ("image_sha256", "V32"),
    ]
)
SUMMED = ("places.npy", "case.json")
IN_USE = "in-use"
_REBUILD = "voxscale prepare CONFIG --verify finds and rebuilds what is damaged"
_MOST_PARTLY = 4096
_BLOCK = 256  # rows that are looked at together

Box = tuple[slice, slice, slice]
Array = Literal["image", "label"]
Check = Literal["header", "index", "files"]
_NUMBER: dict[Array, int] = {"image": 0, "label": 1}
EVERYTHING: Box = (slice(None), slice(None), slice(None))


class Store:
    """Read access to prepared cases, each known by its row. Safe for threads: every read opens its file anew."""

    def __init__(self, folder: Path, header: Mapping[str, Any], rows: NDArray[Any], remedy: str) -> None:
        self.folder = folder
        self._remedy = remedy
        self._channels: int = header["channels"]
        self.dtype = np.dtype(header["dtype"])
        self.digest: str = header["digest"]  # of the cases as their files had them
        self.labels: tuple[int, ...] = tuple(header["labels"])
        self._rows = rows
        self._verified = np.zeros((len(rows), 2), np.bool_)  # whole arrays, image and label
        self._partly: dict[tuple[int, str], NDArray[np.bool_]] = {}  # chunks of others; the oldest are forgotten
        self._held = hold(folder / IN_USE)  # `prune` spares a store that someone reads, or has read of late
        with suppress(OSError):
            os.utime(folder / IN_USE)

    @property
    def channels(self) -> int:
        return self._channels

    def __len__(self) -> int:
        return len(self._rows)

    def id(self, row: int) -> str:
        return bytes(self._rows["id"][row]).decode()

    def ids(self, rows: slice = slice(None)) -> list[str]:
        """The ids of many rows, at a tenth of what they take one by one."""
        return list(map(bytes.decode, self._rows["id"][rows].tolist()))

    def row(self, case: str) -> int:
        row = int(np.searchsorted(self._rows["id"], np.bytes_(case.encode())))
        if row == len(self) or self.id(row) != case:
            raise DataError(f"store {self.folder.name}: has no case {case}", fix="start anew with --fresh")
        return row

    def shape(self, row: int) -> Shape:
        x, y, z = self._rows["shape"][row].tolist()
        return x, y, z

    def largest_shape(self) -> Shape:
        x, y, z = self._rows["shape"].max(axis=0).tolist()
        return x, y, z

    def labels_of(self, row: int) -> tuple[int, ...]:
        """The label values, background included, that stand in the case."""
        return tuple(np.flatnonzero(np.unpackbits(self._rows["labels"][row], bitorder="little")).tolist())

    def image_sha256(self, row: int) -> bytes:
        return bytes(self._rows["image_sha256"][row])

    def labels_at(self, row: int) -> tuple[int, ...]:
        """The labels that `places` knows places of."""
        return tuple(label for label in self.labels_of(row) if label > 0)

    def places(self, row: int, label: int) -> NDArray[np.int16 | np.int32]:
        """Where `label` stands, (n, 3): not every voxel, but spread evenly over all."""
        places = np.load(io.BytesIO(self._small(row, "places.npy")), allow_pickle=False)
        low, high = np.searchsorted(places[:, 0], [label, label + 1])
        rows: NDArray[np.int16 | np.int32] = places[low:high, 1:]
        return rows

    def geometry(self, row: int) -> Geometry:
        return Geometry.from_json(self._details(row)["geometry"])

    def sizes(self, row: int) -> list[int]:
        """The lengths that the case's files were written with, as in FILES."""
        sizes: list[int] = self._rows["bytes"][row].tolist()
        return sizes

    @property
    def disk_bytes(self) -> int:
        """What all cases take on disk."""
        return int(self._rows["bytes"].sum())

    def nbytes(self, row: int) -> int:
        """How much memory the case takes, decompressed."""
        x, y, z = self.shape(row)
        return x * y * z * (self.channels * int(self.dtype.itemsize) + 1)

    def read_image(self, row: int, box: Box = EVERYTHING, *, into: NDArray[np.uint8] | None = None) -> NDArray[Any]:
        """The part of the image in `box`; in the memory of `into`, if given, which is reused from read to read."""
        return self._read(row, "image", (slice(0, self.channels), *box), self.dtype, into)

    def read_channels(self, row: int, box: Box, *, into: NDArray[np.uint8]) -> Iterator[NDArray[Any]]:
        """The part of the image in `box`, channel by channel.

        Each comes in the memory of the one before, which so stays in the processor's cache.
        """
        (_, *ends) = self._ends(row, "image", (slice(None), *box))
        out = _shaped(into, [high - low for low, high in ends], self.dtype)
        with self._naming(row, "image.b2nd"):
            opened = self._checked(row, "image", [(0, self.channels), *ends], self.dtype)
            for channel in range(self.channels):
                if out.size:
                    _fill(out[None], opened, [(channel, channel + 1), *ends])
                yield out

    def read_label(self, row: int, box: Box = EVERYTHING, *, into: NDArray[np.uint8] | None = None) -> Labels:
        """The part of the label in `box`; all background where the case has none."""
        if self._has(row, "label.b2nd"):
            return self._read(row, "label", box, np.dtype(np.uint8), into)
        empty = _shaped(into, [high - low for low, high in self._ends(row, "label", box)], np.dtype(np.uint8))
        empty.fill(0)
        return empty

    def verify(self, row: int) -> None:
        """Check all of the case."""
        self._small(row, "case.json")
        self.read_image(row)
        if self._has(row, "label.b2nd"):
            self.read_label(row)
            self._small(row, "places.npy")

    def _read(
        self, row: int, array: Array, box: Sequence[slice], dtype: np.dtype[Any], into: NDArray[np.uint8] | None
    ) -> NDArray[Any]:
        ends = self._ends(row, array, box)
        out = _shaped(into, [high - low for low, high in ends], dtype)
        with self._naming(row, f"{array}.b2nd"):
            opened = self._checked(row, array, ends, dtype)
            if out.size:
                _fill(out, opened, ends)
        return out

    def _ends(self, row: int, array: Array, box: Sequence[slice]) -> list[tuple[int, int]]:
        shape = (self.channels, *self.shape(row)) if array == "image" else self.shape(row)
        ends = (edge.indices(n) for edge, n in zip(box, shape, strict=True))
        return [(low, max(low, high)) for low, high, _ in ends]

    def _checked(self, row: int, array: Array, ends: Sequence[tuple[int, int]], dtype: np.dtype[Any]) -> Any:
        """The array file, opened, what a read of it touches verified."""
        opened = self._open(row, array)
        shape = (self.channels, *self.shape(row)) if array == "image" else self.shape(row)
        if opened.shape != shape or opened.dtype != dtype:
            raise ValueError(f"found {opened.shape} {opened.dtype}, expected {shape} {dtype}")
        self._verify(row, array, opened, ends)
        return opened

    @contextmanager
    def _naming(self, row: int, name: str) -> Iterator[None]:
        """Whatever goes wrong with a damaged file, the case is named."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
            raise self._damaged(row, name, error) from error

    def _open(self, row: int, array: Array) -> Any:
        """Open an array file, whose header is checked first: a damaged one could make blosc2 do anything."""
        path = self._path(row, f"{array}.b2nd")
        if not self._verified[row, _NUMBER[array]] and (row, array) not in self._partly:
            sums = self._checksums(row, array)
            if sums.frame != _frame_sum(path, sums.head_bytes, sums.tail_bytes):
                raise ValueError("its header differs from what was written")
            while len(self._partly) >= _MOST_PARTLY:
                self._partly.pop(next(iter(self._partly)), None)
            self._partly[row, array] = np.zeros(len(sums.chunks), np.bool_)
        return _open_array(path)

    def _verify(self, row: int, array: Array, opened: Any, ends: Sequence[tuple[int, int]]) -> None:
        """Compare the chunks that a read touches with their checksums, unless this process has done so before."""
        if self._verified[row, _NUMBER[array]]:
            return
        touched = _chunks_of(opened, ends)
        done = self._partly.get((row, array))
        if done is None:  # another thread has just seen the last of it, or too many others came
            done = np.zeros(opened.schunk.nchunks, np.bool_)
        if done[touched].all():
            return
        sums = self._checksums(row, array)
        for chunk in touched[~done[touched]].tolist():
            if google_crc32c.value(opened.schunk.get_chunk(chunk)) != sums.chunks[chunk]:
                raise ValueError(f"chunk {chunk} differs from what was written")
            done[chunk] = True
        if done.all():
            self._verified[row, _NUMBER[array]] = True
            self._partly.pop((row, array), None)

    def _checksums(self, row: int, array: Array) -> Checksums:
        return Checksums.from_json(self._details(row)["checksums"][array])

    def _details(self, row: int) -> Any:
        return json.loads(self._small(row, "case.json"))

    def _small(self, row: int, name: Literal["places.npy", "case.json"]) -> bytes:
        """The content of a small file, checked at every read."""
        with self._naming(row, name):
            content = self._path(row, name).read_bytes()
            if google_crc32c.value(content) != self._rows["sums"][row][SUMMED.index(name)]:
                raise ValueError("it differs from what was written")
        return content

    def _damaged(self, row: int, name: str, error: Exception) -> DataError:
        return DataError(f"store: case {self.id(row)}: {name} is damaged: {error}", fix=self._remedy)

    def _has(self, row: int, name: str) -> bool:
        return bool(self._rows["bytes"][row][FILES.index(name)] >= 0)

    def _path(self, row: int, name: str) -> Path:
        return self.folder / "cases" / self.id(row) / name


def open_store(folder: Path, *, check: Check = "files", remedy: str = _REBUILD) -> Store:
    """Open a complete store; `check` its index, and with "files" also that every file is there in full length.

    With "header" only that is looked at: for further ranks of a node, of which one has checked all. `remedy` is what
    those who find damage are told.
    """
    try:
        header = read_json(folder / "index.json")
        if header["schema"] != SCHEMA_VERSION or seal(header) != header["seal"]:
            raise ValueError("index.json is not the one that was written")
        if check != "header" and sha256_of(folder / "index.npy") != header["index_sha256"]:
            raise ValueError("index.npy is not the one that was written")
        rows = np.load(folder / "index.npy", mmap_mode="r")
        store = Store(folder, header, rows, remedy)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedStore(f"store {folder}: its index is damaged: {error}", fix=remedy) from error
    if check == "files" and (damaged := damaged_rows(store)):
        names = ", ".join(store.id(row) for row in damaged[:5])
        raise DamagedStore(f"store {folder}: files of {len(damaged)} cases are cut or gone, e.g. {names}", fix=remedy)
    return store


def seal(header: Mapping[str, Any]) -> str:
    """A hash over all other fields of a JSON object."""
    content = {name: value for name, value in header.items() if name != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe_store(store: Store) -> dict[str, Any]:
    """What a plan has to know of the store."""
    return {
        "largest": store.largest_shape(),
        "channels": store.channels,
        "labels": store.labels,
        "store": store.folder.name,
        "data_sha256": store.digest,
    }


class DamagedStore(DataError):
    """Not as it was written; building it again mends it."""


def damaged_rows(store: Store) -> list[int]:
    """Cases with a file that has not the length it was written with."""
    cases = str(store.folder / "cases")
    return [
        row
        for first in range(0, len(store), _BLOCK)
        for row, id_ in enumerate(store.ids(slice(first, first + _BLOCK)), start=first)
        if _sizes_in(f"{cases}/{id_}") != store.sizes(row)
    ]


def sizes_of(folder: Path) -> list[int]:
    return _sizes_in(str(folder))


def _sizes_in(folder: str) -> list[int]:
    """As FILES. A `Path` for each would take several times as long as the look at the file."""
    return [_size(f"{folder}/{name}") for name in FILES]


def _size(path: str) -> int:
    try:
        status = os.stat(path)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


@dataclass(frozen=True)
class Checksums:
    """Of one array file: what comes before and after its chunks (and places them), and each chunk."""

    head_bytes: int
    tail_bytes: int
    frame: int
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, path: Path) -> Checksums:
        array = _open_array(path)  # its chunks live as long as it does
        chunked = array.schunk
        with path.open("rb") as file:
            head_bytes = int.from_bytes(file.read(15)[11:], "big")  # blosc2's frame header states its own length
        tail_bytes = path.stat().st_size - head_bytes - chunked.cbytes
        sums = tuple(google_crc32c.value(chunked.get_chunk(n)) for n in range(chunked.nchunks))
        return cls(head_bytes, tail_bytes, _frame_sum(path, head_bytes, tail_bytes), sums)

    def as_json(self) -> list[Any]:
        return [self.head_bytes, self.tail_bytes, self.frame, list(self.chunks)]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> Checksums:
        head_bytes, tail_bytes, frame, chunks = content
        return cls(head_bytes, tail_bytes, frame, tuple(chunks))


def _frame_sum(path: Path, head_bytes: int, tail_bytes: int) -> int:
    with path.open("rb") as file:
        head = file.read(head_bytes)
        file.seek(-tail_bytes, 2)
        return int(google_crc32c.value(head + file.read()))


def _open_array(path: Path) -> Any:
    """An array of numbers and nothing else: `blosc2.open` would make of a file whatever its metadata ask for.

    Lazy arrays among them, which hold code, and proxies, which name other files and hosts.
    """
    opened = blosc2_ext.open(str(path), "r", 0, mmap_mode="r", dparams={"nthreads": 1})
    if not isinstance(opened, NDArrayBase) or set(opened.schunk.meta) != {"b2nd"}:
        raise ValueError("found a file of another kind, expected an array of numbers")
    return opened


def _fill(out: NDArray[Any], opened: Any, ends: Sequence[tuple[int, int]]) -> None:
    """Decompress a box into `out`. The public indexing allocates memory anew at each read."""
    NDArrayBase.get_slice_numpy(opened, out, ([low for low, _ in ends], [high for _, high in ends]))


def _chunks_of(opened: Any, ends: Sequence[tuple[int, int]]) -> NDArray[np.intp]:
    """The numbers of the chunks that a box touches."""
    grid = [-(-n // chunk) for n, chunk in zip(opened.shape, opened.chunks, strict=True)]
    touched = [
        np.arange(low // chunk, -(-high // chunk)) for (low, high), chunk in zip(ends, opened.chunks, strict=True)
    ]
    return np.ravel_multi_index(np.ix_(*touched), grid).ravel()


def _shaped(memory: NDArray[np.uint8] | None, size: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    if memory is None:
        return np.empty(size, dtype)
    return memory[: int(np.prod(size)) * dtype.itemsize].view(dtype).reshape(size)
