"""One optimizer step, the same to the bit on any number of ranks: `train.deterministic: exact`.

Sums of floats depend on their order. So each sample passes the network alone, and the gradient is handed from rank to
rank, each adding its samples' parts to the sum of those before them in the stream: the very additions that one process
makes. Ranks wait for each other, and look at every sample twice; it is a proof, not a way to train fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from voxscale.data.loader import Batch
from voxscale.errors import ConfigError
from voxscale.parallel import World, gather_rows, in_turn
from voxscale.tasks import Task
from voxscale.train.compute import Compute
from voxscale.train.step import loss_rows


@dataclass
class ExactStepper:
    """Runs steps, as `Stepper` does, of a model without batch statistics; micro-batches hold one sample."""

    task: Task
    model: torch.nn.Module
    world: World
    compute: Compute
    scaler: torch.amp.GradScaler

    def settle(self, batch: Batch) -> None:
        """Nothing here depends on what came before."""

    def backward(self, batches: Sequence[Batch], counts: Sequence[int]) -> torch.Tensor:
        """Leave the gradient of the global batch's loss in the parameters; return that loss."""
        with torch.no_grad():
            own = torch.cat([loss_rows(self.task, self.compute, self.model, batch) for batch in batches])
        everyone = gather_rows(own, counts, self.world).requires_grad_()
        loss = self.task.loss(everyone)
        (gradient,) = torch.autograd.grad(loss, everyone)
        first = sum(counts[: self.world.rank])
        samples = [batch for batch in batches if batch.num_real]
        with in_turn(self._empty_gradient(), self.world):
            for number, sample in enumerate(samples, start=first):
                row = loss_rows(self.task, self.compute, self.model, sample)
                row.backward(self.scaler.scale(gradient[number : number + 1]))  # type: ignore[no-untyped-call]
        return loss.detach()

    def _empty_gradient(self) -> torch.Tensor:
        """Zeros in one piece, of which every parameter's gradient is a part."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in trained]
        total = torch.zeros(sum(sizes), device=trained[0].device)
        for parameter, part in zip(trained, torch.split(total, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        return total


def batch_norms(model: torch.nn.Module) -> list[str]:
    """The parts of a network that look at all samples of a micro-batch, or remember earlier ones, by name.

    A user's own network is not asked what it says of itself.
    """
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        or getattr(module, "running_mean", None) is not None
    ]


def refuse_batch_norms(model: torch.nn.Module) -> None:
    if norms := batch_norms(model):
        raise ConfigError(
            f"model: found batch statistics in {', '.join(norms[:3])}{' …' if len(norms) > 3 else ''}, "
            "which train.deterministic: exact cannot have",
            fix="take group or instance norm, or train.deterministic=true",
        )
