"""Kernels of augmentation on a CPU: interpolation by a matrix, filters along the axes, curves of intensity.

There fresh memory costs more than the arithmetic: intermediate results live in a `Scratch`, and volumes are walked
slab by slab. The matrices of filters are made for any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import log2, prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Matrix = NDArray[np.float64]

_SLAB_VOXELS = 2**17  # fewer, and calls cost more than they save; more, and the slab leaves the cache
_BEFORE, _BEHIND = 1, 2  # zeros around a source; the second behind is the upper corner of a voxel on the first


class Scratch:
    """Memory that is reused from call to call: one growing buffer per name and dtype. One per thread."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with unknown contents, valid until `name` is taken again."""
        size = prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(_rounded_up(size), dtype=dtype)
        return buffer[:size].view(tuple(shape))


def _rounded_up(size: int) -> int:
    """At most a quarter more, so that sources of varying size soon find their buffer large enough."""
    step = 1 << max(0, int(log2(max(1, size))) - 2)
    return -(-size // step) * step


def resample(
    image: Tensor,
    label: Tensor,
    matrix: Matrix,
    centre: Matrix,
    *,
    out_image: Tensor,
    out_label: Tensor,
    scratch: Scratch,
) -> None:
    """Fill a patch: its voxel at offset `p` from its centre shows the source at `centre + matrix @ p`, zero outside.

    The image (c, x, y, z) is interpolated linearly, the label (x, y, z) takes the nearest voxel.
    """
    if not label.numel():  # the patch lies beside its case
        out_image.zero_()
        out_label.zero_()
    elif np.count_nonzero(matrix) == 3:
        _resample_by_axis(image, label, matrix, centre, out_image, out_label, scratch)
    else:
        _resample_by_corners(image, label, matrix, centre, out_image, out_label, scratch)


def _resample_by_axis(
    image: Tensor, label: Tensor, matrix: Matrix, centre: Matrix, out_image: Tensor, out_label: Tensor, scratch: Scratch
) -> None:
    """Without oblique rotation each axis of the source fills one axis of the patch, and interpolates by itself."""
    targets = [int(axis) for axis in np.abs(matrix).argmax(axis=1)]
    labels = _bordered(label, "labels", label.dtype, scratch)
    at, steps = [], [torch.empty(0)] * 3
    for axis, target in enumerate(targets):
        num = out_label.shape[target]
        points = centre[axis] + matrix[axis, target] * (np.arange(num) - (num - 1) / 2) + _BEFORE
        at.append(points.clip(0, labels.shape[axis] - _BEHIND))  # beyond the border all is zero
        steps[target] = torch.from_numpy(np.rint(at[axis]).astype(np.int32) * labels.stride(axis))
    index = scratch.take("index", out_label.shape, torch.int32)
    torch.add(steps[0][:, None, None] + steps[1][:, None], steps[2], out=index)
    torch.index_select(labels.view(-1), 0, index.view(-1), out=out_label.view(-1))
    for channel, out in zip(image, out_image.permute(0, *(1 + axis for axis in targets)), strict=True):
        out.copy_(_interpolate_axes(_bordered(channel, "volume", torch.float32, scratch), at, scratch))


def _interpolate_axes(volume: Tensor, at: Sequence[Matrix], scratch: Scratch) -> Tensor:
    """A volume at the points of a grid, given for each axis. Whole rows are mixed, the last axis takes a matrix."""
    (x, y, z), (_, num_y, num_z) = (len(points) for points in at), volume.shape
    planes = scratch.take("planes", (x, num_y, num_z), volume.dtype)
    rows = scratch.take("rows", (x, y, num_z), volume.dtype)
    voxels = scratch.take("voxels", (x, y, z), volume.dtype)
    for row, point in enumerate(at[0]):
        lower = int(point)
        torch.lerp(volume[lower], volume[lower + 1], point - lower, out=planes[row])
    for row, point in enumerate(at[1]):
        lower = int(point)
        torch.lerp(planes[:, lower], planes[:, lower + 1], point - lower, out=rows[:, row])
    distance = np.abs(at[2] - np.arange(num_z)[:, None])
    weights = torch.from_numpy(np.maximum(0, 1 - distance).astype(np.float32))
    return torch.mm(rows.view(-1, num_z), weights, out=voxels.view(-1, z)).view(x, y, z)


def _resample_by_corners(
    image: Tensor, label: Tensor, matrix: Matrix, centre: Matrix, out_image: Tensor, out_label: Tensor, scratch: Scratch
) -> None:
    """Gather the eight voxels around each point, with one array of indices that is shifted from corner to corner."""
    size = out_label.shape
    volumes, labels = (
        _bordered(image, "volumes", image.dtype, scratch),
        _bordered(label, "labels", label.dtype, scratch),
    )
    strides = labels.stride()
    shifts = [sum(np.multiply(corner, strides)) for corner in product((0, 1), repeat=3)]
    leads, tails = _coordinates(matrix, centre + _BEFORE, size)
    num_x = max(1, _SLAB_VOXELS // (size[1] * size[2]))
    for first in range(0, size[0], num_x):
        slab = slice(first, first + num_x)
        lower, nearest, shares = _locate(leads[:, slab], tails, labels, scratch)
        torch.index_select(labels.view(-1), 0, nearest, out=out_label[slab].view(-1))
        gathered = scratch.take("gathered", (8, len(lower)), image.dtype)
        corners = scratch.take("corners", (8, len(lower)), torch.float32)
        for volume, out in zip(volumes, out_image[:, slab], strict=True):
            for row, shift in zip(gathered, shifts, strict=True):
                torch.index_select(volume.view(-1)[shift:], 0, lower, out=row)
            corners.copy_(gathered)
            for num, share in zip((4, 2), shares, strict=False):
                torch.lerp(corners[:num], corners[num : 2 * num], share, out=corners[:num])
            torch.lerp(corners[0], corners[1], shares[2], out=out.view(-1))


def _bordered(volume: Tensor, name: str, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """A contiguous copy with zeros around the last three axes."""
    *lead, x, y, z = volume.shape
    border = _BEFORE + _BEHIND
    copy = scratch.take(name, (*lead, x + border, y + border, z + border), dtype)
    for axis in (-3, -2, -1):
        copy.narrow(axis, 0, _BEFORE).zero_()
        copy.narrow(axis, copy.shape[axis] - _BEHIND, _BEHIND).zero_()
    inside = slice(_BEFORE, -_BEHIND)
    copy[..., inside, inside, inside].copy_(volume)
    return copy


def _coordinates(matrix: Matrix, centre: Matrix, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where the patch's voxels lie in the source, as sums of a part (3, x, y) and a part (3, z)."""
    x, y, z = (np.arange(n) - (n - 1) / 2 for n in size)
    leads = centre[:, None, None] + matrix[:, 0, None, None] * x[:, None] + matrix[:, 1, None, None] * y
    tails = matrix[:, 2, None] * z
    return torch.from_numpy(leads.astype(np.float32)), torch.from_numpy(tails.astype(np.float32))


def _locate(leads: Tensor, tails: Tensor, bordered: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor, list[Tensor]]:
    """For each point: indices of its lower corner and of the nearest voxel, its share of the way to the upper one."""
    shape = (*leads.shape[1:], tails.shape[1])
    whole = scratch.take("whole", shape, torch.float32)
    part = scratch.take("part", shape, torch.int32)
    lower = scratch.take("lower", shape, torch.int32).zero_()
    nearest = scratch.take("nearest", shape, torch.int32).zero_()
    shares = [scratch.take(f"share{axis}", shape, torch.float32) for axis in range(3)]
    for axis, share in enumerate(shares):
        torch.add(leads[axis, ..., None], tails[axis], out=share)
        share.clamp_(0, bordered.shape[axis] - _BEHIND)  # beyond the border all is zero
        torch.floor(share, out=whole)
        share.sub_(whole)
        lower.add_(part.copy_(whole), alpha=bordered.stride(axis))
        torch.round(share, out=whole)
        nearest.add_(part.copy_(whole), alpha=bordered.stride(axis))
    nearest.add_(lower)
    return lower.view(-1), nearest.view(-1), [share.view(-1) for share in shares]


def multiply_axes(volume: Tensor, matrices: Sequence[Tensor], *, out: Tensor, scratch: Scratch) -> None:
    """Multiply a contiguous (x, y, z) volume along each axis by its matrix (new length, length). `out` may be it."""
    (new_x, x), (new_y, y), (new_z, z) = (matrix.shape for matrix in matrices)
    first = scratch.take("first", (new_x, y, z), volume.dtype)
    second = scratch.take("second", (new_x, new_y, z), volume.dtype)
    torch.mm(matrices[0], volume.view(x, -1), out=first.view(new_x, -1))
    torch.bmm(matrices[1].expand(new_x, -1, -1), first, out=second)
    torch.mm(second.view(-1, z), matrices[2].t(), out=out.view(-1, new_z))


def blur_matrices(length: int, sigmas: Tensor) -> Tensor:
    """For each sigma a Gaussian, cut off at three; at the border the weights inside are brought to a sum of one."""
    sigmas = sigmas[:, None, None]
    at = torch.arange(length, dtype=torch.float32, device=sigmas.device)
    distance = (at[:, None] - at).abs()
    distance = distance.masked_fill(distance > (3 * sigmas + 0.5).floor(), torch.inf)  # exp is slow if it underflows
    weights = torch.exp(distance.square() / (-2 * sigmas.square()).float())
    return weights / weights.sum(dim=2, keepdim=True)


def lowres_matrices(length: int, zooms: Tensor) -> Tensor:
    """For each zoom: down to that share of the length by the nearest voxel, and up again linearly."""
    short = (length * zooms[:, None]).round().clamp_min(1)
    at = torch.arange(length, dtype=torch.float32, device=zooms.device)
    last = (short - 1).float()
    position = torch.minimum(((at + 0.5) * (short / length).float() - 0.5).clamp_min(0), last)
    before = position.floor()
    after = torch.minimum(before + 1, last)
    share = (position - before)[..., None]
    up = (length / short).float()
    kept_before, kept_after = (((kept + 0.5) * up).floor()[..., None] for kept in (before, after))
    return (kept_before == at) * (1 - share) + (kept_after == at) * share


def apply_gamma(volume: Tensor, gamma: float, *, invert: bool) -> None:
    """Raise a volume, or its negative, mapped to 0..1, to a power, in place; its mean and standard deviation stay."""
    low, high = torch.aminmax(volume)
    if invert:
        torch.sub(high, volume, out=volume)
    else:
        volume.sub_(low)
    mean, std = _moments(volume)
    # A power is the exponential of a logarithm, in a fifth of the time; log 0 is -inf and comes back as 0.
    log_range = (high - low).clamp_min(1e-30).log()
    volume.log_()
    torch.add(log_range * -gamma, volume, alpha=gamma, out=volume)
    volume.exp_()
    new_mean, new_std = _moments(volume)
    factor = std / new_std.clamp_min(1e-8)
    if invert:
        volume.mul_(-factor).add_(high - mean + new_mean * factor)
    else:
        volume.mul_(factor).add_(low + mean - new_mean * factor)


def apply_contrast(volume: Tensor, factor: float) -> None:
    """Stretch a volume about its mean, in place, and cut it to the range it had."""
    low, high = torch.aminmax(volume)
    mean = volume.sum(dim=-1).double().sum() / volume.numel()
    torch.add((mean * (1 - factor)).float(), volume, alpha=factor, out=volume)
    torch.clamp(volume, low, high, out=volume)


def _moments(volume: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, from sums over rows in single and over all in double precision."""
    mean = volume.sum(dim=-1).double().sum() / volume.numel()
    square = torch.linalg.vector_norm(volume, dim=-1).double().square().sum() / volume.numel()
    return mean, (square - mean.square()).clamp_min(0).sqrt()
