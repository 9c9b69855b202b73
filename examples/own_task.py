"""A task that voxscale does not have, on its building blocks: a network that fills in what was cut out of a volume.

    voxscale prepare DATA --json                # names the folder of prepared cases, `store`
    python examples/own_task.py STORE
    torchrun --standalone --nproc-per-node 2 examples/own_task.py STORE

No labels are needed. Both starts print the same numbers. The four parts that make up a task are the functions below:
what the network gets, a row of the loss for each sample, the loss of all rows, and a score for each held-out case.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from voxscale import World, gather_rows, leave, open_store, patch_loader

SIZE = (16, 16, 16)
HOLE = (slice(None), slice(None), slice(6, 10), slice(6, 10), slice(6, 10))


def with_hole(image: torch.Tensor) -> torch.Tensor:
    """What the network gets: the patch without its middle."""
    seen = image.clone()
    seen[HOLE] = 0
    return seen


def loss_rows(output: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """(squared error, voxels) of each sample."""
    errors = ((output[HOLE] - image[HOLE]) ** 2).flatten(1)
    return torch.stack([errors.sum(1), torch.full_like(errors[:, 0], errors.shape[1])], dim=1)


def loss(rows: torch.Tensor) -> torch.Tensor:
    """The mean over all voxels of all ranks' samples."""
    return rows[:, 0].sum() / rows[:, 1].sum()


def score(model: torch.nn.Module, image: torch.Tensor) -> float:
    """The mean error in the middle of one case."""
    with torch.no_grad():
        return float((model(with_hole(image))[HOLE] - image[HOLE]).abs().mean())


def middle(volume_cxyz: torch.Tensor) -> torch.Tensor:
    """(1, c, x, y, z): the patch in the middle of a volume."""
    starts = [(edge - size) // 2 for edge, size in zip(volume_cxyz.shape[1:], SIZE, strict=True)]
    box = tuple(slice(start, start + size) for start, size in zip(starts, SIZE, strict=True))
    return volume_cxyz[(slice(None), *box)][None]


def network(channels: int) -> torch.nn.Module:
    """Group norm: a sample's output depends on that sample alone, so that ranks do not matter."""
    return torch.nn.Sequential(
        *(torch.nn.Conv3d(channels, 16, 3, padding=1), torch.nn.GroupNorm(4, 16), torch.nn.ReLU()),
        *(torch.nn.Conv3d(16, 16, 3, padding=2, dilation=2), torch.nn.GroupNorm(4, 16), torch.nn.ReLU()),
        *(torch.nn.Conv3d(16, 16, 3, padding=4, dilation=4), torch.nn.GroupNorm(4, 16), torch.nn.ReLU()),
        torch.nn.Conv3d(16, channels, 1),
    )


def evaluate(model: torch.nn.Module, images: Sequence[torch.Tensor], world: World) -> torch.Tensor:
    """The score of every case, once, in their order, on every rank."""
    mine = range(world.rank, len(images), world.size)
    rows = torch.tensor([[index, score(model, images[index])] for index in mine]).reshape(-1, 2)
    everyone = gather_rows(rows, world)
    return everyone[everyone[:, 0].argsort(), 1]


def train(options: argparse.Namespace, world: World) -> None:
    store = open_store(options.store)
    names = [store.id(row) for row in range(len(store))]
    held_out, rest = names[: len(names) // 5], names[len(names) // 5 :]
    images = [middle(torch.from_numpy(store.read_image(store.row(name))).float()) for name in held_out]
    loader = patch_loader(store, size=SIZE, batch=options.batch, cases=rest, world=world, augment="light")

    torch.manual_seed(0)
    model = network(images[0].shape[1])
    distributed = DistributedDataParallel(model) if world.size > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, batch in enumerate(loader.steps(1, options.epochs * loader.steps_per_epoch), start=1):
        rows = loss_rows(distributed(with_hole(batch.image)), batch.image)[: batch.num_real]
        found = loss(gather_rows(rows, world))
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        if step % loader.steps_per_epoch == 0:
            scores = evaluate(model, images, world)
            if world.is_main:
                print(f"epoch {loader.epoch_of(step)} loss {found:.5f} error {scores.mean():.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="folder of prepared cases")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="over all ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = World.from_env(os.environ)
    if world.size > 1:
        dist.init_process_group("gloo")
    train(options, world)
    leave()  # not by returning: gloo's thread may abort a rank whose interpreter ends


if __name__ == "__main__":
    main()
