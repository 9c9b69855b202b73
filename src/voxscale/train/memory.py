"""When memory does not suffice: how that is noticed, and said."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from voxscale.errors import OutOfMemoryError
from voxscale.plan.plan import Plan


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def out_of_memory(
    error: Exception, *, step: int = 0, plan: Plan | None = None, cases: Iterable[str] = ()
) -> OutOfMemoryError:
    """The error for users, with what was computed as far as that is known."""
    what = "the device" if isinstance(error, torch.OutOfMemoryError) else "this process"
    where = ""
    if plan is not None:
        count = f"{plan.micro_batch} patch{'es' if plan.micro_batch > 1 else ''}"
        patches = f"{count} of {' × '.join(map(str, plan.patch))} at once"
        where = f" at step {step}, with {patches}, cases {', '.join(dict.fromkeys(cases))}"
    return OutOfMemoryError(
        f"{what} ran out of memory{where}: {first_line(error)}",
        fix="set train.micro_batch lower (the result stays the same), or choose smaller patches.size",
    )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0]
