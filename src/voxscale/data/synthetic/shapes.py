"""What anatomies are made of: distances, rods, smooth random fields; and the file that holds a volume."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Size = tuple[int, int, int]
Floats = NDArray[np.float64]
Point = NDArray[np.float64] | Sequence[float]


def make_grid(size: Size) -> NDArray[np.float32]:
    """(3, x, y, z): where each voxel is, in voxels."""
    return np.stack(np.meshgrid(*(np.arange(n, dtype=np.float32) for n in size), indexing="ij"))


def make_unit_grid(size: Size) -> NDArray[np.float32]:
    """(3, x, y, z): where each voxel is, the volume reaching from -1 to 1 along every axis."""
    axes = [((np.arange(n) + 0.5) * 2 / n - 1).astype(np.float32) for n in size]
    return np.stack(np.meshgrid(*axes, indexing="ij"))


def squared_distance(grid: NDArray[np.float32], point: Point, radii: Point = (1, 1, 1)) -> Floats:
    """From each voxel to a point, each axis measured in its own radius: below 1 is inside that ellipsoid."""
    return np.asarray(sum(((axis - at) / r) ** 2 for axis, at, r in zip(grid, point, radii, strict=True)))


def make_rod(
    grid: NDArray[np.float32], centre: Point, direction: Point, *, radius: float, half_length: float
) -> NDArray[np.bool_]:
    direction = np.asarray(direction) / np.linalg.norm(direction)
    along = np.tensordot(direction, grid - np.asarray(centre)[:, None, None, None], axes=1)
    off_axis = squared_distance(grid, centre) - along**2
    return np.asarray((off_axis < radius**2) & (np.abs(along) < half_length))


def smooth_field(rng: np.random.Generator, size: Size, *, knots: int = 4) -> Floats:
    """Random values between -1 and 1 that vary smoothly; more `knots`, finer detail."""
    field = rng.normal(size=(knots, knots, knots))
    for length in size:  # an axis at a time: cubic splines are separable, and all three at once take far longer
        weights = ndimage.zoom(np.eye(knots), (length / knots, 1), order=3)
        field = np.tensordot(field, weights, axes=(0, 1))
    return np.asarray(field / np.abs(field).max())


def save_nifti(path: Path, voxels: NDArray[Any], affine: Floats) -> None:
    """Write a `.nii.gz` whose bytes depend on nothing but the arguments, not even on the time."""
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    path.write_bytes(gzip.compress(image.to_bytes(), compresslevel=1, mtime=0))
