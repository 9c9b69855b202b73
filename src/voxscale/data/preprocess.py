"""From a case as its files have it to what is trained on: one grid, one intensity scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from voxscale.config.data import Data, Intensity
from voxscale.data.geometry import Geometry, make_geometry
from voxscale.data.room import refuse_beyond_memory
from voxscale.data.volumes import Floats, Labels, RawCase

Doubles = NDArray[np.float64]

_BLOCK = 1 << 18  # voxels


@dataclass(frozen=True)
class PreparedCase:
    image_cxyz: Floats
    label_xyz: Labels | None
    geometry: Geometry


def preprocess(raw: RawCase, data: Data) -> PreparedCase:
    """Slices, orientation, crop, resampling, intensity: in this order. Raises MemoryError where that has no room."""
    geometry = make_geometry(raw.image_cxyz, raw.affine, data)
    refuse_beyond_memory(geometry, len(raw.image_cxyz))
    image_cxyz = normalise(geometry.apply(raw.image_cxyz, linear=True), data.intensity)
    label_xyz = None if raw.label_xyz is None else geometry.apply(raw.label_xyz, linear=False)
    return PreparedCase(image_cxyz, label_xyz, geometry)


def normalise(image_cxyz: Floats, intensity: Intensity) -> Floats:
    """Bring each channel to one scale. Besides the result it needs memory for a block, or a channel for percentiles."""
    scaled_cxyz = np.array(image_cxyz, np.float32, order="C")
    for channel in scaled_cxyz:
        _normalise_channel(channel.reshape(-1), intensity)
    return scaled_cxyz


def _normalise_channel(voxels: Floats, intensity: Intensity) -> None:
    if intensity.window is not None:
        _rescale(voxels, *intensity.window)
    elif intensity.percentiles is not None:
        low, high = np.percentile(voxels, intensity.percentiles)
        _rescale(voxels, float(low), float(high))
    elif intensity.zscore is not None:
        _standardise(voxels, all_voxels=intensity.zscore == "all")


def _rescale(voxels: Floats, low: float, high: float) -> None:
    voxels -= low
    voxels /= max(high - low, 1e-8)
    np.clip(voxels, 0, 1, out=voxels)


def _standardise(voxels: Floats, *, all_voxels: bool) -> None:
    """In double precision, block by block: the whole channel in it would be twice its own size."""
    count = len(voxels) if all_voxels else int(np.count_nonzero(voxels))
    if not count:
        return
    mean = _sum_of(_Counted(voxels, all_voxels), count, lambda block: block) / count
    variance = _sum_of(_Counted(voxels, all_voxels), count, lambda block: (block - mean) ** 2) / count
    deviation = np.sqrt(variance) or 1.0
    for first in range(0, len(voxels), _BLOCK):
        block = voxels[first : first + _BLOCK]
        scaled = (block.astype(np.float64) - mean) / deviation
        block[...] = scaled if all_voxels else np.where(block != 0, scaled, 0)


class _Counted:
    """The voxels that count, from first to last, as many at a time as are asked for."""

    def __init__(self, voxels: Floats, all_voxels: bool) -> None:
        blocks = (voxels[first : first + _BLOCK] for first in range(0, len(voxels), _BLOCK))
        self._blocks = blocks if all_voxels else (block[block != 0] for block in blocks)
        self._left = voxels[:0]

    def take(self, count: int) -> Doubles:
        parts = [self._left]
        while sum(map(len, parts)) < count:
            parts.append(next(self._blocks))
        joined = np.concatenate(parts)
        self._left = joined[count:]
        return joined[:count].astype(np.float64)


def _sum_of(counted: _Counted, count: int, of: Callable[[Doubles], Doubles]) -> np.float64:
    """The sum over the next voxels, halved as numpy halves a long array: the same to the last bit, so stores stay."""
    if count <= _BLOCK:
        return np.float64(of(counted.take(count)).sum())
    half = count // 2 - count // 2 % 8
    return _sum_of(counted, half, of) + _sum_of(counted, count - half, of)
