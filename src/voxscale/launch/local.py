"""Train or evaluate on this machine: one rank in this process, or several under torch's elastic agent."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial

from voxscale.errors import BY_CODE, StoppedEarly, TrainingError, VoxscaleError
from voxscale.files import read_json, remove, write_json
from voxscale.runs import RunFolder

SAVE_TIME_S = 60  # what ranks get to save their state after a signal
_WORKER = "voxscale.train.worker"
_EVALUATION = "voxscale.train.evaluation"


def train_local(run: RunFolder, devices: int, environ: Mapping[str, str]) -> None:
    """Train to the end. Raises what made the run fail or stop early."""
    if devices == 1:
        from voxscale.parallel import World
        from voxscale.train.rank import do_work
        from voxscale.train.worker import train_run

        do_work(train_run, run, World(), environ)
        return
    failures = _start_ranks(run, [_WORKER, str(run.root), "--reported"], devices)
    metrics = read_json(run.metrics) if run.metrics.exists() else {}
    if metrics.get("state") == "done":
        return
    error = read_failure(run, failures)
    if metrics.get("state") is None:
        write_json(run.metrics, {**metrics, "state": "failed"})
    raise error


def evaluate_local(
    run: RunFolder, devices: int, environ: Mapping[str, str], *, split: str, checkpoint: str, name: str
) -> None:
    """Evaluate a checkpoint on the cases of a split into `evaluations/NAME`."""
    if devices == 1:
        from voxscale.parallel import World
        from voxscale.train.evaluation import evaluate_run
        from voxscale.train.rank import do_work

        work = partial(evaluate_run, split=split, checkpoint=checkpoint, name=name)
        do_work(work, run, World(), environ)
        return
    options = ["--split", split, "--checkpoint", checkpoint, "--name", name]
    failures = _start_ranks(run, [_EVALUATION, str(run.root), "--reported", *options], devices)
    if failures or any(run.logs.glob("error-rank-*.json")):
        raise read_failure(run, failures)


def read_failure(run: RunFolder, failures: Sequence[str]) -> VoxscaleError:
    """What went wrong, as the ranks left it in the run folder; what the agent saw of them comes second."""
    for record in [read_json(path) for path in sorted(run.logs.glob("error-rank-*.json"))]:
        if kind := BY_CODE.get(record["code"]):
            place = "" if issubclass(kind, StoppedEarly) else f"rank {record['rank']}: "
            return kind(place + record["message"], fix=record["fix"])
    return TrainingError(
        "; ".join(failures) or "the ranks ended before their work did",
        fix=f"see {run.logs}; start the same command again to continue from the last checkpoint",
    )


def render_commands(run: RunFolder, devices: int) -> list[tuple[str, str]]:
    """Lines for starting the run by hand, each with what it is for."""
    worker = f"-m {_WORKER} {shlex.quote(str(run.root))}"
    two_nodes = f"--nnodes 2 --nproc-per-node {max(1, devices // 2)}"
    return [
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


def _start_ranks(run: RunFolder, arguments: Sequence[str], devices: int) -> list[str]:
    from voxscale.parallel import start_ranks

    for leftover in run.logs.glob("error-rank-*.json"):
        remove(leftover)
    return [str(failure) for failure in start_ranks(["-m", *arguments], devices, save_time_s=SAVE_TIME_S)]
