"""Ends what a killed driver's own Ray cluster leaves: `python ray_keeper.py FOLDER`, with the driver on standard input.

Ray's daemons die with their driver. Their agents do not: they tell a head that is dead, too, and wait a minute for its
answer. Uses nothing but the standard library, so that it starts in no time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_END_S = 20.0  # for processes that were killed to be gone


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Have what uses a folder ended, and the folder removed, if this process is killed within the body."""
    words = [sys.executable, "-I", "-S", __file__, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as keeper:
        try:
            yield
        finally:
            keeper.kill()


def main(folder: Path) -> None:
    sys.stdin.buffer.read()  # until there is no driver any more
    deadline = time.monotonic() + _END_S
    while (users := list(_users(folder))) and time.monotonic() < deadline:
        for process in users:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def _users(folder: Path) -> Iterator[int]:
    """This user's processes that were started with the folder's token."""
    mark = f"={folder}/".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    yield int(entry.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
