"""The world of ranks: the only home of torch.distributed.

What crosses ranks are rows and flags, never means. Everything here does nothing in a world of one.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from voxscale.errors import ANOTHER_RANK, InfrastructureError, LostContactError, TimedOutError


@dataclass(frozen=True)
class World:
    """Where this worker stands, as torchrun's variables say; without them, a world of one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> World:
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return cls()
        try:
            return cls(
                rank=int(environ["RANK"]),
                size=int(environ["WORLD_SIZE"]),
                local_rank=int(environ.get("LOCAL_RANK", 0)),
                local_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
            )
        except ValueError as error:
            raise InfrastructureError(
                f"RANK={environ['RANK']!r} WORLD_SIZE={environ['WORLD_SIZE']!r}: expected whole numbers",
                fix="start the worker with torchrun, or unset these variables",
            ) from error

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextmanager
def joined(world: World, *, backend: str, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Connect to the other ranks for the length of the body."""
    if world.size == 1:
        yield
        return
    bound, limit = device if device.type == "cuda" else None, timedelta(seconds=timeout_s)
    _limit_s[:] = [timeout_s]
    try:
        dist.init_process_group(backend, timeout=limit, device_id=bound)
    except (RuntimeError, ValueError) as error:
        fix = "start as many ranks as WORLD_SIZE says, and let them reach MASTER_ADDR:MASTER_PORT"
        if (lost := lost_contact(error)) is not None:
            lost.fix = fix
            raise lost.at("while starting", [[] for _ in range(world.size)]) from error
        raise InfrastructureError(
            f"rank {world.rank} of {world.size} could not join the others: {error}", fix=fix
        ) from error
    # A gloo group that dies waits for its thread, which may need the interpreter lock to let go of a tensor: a
    # deadlock (seen with torch 2.13). So it is kept to the end of the process, and `leave` ends that.
    on_host = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=limit)
    _KEPT.extend([dist.group.WORLD, on_host, dist.new_group(timeout=_PATIENCE)])
    try:
        yield
    finally:
        dist.destroy_process_group()


_KEPT: list[Any] = []  # of the last world: the group for steps, one for flags of hosts, and one for records
_limit_s: list[float] = []  # how long the last world waits for a rank
_PATIENCE = timedelta(days=7)


def leave(exit_code: int = 0) -> NoReturn:
    """End a rank's process at once, without tearing the interpreter down; all files are written and closed by then.

    A gloo group's own thread can deadlock with that, or abort the rank after all its work (seen with torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def distribute(model: torch.nn.Module, world: World, device: torch.device, *, all_used: bool = True) -> torch.nn.Module:
    """The model with its gradients averaged over the ranks after each backward pass.

    `all_used`: every parameter takes part in every pass, so that none has to be looked for.
    """
    if world.size == 1:
        return model
    device_ids = None
    if device.type == "cuda":
        device_ids = [device.index]
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # statistics over the whole micro-step
    # Of kernels of a single voxel, channels last and first are the same bytes under other strides: nothing to be told.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
    return DistributedDataParallel(
        model, device_ids=device_ids, gradient_as_bucket_view=True, find_unused_parameters=not all_used
    )


def without_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients on this rank; a later backward pass outside of this sends them all."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def communication_s(model: torch.nn.Module) -> float | None:
    """Seconds of a step for which this rank waits for gradients with nothing left to compute; None: not known.

    DDP keeps them itself, of its first steps and then of every hundredth.
    """
    if not isinstance(model, DistributedDataParallel):
        return None
    seen = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    total, hidden = (seen.get(f"avg_backward_{name}_time") for name in ("comm", "compute_comm_overlap"))
    return None if total is None or hidden is None else max(0, int(total) - int(hidden)) / 1e9


def gather_rows(rows: torch.Tensor, counts: Sequence[int], world: World) -> torch.Tensor:
    """All ranks' rows (n, k) in rank order, on every rank, without gradient. `counts` are known to all."""
    if world.size == 1:
        return rows.detach()
    padded = rows.new_zeros((max(counts), rows.shape[1]))
    padded[: len(rows)] = rows.detach()
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


class Pace:
    """Ranks that work at their own pace, hours apart if need be: one that comes no further in time is noticed.

    They meet in rounds, without waiting: who has done a piece of work goes into the next round as soon as the last one
    is over, that is, when all have done a piece since. Only who is done waits. All ranks call both.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device = world, device
        self._round: tuple[Any, torch.Tensor] | None = None
        self.is_cut_short = False  # a rank is done before its work is: the others may leave theirs

    def advance(self) -> None:
        """A piece of work is done. Raises LostContactError if another rank has not done one for too long."""
        if self._world.size > 1 and (self._round is None or self._round[0].is_completed()):
            self._end()
            self._begin()

    def finish(self, *, cuts_short: bool = False) -> None:
        """All work of this rank is done: wait for the others'. Raises LostContactError as `advance` does."""
        if self._world.size > 1:
            self._end()
            while True:
                self._begin(is_done=True, cuts_short=cuts_short)
                if self._end() == self._world.size:
                    return

    def _begin(self, *, is_done: bool = False, cuts_short: bool = False) -> None:
        counts = torch.tensor([int(is_done), int(cuts_short)], device=self._device)
        self._round = dist.all_reduce(counts, async_op=True), counts

    def _end(self) -> int:
        """How many ranks are done."""
        if self._round is None:
            return 0
        (work, counts), self._round = self._round, None
        try:
            work.wait()
        except RuntimeError as error:
            raise lost_contact(error) or LostContactError(f"{ANOTHER_RANK} is gone") from error
        num_done, num_cutting = counts.tolist()
        self.is_cut_short = num_cutting > 0
        return int(num_done)


def gather_records(
    records: list[dict[str, Any]], world: World, device: torch.device, *, together: bool = False
) -> list[dict[str, Any]]:
    """All ranks' records in rank order, on every rank. They travel as JSON: no pickle between ranks.

    Ranks may come hours apart, unless they are known to come `together`; one that is gone is noticed all the same.
    """
    if world.size == 1:
        return records
    patient = None if together else _KEPT[-1]
    text = torch.frombuffer(bytearray(json.dumps(records).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world.size)]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device), group=patient)
    padded = text.new_zeros(max(int(length) for length in lengths))
    padded[: len(text)] = text
    gathered = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(gathered, padded, group=patient)
    texts = [bytes(part[: int(n)].tolist()) for part, n in zip(gathered, lengths, strict=True)]
    return [record for part in texts for record in json.loads(part)]


@contextmanager
def in_turn(total: torch.Tensor, world: World) -> Iterator[None]:
    """Ranks work on `total` one after another, each on what those before it made of it; all end with the last's."""
    if world.rank > 0:
        dist.recv(total, world.rank - 1)
    yield
    if world.rank + 1 < world.size:
        dist.send(total, world.rank + 1)
    if world.size > 1:
        dist.broadcast(total, world.size - 1)


def share_buffers(model: torch.nn.Module, world: World) -> None:
    """Give every rank what rank 0 has beside its parameters: running statistics differ where ranks keep their own."""
    if world.size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def any_rank(flag: bool, world: World) -> bool:
    """Whether the flag is up on any rank; all ranks get the same answer. Hosts agree on it: no GPU is waited for."""
    if world.size == 1:
        return flag
    flags = torch.tensor([int(flag)])
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=_KEPT[-2])
    return bool(flags.item())


def time_all_reduce(num_bytes: int, world: World, device: torch.device, *, repeats: int = 5) -> float:
    """The median seconds of summing a message of that size over all ranks; all ranks get the same answer."""
    if world.size == 1:
        return 0.0
    message = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(repeats + 1):  # the first connects
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(message)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        message.fill_(1)
    slowest = torch.tensor([sorted(seconds[1:])[repeats // 2]], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()


def lost_contact(error: BaseException) -> LostContactError | None:
    """What to raise for an error that only says that another rank is gone, or silent: a consequence, not a cause."""
    text = str(error)
    if not _limit_s:
        return None  # there are no other ranks
    if isinstance(error, RuntimeError) and any(said in text for said in ("Timed out", "timed out", "timeout")):
        return TimedOutError(f"{ANOTHER_RANK} did not answer within {_limit_s[0]:g} s")
    if isinstance(error, dist.DistError) or ("gloo" in text and "Connection" in text) or "Connection reset" in text:
        return LostContactError(f"{ANOTHER_RANK} is gone")
    return None
