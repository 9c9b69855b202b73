"""Texts that must not change by accident. `GOLDEN=update make test` writes them anew; look at the diff then."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    path = FOLDER / name
    if os.environ.get("GOLDEN") == "update":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"differs from {path}; if that is meant: GOLDEN=update"
