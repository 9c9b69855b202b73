"""The rule about skips is itself tested: a skip passes at a desk and fails in CI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Finished


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_a_skip_fails_in_ci_only(run_python: Callable[..., Finished], tmp_path: Path, ci: str, code: int) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\ndef test_it(): pytest.skip('slurmctld is missing')\n")
    plugin = {"CI": ci, "PYTHONPATH": str(Path(__file__).parent)}
    done = run_python("-m", "pytest", "-p", "skips", "-rs", "--rootdir", tmp_path, tmp_path, env=plugin)
    assert done.code == code, done.out
    assert "slurmctld is missing" in done.out
