"""Where patches are cut from: the store's files, memory that the node's ranks share, or the device's memory.

Each source has one method, `read(row, box, epoch, memory)`. What it returns may lie in `memory`, which the caller
reuses, in shared memory or on the device: it is for reading, and only until the caller's next read.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.data.store import Box, Store
from voxscale.errors import InfrastructureError
from voxscale.files import hold, locked, remove

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  -- memory, by its nature shared; folders in it are 0700
_IN_USE = "in-use"

Patch = tuple[torch.Tensor, torch.Tensor]  # (c, x, y, z) in the store's type, (x, y, z) uint8
Held = Callable[[int], NDArray[np.int32]]  # epoch → the rows that the cache holds in it


class Memory:
    """Bytes that are reused from read to read: fresh memory costs more than filling it."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._bytes: dict[str, torch.Tensor] = {}

    def of(self, name: str, size: int) -> NDArray[np.uint8]:
        held = self._bytes.get(name)
        if held is None or held.numel() < size:
            held = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self._bytes[name] = held
        return held.numpy()


class Source(Protocol):
    def read(self, row: int, box: Box, epoch: int, memory: Memory) -> Patch: ...
    def close(self) -> None: ...


class FromStore:
    """Decompress what is needed; the page cache, which all ranks of a node share, keeps the rest."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, row: int, box: Box, epoch: int, memory: Memory) -> Patch:
        voxels = 1
        for edge, n in zip(box, self._store.shape(row), strict=True):
            voxels *= len(range(*edge.indices(n)))
        itemsize = int(self._store.dtype.itemsize)
        image = self._store.read_image(row, box, into=memory.of("image", voxels * self._store.channels * itemsize))
        label = self._store.read_label(row, box, into=memory.of("label", voxels))
        return torch.from_numpy(image), torch.from_numpy(label)

    def close(self) -> None:
        return


class FromHost:
    """Decompressed cases in the node's shared memory: each is brought there once, by the rank that needs it first.

    The folder goes with the last rank that uses it. What killed ranks left is swept by the next start.
    """

    def __init__(self, store: Store, held: Held, name: str, *, root: Path = SHARED_MEMORY) -> None:
        self._store, self._held = store, held
        sweep_shared_memory(root)
        self._folder = root / f"voxscale-{os.getuid()}-{name}"
        self._epoch, self._rows = 0, frozenset[int]()
        self._brought: set[int] = set()
        self._lock = Lock()
        first = held(1)
        needed = sum(store.nbytes(int(row)) for row in first)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / _IN_USE).touch()
        self._in_use = hold(self._folder / _IN_USE)
        present = sum(path.stat().st_size for path in self._folder.glob("*.raw"))
        free = shutil.disk_usage(root).free
        if needed > free + present:
            self.close()
            raise InfrastructureError(
                f"data.cache: found {(free + present) >> 20} MB of shared memory in {root}, expected "
                f"{needed >> 20} MB for {len(first)} cases",
                fix="lower data.cache.rate, or use data.cache.where: store",
            )

    def read(self, row: int, box: Box, epoch: int, memory: Memory) -> Patch:
        self._enter(epoch)
        if row not in self._rows:
            return FromStore(self._store).read(row, box, epoch, memory)
        shape, channels = self._store.shape(row), self._store.channels
        content = self._content(row)
        split = content.size - int(np.prod(shape))
        image = content[:split].view(self._store.dtype).reshape(channels, *shape)[(slice(None), *box)]
        label = content[split:].reshape(shape)[box]
        return torch.from_numpy(image), torch.from_numpy(label)

    def close(self) -> None:
        if self._in_use is not None:
            self._in_use.close()
            self._in_use = None
        _remove_unused(self._folder)

    def _enter(self, epoch: int) -> None:
        """Once per epoch: drop what this rank has brought and does not hold any more."""
        with self._lock:
            if epoch > self._epoch:
                self._epoch, self._rows = epoch, frozenset(self._held(epoch).tolist())
                for row in self._brought - self._rows:
                    (self._folder / f"{row}.raw").unlink(missing_ok=True)
                self._brought &= self._rows

    def _content(self, row: int) -> NDArray[np.uint8]:
        path = self._folder / f"{row}.raw"
        try:
            return _mapped(path)
        except FileNotFoundError:
            own = self._folder / f"{row}.{secrets.token_hex(4)}.part"
            with own.open("wb") as file:
                file.write(self._store.read_image(row).data)
                file.write(self._store.read_label(row).data)
            own.rename(path)
            with self._lock:
                self._brought.add(row)
            return _mapped(path)


class FromDevice:
    """Decompressed cases in the device's memory, brought there when first needed; patches are views."""

    def __init__(self, store: Store, held: Held, device: torch.device) -> None:
        self._store, self._held, self._device = store, held, device
        self._cases: dict[int, Patch] = {}
        self._epoch, self._rows = 0, frozenset[int]()
        self._lock = Lock()

    def read(self, row: int, box: Box, epoch: int, memory: Memory) -> Patch:
        with self._lock:
            if epoch > self._epoch:
                self._epoch, self._rows = epoch, frozenset(self._held(epoch).tolist())
                self._cases = {row: case for row, case in self._cases.items() if row in self._rows}
            case = self._cases.get(row)
            if case is None and row in self._rows:
                case = self._cases[row] = self._load(row)
        if case is None:
            return FromStore(self._store).read(row, box, epoch, memory)
        image, label = case
        return image[(slice(None), *box)], label[box]

    def close(self) -> None:
        self._cases.clear()

    def _load(self, row: int) -> Patch:
        try:
            image = torch.from_numpy(self._store.read_image(row)).to(self._device)
            return image, torch.from_numpy(self._store.read_label(row)).to(self._device)
        except torch.OutOfMemoryError as error:
            raise InfrastructureError(
                f"data.cache: device memory was full after {len(self._cases)} of {len(self._rows)} cases",
                fix="lower data.cache.rate, or use data.cache.where: host",
            ) from error


def sweep_shared_memory(root: Path = SHARED_MEMORY) -> None:
    """Delete what this user's killed ranks left in shared memory."""
    for folder in root.glob(f"voxscale-{os.getuid()}-*"):
        _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    try:
        if folder.is_dir():
            with locked(folder / _IN_USE, wait=False):
                remove(folder)
    except OSError:  # someone uses it, or it has just gone
        return


def _mapped(path: Path) -> NDArray[np.uint8]:
    content: Any = np.memmap(path, dtype=np.uint8, mode="c")  # copy-on-write: torch wants writable memory
    return np.asarray(content)
