"""What a step costs with the ranks that are there: real steps of a run, timed. The run's folder is only read.

    python -m voxscale.train.measure RUN --out FILE [--seconds 10]
    torchrun --standalone --nproc-per-node 2 -m voxscale.train.measure RUN --out FILE

Steps are taken in turn with and without sharing gradients: what the sharing adds is communication, the rest, but for
waiting for patches, is computing. `voxscale plan` and `voxscale scale` read FILE, which rank 0 writes.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from voxscale.data.cases import TEST, TRAIN, VAL
from voxscale.files import write_json
from voxscale.parallel import World, any_rank, barrier, gather_records, joined, leave, time_all_reduce
from voxscale.plan.costs import SCHEMA_VERSION
from voxscale.runs import RunFolder
from voxscale.train.job import Job, open_job
from voxscale.train.kept import refuse_too_large
from voxscale.train.memory import MemoryWatch
from voxscale.train.probe import choose, describe_compute
from voxscale.train.rank import add_rank_arguments, require, run_as_rank
from voxscale.train.trainer import Trainer

SECONDS = 10.0
_WARM = 2  # steps before the clock counts: buffers are made, buckets regrouped
_LEAST, _MOST = 3, 200  # steps of each kind
_MESSAGE_BYTES = 16 << 20


@dataclass(frozen=True)
class _Timed:
    """Seconds of one step."""

    data: float
    step: float
    shared: bool


def measure_run(
    run: RunFolder, world: World, environ: Mapping[str, str], *, out: Path, seconds: float = SECONDS
) -> None:
    """Measure for about so many seconds. Every rank calls this; rank 0 writes `out`."""
    require(run)
    job = open_job(run, world, environ)
    refuse_too_large(job, environ)
    with joined(world, backend=job.backend, device=job.device, timeout_s=job.config.train.timeout_s):
        began = time.perf_counter()
        job = _unfrozen(choose(job, environ)[0])
        settle_s = time.perf_counter() - began
        trainer = Trainer(job)
        rest = MemoryWatch.now() - _model_bytes(trainer)["weights_bytes"]
        with MemoryWatch(job.device) as training:
            times, cached = _time_steps(trainer, seconds)
        load_s = _time_loading(trainer, seconds / 4)
        with MemoryWatch(job.device) as validating:
            case_s, full_case_s = (_time_case(job, seconds / 4, full=full) for full in (False, True))
        record = {
            **_split(times, tells_sharing=trainer.tells_sharing),
            "settle_s": settle_s,
            "load_s": load_s,
            "validate_case_s": case_s,
            "full_case_s": full_case_s,
            "rest_bytes": rest,
            "training_bytes": training.peak,
            "validating_bytes": validating.peak,
            "device_training_bytes": training.device_peak,
            # A run holds its cache while it validates; here its loader has been closed.
            "device_validating_bytes": None if validating.device_peak is None else validating.device_peak + cached,
            "cached_bytes": cached,
            "host": socket.gethostname(),
        }
        speed = _all_reduce_speed(job)
        barrier(world)
        records = gather_records([record], world, job.device)
    if world.is_main:
        write_json(out, {**_describe(job), **_model_bytes(trainer), **_together(records), "all_reduce_gb_s": speed})


def _unfrozen(job: Job) -> Job:
    """The job as it is once its encoder trains, too: then it takes most."""
    train = job.config.train.model_copy(update={"freeze": None})
    return replace(job, config=job.config.model_copy(update={"train": train}))


def _time_steps(trainer: Trainer, seconds: float) -> tuple[list[_Timed], int]:
    """Seconds of steps, and bytes of the cases that the device held in the end."""
    job = trainer.job
    # A run may have fewer steps than are to be timed; rates are those of a run that has as many.
    plan = replace(job.plan, num_steps=max(job.plan.num_steps, _WARM + 2 * _MOST))
    trainer.job = replace(job, plan=plan)
    times: list[_Timed] = []
    with closing(job.make_loader(trainer.sampler)) as loader, closing(loader.steps(1, plan.num_steps)) as batches:
        for step in range(1, _WARM + 1):
            trainer.take(step, next(batches))
        began = time.perf_counter()
        for step in range(_WARM + 1, _WARM + 2 * _MOST + 1):
            shared = step % 2 == 0 or job.world.size == 1
            start = time.perf_counter()
            micro_batches = next(batches)
            ready = time.perf_counter()
            with trainer.sharing(shared):
                trainer.take(step, micro_batches)
            if job.device.type == "cuda":
                torch.cuda.synchronize(job.device)
            times.append(_Timed(ready - start, time.perf_counter() - ready, shared))
            enough = time.perf_counter() - began > seconds and len(times) >= 2 * _LEAST
            if any_rank(enough, job.world):
                break
        cached = loader.source.device_bytes
    trainer.job = job
    return times, cached


def _time_loading(trainer: Trainer, seconds: float) -> float:
    """Seconds of this rank's patches of one step where nothing else is to be done."""
    job, count = trainer.job, 0
    with closing(job.make_loader(trainer.sampler)) as loader, closing(loader.steps(1, _MOST)) as batches:
        next(batches)
        began = time.perf_counter()
        for count, _ in enumerate(batches, start=1):
            if count >= _LEAST and time.perf_counter() - began > seconds:
                break
    return (time.perf_counter() - began) / count


def _time_case(job: Job, seconds: float, *, full: bool) -> float | None:
    """Seconds of evaluating a case of middle size, as the validation does or in full; nothing where none ever is.

    Each rank takes one of its own.
    """
    found = job.cases_of(VAL) or job.cases_of(TEST) or (job.cases_of(TRAIN) if job.learns else [])
    if not found:
        return None
    alone = replace(job, world=World())
    case = sorted(found, key=lambda case: job.store.shape(job.store.row(case.id)))[len(found) // 2]
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < _LEAST):
        began = time.perf_counter()
        alone.evaluate([case], full=full)
        times.append(time.perf_counter() - began)
    return median(times)


def _all_reduce_speed(job: Job) -> float | None:
    """GB/s that cross each rank's connection."""
    size = job.world.size
    if size == 1:
        return None
    seconds = time_all_reduce(_MESSAGE_BYTES, job.world, job.device)
    return 2 * (size - 1) / size * _MESSAGE_BYTES / seconds / 1e9


def _split(times: Sequence[_Timed], *, tells_sharing: bool) -> dict[str, Any]:
    """A step's median seconds, and what they were spent on; communication is part of computing where none can tell."""
    shared = [each.step for each in times if each.shared]
    alone = [each.step for each in times if not each.shared] or shared
    data = median(each.data for each in times)
    total = median(each.data + each.step for each in times if each.shared)
    communication = max(0.0, median(shared) - median(alone))
    return {
        "data_s": data,
        "communication_s": communication if tells_sharing else None,
        "compute_s": total - data - communication,
        "spread": _spread(shared),
        "steps": len(times),
    }


def _spread(times: Sequence[float]) -> float:
    """The relative deviation of times, by its median: one step that the machine was busy in does not count."""
    middle = median(times)
    return 1.4826 * median(abs(each - middle) for each in times) / middle


def _model_bytes(trainer: Trainer) -> dict[str, int]:
    model = trainer.job.model
    return {
        "weights_bytes": sum(tensor.nbytes for tensor in model.state_dict().values()),
        "gradient_bytes": sum(each.nbytes for each in model.parameters() if each.requires_grad),
        "optimizer_bytes": trainer.optimizer_bytes,
    }


def _together(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All ranks' figures as one: they step together, and memory is that of the one that has most."""
    of_all = {name: [each[name] for each in records if each[name] is not None] for name in records[0]}
    seconds = [name for name in of_all if name.endswith("_s")]
    most = [name for name in of_all if name.endswith("_bytes")]
    return {
        **{name: fmean(of_all[name]) if of_all[name] else None for name in (*seconds, "spread", "steps")},
        **{name: max(of_all[name], default=None) for name in most},
        "nodes": len(set(of_all["host"])),
    }


def _describe(job: Job) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else None
    return {
        "schema": SCHEMA_VERSION,
        "world_size": job.world.size,
        "device": gpu or f"{platform.machine()} CPU",
        "on_gpu": gpu is not None,
        "device_bytes": torch.cuda.get_device_properties(job.device).total_memory if gpu else None,
        "threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)),
        "computing": describe_compute(job.compute),
        "micro_batch": job.plan.micro_batch,
        "accumulate": job.plan.accumulate,
        "global_batch": job.plan.global_batch,
        "patch": job.plan.patch,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m voxscale.train.measure", description="Time steps as one rank.")
    add_rank_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args(arguments)
    return run_as_rank(options, partial(measure_run, out=options.out, seconds=options.seconds))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
