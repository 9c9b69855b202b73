"""Predictions back on the grid of the image they were made for.

Codes are either numbers of exclusive classes (0 is background) or bits of overlapping regions. Where preparing a case
changed its resolution, each class's mask is interpolated and the largest share wins: borders become smooth, where the
nearest code would leave steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from voxscale.data.geometry import Geometry, resample

Floats = NDArray[np.float32]
Codes = NDArray[np.integer[Any]]
Axes = tuple["_Axis", "_Axis", "_Axis"]

_SLAB_VOXELS = 1 << 22
_BORDER_VOXELS = 1 << 18


def restore_codes(codes_xyz: Codes, geometry: Geometry, *, overlapping: bool) -> Codes:
    """Codes on the image's own grid; 0 where slices were dropped or cropped. Exact where nothing was resampled.

    Besides the result it needs memory for a slab only.
    """
    whole = np.zeros(geometry.shape, codes_xyz.dtype, order="F")  # as files have it
    inside = _inside(whole, geometry)
    if inside.shape == codes_xyz.shape:
        inside[...] = codes_xyz
    else:
        _interpolate_codes(codes_xyz, inside, overlapping=overlapping)
    return whole


def restore_channel(channel_xyz: Floats, geometry: Geometry, *, outside: float) -> Floats:
    """A channel of probabilities on the image's own grid; `outside` where slices were dropped or cropped."""
    whole = np.full(geometry.shape, outside, np.float32, order="F")
    inside = _inside(whole, geometry)
    inside[...] = resample(channel_xyz, inside.shape, linear=True)
    return whole


def _inside(whole: NDArray[Any], geometry: Geometry) -> NDArray[Any]:
    """The part that preparing kept, turned as it was: a view, through which `whole` is filled."""
    x, y, z = (slice(low, high) for low, high in geometry.crop)
    return geometry.turn(whole)[x, y, z]


@dataclass(frozen=True)
class _Axis:
    """For each place of the target: the two places of the source it lies between, and how near the second is."""

    low: NDArray[np.intp]
    high: NDArray[np.intp]
    weight: Floats

    @classmethod
    def between(cls, old: int, new: int) -> _Axis:
        at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        low = at.astype(np.intp)
        return cls(low, np.ceil(at).astype(np.intp), (at - low).astype(np.float32))

    def part(self, first: int, last: int) -> _Axis:
        return _Axis(self.low[first:last], self.high[first:last], self.weight[first:last])


def _interpolate_codes(codes_xyz: Codes, out_xyz: Codes, *, overlapping: bool) -> None:
    """Fill `out_xyz` slab by slab. Only borders need work: elsewhere all neighbours have the same code."""
    x, y, z = (_Axis.between(old, new) for old, new in zip(codes_xyz.shape, out_xyz.shape, strict=True))
    decide = _larger_half if overlapping else _largest_share
    thickness = max(1, _SLAB_VOXELS // (len(y.low) * len(z.low)))
    for first in range(0, len(x.low), thickness):
        axes = (x.part(first, first + thickness), y, z)
        least, most = _extremes(codes_xyz, axes)
        borders = np.flatnonzero(least != most)
        flat = least.reshape(-1)
        for some in range(0, len(borders), _BORDER_VOXELS):
            places = borders[some : some + _BORDER_VOXELS]
            flat[places] = decide(*_neighbours(codes_xyz, axes, np.unravel_index(places, least.shape)))
        out_xyz[first : first + thickness] = least


def _extremes(codes_xyz: Codes, axes: Axes) -> tuple[Codes, Codes]:
    """The smallest and the largest code among the neighbours of each place of the target."""
    least = most = codes_xyz
    for number, axis in enumerate(axes):
        least = np.minimum(least.take(axis.low, number), least.take(axis.high, number))
        most = np.maximum(most.take(axis.low, number), most.take(axis.high, number))
    return least, most


def _neighbours(codes_xyz: Codes, axes: Axes, places: tuple[NDArray[np.intp], ...]) -> tuple[Codes, Floats]:
    """The codes of the eight neighbours of each place, and how much each counts: (8, n) both."""
    codes, weights = [], []
    for corner in itertools.product((False, True), repeat=3):
        sides = list(zip(axes, places, corner, strict=True))
        x, y, z = ((axis.high if far else axis.low)[place] for axis, place, far in sides)
        codes.append(codes_xyz[x, y, z])
        shares = [axis.weight[place] if far else 1 - axis.weight[place] for axis, place, far in sides]
        weights.append(shares[0] * shares[1] * shares[2])
    return np.stack(codes), np.stack(weights)


def _largest_share(codes: Codes, weights: Floats) -> Codes:
    """The class that most of the neighbourhood is; of equal ones the first, so background before all."""
    best = np.zeros(codes.shape[1], np.float32)
    winner = np.zeros(codes.shape[1], codes.dtype)
    for code in codes:
        share = (weights * (codes == code)).sum(0)
        better = (share > best) | ((share == best) & (code < winner))
        np.copyto(best, share, where=better)
        np.copyto(winner, code, where=better)
    return winner


def _larger_half(codes: Codes, weights: Floats) -> Codes:
    """Each region by itself: whether more than half of the neighbourhood is inside."""
    winner = np.zeros(codes.shape[1], codes.dtype)
    for bit in range(int(codes.max()).bit_length()):
        share = (weights * (codes >> bit & 1)).sum(0)
        winner |= (share > 0.5).astype(codes.dtype) << bit
    return winner
