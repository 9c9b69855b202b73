"""Rung 3: torchrun starts the ranks, on this machine or on many.

    torchrun --standalone --nproc-per-node 2 3_torchrun.py EPOCHS SAVE_EVERY
"""  # fmt: skip

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from blobs import (
    build_model,
    check,
    count_correct,
    describe_start,
    end_rank,
    epoch_line,
    load_snapshot,
    make_parser,
    make_sets,
    require_same_start,
    save_snapshot,
    train_epoch,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


def main() -> None:
    started = time.perf_counter()
    options = make_parser(__doc__).parse_args()
    if "RANK" not in os.environ:
        sys.exit("error: there is no RANK in the environment; start this with torchrun, as the first lines show")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if rank == 0:
        check(options, world_size)  # the other ranks wait for this one when the group is formed
    on_gpu = torch.cuda.device_count() >= local_size
    device = torch.device(f"cuda:{local_rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")  # where to meet is in torchrun's variables

    train_set, test_set = make_sets(options.seed)
    sampler = DistributedSampler(train_set, world_size, rank, seed=options.seed, drop_last=True)
    train_loader = DataLoader(train_set, options.batch // world_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), options.batch)

    model = build_model(options.seed).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    done = load_snapshot(options, model, optimizer)
    require_same_start(done, options.snapshot, device)
    parallel = DistributedDataParallel(model)
    if rank == 0:
        print(describe_start(done, options, world_size, device), flush=True)

    for epoch in range(done + 1, options.epochs + 1):
        sampler.set_epoch(epoch)  # another order each epoch, and the same after a resume
        sums = train_epoch(parallel, train_loader, optimizer, device) + count_correct(model, test_loader, device)
        totals = torch.tensor(sums, dtype=torch.float64, device=device)
        dist.all_reduce(totals)  # sums cross ranks; a mean of means would be wrong where shares differ
        if rank == 0:
            print(epoch_line(epoch, options.epochs, totals.tolist()), flush=True)
            if epoch % options.save_every == 0 or epoch == options.epochs:
                save_snapshot(options, model, optimizer, epoch=epoch)
    if rank == 0:
        print(f"wall time {time.perf_counter() - started:.1f} s")
    end_rank()


if __name__ == "__main__":
    main()
