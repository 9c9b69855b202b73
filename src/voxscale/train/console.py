"""What a person sees while a run trains: a moving bar on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

from voxscale.plan.plan import Plan
from voxscale.terminal import clock, is_terminal


class Console(Protocol):
    def line(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def step(self, step: int, epoch: int, loss: float) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NullConsole:
    """For the ranks that do not speak."""

    def line(self, text: str) -> None:
        return

    def warn(self, text: str) -> None:
        return

    def step(self, step: int, epoch: int, loss: float) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class LineConsole(NullConsole):
    """Plain lines on standard error, as many as `log` asks for: none, one per epoch, one per step."""

    def __init__(self, plan: Plan, log: str, first_step: int) -> None:
        self._plan, self._log = plan, log
        self._first_step, self._started = first_step, time.monotonic()
        self._epoch_losses: list[float] = []

    def line(self, text: str) -> None:
        if self._log != "quiet":
            self._show(text)

    def warn(self, text: str) -> None:
        self._show(f"warning: {text}", style="yellow")

    def _show(self, text: str, style: str | None = None) -> None:
        with contextlib.suppress(OSError):  # a terminal that was closed, or a pipe, does not end a training
            self._print(text, style)

    def _print(self, text: str, style: str | None) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, step: int, epoch: int, loss: float) -> None:
        self._epoch_losses.append(loss)
        if self._log == "step":
            self.line(f"step {step}/{self._plan.num_steps}  loss {loss:.4f}  {self._time_left(step)}")
        if self._plan.ends_epoch(step):
            epochs = self._plan.num_steps // self._plan.steps_per_epoch
            mean = sum(self._epoch_losses) / len(self._epoch_losses)
            self._epoch_losses.clear()
            self.line(f"epoch {epoch}/{epochs}  step {step}  loss {mean:.4f}  {self._time_left(step)}")

    def _time_left(self, step: int) -> str:
        per_step = (time.monotonic() - self._started) / (step - self._first_step + 1)
        return f"{clock(per_step * (self._plan.num_steps - step))} left"


class BarConsole(LineConsole):
    """A progress bar, with the lines scrolling above it."""

    def __init__(self, plan: Plan, log: str, first_step: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(plan, log, first_step)
        columns: tuple[Any, ...] = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=RichConsole(stderr=True), transient=True)
        self._bar = self._bars.add_task("training", total=plan.num_steps, completed=first_step - 1)

    def _print(self, text: str, style: str | None) -> None:
        self._bars.console.print(text, style=style, highlight=False, markup=False)

    def step(self, step: int, epoch: int, loss: float) -> None:
        self._bars.update(self._bar, completed=step, description=f"training  loss {loss:.4f}")
        super().step(step, epoch, loss)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._bars.stop()


def open_console(plan: Plan, log: str, first_step: int, *, is_main: bool) -> Console:
    if not is_main:
        return NullConsole()
    kind = BarConsole if is_terminal() and log != "quiet" else LineConsole
    return kind(plan, log, first_step)
