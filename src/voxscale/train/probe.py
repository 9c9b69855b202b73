"""What `auto` means on this device: a few measured steps, and only what they gain.

Each way of computing is tried in a process of its own, as some end it: the compiler, or instructions that a processor
announces and a virtual machine does not let through. Trying costs a minute or two, so a run that is over in minutes
is trained the plain way.

    python -m voxscale.train.probe RUN --micro-batch 2 --precision bf16 --channels-last --compile
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from voxscale.config.load import render_config
from voxscale.config.schema import Config
from voxscale.data.loader import Batch
from voxscale.errors import LostContactError, StoppedEarly
from voxscale.files import write_text
from voxscale.parallel import Pace, World, any_rank, gather_records, leave
from voxscale.runs import RunFolder
from voxscale.tasks import Task
from voxscale.train.compute import Compute, buffers_untouched
from voxscale.train.job import Job, open_job
from voxscale.train.memory import is_out_of_memory, out_of_memory
from voxscale.train.rank import PARENT, stop_with_parent
from voxscale.train.stop import StopRequest

_WORTH_MEASURING_S = 600.0  # of training; below, measuring would cost more than it gains
_WORTH_COMPILING_S = 1800.0  # compiling takes a minute or more, at each start
_LEAST_GAIN = 0.05  # of a step; less is noise
_STEPS = 3
_LONGEST_S = 600.0
_LOOK_S = 0.1


def settle(job: Job, environ: Mapping[str, str], stop: StopRequest) -> tuple[Job, str]:
    """The job with nothing left `auto`, its config written, and what was chosen in words. All ranks call it.

    Raises StoppedEarly on all ranks where one is to stop; then nothing is settled.
    """
    settled, chosen = choose(job, environ, stop)
    if settled is not job and any_rank(stop.signalled, job.world):
        raise StoppedEarly(
            "stopped while ways of computing were tried; nothing was trained yet", fix="start the same command again"
        )
    if settled is not job and job.world.is_main:
        write_text(job.run.config, render_config(settled.config))
    return settled, chosen


def choose(job: Job, environ: Mapping[str, str], stop: StopRequest | None = None) -> tuple[Job, str]:
    """The job with nothing left `auto`, and what was chosen in words. All ranks call it; a signal cuts it short."""
    train = job.config.train
    if "auto" not in (train.precision, train.compile, train.channels_last):
        return job, ""
    step_s: dict[str, float] = {}
    chosen = Compute.of(train, job.device)
    pace = Pace(job.world, job.device)
    try:
        if job.world.is_main:
            chosen, step_s = choose_compute(job, environ, stop, pace)
        pace.finish()
    except LostContactError as lost:
        raise lost.at("while ways of computing were tried", [[] for _ in range(job.world.size)]) from lost
    own = [_fields(chosen)] if job.world.is_main else []
    (settled, *_) = gather_records(own, job.world, job.device, together=True)
    job = job.settled(settled)
    compared = ", ".join(f"{name} {seconds:.3g}" for name, seconds in step_s.items())
    return job, f"computing in {describe_compute(chosen)} (seconds a micro-step: {compared})" if compared else ""


def choose_compute(
    job: Job, environ: Mapping[str, str], stop: StopRequest | None, pace: Pace
) -> tuple[Compute, dict[str, float]]:
    """The fastest way, and the seconds of a micro-step in each that was tried; what the config states is kept."""
    train, passes = job.config.train, job.plan.num_steps * job.plan.accumulate
    chosen = Compute.of(train, job.device)
    with _first_batch(job) as batch, buffers_untouched(job.model):
        try:
            once = _measure(chosen, job.task, job.model, batch, steps=0)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(error, step=1, plan=job.plan, cases=batch.cases) from error
    job.model.zero_grad()
    if once * passes < _WORTH_MEASURING_S:
        return chosen, {}
    best = _measure_apart(job, chosen, environ, stop)
    tried = {describe_compute(chosen): best}
    for change in _changes(job.config, job.device):
        if "compile" in change and best * passes < _WORTH_COMPILING_S:
            continue
        pace.advance()
        way = replace(chosen, **change)
        took = tried[describe_compute(way)] = _measure_apart(job, way, environ, stop)
        if took < best * (1 - _LEAST_GAIN):
            chosen, best = way, took
    return chosen, {name: seconds for name, seconds in tried.items() if math.isfinite(seconds)}


def _changes(config: Config, device: torch.device) -> Iterator[Mapping[str, Any]]:
    """What may be gained, one thing after another, each on top of what was gained before."""
    train = config.train
    if train.precision == "auto" and (half := _half_precision(device)):
        yield {"precision": half}
    if train.channels_last == "auto" and not config.model.flat:
        yield {"channels_last": True}
    if train.compile == "auto" and config.can_compile:
        yield {"compile": True}


def _half_precision(device: torch.device) -> str | None:
    """The 16-bit format that the device has units for."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    return "bf16" if "amx_bf16" in flags or "avx512_bf16" in flags else None


def _measure_apart(job: Job, way: Compute, environ: Mapping[str, str], stop: StopRequest | None = None) -> float:
    """Seconds of a micro-step in a process of its own; for ever, if it does not come back with a figure."""
    command = [sys.executable, "-m", "voxscale.train.probe", str(job.run.root)]
    command += ["--micro-batch", str(job.plan.micro_batch), "--precision", way.precision]
    command += [option for option, used in (("--channels-last", way.channels_last), ("--compile", way.compile)) if used]
    of_one_rank = {name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")}
    of_one_rank[PARENT] = str(os.getpid())
    until = time.monotonic() + min(_LONGEST_S, job.config.train.timeout_s / 2)  # other ranks wait for this one
    with subprocess.Popen(
        command, env=of_one_rank, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as apart:
        while apart.poll() is None and time.monotonic() < until and not (stop and stop.signalled):
            with suppress(subprocess.TimeoutExpired):
                apart.wait(_LOOK_S)
        apart.kill()
        words = apart.stdout.read().split() if apart.stdout else []
    try:
        return float(words[-1]) if apart.returncode == 0 else math.inf
    except (ValueError, IndexError):
        return math.inf


def _measure(way: Compute, task: Task, model: torch.nn.Module, batch: Batch, *, steps: int = _STEPS) -> float:
    """Seconds of a forward and backward pass: the median of a few after the first, which is often slower."""
    way.lay_out(model)
    trained = way.trainable(model)
    times: list[float] = []
    while len(times) <= steps:
        began = time.perf_counter()
        rows = task.loss_rows(way.run(trained, *batch.inputs), batch.target)
        rows.sum().backward()  # type: ignore[no-untyped-call]
        if way.device.type == "cuda":
            torch.cuda.synchronize(way.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:] or times)


@contextmanager
def _first_batch(job: Job) -> Iterator[Batch]:
    with closing(job.make_loader(job.make_sampler())) as loader, closing(loader.steps(1, 1)) as steps:
        yield next(steps)[0]


def _fields(way: Compute) -> dict[str, Any]:
    """The fields of `train` that hold the choice."""
    return {"precision": way.precision, "compile": way.compile, "channels_last": way.channels_last}


def describe_compute(way: Compute) -> str:
    extras = [("channels-last", way.channels_last), ("compiled", way.compile)]
    return " ".join([way.precision, *(name for name, used in extras if used)])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m voxscale.train.probe", description="Time one way of computing.")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--micro-batch", type=int, required=True, help="patches at once")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    stop_with_parent(signal.SIGKILL)
    job = open_job(RunFolder(options.run), World(), os.environ)
    job = replace(job, plan=replace(job.plan, micro_batch=options.micro_batch))
    way = Compute(job.device, options.precision, options.channels_last, options.compile)
    with _first_batch(job) as batch:
        print(_measure(way, job.task, job.model, batch))
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
