"""When to stop early: a signal, or a limit from the config. Handlers only set a flag; the loop asks at a step's end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, TypeVar

from voxscale.config.schema import StopAfter
from voxscale.errors import StoppedEarly

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopRequest:
    """Whether this rank wants to stop, and why."""

    def __init__(self, limit: StopAfter | None) -> None:
        self._limit = limit or StopAfter()
        self._started = time.monotonic()
        self.reason = ""

    def wanted(self, steps_done: int) -> bool:
        """`steps_done` counts the steps of this start, not of the run."""
        if not self.reason and self._limit.steps is not None and steps_done >= self._limit.steps:
            self.reason = f"train.stop_after: {self._limit.steps} steps"
        minutes = (time.monotonic() - self._started) / 60
        if not self.reason and self._limit.minutes is not None and minutes >= self._limit.minutes:
            self.reason = f"train.stop_after: {self._limit.minutes:g} minutes"
        return bool(self.reason)

    @property
    def signalled(self) -> bool:
        return self.reason.startswith("signal")

    def heeded(self, work: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
        """The same work, but StoppedEarly once a signal has come: for many short pieces of something long."""

        def do(*given: _Given.args, **named: _Given.kwargs) -> _Made:
            if self.signalled:
                raise StoppedEarly(f"stopped while evaluating ({self.reason})", fix="start the same command again")
            return work(*given, **named)

        return do

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen for the length of the body. Once stopping, further signals are ignored to the end of the process."""
        with self._heard_by(self._note):
            yield

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Leave the body at a signal, also at one that came before it: there is nothing in it to save."""
        try:
            with self._heard_by(self._interrupt):
                if self.signalled:
                    raise KeyboardInterrupt
                yield
        except KeyboardInterrupt:
            raise StoppedEarly(
                f"stopped by {self.reason}; nothing had begun", fix="start the same command again"
            ) from None

    @contextmanager
    def _heard_by(self, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
        heard = [number for number in _SIGNALS if number != signal.SIGHUP or not outlives_terminal()]
        before = {number: signal.signal(number, handler) for number in heard}
        try:
            yield
        finally:
            for number, earlier in before.items():
                signal.signal(number, signal.SIG_IGN if self.signalled else earlier)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or f"signal {signal.Signals(number).name}"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.signalled:  # the first is on its way out already
            self._note(number, frame)
            raise KeyboardInterrupt  # libraries swallow what is an Exception


def outlives_terminal() -> bool:
    """Whether this was started with nohup, or the like: the end of its terminal is not to end it."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
