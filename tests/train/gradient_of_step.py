"""Take one training step of a tiny Cox model as a rank, in float64, and write the loss and gradient to a file.

    torchrun --nproc-per-node N gradient_of_step.py OUT MICRO_BATCH

Seven samples, of which the last two have events: on several ranks some have none, and shares are uneven.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from voxscale.data.loader import Batch
from voxscale.data.sampler import Stream
from voxscale.parallel import World, distribute, joined, leave
from voxscale.tasks.survival import Survival
from voxscale.train.compute import Compute
from voxscale.train.step import Stepper

IMAGES = torch.linspace(-1, 1, 7 * 5, dtype=torch.float64).sin().reshape(7, 5)
TARGETS = torch.tensor([[5, 0], [3, 0], [4, 0], [9, 0], [2, 0], [3, 1], [1, 1]], dtype=torch.float64)


class Risk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 1, dtype=torch.float64)
        torch.nn.init.constant_(self.layer.weight, 0.3)
        torch.nn.init.constant_(self.layer.bias, 0.7)

    def forward(self, image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.layer(image) ** 3 + features


def make_batches(rank: int, world_size: int, micro_batch: int) -> tuple[list[Batch], list[int]]:
    stream = Stream(0, 7, 1, 7)
    share = stream.share(1, rank, world_size)
    batches = []
    for offset in range(0, stream.largest_share(1, world_size), micro_batch):
        real = list(share[offset : offset + micro_batch])
        rows = real or [0]
        nothing = torch.zeros(len(rows), 1, dtype=torch.float64)
        batches.append(Batch(IMAGES[rows], TARGETS[rows], nothing, (), (), len(real), 0))
    return batches, [len(stream.share(1, each, world_size)) for each in range(world_size)]


def main(out: Path, micro_batch: int) -> int:
    world, cpu = World.from_env(os.environ), torch.device("cpu")
    with joined(world, backend="gloo", device=cpu, timeout_s=60):
        model = Risk()
        compute = Compute(cpu)
        task = Survival(np.array(TARGETS), {})
        stepper = Stepper(task, model, distribute(model, world, cpu), world, compute, compute.scaler())
        loss = stepper.backward(*make_batches(world.rank, world.size, micro_batch))
        gradient = model.layer.weight.grad
        if world.is_main and gradient is not None:
            out.write_text(json.dumps({"loss": float(loss), "gradient": gradient.flatten().tolist()}))
    return 0


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), int(sys.argv[2])))
