"""Follow jobs: their states, their output as it grows, a bar on a terminal, and how it all ended."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from voxscale.errors import BY_CODE, InfrastructureError, StoppedEarly, TrainingError, VoxscaleError, printable
from voxscale.files import NewLines, read_json
from voxscale.launch.batch import Submitted
from voxscale.launch.slurm import GONE, JobState, cancel, exit_code_of, states_of
from voxscale.runs import RunFolder
from voxscale.terminal import is_terminal

_POLL_S = (0.5, 1.0, 2.0, 5.0)  # between questions to the scheduler: soon at first, then with patience
_LOG_S = 0.5
_TAIL_BYTES = 65536
_PATIENCE_S = 1800.0  # with a scheduler that does not answer; it may be restarted
_FLUSH_S = 0.3  # a shared file system may show a job's last lines a little later than its end


@dataclass(frozen=True)
class Screen:
    """What follows a job writes to: lines, and a bar that is moved now and then."""

    say: Callable[[str], None]
    move: Callable[[], None]


def follow(
    run: RunFolder, jobs: Sequence[Submitted], environ: Mapping[str, str], *, may_leave: bool = True
) -> JobState:
    """Wait until all of the jobs are over, showing what happens. Returns the state of the first that did not end well,
    else of the last.

    Ctrl-C asks whether to leave the jobs or cancel them; without `may_leave` it cancels them.
    """
    try:
        with display(run) as screen:
            states = _watch(jobs, environ, screen)
    except KeyboardInterrupt:
        raise _leave_or_cancel(run, jobs, environ, may_leave=may_leave) from None
    return next((state for state in states if state.state != "COMPLETED"), states[-1])


def _watch(jobs: Sequence[Submitted], environ: Mapping[str, str], screen: Screen) -> list[JobState]:
    """Show states and output until all jobs are over. A scheduler that does not answer for a while is waited for."""
    numbers = [job.id for job in jobs]
    logs = [Tail(file) for file in _outputs(jobs)]
    shown: dict[int, str] = {}
    ends: dict[int, JobState] = {}  # of jobs that SLURM forgets while others still run
    intervals, last_answer = _intervals(), time.monotonic()
    while True:
        try:
            found = states_of(numbers, environ)
            last_answer = time.monotonic()
            states = [_remembered(job.id, job.state_in(found), ends) for job in jobs]
            for job, state in zip(jobs, states, strict=True):
                _say_once(job.id, _described(job, state), shown, screen)
            if all(state.is_over for state in states):
                _show_for(_FLUSH_S, logs, screen)
                return states
        except InfrastructureError as error:
            if time.monotonic() - last_answer > _PATIENCE_S:
                raise
            _say_once(0, f"warning: {error.message}; still waiting", shown, screen)
        _show_for(next(intervals), logs, screen)


def _remembered(number: int, state: JobState, ends: dict[int, JobState]) -> JobState:
    """A job's state; of one that SLURM has forgotten, how it was last seen to have ended."""
    if state is GONE:
        return ends.get(number, GONE)
    if state.is_over:
        ends[number] = state
    else:
        ends.pop(number, None)  # queued again
    return state


def _show_for(seconds: float, logs: Sequence[Tail], screen: Screen) -> None:
    until = time.monotonic() + seconds
    while True:
        for log in logs:
            log.show(screen)
        screen.move()
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(_LOG_S, left))


def failure_of(state: JobState, run: RunFolder, jobs: Sequence[Submitted], environ: Mapping[str, str]) -> VoxscaleError:
    """What a job's end means where its ranks could not say it: by its state, its exit code and its last words."""
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
    logs = [file for file in _outputs(jobs) if file.exists()]
    if not logs:
        return InfrastructureError(
            f"the job ended with {state} and wrote nothing: its node may not see {run.root}",
            fix="choose a folder that all nodes share with --run, or set `output` in the site",
        )
    codes = [code for job in jobs if (code := exit_code_of(job.id, environ))]
    kind = next((kind for kind in BY_CODE.values() if codes and kind.exit_code == codes[0]), InfrastructureError)
    text = "\n".join(log.read_text(errors="replace") for log in logs)
    said = re.findall(r"^error: (.*)$", text, flags=re.MULTILINE)
    return kind(printable(said[-1]) if said else f"the job ended with {state}", fix=f"see {logs[-1]}")


def _outputs(jobs: Sequence[Submitted]) -> list[Path]:
    """What the jobs write, each file once: with a name of the site's without %j they write to the same."""
    return [*dict.fromkeys(Path(output) for job in jobs for output in job.outputs)]


def _intervals() -> Iterator[float]:
    for interval in _POLL_S[:-1]:
        yield from [interval] * 20
    while True:
        yield _POLL_S[-1]


def _described(job: Submitted, state: JobState) -> str:
    where = f" on {state.nodes}" if state.nodes and state.state == "RUNNING" else ""
    return f"job {job.id} ({job.kind}): {state}{where}"


def _say_once(about: int, text: str, shown: dict[int, str], screen: Screen) -> None:
    if shown.get(about) != text:
        shown[about] = text
        screen.say(text)


class Tail:
    """Shows the lines of a file that are written from now on."""

    def __init__(self, path: Path) -> None:
        self._lines = NewLines(path, from_end=True)

    def show(self, screen: Screen) -> None:
        for line in self._lines.read():
            screen.say(printable(line.decode(errors="replace").expandtabs()))


@contextmanager
def display(run: RunFolder) -> Iterator[Screen]:
    """Where lines are shown; on a terminal a bar of the run's steps moves below them."""
    if not is_terminal():
        yield Screen(lambda text: print(text, file=sys.stderr, flush=True), lambda: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("steps", total=None)

        def move() -> None:
            bars.update(bar, completed=_last_step(run.events), total=_num_steps(run.plan))

        yield Screen(lambda text: bars.console.print(Text(text)), move)


def _num_steps(plan: Path) -> int | None:
    try:
        return int(read_json(plan)["num_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_step(events: Path) -> int:
    """The step of the newest event. Only the end of the file is read: it may be long."""
    try:
        with events.open("rb") as stream:
            stream.seek(max(0, events.stat().st_size - _TAIL_BYTES))
            steps = re.findall(rb'"step": (\d+)', stream.read())
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0


def _leave_or_cancel(
    run: RunFolder, jobs: Sequence[Submitted], environ: Mapping[str, str], *, may_leave: bool
) -> StoppedEarly:
    numbers = [job.id for job in jobs]
    where = shlex.quote(str(run.root))
    answer = "" if may_leave else "c"
    if may_leave and sys.stdin.isatty():
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
