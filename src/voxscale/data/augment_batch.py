"""Augmentation of a whole batch on its device: what `augment` draws for each sample, in few kernels for all of them.

Each step takes together what drew it, rows or single channels of rows, and broadcasts the numbers drawn for each, which
come in one small copy per step. Nothing here makes the host wait for the device. Arithmetic is by element or sums up
one volume, so that a row is the same in any batch; products with matrices may round differently in the last places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from voxscale.data.augment import (
    AddNoise,
    ByVolume,
    Drawn,
    Linear,
    Multiply,
    Power,
    Step,
    Stretch,
    Triple,
    box_of,
    filter_matrices,
    interpolation,
    numbers_of,
)

_VOXELS_AT_ONCE = 2**26  # 256 MB of float32; what is more goes in parts
_SLAB_VOXELS = 2**22  # of a grid: 48 MB

Column = Sequence[Step | None]  # one transform, as it was drawn for each row


@torch.no_grad()
def place_batch(
    drawn: Sequence[Drawn],
    sources: Sequence[tuple[Tensor, Tensor]],
    origins: Sequence[Triple],
    *,
    out_image: Tensor,
    out_label: Tensor,
) -> None:
    """`place` for a batch, images (n, c, x, y, z) and labels (n, x, y, z), from a pair of each per row.

    Sources differ in size, so each row reads its own; the coordinates of all come in one copy. Flips and turns take two
    kernels a row and are seldom the same in two.
    """
    size = out_label.shape[1], out_label.shape[2], out_label.shape[3]
    by_matrix = [
        interpolation(one, origin, label.shape, size)
        for one, origin, (_, label) in zip(drawn, origins, sources, strict=True)
    ]
    axes = [
        _grid_axes(*by, label.shape, size)
        for by, (_, label) in zip(by_matrix, sources, strict=True)
        if by is not None and label.numel()
    ]
    grids = iter(_sent(np.stack(axes), out_image.device)) if axes else iter(())
    for row, (one, by, (image, label)) in enumerate(zip(drawn, by_matrix, sources, strict=True)):
        if by is None:
            _copy(one, image, origins[row], out_image[row])
            _copy(one, label, origins[row], out_label[row])
        elif label.numel():
            _interpolate(image, label, next(grids), out_image[row], out_label[row])
        else:  # the patch lies beside its case
            out_image[row].zero_()
            out_label[row].zero_()


@torch.no_grad()
def adjust_batch(image: Tensor, drawn: Sequence[Drawn]) -> None:
    """Change the intensities of a contiguous float32 batch (n, c, x, y, z) in place, transform by transform."""
    for column in zip(*(one.intensity for one in drawn), strict=True):
        match next((step for step in column if step is not None), None):
            case None:
                pass
            case Linear() | Multiply():
                _scale(image, column)
            case AddNoise():
                _add_noise(image, column)
            case step:
                _change_volumes(image, column, step)


def _copy(drawn: Drawn, source: Tensor, origin: Triple, out: Tensor) -> None:
    """An image or a label, flipped and turned while it is small, then converted."""
    lead = source.ndim - 3
    if source.shape != out.shape:
        patch = torch.zeros(out.shape, dtype=source.dtype, device=source.device)
        patch[box_of(origin, source.shape[lead:])] = source
        source = patch
    if drawn.flips:
        source = source.flip([lead + axis for axis in drawn.flips])
    for count, (first, second) in drawn.turns:
        source = source.rot90(count, (lead + first, lead + second))
    out.copy_(source)


def _grid_axes(
    matrix: NDArray[np.float64], centre: NDArray[np.float64], source: Sequence[int], size: Triple
) -> NDArray[np.float32]:
    """What each x, each y and each z adds to the coordinates of `grid_sample`: (x + y + z, 3).

    It wants the last axis first, from -1 to 1 over the outer faces of the voxels.
    """
    x, y, z = ((np.arange(n) - (n - 1) / 2)[:, None] * (2 * matrix[:, axis] / source) for axis, n in enumerate(size))
    z += (2 * centre + 1) / source - 1
    return np.concatenate([x, y, z])[:, ::-1].astype(np.float32)


def _interpolate(image: Tensor, label: Tensor, axes: Tensor, out_image: Tensor, out_label: Tensor) -> None:
    """The image (c, x, y, z) linearly, the label (x, y, z) by the nearest voxel, zero outside."""
    x, y, z = torch.split(axes, list(out_label.shape))
    image_1c, label_1c = image.float()[None], label.float()[None, None]
    num_x = max(1, _SLAB_VOXELS // (len(y) * len(z)))
    for first in range(0, len(x), num_x):
        slab = slice(first, first + num_x)
        grid = ((x[slab, None] + y)[:, :, None] + z)[None]
        out_image[:, slab] = F.grid_sample(image_1c, grid, mode="bilinear", align_corners=False)[0]
        out_label[slab] = F.grid_sample(label_1c, grid, mode="nearest", align_corners=False)[0, 0]


def _scale(image: Tensor, column: Column) -> None:
    """One pass over the batch. A factor of 1 and an offset of -0 leave a row as it is, to the sign of its zeros."""
    lines = np.empty((2, *image.shape[:2]), np.float32)
    lines[0], lines[1] = 1, -0.0
    for row, step in enumerate(column):
        if isinstance(step, Linear):
            lines[:, row] = [[step.factor], [step.offset]]
        elif isinstance(step, Multiply):
            lines[0, row] = step.factors
    factors, offsets = _sent(lines, image.device)[..., None, None, None]
    torch.addcmul(offsets, image, factors, out=image)


def _add_noise(image: Tensor, column: Column) -> None:
    """Row by row: each has a generator of its own, from the seed that was drawn for it."""
    for row, step in zip(image, column, strict=True):
        if isinstance(step, AddNoise):
            generator = torch.Generator(image.device).manual_seed(step.seed)
            row.add_(torch.empty_like(row).normal_(generator=generator), alpha=step.std)


def _change_volumes(image: Tensor, column: Column, kind: ByVolume) -> None:
    """Gather the volumes, channels of rows, that were chosen; change them together; put them back."""
    chosen = [
        (volume, number)
        for row, step in zip(image, column, strict=True)
        if isinstance(step, ByVolume)
        for volume, number in zip(row, numbers_of(step), strict=True)
        if number is not None
    ]
    at_once = max(1, _VOXELS_AT_ONCE // image[0, 0].numel())
    for first in range(0, len(chosen), at_once):
        views = [volume for volume, _ in chosen[first : first + at_once]]
        numbers = _sent(np.array([number for _, number in chosen[first : first + at_once]]), image.device)
        torch._foreach_copy_(views, _changed(torch.stack(views), numbers, kind).unbind())


def _changed(volumes: Tensor, numbers: Tensor, kind: ByVolume) -> Tensor:
    """Volumes (m, x, y, z) after a step. `kind` is the step of one of them; the numbers are those of each."""
    match kind:
        case Stretch():
            return _stretched(volumes, numbers[:, None, None, None])
        case Power(_, invert):
            return _bent(volumes, numbers[:, None, None, None].float(), invert=invert)
        case step:
            for matrices in filter_matrices(step, volumes.shape[1:], numbers):
                # Each product leaves its axis as the last, so that after three all are where they were.
                m, n, *others = volumes.shape
                product = torch.bmm(volumes.reshape(m, n, -1).mT, matrices.mT)
                volumes = product.view(m, *others, n)
            return volumes


def _stretched(volumes: Tensor, factors: Tensor) -> Tensor:
    """`apply_contrast` for many volumes, by factors (m, 1, 1, 1) in double precision."""
    low, high = _limits(volumes)
    offsets = (_mean(volumes) * (1 - factors)).float()
    return torch.addcmul(offsets, volumes, factors.float()).clamp_(low, high)


def _bent(volumes: Tensor, exponents: Tensor, *, invert: bool) -> Tensor:
    """`apply_gamma` for many volumes, in their own memory, by exponents (m, 1, 1, 1)."""
    low, high = _limits(volumes)
    edge, span = (high, low - high) if invert else (low, high - low)
    mean, std = _moments(volumes)
    volumes.sub_(edge).div_(span.masked_fill(span == 0, 1)).pow_(exponents)
    bent_mean, bent_std = _moments(volumes)
    factor = torch.copysign(std / bent_std.clamp_min(1e-8), span)
    return torch.addcmul((mean - bent_mean * factor).float(), volumes, factor.float())


def _limits(volumes: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.aminmax(volumes.flatten(1), dim=1)
    return low[:, None, None, None], high[:, None, None, None]


def _moments(volumes: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, (m, 1, 1, 1) each: sums over rows in single, over all in double precision."""
    norms = torch.linalg.vector_norm(volumes, dim=-1, keepdim=True).double()
    mean = _mean(volumes)
    square = norms.square().sum(dim=(1, 2), keepdim=True) / volumes[0].numel()
    return mean, (square - mean.square()).clamp_min(0).sqrt()


def _mean(volumes: Tensor) -> Tensor:
    return volumes.sum(dim=-1, keepdim=True).double().sum(dim=(1, 2), keepdim=True) / volumes[0].numel()


def _sent(numbers: NDArray[np.float32] | NDArray[np.float64], device: torch.device) -> Tensor:
    """Numbers on the device. From pinned memory the copy runs on the current stream, and the host goes on."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
