"""A trace of a few steps of each rank, for PyTorch's profiler viewer and Perfetto, and what cost most in words.

The profiler only watches: a run's result is the same with it and without.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, schedule

from voxscale.files import publish, write_text
from voxscale.runs import RunFolder
from voxscale.train.job import Job
from voxscale.train.loop import Timing, Watch, unwatched

_SKIPPED, _TRACED = 2, 4  # steps: buffers are made and buckets regrouped in the first ones
_LISTED = 15  # operators
_COMMUNICATION = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
_OF_PROFILER = "ProfilerStep"
_SILENT = "99"  # the library would print a line whenever it starts and stops


@contextmanager
def profiled(job: Job, *, first_step: int) -> Iterator[Watch]:
    """What is to be called at the end of each step from `first_step` on; a profiler follows by it. On every rank.

    Each rank writes its trace, rank 0 what cost most, as soon as the last of the steps is over.
    """
    left = job.plan.num_steps - first_step + 1
    if left < 1:
        yield unwatched
        return
    skipped = min(_SKIPPED, left - 1)
    taken: list[Timing] = []
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)  # read when the profiler first starts
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.device.type == "cuda" else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=skipped, active=min(_TRACED, left - skipped), repeat=1),
        on_trace_ready=lambda tracer: _keep(tracer, job, taken[skipped : skipped + _TRACED]),
    ) as tracer:

        def watch(timing: Timing) -> None:
            taken.append(timing)
            tracer.step()

        yield watch


def _keep(tracer: profile, job: Job, traced: Sequence[Timing]) -> None:
    if not traced:  # stopped before the first of them was over
        return
    run, world = job.run, job.world
    _write_trace(tracer, run.trace(world.rank))
    if world.is_main:
        on_gpu = job.device.type == "cuda"
        write_text(run.top_costs, render_costs(list(tracer.key_averages()), traced, on_gpu=on_gpu, run=run))


def _write_trace(tracer: profile, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="voxscale-") as folder, publish(path) as temporary:
        plain = Path(folder) / "trace.json"
        tracer.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(temporary, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)


def render_costs(
    operators: Sequence[FunctionEventAvg], steps: Sequence[Timing], *, on_gpu: bool, run: RunFolder
) -> str:
    """What `profile/top.txt` says: where the time of rank 0's steps went, by kind and by operator."""
    count, whole = len(steps), sum(each["step_s"] for each in steps)
    data = sum(each["data_s"] for each in steps)
    own = {str(each.key): each for each in operators if not str(each.key).startswith(_OF_PROFILER)}
    spent = {
        key: float(each.self_device_time_total if on_gpu else each.self_cpu_time_total) for key, each in own.items()
    }
    shared = sum(
        spent[key] if on_gpu else float(own[key].cpu_time_total) for key in own if key.startswith(_COMMUNICATION)
    )
    listed = sorted(own, key=lambda key: -spent[key])[:_LISTED]
    total = sum(spent.values()) or 1.0
    return "\n".join(
        [
            f"{count} step{'s' if count > 1 else ''} of rank 0, {whole / count:.3g} s each, being watched",
            f"  waiting for data  {data / whole:>6.1%}",
            f"  computing         {1 - data / whole:>6.1%}",
            f"  communication     {shared / 1e6 / whole:>6.1%}  beside the computing, or waited for in it",
            "",
            f"{'operator':<60}  {'calls a step':>12}  {'ms a step':>9}  share of {'the GPU' if on_gpu else 'CPUs'}",
            *(
                f"{key[:60]:<60}  {own[key].count / count:>12.1f}  {spent[key] / 1e3 / count:>9.2f}  "
                f"{spent[key] / total:>6.1%}"
                for key in listed
            ),
            "",
            f"traces of all ranks: {run.trace(0).parent}; open them in ui.perfetto.dev or TensorBoard's profiler",
            "",
        ]
    )
