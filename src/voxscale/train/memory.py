"""How much memory is used; and when it does not suffice, how that is noticed and said."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import torch

from voxscale.errors import LESS_MEMORY, OutOfMemoryError
from voxscale.plan.plan import Plan

_LOOK_S = 0.02


class MemoryWatch:
    """The most memory that this process holds for itself while the body runs: files that it maps do not count.

    The kernel keeps no peak of that, so a thread looks often. `device_peak` is the GPU's, None on a CPU: what
    torch has taken of it, gaps between tensors included, as that is what is not free.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory", daemon=True)
        self.peak = self.now()

    @staticmethod
    def now() -> int:
        """Bytes that this process holds for itself."""
        resident, shared = _pages()
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

    @property
    def device_peak(self) -> int | None:
        return torch.cuda.max_memory_reserved(self._device) if self._device is not None else None

    def __enter__(self) -> Self:
        if self._device is not None:
            torch.cuda.empty_cache()  # what was taken before does not count
            torch.cuda.reset_peak_memory_stats(self._device)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.peak = max(self.peak, self.now())


def resident_bytes() -> int:
    """Bytes of this process that are in memory, those of files that it maps included."""
    return _pages()[0] * os.sysconf("SC_PAGE_SIZE")


def _pages() -> tuple[int, int]:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return int(resident), int(shared)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def out_of_memory(
    error: Exception, *, step: int = 0, plan: Plan | None = None, cases: Iterable[str] = ()
) -> OutOfMemoryError:
    """The error for users, with what was computed as far as that is known."""
    what = "the device" if isinstance(error, torch.OutOfMemoryError) else "this process"
    where = ""
    if plan is not None:
        where = f" at step {step}, with {plan.at_once}, cases {', '.join(dict.fromkeys(cases))}"
    return OutOfMemoryError(
        f"{what} ran out of memory{where}: {first_line(error)}",
        fix=LESS_MEMORY,
    )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0]
