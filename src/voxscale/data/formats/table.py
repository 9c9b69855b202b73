"""A CSV or TSV table with a row per case: paths of image and label, and whatever else is known of the case.

Columns are found by their names, or named in `data.columns`. Paths are relative to the table's folder; the user wrote
them, so they may also be absolute. Rows are numbered as a spreadsheet does: the header is row 1.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from voxscale.config.data import Columns, Data
from voxscale.data.cases import Case, Manifest
from voxscale.data.column_names import nearest_usual
from voxscale.data.findings import Finding
from voxscale.data.formats.sources import VOLUME_ENDINGS, distinct_names, error, is_file, nearest, shown, what_is_at
from voxscale.errors import DataError

LAYOUT = "a .csv or .tsv table with a column of image paths (e.g. image or NIFTI path), and labels or outcomes"

_MAX_BYTES = 2**31
_KNOWN: dict[str, tuple[str, ...]] = {
    "image": (
        *("niftipath", "nifti", "niftifile", "imagepath", "imagefile", "image", "imgpath", "img", "scan", "volume"),
        *("path", "filepath", "file", "filename"),
    ),
    "label": (
        *("labelpath", "labelfile", "label", "segpath", "seg", "segmentationpath", "segmentation", "maskpath", "mask"),
    ),
    "case": ("case", "caseid", "casename", "id"),
    "patient": ("patient", "patientid", "subject", "subjectid"),
}


@dataclass(frozen=True)
class Table:
    """Cells by row number and column name; `faults` are the rows that do not fit the header."""

    columns: tuple[str, ...]
    rows: Mapping[int, dict[str, str]]
    faults: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Roles:
    """Which columns hold what."""

    images: tuple[str, ...]
    label: str | None
    case: str | None
    patient: str | None


def detect(source: Path) -> bool:
    """Whether `source` is a table, by its name."""
    return source.suffix.lower() in (".csv", ".tsv") and is_file(source)


def read_manifest(source: Path, data: Data) -> Manifest:
    """One case per row, with the whole row; `label` is None where the table has no column of labels."""
    table = as_named(read_table(source), data.columns)
    roles = find_roles(table, data.columns, source.name)
    findings = list(table.faults)
    sound: dict[int, dict[str, str]] = {}
    for number, row in table.rows.items():
        faults = _row_faults(row, roles, source, number)
        findings += faults
        if not faults:
            sound[number] = row
    cases: dict[str, Case] = {}
    for (number, row), case in zip(sound.items(), _case_ids(sound, roles), strict=True):
        if case in cases:
            found, fix = (
                f"case {shown(case)} a second time",
                "give each case an id of its own, or name another column in data.columns.case",
            )
            findings.append(error("duplicate-case", found, "each case once", fix, case=case, file=_at(source, number)))
            continue
        cases[case] = Case(
            id=case,
            images=tuple(source.parent / row[column].strip() for column in roles.images),
            label=source.parent / row[roles.label].strip() if roles.label else None,
            patient=row[roles.patient].strip() if roles.patient else case,
            row=row,
            where=_at(source, number),
        )
    channels = roles.images if len(roles.images) > 1 else ()
    return Manifest(list(cases.values()), channels=channels, findings=tuple(findings))


def read_table(path: Path) -> Table:
    """Read a table whole; raises DataError where it is none."""
    try:
        if (found := what_is_at(path)) is not None:
            raise ValueError(f"found {found}, expected a table")
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        text = _decode(path.read_bytes())
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(path, text), strict=True))
    except (OSError, ValueError, csv.Error) as problem:
        raise DataError(
            f"{path.name}: cannot be read as a table: {problem}", fix=f"save it as CSV in UTF-8; expected {LAYOUT}"
        ) from None
    header = tuple(cell.strip() for cell in lines[0]) if lines else ()
    named = [name for name in header if name]
    if not named:
        raise DataError(f"{path.name}: found no header", fix="name the columns in the first row")
    if twice := sorted(name for name, count in Counter(named).items() if count > 1):
        names = ", ".join(map(shown, twice[:40]))
        raise DataError(f"{path.name}: found column {names} more than once", fix="give each column its own name")
    rows: dict[int, dict[str, str]] = {}
    faults: list[Finding] = []
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            found, fix = f"{len(cells)} cells", "correct that row; quote cells that hold the separator"
            faults.append(error("bad-row", found, f"{len(header)} as in the header", fix, file=_at(path, number)))
            continue
        rows[number] = {name: cell for name, cell in zip(header, cells, strict=True) if name}
    if not rows and not faults:
        raise DataError(f"{path.name}: found no row below the header", fix="add a row per case")
    return Table(tuple(named), rows, tuple(faults))


def as_named(table: Table, given: Columns) -> Table:
    """The table with its columns called as `data.columns` calls them, where they differ in spelling alone.

    Only what is clear: one column for the name, and one name for the column.
    """
    named = [
        name for value in given.model_dump().values() for name in ([value] if isinstance(value, str) else value or ())
    ]
    wanted = _by_word(name for name in dict.fromkeys(named) if name not in table.columns)
    there = _by_word(column for column in table.columns if column not in named)
    names = {
        there[word][0]: called[0] for word, called in wanted.items() if len(called) == len(there.get(word, ())) == 1
    }
    rows = {number: {names.get(key, key): cell for key, cell in row.items()} for number, row in table.rows.items()}
    return Table(tuple(names.get(column, column) for column in table.columns), rows, table.faults) if names else table


def without_absent_ids(given: Columns, source: Path) -> Columns:
    """`given` but for columns of cases and patients that this table has not: cases are called by what is there."""
    header = as_named(read_table(source), given).columns
    absent = [role for role in ("case", "patient") if getattr(given, role) not in header]
    return given.model_copy(update=dict.fromkeys(absent))


def find_roles(table: Table, given: Columns, name: str) -> Roles:
    """The columns that `data.columns` names, and the others by their usual names."""
    images = (given.image,) if isinstance(given.image, str) else given.image or ()
    asked = {"image": images, **{role: (getattr(given, role),) for role in ("label", "case", "patient")}}
    problems = [
        f"{name}: data.columns.{role}: found no column {shown(column)}{nearest(column, table.columns)}"
        for role, columns in asked.items()
        for column in columns
        if column is not None and column not in table.columns
    ]
    if problems:
        raise DataError.from_findings(problems, fix=f"the columns are {', '.join(map(shown, table.columns[:40]))}")
    image = None if images else _known_column(table.columns, "image", name)
    if not images and image is None:
        like = nearest_usual(table.columns, _KNOWN["image"])
        meant = f"; did you mean {shown(like)}?" if like else ""
        raise DataError(
            f"{name}: found no column of images among {', '.join(map(shown, table.columns[:40]))}{meant}",
            fix="name it in data.columns.image",
        )
    # A column called label may hold a class or a score, not the path of a volume.
    of_volumes = [column for column in table.columns if _holds_volumes(table, column)]
    return Roles(
        images=images or (str(image),),
        label=given.label or _known_column(of_volumes, "label", name),
        case=given.case or _known_column(table.columns, "case", name),
        patient=given.patient or _known_column(table.columns, "patient", name),
    )


def _holds_volumes(table: Table, column: str) -> bool:
    return any(row[column].strip().lower().endswith(VOLUME_ENDINGS) for row in table.rows.values())


def _known_column(columns: Sequence[str], role: str, name: str) -> str | None:
    by_word = _by_word(columns)
    found = next((by_word[word] for word in _KNOWN[role] if word in by_word), [])
    if len(found) > 1:
        raise DataError(
            f"{name}: columns {' and '.join(map(shown, found))} could both be the {role}",
            fix=f"name one in data.columns.{role}",
        )
    return found[0] if found else None


def _by_word(columns: Iterable[str]) -> dict[str, list[str]]:
    by_word: dict[str, list[str]] = {}
    for column in columns:
        by_word.setdefault(re.sub(r"[\s_-]+", "", column).casefold(), []).append(column)
    return by_word


def _row_faults(row: Mapping[str, str], roles: Roles, source: Path, number: int) -> list[Finding]:
    at = _at(source, number)
    case = row[roles.case].strip() if roles.case else ""
    faults: list[Finding] = []
    for column in (roles.case, roles.patient):
        if column and not row[column].strip():
            fix = "fill in that cell, or take the row out"
            faults.append(error("bad-row", f"an empty cell in {shown(column)}", "an id", fix, case=case, file=at))
    several = len(roles.images) > 1
    for column in (*roles.images, *([roles.label] if roles.label else [])):
        cell = row[column].strip()
        fix = "fill in that cell, restore the file, or take the row out"
        if not cell:
            code = "missing-label" if column == roles.label else "missing-modality" if several else "missing-image"
            found = f"an empty cell in {shown(column)}"
            faults.append(error(code, found, "the path of a file", fix, case=case, file=at))
        elif (there := what_is_at(source.parent / cell)) is not None:
            found = f"{there} at {shown(cell)}"
            faults.append(error("missing-file", found, "a volume or an image", fix, case=case, file=at))
    return faults


def _case_ids(rows: Mapping[int, dict[str, str]], roles: Roles) -> list[str]:
    if roles.case:
        return [row[roles.case].strip() for row in rows.values()]
    return distinct_names([Path(row[roles.images[0]].strip()) for row in rows.values()])


def _decode(content: bytes) -> str:
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # what spreadsheets call Unicode text
    text = content.decode("utf-16" if wide else "utf-8-sig")
    if "\0" in text:
        raise ValueError("found binary content")
    return text


def _delimiter(path: Path, text: str) -> str:
    """Of comma, semicolon and tab, the one that parts the header into most cells."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    header = re.split(r"[\r\n]", text, maxsplit=1)[0]
    return max(",;\t", key=re.sub(r'"[^"]*"', "", header).count)


def _at(source: Path, number: int) -> str:
    return f"{source.name} row {number}"
