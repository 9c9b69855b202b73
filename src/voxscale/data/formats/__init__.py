"""How datasets lie on disk. One module per format: `detect(source)` and `find_cases(source)`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from voxscale.data.cases import Case
from voxscale.data.formats import decathlon, pairs
from voxscale.errors import DataError

FORMATS: dict[str, ModuleType] = {"decathlon": decathlon, "pairs": pairs}


def detect_format(source: Path) -> str:
    """The name of the format that `source` is in."""
    if not source.exists():
        raise DataError(
            f"data.source {source}: no such folder", fix="check the path; it is relative to the config file"
        )
    if source.is_dir() and not any(source.iterdir()):
        raise DataError(f"data.source {source}: the folder is empty", fix=f"put the data there: {_expected()}")
    for name, module in FORMATS.items():
        if module.detect(source):
            return name
    raise DataError(f"data.source {source}: found no known layout", fix=f"expected {_expected()}")


def find_cases(source: Path, format: str) -> list[Case]:
    """All cases below `source`, ordered by id. Raises DataError naming every file that is out of place."""
    name = detect_format(source) if format == "auto" else format
    if not source.is_dir():
        raise DataError(f"data.source {source}: not a folder", fix="check the path; it is relative to the config file")
    cases: list[Case] = FORMATS[name].find_cases(source)
    if unfit := [case.id for case in cases if not _is_name(case.id)]:
        raise DataError(
            f"data.source {source}: {unfit[0]!a} cannot name a case",
            fix="rename the file: printable characters, not . or .., at most 200 bytes",
        )
    return sorted(cases, key=lambda case: case.id)


def _is_name(case: str) -> bool:
    """Case ids become folder names and table cells."""
    return case.isprintable() and case not in (".", "..") and len(case.encode(errors="replace")) <= 200


def _expected() -> str:
    return "; or ".join(module.LAYOUT for module in FORMATS.values())
