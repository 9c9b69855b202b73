"""Rung 2: the program starts several ranks of itself on this machine.

    python 2_spawn.py EPOCHS SAVE_EVERY --ranks 2
"""  # fmt: skip

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2, help="(default %(default)s)")
    options = parser.parse_args()
    if options.ranks < 1:
        parser.error(f"--ranks is {options.ranks}; give a whole number from 1")
    check(options, world_size=options.ranks)
    # The ranks meet here. Port 0: the system chooses a free one, so two users of one machine never collide.
    meeting_point = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(train, args=(options, options.ranks, meeting_point.port), nprocs=options.ranks)
    print(f"wall time {time.perf_counter() - started:.1f} s")


def train(rank: int, options: argparse.Namespace, world_size: int, port: int) -> None:
    """What each rank does; spawn gives the rank."""
    on_gpu = torch.cuda.device_count() >= world_size
    device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size)

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
    end_rank()


if __name__ == "__main__":
    main()
