"""Train or evaluate on this machine: one rank in this process, or ranks under torch's elastic agent."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from voxscale.data.cases import VAL
from voxscale.data.shared_memory import sweep_shared_memory
from voxscale.errors import InfrastructureError, StoppedEarly
from voxscale.files import remove
from voxscale.launch.meeting import Place
from voxscale.launch.outcome import judge, read_failure
from voxscale.launch.ranks import start_ranks, sweep_agent_folders
from voxscale.runs import ON_LOCAL, RunFolder, error_files
from voxscale.train.events import parse_events
from voxscale.train.ownership import is_live

SAVE_TIME_S = 60  # what ranks get to save their state after a signal, and after the step that they are at
_WORKER = "voxscale.train.worker"
EVALUATION = "voxscale.train.evaluation"
_TAIL_BYTES = 65536  # of the events: the last steps


def sweep_leftovers() -> None:
    """Remove what starts on this machine that were killed have left outside of their run folders."""
    sweep_shared_memory()
    sweep_agent_folders()


def train_local(
    run: RunFolder, devices: int, environ: Mapping[str, str], *, profile: bool = False, outlive: bool = False
) -> None:
    """Train to the end. Raises what made the run fail or stop early.

    To `outlive` a rank that is killed, this process leaves the work to another even where there is only one.
    """
    with _reports_of(run) as reports:
        if devices == 1 and not outlive:
            from voxscale.parallel import World
            from voxscale.train.rank import do_work
            from voxscale.train.worker import train_run

            do_work(partial(train_run, profile=profile), run, World(), environ, logs=reports)
            return
        failures: list[str] = []
        stopped: StoppedEarly | None = None
        try:
            words = [_WORKER, str(run.root), *profile_words(profile)]
            failures = _start_ranks(words, reports, devices, step_s=partial(_longest_step_s, run))
        except StoppedEarly as signalled:
            stopped = signalled  # the ranks may have come far enough to say more
        finally:
            sweep_shared_memory()  # killed ranks leave theirs
        judge(run, reports, failures, world_size=devices, otherwise=stopped)


@contextmanager
def _reports_of(run: RunFolder) -> Iterator[Path]:
    """A folder for what the ranks of one start have to say; it stays if they had anything to, of their own run."""
    try:
        for leftover in error_files(run.logs):  # of ranks that were started by hand
            remove(leftover)
        reports = run.next_reports(ON_LOCAL)
    except OSError as error:
        raise InfrastructureError(
            f"{run.logs}: cannot be written: {error.strerror}", fix="get write permission, or make room on the disk"
        ) from error
    try:
        yield reports
    finally:
        if is_live(run):  # another start has it, and this one was refused
            remove(reports)
        with suppress(OSError):  # not empty
            reports.rmdir()


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate, and where to: the cases of a split, or other data."""

    out: Path
    split: str = VAL
    checkpoint: str = "best"
    data: Path | None = None
    mirror: bool | None = None


def evaluate_local(runs: Sequence[RunFolder], devices: int, environ: Mapping[str, str], choice: Evaluation) -> None:
    """Evaluate a run, or several as one."""
    run, *others = runs
    if not others and (link := run.checkpoints / choice.checkpoint).is_symlink():
        choice = replace(choice, checkpoint=link.resolve().name)  # a run that trains on may move it between two ranks
    if devices == 1:
        from voxscale.parallel import World
        from voxscale.train.evaluation import evaluate_run
        from voxscale.train.rank import do_work

        do_work(partial(evaluate_run, **vars(choice), others=others), run, World(), environ)
        return
    with tempfile.TemporaryDirectory() as folder:  # a run may train, and be evaluated twice, at the same time
        run_local([EVALUATION, *evaluation_words(runs, choice)], Path(folder), devices)


def run_local(words: Sequence[str], reports: Path, devices: int) -> None:
    """Run a module as ranks that leave no state but their reports. Raises what made them fail."""
    for leftover in error_files(reports):
        remove(leftover)
    failures = _start_ranks(words, reports, devices)
    if failures or error_files(reports):
        raise read_failure(reports, failures)


def evaluation_words(runs: Sequence[RunFolder], choice: Evaluation) -> list[str]:
    """The arguments of `voxscale.train.evaluation`."""
    run, *others = runs
    words = [str(run.root), "--split", choice.split, "--checkpoint", choice.checkpoint, "--out", str(choice.out)]
    words += [part for other in others for part in ("--with", str(other.root))]
    words += ["--data", str(choice.data.resolve())] if choice.data is not None else []
    return words + ([] if choice.mirror is None else ["--mirror" if choice.mirror else "--no-mirror"])


def profile_words(profile: bool) -> list[str]:
    """The argument that makes the worker trace some of its steps."""
    return ["--profile"] if profile else []


def render_commands(run: RunFolder, devices: int, *, profile: bool = False) -> list[tuple[str, str]]:
    """Lines for starting the run by hand, each with what it is for; on two nodes where the devices halve."""
    worker = shlex.join(["-m", _WORKER, str(run.root), *profile_words(profile)])
    two_nodes = f"--nnodes 2 --nproc-per-node {devices // 2}"
    lines = [
        ("one process", f"python {worker}"),
        (f"{devices} on this machine", f"torchrun --standalone --nproc-per-node {devices} {worker}"),
        (
            "two nodes, each with its own --node-rank",
            f"torchrun {two_nodes} --node-rank 0 --master-addr HOST --master-port PORT {worker}",
        ),
        (
            "two nodes, the same line on both",
            f"torchrun {two_nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME {worker}",
        ),
    ]
    return lines if devices % 2 == 0 else lines[:2]


def _start_ranks(
    arguments: Sequence[str], reports: Path, devices: int, *, step_s: Callable[[], float] = float
) -> list[str]:
    arguments = ["-m", *arguments, "--reports", str(reports)]
    failures, received = start_ranks(
        arguments, devices, place=Place(), save_time_s=SAVE_TIME_S, step_s=step_s, watched=reports
    )
    if failures and received:
        raise StoppedEarly(f"stopped by {received[0].name}; nothing new was saved", fix="start the same command again")
    return [str(failure) for failure in failures]


def _longest_step_s(run: RunFolder) -> float:
    """Seconds of the longest of the last steps, twice: they vary. Nothing is saved in the midst of one."""
    try:
        with run.events.open("rb") as stream:
            stream.seek(max(0, run.events.stat().st_size - _TAIL_BYTES))
            return 2 * max((row.get("step_s", 0.0) for row in parse_events(stream.read().splitlines())), default=0.0)
    except OSError:  # no step was taken yet
        return 0.0
