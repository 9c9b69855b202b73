"""Augmentation: parameters are drawn first, from the sample's own random numbers, then applied.

`draw` says what will happen; `source_region` which voxels that needs. On a CPU `place` moves them into a row of the
batch, converted, interpolated, flipped and turned, and `adjust` changes intensities there, sample by sample, channel by
channel, in memory that is reused. On other devices `augment_batch` does the same for a whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from voxscale.config.base import Section
from voxscale.config.training import (
    Affine,
    Blur,
    Brightness,
    Contrast,
    Flip,
    Gamma,
    LowRes,
    Noise,
    Rotate90,
    Scale,
    Shift,
)
from voxscale.data.filters import (
    Scratch,
    apply_contrast,
    apply_gamma,
    blur_matrices,
    lowres_matrices,
    multiply_axes,
    resample,
)

Triple = tuple[int, int, int]
Turn = tuple[int, tuple[int, int]]
Box = tuple[EllipsisType | slice, ...]

_SLACK = 1e-3  # voxels; coordinates are computed in single precision


@dataclass(frozen=True)
class Linear:
    """`x * factor + offset`: any number of scales and shifts that follow one another."""

    factor: float
    offset: float


@dataclass(frozen=True)
class AddNoise:
    std: float
    seed: int


# One value per channel; None leaves the channel alone.
@dataclass(frozen=True)
class Multiply:
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Stretch:
    factors: tuple[float, ...]


@dataclass(frozen=True)
class Power:
    exponents: tuple[float, ...]
    invert: bool


@dataclass(frozen=True)
class Smooth:
    sigmas: tuple[tuple[float, ...] | None, ...]  # voxels, for each axis


@dataclass(frozen=True)
class Coarsen:
    zooms: tuple[float | None, ...]


ByVolume = Stretch | Power | Smooth | Coarsen
Step = Linear | AddNoise | Multiply | ByVolume


@dataclass(frozen=True, eq=False)
class Drawn:
    """What augmentation will do to one sample, drawn before anything is read.

    In space: interpolation, then flips, then turns, whatever the order of the list; intensities in its order, with None
    where chance left a transform out, so that the same place is the same transform in every sample.
    """

    matrix: NDArray[np.float64] | None  # (3, 3): offset from the patch's centre, in voxels, to that from the source's
    flips: tuple[int, ...]  # spatial axes 0..2
    turns: tuple[Turn, ...]  # number of quarter turns, plane
    intensity: tuple[Step | None, ...]


def draw(transforms: Sequence[Section], rng: np.random.Generator, *, channels: int) -> Drawn:
    """What the transforms will do to one sample. Draws the same count of numbers whatever comes out."""
    matrix: NDArray[np.float64] | None = None
    flips: set[int] = set()
    turns: list[Turn] = []
    steps: list[Step | None] = []
    before: Section | None = None
    for transform in transforms:
        match transform:
            case Flip():
                chances = rng.random(3)
                flips ^= {axis for axis in transform.axes if chances[axis] < transform.p}
            case Rotate90():
                chance, which = rng.random(2)
                if chance < transform.p:
                    turns.append((1 + int(which * 3), transform.axes))
            case Affine():
                matrix = _draw_matrix(transform, rng.random(6))
            case _:
                if not (isinstance(transform, Scale | Shift) and isinstance(before, Scale | Shift)):
                    steps.append(None)  # neighbours that are linear share a place
                _enter(steps, _draw_step(transform, rng, channels))
        before = transform
    return Drawn(matrix, tuple(sorted(flips)), tuple(turns), tuple(steps))


def source_region(drawn: Drawn, start: Triple, size: Triple) -> tuple[Triple, Triple]:
    """(start, size) of the box of voxels that fills the patch `[start, start + size)`; it may leave the volume."""
    if drawn.matrix is None:
        return start, size
    half = (np.array(size) - 1) / 2
    reach = np.abs(drawn.matrix) @ half + _SLACK
    low, high = np.floor(half - reach), np.ceil(half + reach)
    return _triple(low + start), _triple(high - low + 1)


def interpolation(
    drawn: Drawn, origin: Triple, source: Sequence[int], size: Triple
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """(matrix, centre): the finished patch's voxel at offset `p` from its centre shows `centre + matrix @ p`.

    The source may be less than `source_region` asked for: `origin` is where its first voxel lies in that region.
    """
    first, region = source_region(drawn, (0, 0, 0), size)
    if any(o < 0 or o + n > whole for o, n, whole in zip(origin, source, region, strict=True)):
        raise ValueError(f"a source of {tuple(source)} at {origin} leaves its region of {region}")
    if drawn.matrix is None:
        return None
    return drawn.matrix @ _permutation(drawn), (np.array(size) - 1) / 2 - first - origin


@torch.no_grad()
def place(
    drawn: Drawn,
    image: Tensor | Iterable[Tensor],
    label: Tensor,
    *,
    origin: Triple,
    out_image: Tensor,
    out_label: Tensor,
    scratch: Scratch,
) -> None:
    """Write one sample, image (c, x, y, z) and label (x, y, z), into its contiguous row of the batch, on a CPU.

    `origin` is as for `interpolation`; what is outside is zero. Every voxel of the row is written. Where nothing is
    interpolated, the image may come as its channels, one by one.
    """
    by_matrix = interpolation(drawn, origin, label.shape, _triple(out_label.shape))
    if by_matrix is None:
        _copy(drawn, image, label, box_of(origin, label.shape), out_image, out_label, scratch)
        return
    if not isinstance(image, Tensor):
        raise TypeError("only a copy takes channels one by one")
    resample(image, label, *by_matrix, out_image=out_image, out_label=out_label, scratch=scratch)


@torch.no_grad()
def adjust(image: Tensor, drawn: Drawn, *, scratch: Scratch) -> None:
    """Change the intensities of a contiguous float32 sample (c, x, y, z) in place, on a CPU."""
    for step in drawn.intensity:
        if step is not None:
            _apply(step, image, scratch)


def _triple(numbers: Iterable[float]) -> Triple:
    x, y, z = (int(number) for number in numbers)
    return x, y, z


def _draw_matrix(transform: Affine, drawn: NDArray[np.float64]) -> NDArray[np.float64] | None:
    rotates, scales = drawn[0] < transform.p_rotate, drawn[1] < transform.p_scale
    if not (rotates or scales):
        return None
    matrix = np.eye(3)
    if rotates:
        for axis, angle in enumerate(np.radians(transform.degrees) * (2 * drawn[2:5] - 1)):
            matrix = matrix @ _rotation(axis, angle)
    return matrix / _about_one(drawn[5], transform.scale) if scales else matrix


def _rotation(axis: int, angle: float) -> NDArray[np.float64]:
    first, second = (other for other in range(3) if other != axis)
    matrix = np.eye(3)
    matrix[first, first] = matrix[second, second] = np.cos(angle)
    matrix[first, second], matrix[second, first] = -np.sin(angle), np.sin(angle)
    return matrix


def _draw_step(transform: Section, rng: np.random.Generator, channels: int) -> Step | None:
    step: Step
    match transform:
        case Scale():
            chance, value = rng.random(2)
            step = Linear(1 + transform.by * (2 * value - 1), 0.0)
        case Shift():
            chance, value = rng.random(2)
            step = Linear(1.0, transform.by * (2 * value - 1))
        case Noise():
            chance, value, seed = rng.random(3)
            step = AddNoise(_between(value, transform.std), int(seed * 2**53))
        case Brightness():
            chance, *values = rng.random(1 + channels)
            step = Multiply(tuple(_about_one(value, transform.factor) for value in values))
        case Contrast():
            chance, *values = rng.random(1 + channels)
            step = Stretch(tuple(_about_one(value, transform.factor) for value in values))
        case Gamma():
            chance, *values = rng.random(1 + channels)
            step = Power(tuple(_about_one(value, transform.gamma) for value in values), transform.invert)
        case Blur():
            chance, *values = rng.random(1 + 4 * channels)
            chosen = np.reshape(values, (channels, 4))
            step = Smooth(
                tuple(
                    tuple(_between(value, transform.sigma) for value in sigmas) if share < transform.p_channel else None
                    for share, *sigmas in chosen
                )
            )
        case LowRes():
            chance, *values = rng.random(1 + 2 * channels)
            chosen = np.reshape(values, (channels, 2))
            step = Coarsen(
                tuple(_between(zoom, transform.zoom) if share < transform.p_channel else None for share, zoom in chosen)
            )
        case _:
            raise TypeError(f"no such transform: {transform!r}")
    return step if chance < transform.p else None


def _enter(steps: list[Step | None], step: Step | None) -> None:
    """Set the last step, or merge it with the one drawn before where both are linear: each is a pass over the image."""
    drawn = [place for place, other in enumerate(steps) if other is not None]
    if isinstance(step, Linear) and drawn and isinstance(last := steps[drawn[-1]], Linear):
        steps[drawn[-1]] = Linear(last.factor * step.factor, last.offset * step.factor + step.offset)
    elif step is not None:
        steps[-1] = step


def _between(share: float, limits: tuple[float, float]) -> float:
    return float(limits[0] + share * (limits[1] - limits[0]))


def _about_one(share: float, limits: tuple[float, float]) -> float:
    """A factor: as often below 1 as above where the limits hold 1, so that on the whole nothing grows or shrinks."""
    low, high = limits
    if not low < 1 < high:
        return _between(share, limits)
    return _between(2 * share, (low, 1)) if share < 0.5 else _between(2 * share - 1, (1, high))


def _permutation(drawn: Drawn) -> NDArray[np.float64]:
    """Flips and turns as a matrix from offsets in the finished patch to offsets in the one before them."""
    matrix = np.eye(3)
    matrix[drawn.flips, drawn.flips] = -1
    for count, (first, second) in drawn.turns:
        quarter = np.eye(3)
        quarter[[first, second]] = 0
        quarter[first, second], quarter[second, first] = 1, -1
        matrix = matrix @ np.linalg.matrix_power(quarter, count)
    return matrix


def box_of(origin: Triple, source: Sequence[int]) -> Box:
    """Where a source lies in the patch."""
    return (..., *(slice(o, o + n) for o, n in zip(origin, source, strict=True)))


def _copy(
    drawn: Drawn,
    channels: Iterable[Tensor],
    label: Tensor,
    box: Box,
    out_image: Tensor,
    out_label: Tensor,
    scratch: Scratch,
) -> None:
    """NumPy moves voxels along negative strides, torch converts them: each does its part several times faster."""
    padded = label.shape != out_label.shape
    stays = not (drawn.flips or drawn.turns)
    _move(drawn, label, box, out_label, padded)
    for channel, out in zip(channels, out_image, strict=True):
        if stays:
            if padded:
                out.zero_()
            out[box].copy_(channel)
        elif channel.dtype == out.dtype:
            _move(drawn, channel, box, out, padded)
        else:
            moved = scratch.take("moved", out.shape, channel.dtype)
            _move(drawn, channel, box, moved, padded)
            out.copy_(moved)


def _move(drawn: Drawn, source: Tensor, box: Box, out: Tensor, padded: bool) -> None:
    """Copy a (x, y, z) source into a view of `out` from which flips and turns have been taken back."""
    if padded:
        out.zero_()
    view = out.numpy()
    for count, plane in reversed(drawn.turns):
        view = np.rot90(view, -count, plane)
    np.copyto(np.flip(view, drawn.flips)[box], source.numpy())


def _apply(step: Step, image: Tensor, scratch: Scratch) -> None:
    """Change one image (c, x, y, z) in place."""
    match step:
        case Linear(factor, offset):
            # Adding to a scalar is one pass and needs no buffer; mul_ and add_ are two.
            torch.add(torch.tensor(offset, dtype=image.dtype), image, alpha=factor, out=image)
        case AddNoise(std, seed):
            generator = torch.Generator().manual_seed(seed)
            noise = scratch.take("noise", image.shape[1:], image.dtype)
            for channel in image:
                channel.add_(noise.normal_(generator=generator), alpha=std)
        case Multiply(factors):
            for channel, factor in zip(image, factors, strict=True):
                channel.mul_(factor)
        case Stretch(factors):
            for channel, factor in zip(image, factors, strict=True):
                apply_contrast(channel, factor)
        case Power(exponents, invert):
            for channel, exponent in zip(image, exponents, strict=True):
                apply_gamma(channel, exponent, invert=invert)
        case Smooth() | Coarsen():
            numbers = numbers_of(step)
            chosen = [channel for channel, number in zip(image, numbers, strict=True) if number is not None]
            if chosen:
                drawn = torch.tensor([number for number in numbers if number is not None], dtype=torch.float64)
                for channel, *matrices in zip(chosen, *filter_matrices(step, image.shape[1:], drawn), strict=True):
                    multiply_axes(channel, matrices, out=channel, scratch=scratch)


def numbers_of(step: ByVolume) -> tuple[float | tuple[float, ...] | None, ...]:
    """What was drawn for each channel; None leaves it alone."""
    match step:
        case Stretch(factors):
            return factors
        case Power(exponents):
            return exponents
        case Smooth(sigmas):
            return sigmas
        case Coarsen(zooms):
            return zooms


def filter_matrices(step: Smooth | Coarsen, size: Sequence[int], numbers: Tensor) -> list[Tensor]:
    """For each axis the matrices (m, n, n) of m volumes, from the numbers drawn for these, in double precision."""
    if isinstance(step, Coarsen):
        alike = {n: lowres_matrices(n, numbers) for n in set(size)}
        return [alike[n] for n in size]
    matrices: dict[int, Tensor] = {}
    for n in set(size):
        axes = [axis for axis in range(3) if size[axis] == n]
        sigmas = torch.cat([numbers[:, axis] for axis in axes])  # axes of one length in one go
        matrices |= zip(axes, blur_matrices(n, sigmas).chunk(len(axes)), strict=True)
    return [matrices[axis] for axis in range(3)]
