"""Progress bars for people: on a terminal they move, in a log or a pipe they stay silent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[], None]


def is_terminal() -> bool:
    return sys.stderr.isatty()


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
