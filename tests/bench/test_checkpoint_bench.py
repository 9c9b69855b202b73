"""The benchmark of saves runs, and says what it says it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY


def test_saves_are_measured(tmp_path: Path) -> None:
    words = ["bench/checkpoint.py", "--steps", "1", "--rounds", "1", "--patch", "32", "--json", "--folder", tmp_path]
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    result = json.loads(done.stdout)
    assert result["state_mb"] > 10
    assert 0 < result["ours"]["wait_s"] < result["ours"]["alone_s"]
    assert not list(tmp_path.iterdir())
