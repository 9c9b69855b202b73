"""What people see: bars that move on a terminal and stay silent in a log or a pipe, and times."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[], None]


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a person looks at a stream; standard error where none is named."""
    return (stream or sys.stderr).isatty()


def clock(seconds: float) -> str:
    """A length of time as 0:07, 12:30 or 1:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def progress(label: str, total: int, *, shown: bool = True) -> Iterator[Advance]:
    """Yield a function to call after each of `total` pieces of work."""
    if not shown or not is_terminal():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(label, total=total)
        yield lambda: bars.advance(bar)
