"""What each rank uses: memory, CPU and GPU, in a small file of the run folder that is replaced every few seconds.

Whoever watches a run, on whichever machine, reads these files. Nothing in a training depends on them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from voxscale.files import remove, remove_temporaries, write_json
from voxscale.parallel import World
from voxscale.runs import RunFolder
from voxscale.train.memory import MemoryWatch, resident_bytes
from voxscale.train.nvml import busy_percent, open_nvml

EVERY_S = 5.0
_LOOK_S = 0.5  # between looks at the memory, for its peak


@contextmanager
def recorded_usage(run: RunFolder, world: World, device: torch.device) -> Iterator[None]:
    """Keep this rank's file up to date while the body runs. Every rank calls it, each has a file of its own."""
    file = run.usage(world.rank)
    with contextlib.suppress(OSError):
        if world.is_main:
            for rank, left in run.usages().items():
                if rank >= world.size:  # of an earlier start with more ranks
                    remove(left)
        remove_temporaries(file.parent, of=file.name)
    over = threading.Event()
    usage = _Usage(world, device)

    def record(*, ended: bool = False) -> None:
        # A full disk is for the checkpoints to complain about, a failing device for the step.
        with contextlib.suppress(OSError, RuntimeError):
            write_json(file, usage.measured(ended=ended), durable=False)

    def keep() -> None:
        while not over.is_set():
            record()
            due = time.monotonic() + EVERY_S
            while time.monotonic() < due and not over.wait(_LOOK_S):
                usage.look()

    thread = threading.Thread(target=keep, name="usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        record(ended=True)


class _Usage:
    """What this process uses; the share of a CPU is that since the time before."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._device = device
        self._who = {
            "rank": world.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "since": round(time.time(), 1),
        }
        self._peak = 0
        self._clock, self._cpu_s = time.monotonic(), time.process_time()

    def look(self) -> int:
        now = MemoryWatch.now()
        self._peak = max(self._peak, now)
        return now

    def measured(self, *, ended: bool) -> dict[str, Any]:
        clock, cpu_s = time.monotonic(), time.process_time()
        elapsed, used = clock - self._clock, cpu_s - self._cpu_s
        self._clock, self._cpu_s = clock, cpu_s
        memory = self.look()
        return {
            **self._who,
            "time": round(time.time(), 1),
            "ended": ended,
            "memory_bytes": memory,
            "memory_peak_bytes": self._peak,
            "resident_bytes": resident_bytes(),
            "cpu_percent": round(100 * used / elapsed, 1) if elapsed > _LOOK_S else None,
            "gpu": _gpu(self._device) if self._device.type == "cuda" else None,
        }


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "total_bytes": properties.total_memory,
        "utilisation_percent": busy_percent(open_nvml(), str(properties.uuid)),
    }
