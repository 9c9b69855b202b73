"""Rung 1: one process trains on one device.

    python 1_single.py EPOCHS SAVE_EVERY
"""  # fmt: skip

from __future__ import annotations

import time

import torch
from blobs import (
    build_model,
    check,
    count_correct,
    describe_start,
    epoch_line,
    load_snapshot,
    make_parser,
    make_sets,
    save_snapshot,
    train_epoch,
)
from torch.utils.data import DataLoader, RandomSampler


def main() -> None:
    started = time.perf_counter()
    options = make_parser(__doc__).parse_args()
    check(options, world_size=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_set, test_set = make_sets(options.seed)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    train_loader = DataLoader(train_set, options.batch, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, options.batch)

    model = build_model(options.seed).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    done = load_snapshot(options, model, optimizer)
    print(describe_start(done, options, 1, device), flush=True)

    for epoch in range(done + 1, options.epochs + 1):
        order.manual_seed(options.seed + epoch)  # another order each epoch, and the same after a resume
        sums = train_epoch(model, train_loader, optimizer, device) + count_correct(model, test_loader, device)
        print(epoch_line(epoch, options.epochs, sums), flush=True)
        if epoch % options.save_every == 0 or epoch == options.epochs:
            save_snapshot(options, model, optimizer, epoch=epoch)
    print(f"wall time {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
