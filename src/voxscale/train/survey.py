"""What the ranks of a job find where they are: hosts, devices, clocks, and how fast they reach each other.

    torchrun … -m voxscale.train.survey FOLDER --out FILE [--scratch DIR]

Rank 0 writes FILE; `voxscale site check` submits this and says what is wrong.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from voxscale.files import write_json
from voxscale.parallel import World, barrier, gather_records, joined, leave, time_all_reduce
from voxscale.runs import RunFolder
from voxscale.train.job import choose_device
from voxscale.train.rank import add_rank_arguments, run_as_rank

_TIMEOUT_S = 60.0
_MESSAGE_BYTES = 64 << 20


def survey(run: RunFolder, world: World, environ: Mapping[str, str], *, out: Path, scratch: Path | None) -> None:
    """Gather a record from each rank and time an all-reduce. Every rank calls this; rank 0 writes `out`."""
    device = choose_device(world)
    with joined(world, backend="nccl" if device.type == "cuda" else "gloo", device=device, timeout_s=_TIMEOUT_S):
        seconds = time_all_reduce(_MESSAGE_BYTES, world, device)
        barrier(world)
        own = {**_describe(world, environ, device, clock_s=time.time()), "scratch_error": _try_to_write(scratch)}
        records = gather_records([own], world, device)
    if world.is_main:
        share = 2 * (world.size - 1) / world.size  # of the message that crosses each rank's connection
        speed = share * _MESSAGE_BYTES / seconds / 1e9 if world.size > 1 else None
        write_json(out, {"world_size": world.size, "all_reduce_gb_s": speed, "ranks": records})


def _describe(world: World, environ: Mapping[str, str], device: torch.device, *, clock_s: float) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "device": f"{gpu.name} ({gpu.total_memory >> 30} GB)" if gpu is not None else "CPU",
        "gpu_uuid": str(getattr(gpu, "uuid", "")) if gpu is not None else "",
        "visible_gpus": torch.cuda.device_count(),
        "cpus": int(environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0))),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "torch": torch.__version__,
        "interface": environ.get("GLOO_SOCKET_IFNAME", ""),
        "clock_s": clock_s,
    }


def _try_to_write(folder: Path | None) -> str:
    """Why nothing can be written there; empty if all is well, or there is nothing to try."""
    if folder is None:
        return ""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"voxscale")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m voxscale.train.survey", description="Look around as one rank.")
    add_rank_arguments(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path)
    options = parser.parse_args(arguments)
    return run_as_rank(options, partial(survey, out=options.out, scratch=options.scratch))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
