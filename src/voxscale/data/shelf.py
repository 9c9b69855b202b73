"""All stores below one root: what they take, which can go, and copies on a node's own disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from voxscale.data.store import IN_USE, DamagedStore, Store, open_store
from voxscale.errors import InfrastructureError
from voxscale.files import is_locked, locked, publish, read_json, remove

_ROOM = 1.05  # a copy is refused unless this much of its size is free


@dataclass(frozen=True)
class Shelved:
    """One store as `prepare --list` shows it."""

    key: str
    source: str
    cases: int
    bytes: int
    idle_days: float
    state: str  # ready, in use, unfinished

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def list_stores(root: Path) -> list[Shelved]:
    """The stores below `root`, largest first."""
    folders = [path for path in root.iterdir() if (path / "cases").is_dir()] if root.is_dir() else []
    return sorted((_describe(folder) for folder in folders), key=lambda shelved: -shelved.bytes)


def render_stores(stores: Sequence[Shelved], root: Path, title: str) -> str:
    total = sum(store.bytes for store in stores)
    lines = [f"{'STORE':24}  {'SOURCE':24}  {'CASES':>7}  {'MB':>9}  {'IDLE':>8}  STATE"] if stores else []
    lines += [
        f"{store.key:24}  {store.source[:24]:24}  {store.cases:7}  {store.bytes / 1e6:9.1f}  {store.idle_days:5.1f} d  "
        f"{store.state}"
        for store in stores
    ]
    return "\n".join([*lines, f"{title}: {len(stores)}, {total / 1e6:.1f} MB, in {root}"])


def prune_stores(root: Path, *, idle_days: float) -> list[Shelved]:
    """Delete the stores that no one reads and no one has read for so many days. They are built again when needed."""
    pruned = []
    for shelved in list_stores(root):
        if shelved.idle_days < idle_days:
            continue
        folder = root / shelved.key
        try:
            with locked(root / f".{shelved.key}.lock", wait=False), locked(folder / IN_USE, wait=False):
                remove(folder / "index.json")  # first: without it no one takes the rest for a store
                remove(folder)
        except BlockingIOError:
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
                shutil.copytree(store.folder, temporary)
    except OSError as error:
        raise InfrastructureError(
            f"data.stage {into}: cannot be used: {error.strerror or error}", fix="choose a writable folder with room"
        ) from error
    return open_store(copy, remedy=remedy)


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


def _describe(folder: Path) -> Shelved:
    idle_days = (time.time() - (folder / IN_USE).stat().st_mtime) / 86400 if (folder / IN_USE).exists() else 0.0
    try:
        header = read_json(folder / "index.json")
        source, cases, size, state = header["source"], header["cases"], header["bytes"], "ready"
    except (OSError, ValueError, KeyError, TypeError):
        source, cases, state = "?", sum(1 for _ in (folder / "cases").iterdir()), "unfinished"
        size = sum(_length(path) for path in folder.rglob("*"))
    if is_locked(folder / IN_USE):
        state = "in use"
    return Shelved(folder.name, source, cases, size, round(max(0.0, idle_days), 2), state)
