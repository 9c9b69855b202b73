"""All stores and unpacked archives below one root: what they take, which can go, and copies on a node's own disk."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from voxscale.data.archive import ARCHIVES, is_unpacked, stamp_of
from voxscale.data.store import IN_USE, DamagedStore, Store, open_store
from voxscale.errors import InfrastructureError
from voxscale.files import is_locked, locked, publish, read_json, remove

_ROOM = 1.05  # a copy is refused unless this much of its size is free


@dataclass(frozen=True)
class Shelved:
    """One store, or archive that was unpacked, as `prepare --list` shows it."""

    key: str  # its path below the root
    source: str
    cases: int | None  # of an archive nobody has counted them
    bytes: int
    idle_days: float
    state: str  # ready, in use, unfinished, archive

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def list_stores(root: Path) -> list[Shelved]:
    """The stores and unpacked archives below `root`, largest first; whatever else lies there is left out."""
    stores = [_describe(folder) for folder in _folders(root) if _is_store(folder)]
    archives = [_describe_archive(folder) for folder in _folders(root / ARCHIVES) if is_unpacked(folder)]
    return sorted(stores + archives, key=lambda shelved: -shelved.bytes)


def render_stores(stores: Sequence[Shelved], root: Path, title: str) -> str:
    total = sum(store.bytes for store in stores)
    width = max((24, *(len(store.key) for store in stores)))
    lines = [f"{'STORE':{width}}  {'SOURCE':24}  {'CASES':>7}  {'MB':>9}  {'IDLE':>8}  STATE"] if stores else []
    lines += [
        f"{store.key:{width}}  {store.source[:24]:24}  {'-' if store.cases is None else store.cases:>7}  "
        f"{store.bytes / 1e6:9.1f}  {store.idle_days:5.1f} d  {store.state}"
        for store in stores
    ]
    return "\n".join([*lines, f"{title}: {len(stores)}, {total / 1e6:.1f} MB, in {root}"])


def prune_stores(root: Path, *, idle_days: float) -> list[Shelved]:
    """Delete what no one reads and no one has read for so many days. It is built or unpacked again when needed.

    Where several share the root, what belongs to others stays.
    """
    pruned = []
    for shelved in list_stores(root):
        if shelved.idle_days < idle_days:
            continue
        folder = root / shelved.key
        stamp = _stamp(folder)
        try:
            with locked(folder.parent / f".{folder.name}.lock", wait=False), locked(stamp, wait=False):
                remove(folder / "index.json")  # first: without it no one takes the rest for a store
                remove(folder)
                remove(stamp)
        except (BlockingIOError, PermissionError):  # someone reads it, or it is another user's
            continue
        pruned.append(shelved)
    return pruned


def stage_store(store: Store, into: Path) -> Store:
    """Open a copy of the store on the node's own disk; the first rank on the node makes it, the others wait."""
    copy = into / store.folder.name
    remedy = f"delete {copy}; it is copied again"
    try:
        with locked(into / f".{copy.name}.lock"):
            with suppress(DamagedStore):
                return open_store(copy, remedy=remedy)
            for leftover in (copy, *into.glob(f".{copy.name}.*.tmp")):
                remove(leftover)
            _check_room(store.folder, into)
            with publish(copy) as temporary:
                shutil.copytree(store.folder, temporary, ignore=_stamp_at(store.folder))
                (temporary / IN_USE).touch()
    except OSError as error:
        raise InfrastructureError(
            f"data.stage {into}: cannot be used: {error.strerror or error}", fix="choose a writable folder with room"
        ) from error
    return open_store(copy, remedy=remedy)


def _stamp_at(top: Path) -> Callable[[str, list[str]], set[str]]:
    """Copied, it would be opened and closed, which frees the lock that this reader has on it."""
    return lambda folder, _: {IN_USE} if folder == str(top) else set()


def _check_room(folder: Path, into: Path) -> None:
    needed, free = int(read_json(folder / "index.json")["bytes"] * _ROOM), shutil.disk_usage(into).free
    if needed > free:
        raise InfrastructureError(
            f"data.stage {into}: found {free >> 20} MB free, expected {needed >> 20} MB for the store",
            fix="free some room, choose another folder, or drop data.stage",
        )


def _length(path: Path) -> int:
    """Of a file that may vanish at any moment, when someone builds here."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _folders(root: Path) -> Iterator[Path]:
    return (path for path in root.iterdir() if path.is_dir()) if root.is_dir() else iter(())


def _is_store(folder: Path) -> bool:
    """Whether `prepare` has made it: data.store may be a folder that holds other things as well."""
    is_key = re.fullmatch(r"[0-9a-f]{24}", folder.name) is not None
    return is_key and ((folder / IN_USE).is_file() or (folder / "index.json").is_file())


def _stamp(folder: Path) -> Path:
    """The file that readers hold, and that says when the last of them came."""
    return stamp_of(folder) if folder.parent.name == ARCHIVES else folder / IN_USE


def _idle_days(folder: Path) -> float:
    try:
        seconds = time.time() - _stamp(folder).stat().st_mtime
    except OSError:
        return 0.0
    return round(max(0.0, seconds / 86400), 2)


def _size(folder: Path) -> int:
    return sum(_length(path) for path in folder.rglob("*"))


def _describe(folder: Path) -> Shelved:
    try:
        header = read_json(folder / "index.json")
        source, cases, size, state = header["source"], header["cases"], header["bytes"], "ready"
    except (OSError, ValueError, KeyError, TypeError):
        source, cases, state = "?", sum(1 for _ in _folders(folder / "cases")), "unfinished"
        size = _size(folder)
    if is_locked(_stamp(folder)):
        state = "in use"
    return Shelved(folder.name, source, cases, size, _idle_days(folder), state)


def _describe_archive(folder: Path) -> Shelved:
    state = "in use" if is_locked(_stamp(folder)) else "archive"
    source = folder.name.rpartition("-")[0]
    return Shelved(f"{ARCHIVES}/{folder.name}", source, None, _size(folder), _idle_days(folder), state)
