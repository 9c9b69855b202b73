"""Rows of all ranks, with gradients: what a loss that couples samples is computed from."""

from __future__ import annotations

from typing import Any

import torch

from voxscale import parallel
from voxscale.parallel import World


def gather_rows(rows: torch.Tensor, world: World, *, averaged: bool = True) -> torch.Tensor:
    """All ranks' rows, (n, k) each, in rank order and on every rank. Every rank calls it; n may differ, and be 0.

    The gradient goes back to this rank's own rows. Compute the same loss from the result on every rank: then the
    gradients that DistributedDataParallel averages over ranks are those of that loss over all rows, as in one process.
    `averaged=False` is for those who sum gradients over ranks instead. In a world of one the rows come back as they
    are.
    """
    if rows.dim() != 2:
        raise ValueError(f"rows: found shape {tuple(rows.shape)}, expected (n, k), a row for each sample")
    if world.size == 1:
        return rows
    shapes = torch.tensor([rows.shape], device=rows.device)
    counts, widths = parallel.gather_rows(shapes, [1] * world.size, world).T.tolist()
    if len(set(widths)) > 1:
        raise ValueError(f"rows: found {widths} columns on ranks 0 to {world.size - 1}, expected the same on all")
    gathered: torch.Tensor = _Gather.apply(rows, counts, world, world.size if averaged else 1)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Every rank knows the gradient of all rows, as all compute the same loss; each takes that of its own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int], world: World, factor: int) -> torch.Tensor:
        start = sum(counts[: world.rank])
        ctx.mine, ctx.factor = slice(start, start + counts[world.rank]), factor
        return parallel.gather_rows(rows, counts, world)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        return gradients[0][ctx.mine] * ctx.factor, None, None, None
