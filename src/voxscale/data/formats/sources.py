"""What the formats share: files as they are on disk or in a listing, and findings about them."""

from __future__ import annotations

import difflib
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath, PurePosixPath

from voxscale.data.findings import ERROR, WARNING, Finding

VOLUME_ENDINGS = (".nii.gz", ".nii")


def error(code: str, found: str, expected: str, fix: str, *, case: str = "", file: str = "") -> Finding:
    return Finding(ERROR, code, _printable(case), _printable(file), found, expected, fix)


def warning(code: str, found: str, expected: str, fix: str, *, case: str = "", file: str = "") -> Finding:
    return Finding(WARNING, code, _printable(case), _printable(file), found, expected, fix)


def shown(value: object) -> str:
    """A value from a file in a form that is safe and short enough for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-15:]}"


def nearest(column: str, columns: Iterable[str]) -> str:
    """A question for the end of a message: the column that was probably meant, if one is like it."""
    by_lower = {name.casefold(): name for name in columns}
    close = difflib.get_close_matches(column.casefold(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def _printable(name: str) -> str:
    """File names may hold anything, line breaks and escape codes too; messages must not."""
    return name if name.isprintable() else ascii(name)


def relative(path: Path, source: Path) -> str:
    """How findings name a file: relative to the source, so without the places of this machine."""
    return path.relative_to(source).as_posix() if path.is_relative_to(source) else path.name


def is_hidden(path: PurePath) -> bool:
    """Such as `._img3.nii.gz`, which archives made on macOS carry along."""
    return path.name.startswith(".")


def stem(path: PurePath) -> str:
    ending = next((ending for ending in VOLUME_ENDINGS if path.name.lower().endswith(ending)), "")
    return path.name[: len(path.name) - len(ending)]


def volumes(folder: Path) -> list[Path]:
    """The NIfTI files in a folder, in order; hidden ones do not count."""
    paths = (path for path in folder.iterdir() if not is_hidden(path))
    return sorted(path for path in paths if path.name.lower().endswith(VOLUME_ENDINGS))


def inside(root: Path, listed: object) -> Path:
    """The file that a manifest names, which must lie below `root`; raises ValueError otherwise."""
    if not isinstance(listed, str) or not listed:
        raise TypeError(f"found {shown(listed)}, expected the path of a file")
    path = PurePosixPath(listed)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{shown(listed)} leads out of the folder")
    return root / path


def is_file(path: Path) -> bool:
    return what_is_at(path) is None


def what_is_at(path: Path) -> str | None:
    """None for a regular file, else what stands in its place, in words. Never raises."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return "no such file"
    except OSError as problem:
        return f"no readable file ({problem.strerror})"
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "no regular file"


def absent_files(case: str, files: Iterable[Path], source: Path, fix: str) -> list[Finding]:
    return [
        error("missing-file", found, "a NIfTI file", fix, case=case, file=relative(path, source))
        for path in files
        if (found := what_is_at(path)) is not None
    ]


def distinct_names(files: Sequence[PurePath]) -> list[str]:
    """A name for each file: its own, and where that repeats, preceded by the folders that tell them apart.

    Files that are the same still share a name.
    """
    names = {path: stem(path) for path in files}
    for depth in range(1, 4):
        counts = Counter(names.values())
        if max(counts.values(), default=1) == 1:
            break
        for path, name in names.items():
            if counts[name] > 1:
                names[path] = "-".join([*path.parts[:-1][-depth:], stem(path)])
    return [names[path] for path in files]
