"""Files that appear whole or not at all, and locks that die with their owner."""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import struct
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def publish(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; make it `path` by rename once the body has ended well.

    The body writes a file or makes a folder there. Everything is on disk before the name appears, so that
    after a crash or a power cut `path` holds the old content or the new one, never a part. A file replaces
    an older one; a folder must not exist yet. What is soon replaced again need not be `durable`: no reader sees a
    part of it, but after a power cut it may be lost.
    """
    made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    try:
        yield temporary
        if durable:
            _sync_tree(temporary)
        temporary.rename(path)
        if durable:
            for folder in (path.parent, *(each.parent for each in made)):
                _sync(folder)
    except BaseException as error:
        remove(temporary)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # of a full disk, the system does not say for which file
        raise


def remove(path: Path) -> None:
    """Delete a file, link or folder; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_temporaries(folder: Path, *, of: str = "*") -> None:
    """Delete what killed writers left behind in `folder`, or of one file. Only for the one who owns it."""
    for leftover in folder.glob(f".{of}.*{TEMPORARY_SUFFIX}"):
        remove(leftover)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    with publish(path, durable=durable) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str, *, durable: bool = True) -> None:
    write_bytes(path, content.encode(), durable=durable)


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n", durable=durable)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table; an absent value is an empty cell, and no cell can act as a spreadsheet formula."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _neutral(value) for key, value in row.items()})
    write_text(path, text.getvalue())


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table, by its columns; ValueError: one has more or fewer cells than these."""
    with path.open(newline="") as lines:
        rows = csv.reader(lines)
        try:
            columns = next(rows, [])
            found = []
            for row in filter(None, rows):
                if len(row) != len(columns):
                    raise ValueError(f"line {rows.line_num}: found {len(row)} cells, expected {len(columns)}")
                cells = (cell[1:] if _is_neutralised(cell) else cell for cell in row)
                found.append(dict(zip(columns, cells, strict=True)))
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from error
        return found


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[list[str]]:
    """The cells of a table that `write_csv` wrote with these columns, a row at a time; ValueError: it is damaged."""
    has_signs = _has_signs(path)
    with path.open(encoding="utf-8", newline="") as lines:
        rows = csv.reader(lines, strict=True)
        try:
            if (header := next(rows, [])) != list(columns):
                raise ValueError(f"found columns {header}, expected {list(columns)}")
            for row in rows:
                if len(row) != len(columns):
                    raise ValueError(f"line {rows.line_num}: found {len(row)} cells, expected {len(columns)}")
                if has_signs:
                    row = [cell[1:] if _is_neutralised(cell) else cell for cell in row]
                yield row
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from error


def _has_signs(path: Path) -> bool:
    """Whether any cell may be neutralised: rarely, and to look through the file costs less than at a row of it."""
    has_signs, last = False, b""
    with path.open("rb") as content:
        while block := content.read(1 << 20):
            has_signs, last = has_signs or b"'" in block, block
    if not last.endswith(b"\n"):
        raise ValueError("its last line is cut off")
    return has_signs


def point(link: Path, target: str) -> None:
    """Make `link` a relative symbolic link to its neighbour `target`, replacing an older one in one move."""
    with publish(link) as temporary:
        temporary.symlink_to(target)


class NewLines:
    """The whole lines of a file that were written since the last look; it may not be there at first."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path, self._rest = path, b""
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> list[bytes]:
        try:
            with self._path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < self._offset:  # another file has taken its place
                    self._offset, self._rest = 0, b""
                stream.seek(self._offset)
                block = stream.read()
        except FileNotFoundError:
            return []
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        return lines


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def locked(path: Path, *, wait: bool = True, told: str = "") -> Iterator[BinaryIO]:
    """Hold an exclusive lock on the file `path`, open; with `wait=False` raise BlockingIOError if it is taken.

    Standard error is `told` of a wait, which may be long. A POSIX record lock: it also holds between hosts on NFS, and
    the kernel frees it when its owner dies.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # POSIX allows EACCES too for a lock that is taken
            if not wait:
                raise BlockingIOError(str(error)) from error
            if told:
                print(told, file=sys.stderr, flush=True)
            fcntl.lockf(stream, fcntl.LOCK_EX)
        yield stream


class Held:
    """A shared lock on a file; it is freed with this object."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        fcntl.lockf(descriptor, fcntl.LOCK_SH)


_held: weakref.WeakValueDictionary[tuple[int, int], Held] = weakref.WeakValueDictionary()  # by device and inode
_holding = threading.Lock()


def hold(path: Path) -> Held | None:
    """Share a lock on the file `path`, if it is there, for as long as anyone in this process keeps what is returned.

    All of a process have one descriptor: closing any other of that file would free the lock of them all.
    """
    try:
        with _holding:
            status = path.stat()
            file = status.st_dev, status.st_ino
            if (held := _held.get(file)) is None:
                held = _held[file] = Held(path)
            return held
    except OSError:
        return None


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock on `path`; asks the kernel, takes nothing.

    Not for the holder itself: closing any descriptor of the file frees its lock.
    """
    layout = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid
    try:
        with path.open("rb") as stream:
            asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(stream, fcntl.F_GETLK, asked)
    except OSError:
        return False
    return bool(struct.unpack(layout, answer)[0] != fcntl.F_UNLCK)


# What may begin one, also behind the quotes that keep it from acting; a plain number is none.
_FORMULA = re.compile(r"'*(?![+-][0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?\Z)[=+@-]", re.IGNORECASE)


def _neutral(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def _is_neutralised(cell: str) -> bool:
    return cell.startswith("'") and _FORMULA.match(cell, 1) is not None


def _sync_tree(path: Path) -> None:
    if path.is_symlink():
        return
    if path.is_dir():
        for inner in path.iterdir():
            _sync_tree(inner)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_at(path: Path, file: BinaryIO) -> bool:
    """Whether an open file is still the one at this path: another may have taken it away."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
