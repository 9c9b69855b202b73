"""The worker: one per rank, the same for every launcher.

    python -m voxscale.train.worker RUN                                             a world of one
    torchrun --standalone --nproc-per-node 2 -m voxscale.train.worker RUN           two ranks on this machine
    torchrun --nnodes 2 --node-rank 0 --master-addr HOST … -m voxscale.train.worker RUN     on each of two nodes

RUN is a run folder (`voxscale train CONFIG --run RUN --no-start` writes one). A rank learns its place from
torchrun's variables alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from voxscale.checkpoint import digest_of, point_best
from voxscale.data.cases import TEST, VAL
from voxscale.errors import StoppedEarly
from voxscale.files import remove, write_json
from voxscale.infer.evaluate import write_cases
from voxscale.parallel import World, barrier, joined, leave
from voxscale.runs import RunFolder
from voxscale.tasks.summary import Summary
from voxscale.train.console import open_console
from voxscale.train.environment import describe_environment
from voxscale.train.events import Events, JsonlEvents, NullEvents
from voxscale.train.exact import batch_norms
from voxscale.train.job import Job, open_job
from voxscale.train.loop import Loop, Watch, unwatched
from voxscale.train.ownership import claimed
from voxscale.train.probe import settle
from voxscale.train.rank import add_rank_arguments, require, run_as_rank
from voxscale.train.resume import load_agreed
from voxscale.train.start import start_from
from voxscale.train.stop import StopRequest
from voxscale.train.usage import recorded_usage


def train_run(run: RunFolder, world: World, environ: Mapping[str, str], *, profile: bool = False) -> None:
    """Train a run, or continue it, to its end. Every rank calls this; rank 0 owns and writes the folder.

    With `profile` a few steps are traced; the result is the same.
    """
    require(run)
    job = open_job(run, world, environ)
    stop = StopRequest(job.config.train.stop_after)
    with (
        _owned(job),
        recorded_usage(run, world, job.device),
        joined(world, backend=job.backend, device=job.device, timeout_s=job.config.train.timeout_s),
        stop.on_signals(),
    ):
        job, chosen = settle(job, environ, stop)
        warnings: list[str] = []
        checkpoint = load_agreed(run, world, job.device, warnings.append)
        began_before = run.events.exists()
        done = checkpoint.step if checkpoint is not None else 0
        with (
            _open_events(job, first_step=done + 1) as events,
            _watched(job, first_step=done + 1, profile=profile) as watch,
            open_console(job.plan, job.config.log, done + 1, is_main=world.is_main) as console,
        ):
            for warning in [*warnings, *_cautions(job)]:
                console.warn(warning)
            if chosen:
                console.line(chosen)
            loop = Loop(job, stop, events, console, watch)
            if checkpoint is None and job.config.train.init_from is not None:
                transfer = start_from(Path(job.config.train.init_from), job.model)
                console.line(f"from {job.config.train.init_from}: {transfer.as_text()}")
                events.write("transfer", **loop.place, **transfer.as_json())
            if checkpoint is not None:
                loop.restore(checkpoint)
                if world.is_main and loop.progress.best is not None:
                    point_best(run, loop.progress.best["step"])
                console.line(f"continuing from step {done}")
            if world.is_main:
                remove(run.metrics)
            if began_before:
                events.write("resume", **loop.place)
            about = {"world_size": world.size, "steps": job.plan.num_steps, "environment": describe_environment(job)}
            events.write("start", **loop.place, **about)
            _finish(loop, events)


def _finish(loop: Loop, events: Events) -> None:
    """Run the loop to its end and record how it went."""
    try:
        loop.run()
        with loop.evaluating():
            communication = loop.gather_communication()
            _write_metrics(loop, "done")
    except StoppedEarly:
        _write_metrics(loop, "stopped")
        raise
    except Exception as error:
        events.write("error", **loop.place, message=str(error))
        _write_metrics(loop, "failed")
        raise
    events.write("end", **loop.place, communication_s=communication)


@contextmanager
def _owned(job: Job) -> Iterator[None]:
    """Own the run folder while it trains; rank 0 does so for all."""
    if not job.world.is_main:
        yield
        return
    with claimed(job.run):
        yield


@contextmanager
def _open_events(job: Job, *, first_step: int) -> Iterator[Events]:
    """Where events go: the file, and TensorBoard if wanted. Ranks other than 0 write to a null object."""
    with ExitStack() as stack:
        events: Events = NullEvents()
        if job.world.is_main:
            events = stack.enter_context(JsonlEvents(job.run))
        if job.world.is_main and job.config.track != "none":
            from voxscale.train.tracking import TensorBoardEvents  # a second of imports that not everyone wants

            events = tracked = TensorBoardEvents(job.run.tensorboard, events, first_step=first_step)
            stack.callback(tracked.close)
        yield events


def _watched(job: Job, *, first_step: int, profile: bool) -> AbstractContextManager[Watch]:
    """Who looks at the ends of steps: the profiler, if it is wanted."""
    if not profile:
        return nullcontext(unwatched)
    from voxscale.train.profile import profiled

    return profiled(job, first_step=first_step)


def _cautions(job: Job) -> Iterator[str]:
    if (norms := batch_norms(job.model)) and job.world.size > 1 and job.device.type == "cpu":
        yield f"batch norm ({norms[0]}): each rank has its own statistics, so results depend on the number of ranks"
    if job.plan.stream != "global":
        yield f"the samples of an epoch: {job.plan.stream}"
    if job.config.model.dropout and job.world.size > 1 and job.config.train.deterministic != "exact":
        yield "model.dropout: masks are drawn per micro-batch, so results depend on the number of ranks"


def _write_metrics(loop: Loop, state: str) -> None:
    """Write `metrics.json`. When done, the best model is measured in full first, by all ranks."""
    job, progress = loop.job, loop.progress
    final, details = _measure_best(loop) if state == "done" else ({}, {})
    best = progress.best
    metrics: dict[str, Any] = {
        "task": job.config.task,
        "state": state,
        "best": {key: best[key] for key in ("step", "metric", "value")} if best else None,
        "summary": final.get(VAL, best["summary"] if best else {}),
        "world_size": job.world.size,
        "steps": progress.step,
        "wall_s": round(progress.wall_s, 3),
        "weights_sha256": digest_of(job.model.state_dict()),
    }
    if TEST in final:
        metrics["test"] = final[TEST]
    if any(details.values()):
        metrics["details"] = details
    if job.world.is_main:
        write_json(job.run.metrics, metrics)


def _measure_best(loop: Loop) -> tuple[dict[str, Summary], dict[str, dict[str, Any]]]:
    """Measure the best model in full on the validation and test cases: a summary, and details, of each that has any."""
    job = loop.job
    cases = {split: found for split in (VAL, TEST) if (found := job.cases_of(split))}
    barrier(job.world)  # rank 0 has saved it
    last = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    loop.take_best()
    previews = job.previews()
    try:
        learnt = job.learn(loop.stop)
        found = [case for of_split in cases.values() for case in of_split]
        rows = job.evaluate(found, full=True, stop=loop.stop, previews=previews)
    finally:
        job.model.load_state_dict(last)
    if job.world.is_main and rows:
        write_cases(job.run.cases, rows, job.task.columns(full=True))
    if job.world.is_main and learnt:
        write_json(job.run.learnt, learnt)
    previews.write(job.run, rows, job.world, job.device)
    of_split = {split: [row for row in rows if row["split"] == split] for split in cases}
    summaries = {split: job.task.summarise(found, full=True) for split, found in of_split.items()}
    return summaries, {split: job.task.details(found) for split, found in of_split.items()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m voxscale.train.worker", description="Train a run folder as one rank."
    )
    add_rank_arguments(parser)
    parser.add_argument("--profile", action="store_true", help="trace a few steps into RUN/profile")
    options = parser.parse_args(arguments)
    return run_as_rank(options, partial(train_run, profile=options.profile))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
