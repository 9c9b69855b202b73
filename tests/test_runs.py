"""Folders of runs are their owner's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from voxscale.errors import InfrastructureError
from voxscale.runs import RunFolder

_ANOTHER = 4711


@pytest.mark.skipif(os.geteuid() != 0, reason="being another user needs root")
@pytest.mark.parametrize(
    ("run", "why"),
    [
        ("theirs", f"Operation not permitted; it belongs to user 0, you are user {_ANOTHER}"),
        ("closed/run", "Permission denied"),
    ],
)
def test_a_folder_of_another_user_is_refused(
    run: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though one may write there: it tells of patients."""
    monkeypatch.chdir(tmp_path)
    for name, mode in ((".", 0o755), ("theirs", 0o777), ("closed", 0o755)):
        Path(name).mkdir(exist_ok=True)
        Path(name).chmod(mode)
    os.seteuid(_ANOTHER)
    try:
        with pytest.raises(InfrastructureError) as told:
            RunFolder(Path(run)).make()
    finally:
        os.seteuid(0)
    assert told.value.message == f"run folder {run}: cannot be made yours alone: {why}"
    assert re.search(r"--run$", told.value.fix)
    assert (tmp_path / "theirs").stat().st_mode & 0o777 == 0o777
