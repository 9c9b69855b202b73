"""Become one rank, its output kept: what node.py starts in a rank's place.

    python as_rank.py DIR all|first SCRIPT ARGUMENTS

The output goes to DIR/rank-NNNN.log and, of all ranks or of the first alone, also where it would have gone. Needs the
standard library alone, as node.py does, and is copied with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

PARENT = "VOXSCALE_PARENT"  # the process that starts the ranks of a node
_LINE_S = 0.5  # for a line to be complete


def become_rank(reports: Path, echo: str, arguments: Sequence[str]) -> NoReturn:
    """Keep this rank's output in its own log, show it too if it is `echo`ed, and become `python ARGUMENTS`."""
    rank = os.environ.get("RANK", "0")
    read, write = os.pipe()
    shown = 1 if echo == "all" or rank == "0" else None
    log = os.open(reports / f"rank-{int(rank):04d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if os.fork() == 0:
        os.close(write)
        if os.fork() == 0:  # a grandchild, so that the rank has no child that it knows nothing of
            _copy(read, log, shown)
        os._exit(0)
    os.wait()
    os.close(read)
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.environ["PYTHONUNBUFFERED"] = "1"
    stop_with_parent()
    os.environ.pop(PARENT, None)
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 an argument list


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """A process whose parent is killed gets a signal from the kernel, so it saves and leaves no orphan.

    A rank whose parent, which it knows by number, was killed before gets it now.
    """
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    if os.environ.get(PARENT) not in (None, str(os.getppid())):
        os.kill(os.getpid(), number)


def _copy(source: int, log: int, shown: int | None) -> NoReturn:
    """Copy to the end, whatever signals the job gets meanwhile. What is shown comes in whole lines, as other ranks
    write there too; a line that is long in coming is shown as far as it is."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    rest = b""
    while True:
        is_waiting = not select.select([source], [], [], _LINE_S if rest else None)[0]
        block = b"" if is_waiting else os.read(source, 65536)
        rest += block
        cut = len(rest) if not block else max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        for target, part in ((log, block), (shown, rest[:cut])):
            if target is not None:
                with contextlib.suppress(OSError):  # a full disk or a closed screen is not the rank's concern
                    os.write(target, part)
        rest = rest[cut:]
        if not block and not is_waiting:
            os._exit(0)


if __name__ == "__main__":
    become_rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
