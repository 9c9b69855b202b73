"""What `doctor` found, as text: a line or two per finding, then the dataset's fingerprint as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from voxscale.data.doctor import Diagnosis
from voxscale.data.findings import ERROR
from voxscale.errors import printable

_NAME_WIDTH = 40


def render_diagnosis(diagnosis: Diagnosis) -> str:
    lines = []
    for finding in diagnosis.findings:
        lines += [f"{finding.level}: {finding}", f"  fix: {printable(finding.fix)}"]
    num_errors = sum(finding.level == ERROR for finding in diagnosis.findings)
    lines += ["", *_tables(diagnosis.fingerprint)] if diagnosis.fingerprint["cases"] else []
    verdict = "safe to train on" if diagnosis.is_safe else "not safe to train on"
    num_warnings = len(diagnosis.findings) - num_errors
    counted = f"{diagnosis.fingerprint['cases']} cases read, {num_errors} errors, {num_warnings} warnings"
    return "\n".join([*lines, f"{counted}: {verdict}"]).lstrip("\n")


def _tables(fingerprint: dict[str, Any]) -> list[str]:
    rows = [["", "min", "median", "max"]]
    for name in ("size", "prepared_size", "spacing_mm"):
        spread = fingerprint[name]
        rows.append([name.replace("_", " "), *("×".join(f"{n:g}" for n in spread[key]) for key in rows[0][1:])])
    for entry in fingerprint["volumes_ml"].values():
        title = f"{_short(entry['name'])} (ml, in {entry['cases']} cases)"
        rows.append([title, *(f"{entry[key]:g}" if key in entry else "-" for key in rows[0][1:])])
    statistics = list(fingerprint["intensity"][0])
    intensity = [["intensity", *statistics]]
    for channel, values in zip(fingerprint["channels"], fingerprint["intensity"], strict=True):
        intensity.append([f"channel {_short(channel)}", *(f"{values[key]:g}" for key in statistics)])
    turns = ", ".join(f"{codes} {count}" for codes, count in fingerprint["orientations"].items())
    return [*_aligned(rows), "", *_aligned(intensity), "", f"orientations: {turns}", ""]


def _short(name: str) -> str:
    """A name that a dataset gives, fit for a table."""
    return printable(name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
