"""Tar archives, unpacked with care: what is inside was written by someone else.

    INTO/KEY/           the files; appears whole or not at all
    INTO/.KEY.in-use    held by those who read them; changed whenever one comes

KEY names the archive (name, size, time of change), so each is unpacked once.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from voxscale.errors import DataError, InfrastructureError
from voxscale.files import TEMPORARY_SUFFIX, Held, hold, locked, publish, remove
from voxscale.terminal import Advance, progress

ARCHIVES = "archives"  # the folder of a store's root that they are unpacked in
ENDINGS = (".tar", ".tar.gz", ".tgz")
_OTHERS = (".zip", ".7z", ".rar", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
_GZIP = b"\x1f\x8b"
MAX_BYTES = 2**42
MAX_MEMBERS = 2_000_000
_MAX_RATIO = 200  # no archive of volumes grows more when unpacked
_ALWAYS_ALLOWED = 2**30
_BLOCK = 1 << 20
_PIECE = 1 << 26  # of the archive, for each step of the progress bar

_kept: dict[Path, Held | None] = {}

_Unreadable = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, OverflowError, RecursionError)


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ENDINGS) and path.is_file()


def refuse_other_archive(path: Path) -> None:
    """Archives of kinds that are not unpacked are named as such, rather than taken for something else."""
    if path.name.lower().endswith(_OTHERS) and path.is_file():
        raise DataError(
            f"{path.name}: found an archive that is not unpacked here, expected {', '.join(ENDINGS)}",
            fix="unpack it and give the folder, or pack it again as .tar",
        )


def stamp_of(folder: Path) -> Path:
    """Beside an unpacked archive, as all that is inside is the archive's own."""
    return folder.with_name(f".{folder.name}.in-use")


def is_unpacked(folder: Path) -> bool:
    """Whether `extract_archive` has made this folder."""
    return re.search(r"-[0-9a-f]{16}$", folder.name) is not None and stamp_of(folder).is_file()


def extract_archive(tar: Path, into: Path, *, max_bytes: int = MAX_BYTES, max_members: int = MAX_MEMBERS) -> Path:
    """Unpack an archive once below `into` and return its folder. Any number of ranks may call this at once.

    Only regular files and folders below that folder are taken; anything else is refused by name and nothing appears.
    """
    try:
        status = tar.stat()
        identity = f"{tar.name}\0{status.st_size}\0{status.st_mtime_ns}"
        digest = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:16]
        readable = re.sub(r"[^A-Za-z0-9_-]+", "-", tar.name)[:80]
        folder = into / f"{readable}-{digest}"
        _keep(folder)
        if not folder.exists():
            with locked(into / f".{folder.name}.lock", told=f"waiting for whoever unpacks {tar.name}"):
                if not folder.exists():
                    for leftover in into.glob(f".{folder.name}.*{TEMPORARY_SUFFIX}"):
                        remove(leftover)
                    limit = min(max_bytes, max(_ALWAYS_ALLOWED, _MAX_RATIO * status.st_size))
                    with publish(folder) as temporary:
                        temporary.mkdir()
                        _extract(tar, temporary, limit, max_members)
        return folder
    except _Unreadable as error:
        raise DataError(
            f"{tar.name}: damaged or cut off: {str(error) or type(error).__name__}", fix="download the archive again"
        ) from None
    except OSError as error:
        raise InfrastructureError(
            f"{tar.name}: cannot be unpacked below {into}: {error.strerror or error}",
            fix="set data.store to a writable folder with room, or unpack the archive yourself",
        ) from error


def _keep(folder: Path) -> None:
    """Nobody prunes what this process reads: until it ends, as paths into the folder may live that long."""
    stamp = stamp_of(folder)
    with suppress(OSError):  # of a store that others have prepared, and that may only be read
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    _kept[stamp] = hold(stamp)


def _extract(tar: Path, folder: Path, limit: int, max_members: int) -> None:
    refused: list[str] = []
    with _open(tar, limit) as (stream, archive):
        total = 0
        for number, member in enumerate(iter(archive.next, None), start=1):
            if member.size < 0:
                raise tarfile.ReadError(f"{member.name!a} has a negative size")
            total += member.size
            if number > max_members or total > limit:
                raise DataError(
                    f"{tar.name}: unpacks to more than {limit} bytes or {max_members} files",
                    fix="unpack it yourself if you trust it, and name the folder",
                )
            fault = _fault(member)
            if fault is not None:
                refused.append(f"{tar.name}: {member.name!a}: found {fault}, expected a file or folder inside")
            elif not refused and not any(part.startswith("._") for part in PurePosixPath(member.name).parts):
                _write(archive, member, folder, tar.name)
            archive.members = []  # type: ignore[attr-defined]  # else it keeps every header
        _expect_end(stream, archive.offset)
    if refused:
        more = [f"{tar.name}: and {len(refused) - 20} more"] if len(refused) > 20 else []
        raise DataError.from_findings(refused[:20] + more, fix="get the archive from a source that you trust")


@contextmanager
def _open(tar: Path, limit: int) -> Iterator[tuple[_Bounded, tarfile.TarFile]]:
    """The archive, and the decompressed stream below it, which gives no more than a sane amount."""
    pieces = tar.stat().st_size // _PIECE + 1
    with tar.open("rb") as raw, progress(f"unpacking {tar.name}", pieces) as advance:
        packed = raw.read(2) == _GZIP  # whatever it is called
        raw.seek(0)
        content: IO[bytes] = gzip.open(raw) if packed else raw  # type: ignore[assignment]  # noqa: SIM115
        stream = _Bounded(content, 2 * limit + _BLOCK, _steps(raw.tell, advance))
        with tarfile.open(fileobj=stream, mode="r:", errorlevel=2) as archive:  # type: ignore[call-overload]
            yield stream, archive


class _Bounded:
    """A stream that refuses to be read far beyond its due, or in one huge piece."""

    def __init__(self, content: IO[bytes], limit: int, moved: Callable[[], None]) -> None:
        self._content, self._limit, self._moved = content, limit, moved

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= 64 * _BLOCK or self._content.tell() > self._limit:
            raise ValueError("a header asks for more than an archive of volumes can hold")
        self._moved()
        return self._content.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and offset > self._limit:
            raise ValueError("a header points far beyond what an archive of volumes can hold")
        return self._content.seek(offset, whence)

    def tell(self) -> int:
        return self._content.tell()


def _steps(tell: Callable[[], int], advance: Advance) -> Callable[[], None]:
    done = 0

    def moved() -> None:
        nonlocal done
        while done < tell() // _PIECE:
            done += 1
            advance()

    return moved


def _fault(member: tarfile.TarInfo) -> str | None:
    """Why a member is not taken."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return "a path that leads out"
    if member.issym() or member.islnk():
        return "a link"
    if member.issparse() or not (member.isreg() or member.isdir()):
        return "no regular file"
    if "\0" in member.name or any(len(part.encode(errors="surrogateescape")) > 255 for part in path.parts):
        return "a name that no file can have"
    return None


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, name: str) -> None:
    target = folder / PurePosixPath(member.name)
    try:
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        content = archive.extractfile(member)
        if content is None:
            raise tarfile.ReadError(f"{member.name!a} has no content")
        with target.open("xb") as out:
            while block := content.read(_BLOCK):
                out.write(block)
            if out.tell() != member.size:
                raise tarfile.ReadError(f"{member.name!a} is cut off")
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise DataError(
            f"{name}: {member.name!a}: stands in it twice, or both as a file and as a folder",
            fix="get the archive from a source that you trust",
        ) from None


def _expect_end(stream: _Bounded, offset: int) -> None:
    """An archive ends with a block of zeros; one that was cut between two members does not.

    Reading on to the end also makes gzip verify its checksum.
    """
    stream.seek(offset)
    if stream.read(512) != bytes(512):
        raise tarfile.ReadError("its end is missing")
    while stream.read(_BLOCK):
        pass
