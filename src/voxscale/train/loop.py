"""The loop: step after step through the stream, validating, saving, and stopping when asked."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from torch.nn.utils import clip_grad_norm_

from voxscale.checkpoint import BadCheckpointError, Checkpoint, load_checkpoint, point_best
from voxscale.config.models import OwnOptions
from voxscale.data.cases import VAL
from voxscale.data.loader import Batch
from voxscale.errors import ANOTHER_RANK, LostContactError, NotFiniteError, StoppedEarly, TimedOutError
from voxscale.infer.evaluate import write_cases
from voxscale.models.transfer import freeze_encoder
from voxscale.parallel import any_rank, barrier, distribute, is_lost_contact, is_timeout
from voxscale.tasks.summary import metric_value
from voxscale.train.console import Console
from voxscale.train.events import Events
from voxscale.train.exact import ExactStepper
from voxscale.train.job import Job
from voxscale.train.memory import is_out_of_memory, out_of_memory
from voxscale.train.optimize import (
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from voxscale.train.saver import Saver
from voxscale.train.step import Stepper
from voxscale.train.stop import StopRequest


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds beside tensors."""

    step: int = 0
    best: dict[str, Any] | None = None  # step, metric, value, summary
    validated: int = 0  # the last step at which that was done
    wall_s: float = 0.0
    steps_here: int = field(default=0, compare=False)


class Loop:
    """Trains a job from wherever its progress is to the end of the plan. One per rank, all in step."""

    def __init__(self, job: Job, stop: StopRequest, events: Events, console: Console) -> None:
        self.job = job
        self.progress = Progress()
        self.stop, self._events, self._console = stop, events, console
        self._sampler = job.make_sampler()
        self._optimizer = build_optimizer(job.config, job.model.parameters())
        self._scaler = job.compute.scaler()
        self._saver = Saver(
            job.run, keep=job.config.checkpoint.keep, tell=lambda event: events.write("checkpoint", **event)
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint: from here on all is as if the run had never stopped."""
        self.job.model.load_state_dict(checkpoint.model)
        restore_optimizer(self._optimizer, checkpoint.optimizer)
        state = dict(checkpoint.state)
        self._scaler.load_state_dict(state.pop("scaler", {}))
        self.progress = Progress(**state)

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

    @property
    def place(self) -> dict[str, int]:
        """Where the run is, as events say it."""
        return {"step": self.progress.step, "epoch": self.job.plan.epoch_of(self.progress.step)}

    def run(self) -> None:
        """Train to the end, or raise StoppedEarly after saving."""
        plan, progress = self.job.plan, self.progress
        self._frozen = self._is_frozen(progress.step + 1)
        self._stepper = self._make_stepper()
        self._clock = time.monotonic()
        self._saved = self._clock
        with self._saver, closing(self.job.make_loader(self._sampler)) as loader:
            try:
                self._train(loader.steps(progress.step + 1, plan.num_steps))
            except (RuntimeError, MemoryError) as error:
                raise self._explained(error) from error

    def _is_frozen(self, step: int) -> bool:
        """Whether the encoder keeps its weights in a step."""
        freeze = self.job.config.train.freeze
        return freeze is not None and self.job.plan.epoch_of(step) <= freeze.encoder

    def _make_stepper(self) -> Stepper | ExactStepper:
        """Gradients are shared of what trains: when the encoder begins to, it is wrapped anew."""
        job = self.job
        if job.config.train.freeze is not None:
            freeze_encoder(job.model, self._frozen)
        if job.config.train.deterministic == "exact":
            return ExactStepper(job.task, job.model, job.world, job.compute, self._scaler)
        all_used = not isinstance(job.config.model, OwnOptions)
        distributed = distribute(job.compute.trainable(job.model), job.world, job.device, all_used=all_used)
        return Stepper(job.task, job.model, distributed, job.world, job.compute, self._scaler)

    def _train(self, batches: Iterator[list[Batch]]) -> None:
        plan, progress = self.job.plan, self.progress
        while True:
            if self._validates_next():
                self._validate_and_save()
            if progress.step == plan.num_steps:
                return
            self._take_step(batches)
            stopping = any_rank(self.stop.wanted(progress.steps_here), self.job.world, self.job.device)
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
        step = self.progress.step + 1
        if self._frozen and not self._is_frozen(step):
            self._frozen = False
            self._stepper = self._make_stepper()
            self._stepper.settle(micro_batches[0])
        elif self.progress.steps_here == 0:
            self._stepper.settle(micro_batches[0])
        rate = learning_rate(self.job.config, step, self.job.plan.num_steps, self.job.plan.steps_per_epoch)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.zero_grad()
        loss = float(self._stepper.backward(micro_batches, self._counts(step)))
        if not math.isfinite(loss):
            self._refuse(step, f"the loss is {loss}")
        self._scaler.unscale_(self._optimizer)
        norm = float(clip_grad_norm_(self.job.model.parameters(), self.job.config.train.clip_norm or math.inf))
        if not math.isfinite(norm) and not self._scaler.is_enabled():
            self._refuse(step, f"the norm of the gradient is {norm}")
        self._scaler.step(self._optimizer)  # left out where half precision overflowed
        self._scaler.update()
        self.progress.step = step
        self.progress.steps_here += 1
        self._report(loss, rate, waited, time.monotonic() - began)

    def _counts(self, step: int) -> list[int]:
        """How many samples each rank has in a step."""
        world_size = self.job.world.size
        return [len(self._sampler.stream.share(step, rank, world_size)) for rank in range(world_size)]

    def _cases(self, step: int) -> list[str]:
        """The cases of the global batch, in the order of the stream."""
        return [case for cases in self._cases_of_ranks(step) for case in cases]

    def _cases_of_ranks(self, step: int) -> list[list[str]]:
        stream, world_size = self._sampler.stream, self.job.world.size
        shares = [stream.share(step, rank, world_size) for rank in range(world_size)]
        return [[self._sampler.case(stream.epoch_of(step), position) for position in share] for share in shares]

    def _report(self, loss: float, rate: float, data_s: float, step_s: float) -> None:
        timing = {"data_s": round(data_s, 6), "step_s": round(step_s, 6)}
        cases = self._cases(self.progress.step)
        self._events.write("train", **self.place, loss=loss, lr=rate, **timing, cases=cases)
        self._console.step(**self.place, loss=loss)

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
        now = time.monotonic()
        self.progress.wall_s, self._clock = self.progress.wall_s + now - self._clock, now
        self._saved = now
        if self.job.world.is_main:
            state = {name: getattr(self.progress, name) for name in ("step", "best", "validated", "wall_s")}
            state |= {"scaler": scaler} if (scaler := self._scaler.state_dict()) else {}
            checkpoint = Checkpoint(self.job.model.state_dict(), optimizer_tensors(self._optimizer), state)
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
        place: dict[str, Any] = {"step": step, "cases": self._cases_of_ranks(step), "fix": f"see {self.job.run.logs}"}
        if is_out_of_memory(error):
            return out_of_memory(error, step=step, plan=self.job.plan, cases=place["cases"][self.job.world.rank])
        if is_timeout(error):
            limit = self.job.config.train.timeout_s
            return TimedOutError(f"{ANOTHER_RANK} did not answer within {limit:g} s", **place)
        return LostContactError(f"{ANOTHER_RANK} is gone", **place) if is_lost_contact(error) else error

    def _refuse(self, step: int, what: str) -> None:
        """Before the optimizer could spread it. Every rank sees the same numbers, so every rank comes here."""
        cases = ", ".join(dict.fromkeys(self._cases(step)))
        raise NotFiniteError(
            f"{what} at step {step}, with cases {cases}; the weights are as before it",
            fix="look at these cases, lower optimizer.lr, or set train.clip_norm",
        )
