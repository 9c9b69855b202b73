"""One optimizer step over the global batch.

Each rank turns its samples into loss rows; the rows of all ranks are gathered, the loss is computed from all of
them, and each rank sends back through the network the gradient of its own rows. So the gradient, summed over
ranks, is that of the loss over the whole global batch, however the batch is spread and whatever couples its
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from voxscale.data.loader import Batch
from voxscale.parallel import World, gather_rows, without_sync
from voxscale.tasks import Task
from voxscale.train.compute import Compute, buffers_untouched


@dataclass
class Stepper:
    """Runs steps. `model` is what is trained, `distributed` the same model with its gradients shared."""

    task: Task
    model: torch.nn.Module
    distributed: torch.nn.Module
    world: World
    compute: Compute
    scaler: torch.amp.GradScaler

    def backward(self, batches: Sequence[Batch], counts: Sequence[int]) -> torch.Tensor:
        """Leave the gradient of the global batch's loss in the parameters; return that loss.

        `counts` are the numbers of samples that each rank has in this step.
        """
        if len(batches) == 1:
            rows = self._rows(self.distributed, batches[0])
            loss, gradient = self._loss_and_gradient(rows, counts)
            rows.backward(self.scaler.scale(gradient))  # type: ignore[no-untyped-call]
            return loss
        if self.task.couples_samples:
            return self._backward_coupled(batches, counts)
        return self._backward_separate(batches, counts)

    def settle(self, batch: Batch) -> None:
        """Make DDP's first backward pass before the first step, and leave no trace of it.

        After that pass DDP regroups its buckets. With more than two ranks the grouping decides the order of
        additions, so a resumed run, whose first pass comes later, would differ in the last bits.
        """
        if self.world.size <= 2:
            return
        with buffers_untouched(self.model):
            self._rows(self.distributed, batch).sum().backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad()

    def _backward_coupled(self, batches: Sequence[Batch], counts: Sequence[int]) -> torch.Tensor:
        """Accumulation where every sample's gradient depends on all the others: look first, then go again."""
        with torch.no_grad(), buffers_untouched(self.model):
            seen = torch.cat([self._rows(self.model, batch) for batch in batches])
        loss, gradient = self._loss_and_gradient(seen, counts)
        parts = torch.split(gradient, [batch.num_real for batch in batches])
        for number, (batch, part) in enumerate(zip(batches, parts, strict=True), start=1):
            with self._sharing(when=number == len(batches)):
                self._rows(self.distributed, batch).backward(self.scaler.scale(part))  # type: ignore[no-untyped-call]
        return loss

    def _backward_separate(self, batches: Sequence[Batch], counts: Sequence[int]) -> torch.Tensor:
        """Accumulation where the loss is a mean over samples: each micro-batch adds its share."""
        seen = []
        for number, batch in enumerate(batches, start=1):
            with self._sharing(when=number == len(batches)):
                rows = self._rows(self.distributed, batch)
                share = self.task.loss(rows) * (len(rows) / sum(counts)) if len(rows) else rows.sum()
                self.scaler.scale(share * self.world.size).backward()  # type: ignore[no-untyped-call]
            seen.append(rows.detach())
        return self.task.loss(gather_rows(torch.cat(seen), counts, self.world))

    def _sharing(self, *, when: bool) -> AbstractContextManager[None]:
        """Gradients cross ranks once per step, with the last micro-batch."""
        return nullcontext() if when else without_sync(self.distributed)

    def _rows(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return loss_rows(self.task, self.compute, model, batch)

    def _loss_and_gradient(self, rows: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss over all ranks' rows, and its gradient for this rank's rows.

        Gradients are averaged over ranks on their way to the parameters; the factor makes that a sum.
        """
        everyone = gather_rows(rows, counts, self.world).requires_grad_()
        loss = self.task.loss(everyone)
        (gradient,) = torch.autograd.grad(loss, everyone)
        start = sum(counts[: self.world.rank])
        return loss.detach(), gradient[start : start + len(rows)] * self.world.size


def loss_rows(task: Task, compute: Compute, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The loss rows of a micro-batch's samples, with gradient."""
    torch.manual_seed(batch.seed)  # dropout is drawn per micro-batch, the same after a restart
    output = compute.run(model, *batch.inputs)
    return task.loss_rows(output, batch.target)[: batch.num_real]
