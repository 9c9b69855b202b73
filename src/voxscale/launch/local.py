"""Train or evaluate on this machine: one rank in this process, or several under torch's elastic agent."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from voxscale.config.load import read_config
from voxscale.data.cases import VAL
from voxscale.data.shared_memory import sweep_shared_memory
from voxscale.errors import BY_CODE, StoppedEarly, TrainingError, VoxscaleError
from voxscale.files import read_json, remove, write_json
from voxscale.runs import RunFolder, error_files
from voxscale.train.events import read_events
from voxscale.train.ownership import is_live

SAVE_TIME_S = 60  # what ranks get to save their state after a signal
_WORKER = "voxscale.train.worker"
_EVALUATION = "voxscale.train.evaluation"


def train_local(run: RunFolder, devices: int, environ: Mapping[str, str]) -> None:
    """Train to the end. Raises what made the run fail or stop early."""
    sweep_shared_memory()
    if devices == 1:
        from voxscale.parallel import World
        from voxscale.train.rank import do_work
        from voxscale.train.worker import train_run

        for leftover in error_files(run.logs):
            remove(leftover)
        do_work(train_run, run, World(), environ)
        return
    failures: list[str] = []
    stopped: StoppedEarly | None = None
    try:
        failures = _start_ranks([_WORKER, str(run.root)], run.logs, devices)
    except StoppedEarly as signalled:
        stopped = signalled  # the ranks may have come far enough to say more
    finally:
        sweep_shared_memory()  # killed ranks leave theirs
    state = read_state(run)
    if state == "done":
        return
    error = read_failure(run, run.logs, failures, otherwise=stopped)
    if state is None and not isinstance(error, StoppedEarly) and not is_live(run):
        _record_failure(run, devices)
    raise error


def read_state(run: RunFolder) -> str | None:
    """How the last start of a run ended: done, stopped, failed; None if it was not written down."""
    try:
        return str(read_json(run.metrics)["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def evaluate_local(
    runs: Sequence[RunFolder],
    devices: int,
    environ: Mapping[str, str],
    *,
    out: Path,
    split: str = VAL,
    checkpoint: str = "best",
    data: Path | None = None,
    mirror: bool | None = None,
) -> None:
    """Evaluate a run, or several as one, on the cases of a split or on other data, into `out`."""
    run, *others = runs
    if not others and (link := run.checkpoints / checkpoint).is_symlink():
        checkpoint = link.resolve().name  # a run that trains on may move the link between two ranks
    if devices == 1:
        from voxscale.parallel import World
        from voxscale.train.evaluation import evaluate_run
        from voxscale.train.rank import do_work

        work = partial(
            evaluate_run, out=out, split=split, checkpoint=checkpoint, others=others, data=data, mirror=mirror
        )
        do_work(work, run, World(), environ)
        return
    options = ["--split", split, "--checkpoint", checkpoint, "--out", str(out)]
    options += [part for other in others for part in ("--with", str(other.root))]
    options += ["--data", str(data)] if data is not None else []
    options += [] if mirror is None else ["--mirror" if mirror else "--no-mirror"]
    with tempfile.TemporaryDirectory() as folder:  # a run may train, and be evaluated twice, at the same time
        failures = _start_ranks([_EVALUATION, str(run.root), *options], Path(folder), devices)
        if failures or error_files(Path(folder)):
            raise read_failure(run, Path(folder), failures)


def read_failure(
    run: RunFolder, reports: Path, failures: Sequence[str], *, otherwise: VoxscaleError | None = None
) -> VoxscaleError:
    """What went wrong, as the ranks left it in `reports`; what the agent saw of them comes second."""
    for record in map(read_json, error_files(reports)):
        if kind := BY_CODE.get(record["code"]):
            place = "" if issubclass(kind, StoppedEarly) else f"rank {record['rank']}: "
            return kind(place + record["message"], fix=record["fix"])
    return otherwise or TrainingError(
        "; ".join(failures) or "the ranks ended before their work did",
        fix=f"see {run.logs}; start the same command again to continue from the last checkpoint",
    )


def render_commands(run: RunFolder, devices: int) -> list[tuple[str, str]]:
    """Lines for starting the run by hand, each with what it is for; on two nodes where the devices halve."""
    worker = f"-m {_WORKER} {shlex.quote(str(run.root))}"
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


def _record_failure(run: RunFolder, devices: int) -> None:
    """Write the `metrics.json` that the ranks could not write any more, from their events."""
    events = read_events(run.events)
    bests = [event for event in events if event["event"] == "checkpoint" and event.get("best")]
    write_json(
        run.metrics,
        {
            "task": read_config(run.config).task,
            "state": "failed",
            "best": {key: bests[-1][key] for key in ("step", "metric", "value")} if bests else None,
            "summary": {},
            "world_size": devices,
            "steps": max((event["step"] for event in events), default=0),
            "wall_s": events[-1]["time_s"] if events else 0.0,
            "weights_sha256": None,
        },
    )


def _start_ranks(arguments: Sequence[str], reports: Path, devices: int) -> list[str]:
    from voxscale.parallel import start_ranks

    for leftover in error_files(reports):
        remove(leftover)
    arguments = ["-m", *arguments, "--reports", str(reports)]
    return [str(failure) for failure in start_ranks(arguments, devices, save_time_s=SAVE_TIME_S)]
