"""Follow jobs: their states, their output as it grows, a bar on a terminal, and how it all ended."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from voxscale.errors import InfrastructureError, StoppedEarly, TrainingError, VoxscaleError, printable
from voxscale.files import read_json
from voxscale.launch.batch import Submitted
from voxscale.launch.slurm import JobState, cancel, states_of
from voxscale.runs import RunFolder
from voxscale.terminal import is_terminal
from voxscale.train.events import read_events

_POLL_S = (0.5, 1.0, 2.0, 5.0)  # between questions to the scheduler: soon at first, then with patience
_LOG_S = 0.5
_PATIENCE_S = 1800.0  # with a scheduler that does not answer; it may be restarted
_FLUSH_S = 0.3  # a shared file system may show a job's last lines a little later than its end

Say = Callable[[str], None]


def follow(run: RunFolder, jobs: Sequence[Submitted], environ: Mapping[str, str]) -> JobState:
    """Wait until all of the jobs are over, showing what happens. Returns the state of the first that did not end well,
    else of the last.

    Ctrl-C asks whether to leave the jobs or cancel them.
    """
    try:
        with _display(run) as say:
            states = _watch(jobs, environ, say)
    except KeyboardInterrupt:
        raise _leave_or_cancel(run, jobs, environ) from None
    return next((state for state in states if state.state != "COMPLETED"), states[-1])


def _watch(jobs: Sequence[Submitted], environ: Mapping[str, str], say: Say) -> list[JobState]:
    """Show states and output until all jobs are over. A scheduler that does not answer for a while is waited for."""
    numbers = [job.id for job in jobs]
    logs = [_Tail(path) for job in jobs for path in job.logs()]
    shown: dict[int, str] = {}
    intervals, last_answer = _intervals(), time.monotonic()
    while True:
        try:
            states = states_of(numbers, environ)
            last_answer = time.monotonic()
            for job in jobs:
                _say_once(job.id, _described(job, states[job.id]), shown, say)
            if all(state.is_over for state in states.values()):
                _show_for(_FLUSH_S, logs, say)
                return [states[number] for number in numbers]
        except InfrastructureError as error:
            if time.monotonic() - last_answer > _PATIENCE_S:
                raise
            _say_once(0, f"warning: {error.message}; still waiting", shown, say)
        _show_for(next(intervals), logs, say)


def _show_for(seconds: float, logs: Sequence[_Tail], say: Say) -> None:
    until = time.monotonic() + seconds
    while True:
        for log in logs:
            log.show(say)
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(_LOG_S, left))


def failure_of(state: JobState, run: RunFolder, jobs: Sequence[Submitted]) -> VoxscaleError:
    """What a job's end means where its ranks could not say it."""
    log = jobs[-1].log
    again = "start the same command again to continue from the last checkpoint"
    match state.state:
        case "CANCELLED":
            return StoppedEarly("the job was cancelled", fix=again)
        case "TIMEOUT":
            return StoppedEarly(
                "the job reached its time limit before its ranks had saved", fix=f"set signal_s higher; {again}"
            )
        case "OUT_OF_MEMORY":
            return TrainingError(
                "the job ran out of its memory", fix="set `memory` in the site higher, or train.micro_batch lower"
            )
        case "NODE_FAIL" | "BOOT_FAIL" | "PREEMPTED":
            return InfrastructureError(f"the job ended with {state}", fix=again)
    if not any(path.exists() for job in jobs for path in job.logs()):
        return InfrastructureError(
            f"the job ended with {state} and wrote nothing: its node may not see {run.root}",
            fix="choose a folder that all nodes share with --run, or set `output` in the site",
        )
    return InfrastructureError(f"the job ended with {state}", fix=f"see {log}")


def _intervals() -> Iterator[float]:
    for interval in _POLL_S[:-1]:
        yield from [interval] * 20
    while True:
        yield _POLL_S[-1]


def _described(job: Submitted, state: JobState) -> str:
    where = f" on {state.nodes}" if state.nodes and state.state == "RUNNING" else ""
    return f"job {job.id} ({job.kind}): {state}{where}"


def _say_once(about: int, text: str, shown: dict[int, str], say: Say) -> None:
    if shown.get(about) != text:
        shown[about] = text
        say(text)


class _Tail:
    """The lines of a file that has not been shown yet; it may not be there at first."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""
        self._offset = path.stat().st_size if path.exists() else 0

    def show(self, say: Say) -> None:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                block = stream.read()
        except FileNotFoundError:
            return
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            say(printable(line.decode(errors="replace").expandtabs()))


@contextmanager
def _display(run: RunFolder) -> Iterator[Say]:
    """A function that shows a line; on a terminal a bar of the run's steps moves below the lines."""
    if not is_terminal():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("steps", total=None)

        def say(text: str) -> None:
            bars.console.print(Text(text))
            completed, total = _progress_of(run)
            bars.update(bar, completed=completed, total=total)

        yield say


def _progress_of(run: RunFolder) -> tuple[int, int | None]:
    """Steps done, and steps in all where they are known."""
    try:
        total = int(read_json(run.plan)["num_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, None
    return max((row.get("step") or 0 for row in read_events(run.events)), default=0), total


def _leave_or_cancel(run: RunFolder, jobs: Sequence[Submitted], environ: Mapping[str, str]) -> StoppedEarly:
    numbers = [job.id for job in jobs]
    where = shlex.quote(str(run.root))
    answer = ""
    if sys.stdin.isatty():
        try:
            answer = input(f"\nleave job {numbers[-1]} running, or cancel it? [L/c] ").strip().lower()
        except (EOFError, KeyboardInterrupt):
            answer = ""
    if answer.startswith("c"):
        cancel(numbers, environ)
        return StoppedEarly(f"job {numbers[-1]} was cancelled", fix="start the same command again to continue")
    return StoppedEarly(
        f"job {numbers[-1]} goes on without being followed",
        fix=f"see `voxscale runs {where}`; cancel it with `voxscale cancel {where}`",
    )
