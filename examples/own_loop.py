"""A loop of your own on voxscale's building blocks: a small network for survival, trained by Cox's partial likelihood.

    python examples/own_loop.py cohort.csv
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py cohort.csv

Both print the same losses: the risk set is the whole batch, however many ranks share it. With --folder it goes on where
it was stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from voxscale import (
    World,
    cox_loss,
    distributed_loader,
    gather_rows,
    leave,
    load_checkpoint,
    save_checkpoint,
    survival_cases,
)
from voxscale.blocks import SurvivalCase

Sample = tuple[torch.Tensor, torch.Tensor, float, int]


class Scans(Dataset[Sample]):
    """(image, features, time, event) of each case."""

    def __init__(self, cases: Sequence[SurvivalCase]) -> None:
        self.cases = cases

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> Sample:
        case = self.cases[index]
        image = np.clip(np.asarray(nib.load(case.image).dataobj, np.float32) / 1000, -1, 1)
        if np.random.random() < 0.5:  # seeded by the sample's place in the stream, on whatever rank it is read
            image = image[::-1].copy()
        return torch.from_numpy(image)[None], torch.from_numpy(case.features), case.time, case.event


class Network(torch.nn.Module):
    """Image and features in, one log hazard ratio out. Group norm: a sample's output depends on that sample alone."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(
            *(torch.nn.Conv3d(1, 8, 3, stride=2, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.ReLU()),
            *(torch.nn.Conv3d(8, 16, 3, stride=2, padding=1), torch.nn.GroupNorm(2, 16), torch.nn.ReLU()),
        )
        self.head = torch.nn.Linear(16 + num_features, 1)

    def forward(self, image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        seen = self.encoder(image).mean(dim=(2, 3, 4))
        risk: torch.Tensor = self.head(torch.cat([seen, features], dim=1))
        return risk


def train(options: argparse.Namespace, world: World) -> None:
    cohort = survival_cases(options.table, features=options.features, fold=options.fold)
    loader = distributed_loader(
        Scans(cohort.train), batch=options.batch, world=world, strata=[case.event for case in cohort.train]
    )
    torch.manual_seed(0)
    network = Network(len(cohort.feature_names))
    model = DistributedDataParallel(network) if world.size > 1 else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    found = load_checkpoint(options.folder, model, optimizer) if options.folder else None
    done = found[0] if found is not None else 0

    for share in loader.steps(done + 1, options.epochs * loader.steps_per_epoch):
        image, features, time, event = share.batch
        rows = torch.cat([model(image, features), time[:, None], event[:, None]], dim=1)[: share.num_real]
        risk, times, events = gather_rows(rows, world).T  # of all ranks, with gradients
        loss = cox_loss(risk, times, events)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if world.is_main:
            print(f"step {share.step} cases {len(risk)} loss {loss.item():.6f}", flush=True)
        if options.folder and share.step % loader.steps_per_epoch == 0:
            save_checkpoint(options.folder, model, optimizer, step=share.step, world=world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="CSV with columns of images, times and events")
    parser.add_argument("--features", nargs="*", default=[], help="columns that help")
    parser.add_argument("--fold", help="a column of train, val and test; default: a fifth of the patients validates")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="over all ranks")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = World.from_env(os.environ)
    if world.size > 1:
        dist.init_process_group("gloo")
    train(options, world)
    leave()  # not by returning: gloo's thread may abort a rank whose interpreter ends


if __name__ == "__main__":
    main()
