"""Cohorts, recorded splits and recorded outcomes with damaged bytes, rows, columns and cells."""

from __future__ import annotations

import csv
import functools
import io
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from chaos.report import Report
from fuzz.inputs import AS_STATED, REFUSED, UNCHANGED, Input, Wrong, mutated, try_inputs
from voxscale.config.load import make_config
from voxscale.config.schema import Config
from voxscale.data.cases import Case
from voxscale.data.formats import find_cases
from voxscale.data.outcomes import Outcomes, make_outcomes, read_outcomes, target_strata, write_outcomes
from voxscale.data.split import ROLES, read_split, split_cases, write_split

_HEADER = ["case", "patient", "image", "time", "event", "age", "sex", "class", "Fold", "remark"]
_ROWS = 24
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
_TASKS: dict[str, dict[str, Any]] = {
    "survival": {"features": ["age", "sex"]},
    "regression": {"targets": ["time", "age"], "features": ["sex"]},
    "classification": {"classes": "class", "features": ["age"]},
}
_NAMED = r"cohort\.csv|^case c\d\d|cases c\d\d|c\d\d\b|^data\.(split|columns|source)|^patient p\d"
_NO_NUMBERS = (
    "",
    " ",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "1e999",
    "12 days",
    "1,5",
    "1_000",
    "0x1F",
    "½",
    "=1+1",
    "None",
    "--5",
)
_LONG = "x" * 200_000


def fuzz_tables(root: Path, *, inputs: int, seed: int) -> Report:
    return try_inputs("malformed tables", root, _make_table, inputs=inputs, seed=seed)


def _make_table(chance: random.Random, root: Path) -> Input:
    make = chance.choice([_damaged_cohort, _odd_cells, _odd_cells, _odd_structure, _odd_structure, _damaged_record])
    return make(chance, _folder(root))


@functools.cache
def _folder(root: Path) -> Path:
    for number in range(_ROWS):
        (root / f"c{number:02}.nii.gz").touch()
    return root


def sound_rows() -> list[list[str]]:
    """Two cases of each patient, in one part of the split."""
    return [
        [
            *(f"c{n:02}", f"p{n // 2:02}", f"c{n:02}.nii.gz", f"{100 + 37 * n % 900}.5", str(n % 2), str(40 + n)),
            *(
                "FM"[n % 3 == 0],
                ("benign", "malign")[n // 2 % 2],
                ("train", "train", "val", "train", "test")[n // 2 % 5],
            ),
            "as usual",
        ]
        for n in range(_ROWS)
    ]


def rendered(rows: Sequence[Sequence[str]], **form: Any) -> str:
    text = io.StringIO()
    csv.writer(text, **{"lineterminator": "\n", **form}).writerows(rows)
    return text.getvalue()


@functools.cache
def config_of(task: str, root: Path) -> Config:
    data = {"source": "cohort.csv", "columns": _TASKS[task], "split": {"column": "Fold"}}
    return make_config({"task": task, "data": data}, name="fuzz", base=root)


def read_cohort(task: str, root: Path) -> tuple[list[Case], Outcomes]:
    """As those who train read it."""
    config = config_of(task, root)
    cases = find_cases(config.data, root / "scratch").cases
    cases = split_cases(cases, config.data.split, target_strata(config, cases))
    return cases, make_outcomes(config, cases)


def _cohort(kind: str, task: str, root: Path, content: bytes, must: str) -> Input:
    path = root / "cohort.csv"
    path.write_bytes(content)

    def read() -> str:
        cases, outcomes = read_cohort(task, root)
        _check_outcomes(cases, outcomes, task)
        found = {case.id: {name: cell.strip() for name, cell in case.row.items()} for case in cases}
        sound = {row[0]: dict(zip(_HEADER, row, strict=True)) for row in sound_rows()}
        if found == sound:
            return UNCHANGED
        _check_untouched(content, found, sound)
        return AS_STATED

    return Input(kind, read, _NAMED, must=must)


def _check_outcomes(cases: Sequence[Case], outcomes: Outcomes, task: str) -> None:
    """Numbers are those of the cells, and the scales of columns such that something is left of them."""
    if not (np.isfinite(outcomes.targets).all() and np.isfinite(outcomes.features).all()):
        raise Wrong("outcomes or features that are not finite")
    by_id = {case.id: case.row for case in cases}
    columns = {"survival": ["time"], "regression": ["time", "age"]}.get(task, [])
    for case, values in zip(outcomes.cases, outcomes.targets, strict=True):
        for column, value in zip(columns, values, strict=False):
            cell = by_id[case][column]
            if not _NUMBER.fullmatch(cell) or float(cell) != value:
                raise Wrong(f"case {case}: {column} is {value}, though its cell is {cell[:50]!r}")
    scales = [each for each in (*outcomes.encoding.features, *outcomes.encoding.targets) if hasattr(each, "scale")]
    for scale in scales:
        cells = {row[scale.column].strip() for row in by_id.values()}
        if not np.isfinite([scale.mean, scale.scale]).all():
            raise Wrong(f"column {scale.column} is scaled by {scale.scale} about {scale.mean}")
        if odd := [cell for cell in cells if not _NUMBER.fullmatch(cell)]:
            raise Wrong(f"column {scale.column}: {odd[0]!r} was taken for a number")


def _check_untouched(content: bytes, found: dict[str, dict[str, str]], sound: dict[str, dict[str, str]]) -> None:
    """A row that still stands there as it was is not lost, and says what it said."""
    text = content.decode("utf-8-sig", errors="replace")
    first, *lines = text.splitlines()
    if first != ",".join(_HEADER):
        return
    for line in lines:
        case = line.partition(",")[0]
        if case in sound and line == ",".join(sound[case].values()) and found.get(case) != sound[case]:
            raise Wrong(f"case {case} silently became {found.get(case)}")


def _damaged_cohort(chance: random.Random, root: Path) -> Input:
    kind, content = mutated(rendered([_HEADER, *sound_rows()]).encode(), chance)
    return _cohort(f"cohort: {kind}", chance.choice(list(_TASKS)), root, content, "")


def _odd_cells(chance: random.Random, root: Path) -> Input:
    """One cell that may not be so; each with the task that needs its column."""
    rows = sound_rows()
    number = chance.randrange(_ROWS)
    elsewhere = next(row[1] for row in rows if row[8] != rows[number][8])
    no_number = chance.choice(_NO_NUMBERS)
    missing = chance.choice(["", "no.nii.gz", "../c00.nii.gz", "c00.nii.gz/x", ".", "a" * 300, "/", "é" * 200])
    choices: dict[str, tuple[str, str, str, str]] = {
        "a time that is no number": ("survival", "time", no_number, REFUSED),
        "a negative time": ("survival", "time", chance.choice(["-1", "-0.5", "-1e9"]), REFUSED),
        "an event of another kind": ("survival", "event", chance.choice(["", "2", "-1", "yes", "0.5", "nan"]), REFUSED),
        "a target that is no number": ("regression", "time", no_number, REFUSED),
        "a huge target": ("regression", "time", chance.choice(["1e200", "-1e308", "1" * 300]), ""),
        "a feature that is no number": ("survival", "age", no_number, REFUSED),
        "a huge feature": ("survival", "age", chance.choice(["1e200", "-1e308", "9" * 300]), ""),
        "no class": ("classification", "class", chance.choice(["", " ", "\t"]), REFUSED),
        "a class called mean": ("classification", "class", "mean", REFUSED),
        "no case": (
            "survival",
            "case",
            chance.choice(["", " ", ".", "..", "a/b", "a\x1bb", "x" * 300, "a\nb"]),
            REFUSED,
        ),
        "a case twice": ("survival", "case", f"c{(number + 1) % _ROWS:02}", REFUSED),
        "no patient": ("survival", "patient", chance.choice(["", "  "]), REFUSED),
        "a patient in two parts": ("survival", "patient", elsewhere, REFUSED),
        "no such image": ("survival", "image", missing, REFUSED),
        "no such part": ("survival", "Fold", chance.choice(["", "training", "1", "Train,val", "nan"]), REFUSED),
        "a part in capitals": ("survival", "Fold", rows[number][8].upper(), AS_STATED),
        "a long remark": ("survival", "remark", _LONG, REFUSED),
        "an odd remark": (
            "survival",
            "remark",
            chance.choice(['"', "a\nb", "\x7f\x1b[2J", "😀", "=cmd()", "\u2028"]),
            AS_STATED,
        ),
    }
    kind = chance.choice(list(choices))
    task, column, cell, must = choices[kind]
    rows[number][_HEADER.index(column)] = cell
    return _cohort(f"cell: {kind}", task, root, rendered([_HEADER, *rows]).encode(), must)


def _odd_structure(chance: random.Random, root: Path) -> Input:
    """The same cells in another form, most of which are not to be trusted."""
    rows = [_HEADER, *sound_rows()]
    text = rendered(rows)
    lines = text.splitlines()
    at, column = chance.randrange(1, len(lines)), chance.randrange(len(_HEADER))
    needed = chance.choice([_HEADER.index(name) for name in ("image", "time", "event", "age", "Fold")])
    order = chance.sample(range(len(_HEADER)), len(_HEADER))
    sign = chance.randrange(len(text))
    made: dict[str, Callable[[], tuple[bytes, str]]] = {
        "with a mark of UTF-8": lambda: (b"\xef\xbb\xbf" + text.encode(), UNCHANGED),
        "UTF-16": lambda: (text.encode("utf-16"), UNCHANGED),
        "UTF-16 without a mark": lambda: (text.encode("utf-16-le"), REFUSED),
        "UTF-32": lambda: (text.encode("utf-32"), REFUSED),
        "Latin-1": lambda: (text.replace("as usual", "für später", 1).encode("latin-1"), REFUSED),
        "lines of Windows": lambda: (text.replace("\n", "\r\n").encode(), UNCHANGED),
        "lines of old Macs": lambda: (text.replace("\n", "\r").encode(), UNCHANGED),
        "empty lines": lambda: ("\n".join([*lines[:at], "", ",,,", " ", *lines[at:]]).encode(), UNCHANGED),
        "semicolons": lambda: (rendered(rows, delimiter=";").encode(), UNCHANGED),
        "tabs": lambda: (rendered(rows, delimiter="\t").encode(), UNCHANGED),
        "bars": lambda: (rendered(rows, delimiter="|").encode(), REFUSED),
        "all quoted": lambda: (rendered(rows, quoting=csv.QUOTE_ALL).encode(), UNCHANGED),
        "single quotes": lambda: (rendered(rows, quoting=csv.QUOTE_ALL, quotechar="'").encode(), REFUSED),
        "other order": lambda: (rendered([[row[n] for n in order] for row in rows]).encode(), UNCHANGED),
        "spaces around": lambda: (rendered([[f" {cell} " for cell in row] for row in rows]).encode(), UNCHANGED),
        "an open quote": lambda: ("\n".join([*lines[:at], '"' + lines[at], *lines[at + 1 :]]).encode(), REFUSED),
        "a NUL": lambda: ((text[:sign] + "\0" + text[sign:]).encode(), REFUSED),
        "a byte that is no UTF-8": lambda: (text[:sign].encode() + b"\xff" + text[sign:].encode(), REFUSED),
        "a row twice": lambda: ("\n".join([*lines, lines[at]]).encode(), REFUSED),
        "a cell less": lambda: (
            "\n".join([*lines[:at], lines[at].rpartition(",")[0], *lines[at + 1 :]]).encode(),
            REFUSED,
        ),
        "a cell more": lambda: ("\n".join([*lines[:at], lines[at] + ",1", *lines[at + 1 :]]).encode(), REFUSED),
        "a column twice": lambda: (rendered([[*row, row[column]] for row in rows]).encode(), REFUSED),
        "a column missing": lambda: (rendered([row[:needed] + row[needed + 1 :] for row in rows]).encode(), REFUSED),
        "no header": lambda: ("\n".join(lines[1:]).encode(), REFUSED),
        "the header alone": lambda: (lines[0].encode(), REFUSED),
        "nothing": lambda: (chance.choice([b"", b"\n\n\n", b"\xef\xbb\xbf", b",,,\n,,,\n", b" "]), REFUSED),
        "many columns": lambda: (_widened(rows, 40_000), ""),
        "many rows": lambda: (text.encode() + b"x,y\n" * 20_000, REFUSED),
        "rubbish": lambda: (chance.randbytes(chance.choice([1, 100, 5000])), REFUSED),
        "only quotes": lambda: (b'"' * chance.choice([1, 2, 3, 99_999]), REFUSED),
        "a long line": lambda: (b"case," * 30_000, REFUSED),
    }
    kind = chance.choice(list(made))
    if kind in ("many columns", "many rows", "a long line") and chance.random() < 0.8:
        kind = "a column twice"
    content, must = made[kind]()
    return _cohort(f"table: {kind}", "survival", root, content, must)


def _widened(rows: Sequence[Sequence[str]], columns: int) -> bytes:
    first, *rest = rows
    return rendered([[*first, *(f"x{n}" for n in range(columns))], *([*row, *[""] * columns] for row in rest)]).encode()


@functools.cache
def _sound_record(root: Path) -> tuple[list[Case], Outcomes, bytes, bytes]:
    """Cases, their outcomes, and what a run has recorded of both."""
    (root / "cohort.csv").write_text(rendered([_HEADER, *sound_rows()]))
    cases, outcomes = read_cohort("survival", root)
    write_split(root / "split.csv", cases)
    write_outcomes(root / "outcomes.csv", root / "encoding.json", outcomes)
    return cases, outcomes, (root / "split.csv").read_bytes(), (root / "outcomes.csv").read_bytes()


def _damaged_record(chance: random.Random, root: Path) -> Input:
    """What a run has recorded: no checksum tells of another number in a cell, all else has to be noticed."""
    cases, outcomes, split, table = _sound_record(root)
    name, content = chance.choice([("split.csv", split), ("outcomes.csv", table)])
    kind, content = mutated(content, chance)
    (root / "split.csv").write_bytes(split)
    (root / "outcomes.csv").write_bytes(table)
    (root / name).write_bytes(content)

    def read_recorded_split() -> str:
        unsplit = [replace(case, split="", patient=case.id) for case in cases]
        held = read_split(root / "split.csv", unsplit)
        if [case.id for case in held] != [case.id for case in cases] or any(case.split not in ROLES for case in held):
            raise Wrong("silently other cases or parts")
        return UNCHANGED if held == list(cases) else AS_STATED

    def read_recorded_outcomes() -> str:
        held = read_outcomes(root / "outcomes.csv", root / "encoding.json")
        if not (np.isfinite(held.targets).all() and np.isfinite(held.features).all()):
            raise Wrong("numbers that are not finite")
        if not set(held.splits) <= set(ROLES):
            raise Wrong(f"silently other parts: {sorted(set(held.splits) - set(ROLES))}")
        if list(held.cases) != sorted(set(held.cases)):
            raise Wrong("silently cases twice, or out of order")
        same = held.cases == outcomes.cases and np.array_equal(held.targets, outcomes.targets)
        same = same and np.array_equal(held.features, outcomes.features)
        if kind == "cut off" and held.cases == outcomes.cases and not same:  # fewer cases are noticed by who reads them
            raise Wrong("silently another number, as the last was cut off")
        return UNCHANGED if same else AS_STATED

    read = read_recorded_split if name == "split.csv" else read_recorded_outcomes
    return Input(f"recorded {name}: {kind}", read, re.escape(name))
