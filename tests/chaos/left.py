"""What a fault leaves behind: processes, locks that are held, shared memory and files aside, counted after each."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

from chaos.report import Report
from chaos.training import Training, marked
from voxscale.files import is_locked

_GONE_S = 20.0
_OF_TORCH = "torchinductor_"  # a cache of the user's, which torch makes as it is loaded
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where voxscale has it


def count_left(training: Training, mark: str, report: Report, *, has_launcher: bool, is_over: bool = False) -> None:
    """Wait for the processes of a start to be gone, and put down all that stays.

    A launcher that was not killed has to remove memory and temporary folders, whatever became of its ranks. Else nobody
    was left to do so: those count at the end of the start after it, as what a killed save has begun does in any case,
    when the run `is_over`.
    """
    until = time.monotonic() + _GONE_S
    while (left := _living(training, mark)) and time.monotonic() < until:
        time.sleep(0.02)
    if has_launcher:
        left += [f"shared memory {path}" for path in shared_memory_of(training.run.root)]
        left += [f"file {path.name}" for path in training.temporary.iterdir() if not path.name.startswith(_OF_TORCH)]
    if is_over:
        left += [f"file {path.name}" for path in training.root.rglob(".*.tmp")]
    for what in left:
        report.wrong.append(f"{training.root.name}: {what} is left")
    report.add("left behind", len(left))
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


def _living(training: Training, mark: str) -> list[str]:
    """Processes, and locks: a process that is about to end may hold one a moment longer than it shows its mark."""
    locks = {*training.root.rglob("*.lock"), training.run.owner_lock}
    return [
        *(f"process {pid}" for pid in marked(mark)),
        *(f"a lock on {path.name}" for path in locks if is_locked(path)),
    ]


def shared_memory_of(run: Path) -> list[Path]:
    name = hashlib.sha256(str(run).encode()).hexdigest()[:16]
    return list(SHARED_MEMORY.glob(f"*{name}*"))
