"""What reaches the disk in which order: the syncs and renames of this process, as they are made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_SYNC, _RENAME = "sync", "rename"


@dataclass
class DiskLog:
    """Each sync with what was synced, each rename with the new name, in their order."""

    entries: list[tuple[str, Path, Any]] = field(default_factory=list)

    def expect_published(self, path: Path) -> None:
        """Each part was synced as it is now before it got its name, and that name before anything else got one."""
        at, temporary = self._naming_of(path)
        for part in () if path.is_symlink() else (path, *path.rglob("*")):
            wanted = _SYNC, temporary / part.relative_to(path), _content(part)
            assert wanted in self.entries[:at], f"{part.name} is named before it is on disk"
        following = [index for index, entry in enumerate(self.entries) if index > at and entry[0] == _RENAME]
        after = self.entries[at : min(following, default=None)]
        assert (_SYNC, path.parent) in [entry[:2] for entry in after], f"the name of {path.name} is not on disk"

    def _naming_of(self, path: Path) -> tuple[int, Path]:
        [found] = [(at, old) for at, (kind, old, new) in enumerate(self.entries) if kind == _RENAME and new == path]
        return found


def _content(path: Path) -> object:
    return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()


@pytest.fixture
def disk_log(monkeypatch: pytest.MonkeyPatch) -> DiskLog:
    log, sync, rename = DiskLog(), os.fsync, os.rename

    def logged_sync(descriptor: int) -> None:
        sync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        log.entries.append((_SYNC, path, _content(path)))

    def logged_rename(old: Path, new: Path) -> None:
        rename(old, new)
        log.entries.append((_RENAME, old, new))

    monkeypatch.setattr(os, "fsync", logged_sync)
    monkeypatch.setattr(os, "rename", logged_rename)
    return log
