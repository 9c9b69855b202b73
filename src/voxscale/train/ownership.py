"""One live owner per run folder: a lock that the kernel frees when its holder dies, and a note of who holds it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from voxscale.errors import InfrastructureError
from voxscale.files import locked, read_json, write_json
from voxscale.runs import RunFolder


@contextmanager
def claimed(run: RunFolder) -> Iterator[None]:
    """Own the run for the length of the body. Rank 0 only."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(run.owner_lock, wait=False))
        except BlockingIOError:
            raise _in_use(run) from None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(run.owner, {"host": socket.gethostname(), "pid": os.getpid(), "since": now})
        yield


def refuse_if_live(run: RunFolder) -> None:
    """For those who are about to change a run from outside."""
    if is_live(run):
        raise _in_use(run)


def is_live(run: RunFolder) -> bool:
    """Whether someone works in the folder now. Not to be asked by the owner itself: asking frees its lock."""
    if not run.owner_lock.exists():
        return False
    try:
        with locked(run.owner_lock, wait=False):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _in_use(run: RunFolder) -> InfrastructureError:
    try:
        owner = read_json(run.owner)
        who = f"pid {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return InfrastructureError(
        f"run {run.root}: in use by {who}", fix="wait for it, stop it, or choose another folder with --run"
    )
