"""Watch a run until it ends: a picture that is renewed on a terminal, a line for each change in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from voxscale.errors import StoppedEarly, TrainingError
from voxscale.report.watch_text import fitted, render_line, render_view
from voxscale.report.watched import GroupView, View, Watched
from voxscale.terminal import is_terminal

_LOOK_S = 1.0
_AGAIN_S = 15.0  # in which whoever started a run that was lost may start it again

Show = Callable[[View], None]


def watch(watched: Watched) -> View:
    """Show what happens until it has ended. Raises what its end means, if it did not end well.

    Ctrl-C leaves it alone: the run goes on.
    """
    try:
        with _screen() as show:
            view = _follow(watched, show)
    except KeyboardInterrupt:
        raise StoppedEarly("it is not watched any more, and goes on", fix="start the same command again") from None
    if view.state == "done":
        return view
    about = f"{view.run}: {view.state}" + (f": {view.why}" if view.why else "")
    again = "start the command that trains it again to continue"
    raise (TrainingError if view.state in ("failed", "interrupted") else StoppedEarly)(about, fix=again)


def _follow(watched: Watched, show: Show) -> View:
    """Look again and again. A run that was seen alive is waited for a little: it may be started again."""
    was_alive, over_since = False, 0.0
    while True:
        view = watched.look()
        show(view)
        now = time.monotonic()
        over_since = (over_since or now) if view.is_over else 0.0
        if view.is_over and (view.state == "done" or not was_alive or now - over_since > _patience(view)):
            return view
        was_alive = was_alive or not view.is_over
        time.sleep(_LOOK_S)


def _patience(view: View) -> float:
    """Folds follow one another, and a run that was lost may be started again; one that was stopped is not."""
    return _AGAIN_S if isinstance(view, GroupView) or view.state in ("interrupted", "failed") else 0.0


@contextmanager
def _screen() -> Iterator[Show]:
    if not is_terminal(sys.stdout):
        yield _LinePerChange()
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:

        def show(view: View) -> None:
            first, *rest = fitted(render_view(view), live.console.width, live.console.height)
            picture = Text(f"{first}\n", style="bold", overflow="fold")  # a long path must not hide the state
            live.update(picture.append("\n".join(rest), style="not bold"), refresh=True)

        yield show


class _LinePerChange:
    """Prints a line when the state, what is done, the epoch or a validation has changed."""

    def __init__(self) -> None:
        self._shown: object = None

    def __call__(self, view: View) -> None:
        runs = view.runs if isinstance(view, GroupView) else [view]
        change = (view.state, view.why, [(run.run, run.state, run.doing, run.epoch, run.validation) for run in runs])
        if change != self._shown:
            self._shown = change
            print(render_line(view), flush=True)
