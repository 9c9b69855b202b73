"""Optimizer steps, one after another. When to validate, save or stop is not known here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.utils import clip_grad_norm_

from voxscale.checkpoint import Checkpoint
from voxscale.config.models import OwnOptions
from voxscale.data.loader import Batch
from voxscale.errors import DataError, NotFiniteError
from voxscale.models.transfer import freeze_encoder
from voxscale.parallel import communication_s, distribute, without_sync
from voxscale.train.exact import ExactStepper
from voxscale.train.job import Job
from voxscale.train.memory import is_out_of_memory
from voxscale.train.optimize import (
    build_optimizer,
    can_skip,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
    skip_when,
)
from voxscale.train.step import Stepper


class Taken:
    """A step that has been taken. Its numbers are on their way to the host: a step later, nobody waits for them."""

    def __init__(self, step: int, rate: float, numbers: torch.Tensor) -> None:
        self.step, self.rate = step, rate
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self._numbers.copy_(numbers, non_blocking=True)
        self._copied = torch.cuda.current_stream(numbers.device).record_event() if numbers.is_cuda else None

    def read(self) -> tuple[float, float]:
        """The loss, and the norm of the gradient."""
        if self._copied is not None:
            self._copied.synchronize()
        loss, norm = self._numbers.tolist()
        return loss, norm


class Trainer:
    """Takes steps of a job. One per rank, all in step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.sampler = job.make_sampler()
        self._optimizer = build_optimizer(job.config, job.model.parameters())
        self._scaler = job.compute.scaler()
        self._spoilt = torch.zeros((), dtype=torch.bool, device=job.device)
        self._frozen = False
        self._stepper: Stepper | ExactStepper | None = None

    def restore(self, checkpoint: Checkpoint) -> None:
        try:
            self.job.model.load_state_dict(checkpoint.model)
            restore_optimizer(self._optimizer, checkpoint.optimizer)
        except (RuntimeError, ValueError, KeyError) as error:
            if is_out_of_memory(error):
                raise
            raise DataError(
                f"the checkpoint of step {checkpoint.step} is of another model or optimizer: "
                f"{' '.join(str(error).split())[:200]}",
                fix="go on with the version of voxscale that wrote it, or start anew with --fresh",
            ) from error
        self._scaler.load_state_dict(checkpoint.state.get("scaler", {}))

    def checkpoint(self, state: dict[str, object]) -> Checkpoint:
        """What restores this, with a `state` beside it."""
        scaler = self._scaler.state_dict()
        state = {**state, "scaler": scaler} if scaler else state
        return Checkpoint(self.job.model.state_dict(), optimizer_tensors(self._optimizer), state)

    def take(self, step: int, micro_batches: Sequence[Batch]) -> Taken:
        """Take a step, counted from 1. What is not finite never reaches the weights; `loss_of` then says so."""
        stepper = self._stepper_of(step, micro_batches[0])
        plan = self.job.plan
        rate = learning_rate(self.job.config, step, plan.num_steps, plan.steps_per_epoch)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.zero_grad()
        loss = stepper.backward(micro_batches, self._counts(step))
        self._scaler.unscale_(self._optimizer)
        norm = clip_grad_norm_(self.job.model.parameters(), self.job.config.train.clip_norm or math.inf)
        taken = Taken(step, rate, torch.stack([loss.double(), norm.double()]))
        self._guard(taken, loss, norm)
        self._scaler.step(self._optimizer)  # left out where half precision overflowed
        self._scaler.update()
        return taken

    def _guard(self, taken: Taken, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Keep the optimizer from this step and all later ones once a number is not finite."""
        if self._scaler.is_enabled() or not can_skip(self._optimizer):
            self.loss_of(taken)
            return
        self._spoilt = self._spoilt | ~(loss.isfinite() & norm.isfinite())
        skip_when(self._optimizer, self._spoilt)

    def loss_of(self, taken: Taken) -> float:
        """Raises NotFiniteError for a step that had numbers that are not: the weights are still as before it.

        Every rank sees the same numbers, so every rank raises.
        """
        loss, norm = taken.read()
        overflows = self._scaler.is_enabled()  # the scaler leaves such a step out, and goes on
        if math.isfinite(loss) and (overflows or math.isfinite(norm)):
            return loss
        what = f"the norm of the gradient is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        cases = ", ".join(dict.fromkeys(self.cases(taken.step)))
        raise NotFiniteError(
            f"{what} at step {taken.step}, with cases {cases}; the weights are as before it",
            fix="look at these cases, lower optimizer.lr, or set train.clip_norm",
        )

    def sharing(self, wanted: bool) -> AbstractContextManager[None]:
        """Whether ranks share their gradients while this holds: without, one sees what sharing costs."""
        if wanted or not isinstance(self._stepper, Stepper):
            return nullcontext()
        return without_sync(self._stepper.distributed)

    @property
    def tells_sharing(self) -> bool:
        """Whether steps can be taken without sharing: `exact` ones hand their gradient from rank to rank."""
        return self.job.world.size == 1 or isinstance(self._stepper, Stepper)

    @property
    def communication_s(self) -> float | None:
        """Of a step, what sharing gradients adds to it; None: not known."""
        if self.job.world.size == 1:
            return 0.0
        return communication_s(self._stepper.distributed) if isinstance(self._stepper, Stepper) else None

    @property
    def optimizer_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in optimizer_tensors(self._optimizer).values())

    def _stepper_of(self, step: int, batch: Batch) -> Stepper | ExactStepper:
        """Gradients are shared of what trains: when the encoder begins to, the model is wrapped anew."""
        freeze = self.job.config.train.freeze
        frozen = freeze is not None and self.job.plan.epoch_of(step) <= freeze.encoder
        if self._stepper is None or frozen != self._frozen:
            self._frozen = frozen
            if freeze is not None:
                freeze_encoder(self.job.model, frozen)
            self._stepper = self._make_stepper()
            self._stepper.settle(batch)
        return self._stepper

    def _make_stepper(self) -> Stepper | ExactStepper:
        job = self.job
        if job.config.train.deterministic == "exact":
            return ExactStepper(job.task, job.model, job.world, job.compute, self._scaler)
        all_used = not isinstance(job.config.model, OwnOptions)
        distributed = distribute(job.compute.trainable(job.model), job.world, job.device, all_used=all_used)
        return Stepper(job.task, job.model, distributed, job.world, job.compute, self._scaler)

    def _counts(self, step: int) -> list[int]:
        """How many samples each rank has in a step."""
        world_size = self.job.world.size
        return [len(self.sampler.stream.share(step, rank, world_size)) for rank in range(world_size)]

    def cases(self, step: int) -> list[str]:
        """The cases of the global batch, in the order of the stream."""
        return [case for cases in self.cases_of_ranks(step) for case in cases]

    def cases_of_ranks(self, step: int) -> list[list[str]]:
        stream, world_size = self.sampler.stream, self.job.world.size
        shares = [stream.share(step, rank, world_size) for rank in range(world_size)]
        return [[self.sampler.case(stream.epoch_of(step), position) for position in share] for share in shares]
