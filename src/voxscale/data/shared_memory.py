"""A folder in the node's shared memory that a run's ranks have in common, and that goes with the last of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from voxscale.errors import InfrastructureError
from voxscale.files import hold, is_at, locked, remove

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory, by its nature shared; the folders in it are 0700
_IN_USE = "in-use"
_open_here: list[Path] = []  # locks keep other processes out, but not this one


class SharedFolder:
    """Open for as long as this object is not closed, or its process lives."""

    def __init__(self, name: str, root: Path = SHARED_MEMORY) -> None:
        self.root = root
        self.path = root / f"{_prefix()}{name}"
        with _alone(root):
            _sweep(root)
            self.path.mkdir(mode=0o700, exist_ok=True)
            _refuse_strange(self.path)
            (self.path / _IN_USE).touch()
            self._in_use = hold(self.path / _IN_USE)
            _open_here.append(self.path)

    def close(self) -> None:
        if self._in_use is not None:
            with _alone(self.root):
                self._in_use = None  # which frees it
                _open_here.remove(self.path)
                _sweep(self.root)


def sweep_shared_memory(root: Path = SHARED_MEMORY) -> None:
    """Delete what this user's killed ranks left in shared memory."""
    if _own_folders(root):
        with suppress(InfrastructureError), _alone(root):
            _sweep(root)


def _own_folders(root: Path) -> list[Path]:
    return [folder for folder in root.glob(f"{_prefix()}*") if not _is_strange(folder)]


def _is_strange(path: Path) -> bool:
    """Whether it is another user's, or a link: anybody can put anything there, under any name."""
    with suppress(FileNotFoundError):  # what another process removes meanwhile was this user's
        status = path.lstat()
        return status.st_uid != os.getuid() or stat.S_ISLNK(status.st_mode)
    return False


def _refuse_strange(path: Path) -> None:
    if _is_strange(path):
        raise InfrastructureError(
            f"{path}: found another user's, or a link; expected this user's own",
            fix="have it removed, or use data.cache.where: store",
        )


def _sweep(root: Path) -> None:
    for folder in _own_folders(root):
        if folder in _open_here:
            continue
        try:
            with locked(folder / _IN_USE, wait=False):
                remove(folder)
        except OSError:  # someone uses it
            continue


def _prefix() -> str:
    return f"voxscale-{os.getuid()}-"


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """All that comes and goes does so under one lock, so that no one sweeps what another is about to use.

    The lock's file goes with the last folder; whoever has waited for a file that is gone meanwhile begins again.
    """
    path = root / f".voxscale-{os.getuid()}.lock"
    while True:
        _refuse_strange(path)
        with locked(path) as file:
            if not is_at(path, file):
                continue
            yield
            if not _own_folders(root):
                path.unlink()
            return
