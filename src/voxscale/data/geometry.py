"""From a file's own grid to the grid that is trained on, and back: slices, orientation, crop, resampling.

Axes are the last three of an array; what comes before (channels) is carried along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from nibabel.affines import voxel_sizes
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform
from numpy.typing import NDArray

from voxscale.config.data import Data
from voxscale.errors import DataError

MAX_VOXELS = 2**31  # a header that promises more is taken for a decompression bomb
MAX_BYTES = 4 * MAX_VOXELS

Shape = tuple[int, int, int]
Range = tuple[int, int]
Ranges = tuple[Range, Range, Range]


@dataclass(frozen=True)
class Geometry:
    """The steps from a file's grid to the prepared one. `axes` and `flips` turn; `crop` is in turned axes."""

    shape: Shape
    affine: tuple[tuple[float, ...], ...]
    slices: Ranges
    axes: tuple[int, int, int]
    flips: tuple[bool, bool, bool]
    crop: Ranges
    size: Shape

    def turn(self, volume: NDArray[Any]) -> NDArray[Any]:
        """Drop slices and turn the axes; a view."""
        kept = _within(volume, self.slices)
        lead = kept.ndim - 3
        turned = kept.transpose(*range(lead), *(lead + axis for axis in self.axes))
        return np.flip(turned, tuple(lead + axis for axis in range(3) if self.flips[axis]))

    def apply(self, volume: NDArray[Any], *, linear: bool) -> NDArray[Any]:
        """All steps forward: interpolated for images, nearest for labels."""
        return resample(_within(self.turn(volume), self.crop), self.size, linear=linear)

    def restore(self, volume: NDArray[Any], *, linear: bool = False) -> NDArray[Any]:
        """All steps back, onto the grid of the file; what was dropped on the way is zero."""
        lead = volume.shape[:-3]
        whole = np.zeros((*lead, *self.shape), dtype=volume.dtype)
        inside = _within(self.turn(whole), self.crop)  # a view: writing fills `whole`
        inside[...] = resample(volume, inside.shape[-3:], linear=linear)
        return whole

    @property
    def prepared_affine(self) -> NDArray[np.float64]:
        """Where the prepared grid lies in space."""
        offset = np.eye(4)
        offset[:3, 3] = [low for low, _ in self.slices]
        kept = tuple(high - low for low, high in self.slices)
        turn = np.array([[axis, -1 if flip else 1] for axis, flip in zip(self.axes, self.flips, strict=True)], float)
        back = np.empty((3, 2))  # nibabel states a turn by source axis, this class by target axis
        back[turn[:, 0].astype(int)] = np.stack([np.arange(3), turn[:, 1]], axis=1)
        crop = np.eye(4)
        crop[:3, 3] = [low for low, _ in self.crop]
        scale = [(high - low) / new for (low, high), new in zip(self.crop, self.size, strict=True)]
        zoom = np.diag([*scale, 1.0])
        zoom[:3, 3] = [(step - 1) / 2 for step in scale]  # voxels are boxes: their outer borders stay
        return np.asarray(np.array(self.affine) @ offset @ inv_ornt_aff(back, kept) @ crop @ zoom)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Geometry:
        def nested(value: Any) -> Any:
            return tuple(nested(item) for item in value) if isinstance(value, list) else value

        return cls(**{name: nested(content[name]) for name in cls.__dataclass_fields__})


def make_geometry(image_cxyz: NDArray[np.float32], affine: NDArray[np.float64], data: Data) -> Geometry:
    """The steps that `data` asks for, for a volume on this grid."""
    shape: Shape = image_cxyz.shape[1], image_cxyz.shape[2], image_cxyz.shape[3]
    slices = _kept_slices(shape, data)
    axes, flips = _turn(affine, data.orientation)
    x, y, z = (slices[axis][1] - slices[axis][0] for axis in axes)
    placed = tuple(tuple(float(value) for value in row) for row in affine)
    geometry = Geometry(shape, placed, slices, axes, flips, crop=((0, x), (0, y), (0, z)), size=(x, y, z))
    crop = _foreground_box(geometry.turn(image_cxyz), data) if data.crop_foreground else geometry.crop
    return replace(geometry, crop=crop, size=_prepared_size(crop, voxel_sizes(affine)[list(axes)], data))


def _prepared_size(crop: Ranges, spacing_mm: NDArray[np.float64], data: Data) -> Shape:
    x, y, z = data.size or (high - low for low, high in crop)
    if data.spacing is not None:
        x, y, z = (max(1, round(n * own / to)) for n, own, to in zip((x, y, z), spacing_mm, data.spacing, strict=True))
    if x * y * z > MAX_VOXELS:
        raise DataError(f"resampled to {(x, y, z)}, more voxels than a volume may have", fix="widen data.spacing")
    return x, y, z


def resample(volume: NDArray[Any], size: tuple[int, ...], *, linear: bool) -> NDArray[Any]:
    """Bring the last three axes to `size`, each axis by itself; the outer borders of the grid stay where they are."""
    for axis, new in enumerate(size, start=volume.ndim - 3):
        old = volume.shape[axis]
        if old == new:
            continue
        at = (np.arange(new) + 0.5) * old / new
        if not linear:
            volume = volume.take(np.minimum(at.astype(np.intp), old - 1), axis)
            continue
        at = np.clip(at - 0.5, 0, old - 1)
        low = at.astype(np.intp)
        weight = (at - low).astype(np.float32).reshape(-1, *[1] * (volume.ndim - 1 - axis))
        first, second = volume.take(low, axis), volume.take(np.minimum(low + 1, old - 1), axis)
        volume = (first + (second - first) * weight).astype(volume.dtype)
    return volume


def _within(volume: NDArray[Any], ranges: Ranges) -> NDArray[Any]:
    x, y, z = (slice(low, high) for low, high in ranges)
    return volume[..., x, y, z]


def _kept_slices(shape: Shape, data: Data) -> Ranges:
    kept = []
    for name, n in zip("xyz", shape, strict=True):
        asked = getattr(data.slices, name, None) or (0, None)
        low, high, _ = slice(*asked).indices(n)
        if low >= high:
            raise DataError(
                f"data.slices {name} {list(asked)} leaves nothing of {n} slices", fix="keep at least one slice"
            )
        kept.append((low, high))
    return kept[0], kept[1], kept[2]


def _turn(affine: NDArray[np.float64], orientation: str | None) -> tuple[Shape, tuple[bool, bool, bool]]:
    """For each target axis, the source axis it is taken from and whether it is reversed."""
    if orientation is None:
        return (0, 1, 2), (False, False, False)
    turn = ornt_transform(io_orientation(affine), axcodes2ornt(tuple(orientation)))
    sources = np.argsort(turn[:, 0])
    x, y, z = ((int(axis), bool(turn[axis, 1] < 0)) for axis in sources)
    return (x[0], y[0], z[0]), (x[1], y[1], z[1])


def _foreground_box(image_cxyz: NDArray[np.float32], data: Data) -> Ranges:
    """The box around what is not background: above the window, or not zero where no window is given."""
    window = data.intensity.window
    mask = np.asarray((image_cxyz > window[0] if window is not None else image_cxyz != 0).any(axis=0))
    box = []
    for axis in range(3):
        places = np.flatnonzero(mask.any(axis=tuple(other for other in range(3) if other != axis)))
        box.append((int(places[0]), int(places[-1]) + 1) if len(places) else (0, mask.shape[axis]))
    return box[0], box[1], box[2]
