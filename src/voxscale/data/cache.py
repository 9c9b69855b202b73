"""Where patches are cut from: the store's files, memory that the node's ranks share, or the device's memory.

What `read` returns may lie in `memory`, which the caller reuses, in shared memory or on the device: it is for reading,
and only until the caller's next read. `read_channels` may read the channels one after another.
"""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.data.shared_memory import SHARED_MEMORY, SharedFolder
from voxscale.data.store import Box, Store
from voxscale.errors import InfrastructureError

Patch = tuple[torch.Tensor, torch.Tensor]  # (c, x, y, z) in the store's type, (x, y, z) uint8
Channels = tuple[Iterable[torch.Tensor], torch.Tensor]  # the same, each channel good until the next is asked for
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
    @property
    def device_bytes(self) -> int: ...  # that it holds of the device's memory, or of this process's own
    def read(self, row: int, box: Box, epoch: int, memory: Memory) -> Patch: ...
    def read_channels(self, row: int, box: Box, epoch: int, memory: Memory) -> Channels: ...
    def close(self) -> None: ...


class FromStore:
    """Decompress what is needed; the page cache, which all ranks of a node share, keeps the rest."""

    device_bytes = 0

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, row: int, box: Box, epoch: int, memory: Memory) -> Patch:
        nbytes = self._voxels(row, box) * self._store.channels * int(self._store.dtype.itemsize)
        image = self._store.read_image(row, box, into=memory.of("image", nbytes))
        return torch.from_numpy(image), self._label(row, box, memory)

    def read_channels(self, row: int, box: Box, epoch: int, memory: Memory) -> Channels:
        nbytes = self._voxels(row, box) * int(self._store.dtype.itemsize)
        channels = self._store.read_channels(row, box, into=memory.of("image", nbytes))
        return map(torch.from_numpy, channels), self._label(row, box, memory)

    def close(self) -> None:
        return

    def _label(self, row: int, box: Box, memory: Memory) -> torch.Tensor:
        return torch.from_numpy(self._store.read_label(row, box, into=memory.of("label", self._voxels(row, box))))

    def _voxels(self, row: int, box: Box) -> int:
        x, y, z = (len(range(*edge.indices(n))) for edge, n in zip(box, self._store.shape(row), strict=True))
        return x * y * z


class FromHost:
    """Decompressed cases in the node's shared memory: each is brought there once, by the rank that needs it first."""

    device_bytes = 0

    def __init__(self, store: Store, held: Held, name: str, *, root: Path = SHARED_MEMORY) -> None:
        self._store, self._held = store, held
        self._folder = SharedFolder(name, root)
        self._epoch, self._rows = 0, frozenset[int]()
        self._brought: set[int] = set()
        self._lock = Lock()
        needed = sum(store.nbytes(int(row)) for row in held(1))
        present = sum(path.stat().st_size for path in self._folder.path.glob("*.raw"))
        if needed > shutil.disk_usage(root).free + present:
            self.close()
            raise self._no_room(needed)

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

    read_channels = read

    def close(self) -> None:
        self._folder.close()

    def _enter(self, epoch: int) -> None:
        """Once per epoch: drop what this rank has brought and does not hold any more."""
        with self._lock:
            if epoch > self._epoch:
                self._epoch, self._rows = epoch, frozenset(self._held(epoch).tolist())
                for row in self._brought - self._rows:
                    (self._folder.path / f"{row}.raw").unlink(missing_ok=True)
                self._brought &= self._rows

    def _content(self, row: int) -> NDArray[np.uint8]:
        path = self._folder.path / f"{row}.raw"
        try:
            return _mapped(path)
        except FileNotFoundError:
            return self._bring(row, path)

    def _bring(self, row: int, path: Path) -> NDArray[np.uint8]:
        own = path.with_suffix(f".{secrets.token_hex(4)}.part")
        try:
            with own.open("wb") as file:
                file.write(self._store.read_image(row).data)
                file.write(self._store.read_label(row).data)
            content = _mapped(own)  # before another rank, done with the case, can take it away
            own.rename(path)
        except OSError as error:
            own.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC:
                raise
            raise self._no_room(self._store.nbytes(row)) from error
        with self._lock:
            self._brought.add(row)
        return content

    def _no_room(self, needed: int) -> InfrastructureError:
        free = shutil.disk_usage(self._folder.root).free
        return InfrastructureError(
            f"data.cache: found {free >> 20} MB of shared memory free in {self._folder.root}, "
            f"expected {needed >> 20} MB more",
            fix="lower data.cache.rate, or use data.cache.where: store",
        )


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

    read_channels = read

    @property
    def device_bytes(self) -> int:
        with self._lock:
            return sum(tensor.nbytes for case in self._cases.values() for tensor in case)

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


def _mapped(path: Path) -> NDArray[np.uint8]:
    content: Any = np.memmap(path, dtype=np.uint8, mode="c")  # copy-on-write: torch wants writable memory
    return np.asarray(content)
