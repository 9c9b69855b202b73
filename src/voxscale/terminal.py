"""What people see: bars that move on a terminal, lines now and then in a log or a pipe, and times."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[], None]
_LOG_S = 30.0  # what takes less says nothing in a log


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a person looks at a stream; standard error where none is named."""
    return (stream or sys.stderr).isatty()


def clock(seconds: float) -> str:
    """A length of time as 0:07, 12:30 or 1:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def progress(label: str, total: int, *, shown: bool = True, log_s: float = _LOG_S) -> Iterator[Advance]:
    """Yield a function to call after each of `total` pieces of work, from any thread.

    On a terminal a bar moves; elsewhere, as in a job's log, a line says every `log_s` seconds how far it is.
    """
    if not shown:
        yield lambda: None
        return
    if not is_terminal():
        yield _Logged(label, total, log_s)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(label, total=total)
        yield lambda: bars.advance(bar)


class _Logged:
    """Counts pieces of work, and writes lines about them to standard error."""

    def __init__(self, label: str, total: int, every_s: float) -> None:
        self._label, self._total, self._every_s = label, total, every_s
        self._done, self._lock = 0, threading.Lock()
        self._began = self._said = time.monotonic()

    def __call__(self) -> None:
        with self._lock:
            self._done += 1
            now = time.monotonic()
            if now - self._said < self._every_s or self._done >= self._total:
                return
            self._said, took_s = now, now - self._began
            left_s = took_s / self._done * (self._total - self._done)
            line = f"{self._label}: {self._done} of {self._total} after {clock(took_s)}, about {clock(left_s)} left"
            print(line, file=sys.stderr, flush=True)
