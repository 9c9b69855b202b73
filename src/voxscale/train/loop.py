"""The loop: step after step through the stream, validating, saving, and stopping when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from voxscale.checkpoint import BadCheckpointError, Checkpoint, load_checkpoint, point_best
from voxscale.data.cases import VAL
from voxscale.data.loader import Batch, PatchLoader
from voxscale.errors import LostContactError, StoppedEarly
from voxscale.files import write_json
from voxscale.infer.evaluate import write_cases
from voxscale.parallel import any_rank, barrier, gather_records, lost_contact
from voxscale.plan.links import BUCKET_BYTES
from voxscale.tasks.summary import metric_value
from voxscale.train.console import Console
from voxscale.train.events import Events
from voxscale.train.job import Job
from voxscale.train.memory import is_out_of_memory, out_of_memory
from voxscale.train.saver import Saver
from voxscale.train.stop import StopRequest
from voxscale.train.trainer import Taken, Trainer

Timing = Mapping[str, float]  # of a step: data_s, waiting for its patches, and step_s, all of it
Watch = Callable[[Timing], None]


def unwatched(timing: Timing) -> None:
    """Nobody looks at the ends of steps."""


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds beside tensors."""

    step: int = 0
    best: dict[str, Any] | None = None  # step, metric, value, summary
    validated: int = 0  # the last step at which that was done
    wall_s: float = 0.0
    steps_here: int = field(default=0, compare=False)


_KEPT = ("step", "best", "validated", "wall_s")  # of the progress, in a checkpoint


class Loop:
    """Trains a job from wherever its progress is to the end of the plan. One per rank, all in step."""

    def __init__(self, job: Job, stop: StopRequest, events: Events, console: Console, watch: Watch = unwatched) -> None:
        """`watch` is called at the end of each step."""
        self.job = job
        self.progress = Progress()
        self.stop, self._events, self._console, self._watch = stop, events, console, watch
        self._trainer = Trainer(job)
        self._taken: tuple[Taken, Timing] | None = None
        self._settings: dict[str, Any] = {}
        self._saver = Saver(
            job.run, keep=job.config.checkpoint.keep, tell=lambda event: events.write("checkpoint", **event)
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint: from here on all is as if the run had never stopped."""
        self._trainer.restore(checkpoint)
        self.progress = Progress(**{key: value for key, value in checkpoint.state.items() if key in _KEPT})

    def take_best(self) -> None:
        """Bring the weights of the best step into the model; where they are damaged, the last step's count as best."""
        best = self.progress.best
        if best is None or best["step"] == self.progress.step:
            return
        try:
            self.job.model.load_state_dict(load_checkpoint(self.job.run.checkpoint(best["step"])).model)
        except BadCheckpointError as error:
            self._console.warn(f"{error.message}; the last checkpoint is measured, and called the best, in its place")
            self.progress.best = None
            if self._validate() and self.job.world.is_main:
                point_best(self.job.run, self.progress.step)

    def gather_communication(self) -> list[float | None]:
        """Seconds that each rank waited for gradients in a step, in rank order; None: not known. All ranks call it."""
        records = [{"communication_s": self._trainer.communication_s}]
        gathered = gather_records(records, self.job.world, self.job.device, together=True)
        return [each["communication_s"] for each in gathered]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While cases are evaluated: a rank that is lost is told of with the step they are evaluated at."""
        try:
            yield
        except (LostContactError, RuntimeError) as error:
            lost = error if isinstance(error, LostContactError) else lost_contact(error)
            if lost is None:
                raise
            cases = lost.cases or [[] for _ in range(self.job.world.size)]
            raise lost.at(f"while evaluating at step {self.progress.step}", cases) from error

    @property
    def place(self) -> dict[str, int]:
        """Where the run is, as events say it."""
        return {"step": self.progress.step, "epoch": self.job.plan.epoch_of(self.progress.step)}

    def run(self) -> None:
        """Train to the end, or raise StoppedEarly after saving."""
        plan, progress = self.job.plan, self.progress
        self._clock = time.monotonic()
        self._saved = self._clock
        with self._saver, closing(self.job.make_loader(self._trainer.sampler)) as loader:
            self._write_plan(loader)
            try:
                self._train(loader.steps(progress.step + 1, plan.num_steps))
            except (RuntimeError, MemoryError) as error:
                raise self._explained(error) from error
            finally:
                with suppress(OSError):  # nothing depends on it, and what went wrong is more important
                    self._write_plan(loader)

    def _write_plan(self, loader: PatchLoader) -> None:
        """Keep the plan with what speed depends on, which may have changed on the way; results do not."""
        settings = {
            "loader": loader.settings,
            "threads": torch.get_num_threads(),
            "affinity": "system",
            "ddp": {"bucket_mb": BUCKET_BYTES >> 20, "static_graph": False},
        }
        if self.job.world.is_main and settings != self._settings:
            self._settings = settings
            write_json(self.job.run.plan, {**self.job.plan.as_json(), **settings})

    def _train(self, batches: Iterator[list[Batch]]) -> None:
        plan, progress = self.job.plan, self.progress
        while True:
            if self._validates_next():
                self._report_taken()
                self._validate_and_save()
            if progress.step == plan.num_steps:
                return
            self._take_step(batches)
            stopping = any_rank(self.stop.wanted(progress.steps_here), self.job.world)
            if stopping and progress.step < plan.num_steps:
                self._stop_early()  # what is to be validated at this step is so when the run goes on
            self._saver.look()
            if self._save_is_due():
                self._save(is_best=False)

    def _validates_next(self) -> bool:
        return self.progress.validated < self.progress.step and self.job.plan.validates(self.progress.step)

    def _take_step(self, batches: Iterator[list[Batch]]) -> None:
        began = time.monotonic()
        micro_batches = next(batches)
        waited = time.monotonic() - began
        taken = self._trainer.take(self.progress.step + 1, micro_batches)
        self._report_taken()  # the step before this one, whose numbers have come by now
        self.progress.step += 1
        self.progress.steps_here += 1
        timing = {"data_s": round(waited, 6), "step_s": round(time.monotonic() - began, 6)}
        self._taken = taken, timing
        self._watch(timing)

    def _report_taken(self) -> None:
        """Report the last step, if that is still to be done. Raises NotFiniteError."""
        if self._taken is None:
            return
        (taken, timing), self._taken = self._taken, None
        loss = self._trainer.loss_of(taken)
        place = {"step": taken.step, "epoch": self.job.plan.epoch_of(taken.step)}
        cases = self._trainer.cases(taken.step)
        self._events.write("train", **place, loss=loss, lr=taken.rate, **timing, cases=cases)
        self._console.step(**place, loss=loss)

    def _validate_and_save(self) -> None:
        try:
            is_best = self._validate()
        except StoppedEarly:
            self._stop_early()
            raise
        self.progress.validated = self.progress.step
        self._save(is_best=is_best)

    def _validate(self) -> bool:
        """Evaluate the validation cases; return whether this is the best model so far."""
        cases = self.job.cases_of(VAL)
        if not cases:
            return False
        with self.evaluating():
            rows = self.job.evaluate(cases, stop=self.stop)
        summary = self.job.task.summarise(rows, full=False)
        name = self.job.config.validation.metric
        value = metric_value(summary, name)
        means = {metric: entry["mean"] for metric, entry in summary.items()}
        self._events.write("validate", **self.place, **means)
        self._console.line(f"  validated {len(rows)} cases: {name} {'undefined' if value is None else f'{value:.4f}'}")
        if value is None or not self._improves(value):
            return False
        self.progress.best = {"step": self.progress.step, "metric": name, "value": value, "summary": summary}
        if self.job.world.is_main:
            write_cases(self.job.run.cases, rows, self.job.task.columns(full=False))
        return True

    def _improves(self, value: float) -> bool:
        best = self.progress.best
        if best is None:
            return True
        return bool(value < best["value"] if self.job.task.prefers_low(best["metric"]) else value > best["value"])

    def _save_is_due(self) -> bool:
        """Rank 0 decides and saves alone: every rank holds the same state."""
        options, step = self.job.config.checkpoint, self.progress.step
        every = (options.every_steps, options.every_epochs and options.every_epochs * self.job.plan.steps_per_epoch)
        minutes = (time.monotonic() - self._saved) / 60
        is_due = minutes >= options.every_minutes or any(steps and step % steps == 0 for steps in every)
        return self.job.world.is_main and is_due and not self._validates_next()

    def _save(self, *, is_best: bool) -> None:
        self._report_taken()  # a step that is not finite is never saved
        now = time.monotonic()
        self.progress.wall_s, self._clock = self.progress.wall_s + now - self._clock, now
        self._saved = now
        if self.job.world.is_main:
            checkpoint = self._trainer.checkpoint({name: getattr(self.progress, name) for name in _KEPT})
            best = self.progress.best if is_best and self.progress.best else {}
            shown: dict[str, Any] = {key: best[key] for key in ("metric", "value") if key in best}
            self._saver.save(checkpoint, is_best=is_best, event={**self.place, "best": is_best, **shown})

    def _stop_early(self) -> None:
        self._save(is_best=False)
        self._saver.wait()
        self._events.write("stop", **self.place, reason=self.stop.reason)
        barrier(self.job.world)  # no rank leaves before rank 0 has saved
        raise StoppedEarly(
            f"stopped at step {self.progress.step} of {self.job.plan.num_steps}"
            f" ({self.stop.reason or 'asked by another rank'}); the state is saved",
            fix="start the same command again to continue",
        )

    def _explained(self, error: Exception) -> Exception:
        """The error with the step and its cases: what did not fit, or what another rank was at that is gone."""
        step = self.progress.step + 1
        cases = self._trainer.cases_of_ranks(step)
        if is_out_of_memory(error):
            return out_of_memory(error, step=step, plan=self.job.plan, cases=cases[self.job.world.rank])
        lost = lost_contact(error)
        return lost.at(f"at step {step}", cases) if lost is not None else error
