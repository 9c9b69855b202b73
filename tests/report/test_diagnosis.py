"""A diagnosis as text, and the page that explains its codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import REPOSITORY
from voxscale.data.doctor import Diagnosis
from voxscale.data.findings import ERROR, WARNING, Finding
from voxscale.report.diagnosis import render_diagnosis


def finding(level: str = ERROR, **fields: str) -> Finding:
    whole = {"code": "nan", "case": "a", "file": "a.nii.gz", "found": "x", "expected": "y", "fix": "z", **fields}
    return Finding(level=level, **whole)


def fingerprint(**fields: Any) -> dict[str, Any]:
    spread = {"min": [16, 16, 9], "median": [20.5, 16, 10], "max": [128, 128, 100]}
    statistics = {"mean": 1.5, "std": 0.25, "p0.5": -3.0, "p50": 1.0, "p99.5": 1234.5}
    return {
        "cases": 3,
        "channels": ["T1w", "a longer name"],
        "size": spread,
        "prepared_size": spread,
        "spacing_mm": spread,
        "orientations": {"LPS": 1, "RAS": 2},
        "intensity": [statistics, statistics],
        "volumes_ml": {
            "1": {"name": "organ", "cases": 3, "min": 0.5, "median": 1.25, "max": 20.0},
            "2": {"name": "tumour", "cases": 0},
        },
        **fields,
    }


def tables(text: str) -> list[list[str]]:
    """Blocks of lines that stand under each other."""
    return [block.splitlines() for block in text.split("\n\n")]


def test_findings_come_with_their_fix_and_a_verdict() -> None:
    text = render_diagnosis(Diagnosis([finding(), finding(WARNING, case="", file="")], {"cases": 0}))
    assert text.splitlines() == [
        "error: case a: a.nii.gz: found x, expected y",
        "  fix: z",
        "warning: data: found x, expected y",
        "  fix: z",
        "0 cases read, 1 errors, 1 warnings: not safe to train on",
    ]


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([], "3 cases read, 0 errors, 0 warnings: safe to train on"),
        ([finding(WARNING)] * 2, "3 cases read, 0 errors, 2 warnings: safe to train on"),
        ([finding(ERROR)], "3 cases read, 1 errors, 0 warnings: not safe to train on"),
    ],
)
def test_only_errors_make_data_unsafe(findings: list[Finding], verdict: str) -> None:
    assert render_diagnosis(Diagnosis(findings, fingerprint())).splitlines()[-1] == verdict


def test_the_tables_stand_in_columns() -> None:
    sizes, intensities, turns, verdict = tables(render_diagnosis(Diagnosis([], fingerprint())))
    assert sizes[0].split() == ["min", "median", "max"]
    assert sizes[1].split() == ["size", "16×16×9", "20.5×16×10", "128×128×100"]
    assert sizes[4].split("  ")[0] == "organ (ml, in 3 cases)"
    assert sizes[4].split()[-3:] == ["0.5", "1.25", "20"]
    assert sizes[5].split()[-3:] == ["-", "-", "-"], "a class that no case has"
    assert intensities[2].split() == ["channel", "a", "longer", "name", "1.5", "0.25", "-3", "1", "1234.5"]
    assert {len({len(line) for line in block}) for block in (sizes, intensities)} == {1}
    assert turns == ["orientations: LPS 1, RAS 2"]
    assert verdict == ["3 cases read, 0 errors, 0 warnings: safe to train on"]


@pytest.mark.parametrize("name", ["x\nerror: y", "\x1b[2J", "\r\b", "\u202e", "\udcff", "n" * 1000])
def test_names_cannot_break_lines_or_tables(name: str) -> None:
    """A dataset chooses names of cases, files, labels and channels; none of them reaches the terminal raw."""
    volumes = {"1": {"name": name, "cases": 1, "min": 1, "median": 1, "max": 1}}
    print_ = fingerprint(channels=[name, "b"], volumes_ml=volumes)
    hostile = finding(case=name, file=name, found=name, expected=name, fix=name)
    text = render_diagnosis(Diagnosis([hostile], print_))
    assert text.replace("\n", "").isprintable()
    assert len(text.splitlines()) == len(render_diagnosis(Diagnosis([finding()], fingerprint())).splitlines()) - 1
    assert max(len(line) for block in tables(text)[1:] for line in block) < 250


def codes_in_use() -> Iterator[str]:
    """Every code that some call in the sources gives to a finding."""
    for path in (REPOSITORY / "src" / "voxscale" / "data").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                place = slice(1, 2) if name in ("Finding", "_as_findings") else slice(0, 1 if name in CALLS else 0)
                given = node.args[place]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "code":
                given = [node.value]
            else:
                continue
            for value in given:
                yield from _texts(value)


CALLS = ("error", "warning", "warn", "_passed_over")


def _texts(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.IfExp):
        yield from _texts(value.body)
        yield from _texts(value.orelse)
    elif (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Dict)
    ):
        for choice in (*value.func.value.values, *value.args[1:]):  # {…: code}.get(key, code)
            yield from _texts(choice)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value


def test_the_page_explains_every_code_and_no_other() -> None:
    rows = re.findall(
        r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \| (error|warning|error, or warning) \| (.+) \| (.+) \|$",
        (REPOSITORY / "docs" / "doctor.md").read_text(),
        flags=re.MULTILINE,
    )
    explained = [code for codes, *_ in rows for code in re.findall("[a-z-]+", codes)]
    assert len(explained) == len(set(explained))
    assert set(explained) == set(codes_in_use())
