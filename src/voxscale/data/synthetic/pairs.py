"""Volumes that a threshold cannot solve: balls to find, rods of the same brightness to ignore.

Both stand on a smooth background that varies more than their contrast, under noise. Files are named as
in MONAI's tutorials: `img{i}.nii.gz` and `seg{i}.nii.gz`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from voxscale.config.data import Synthetic
from voxscale.data.synthetic.shapes import Size, make_grid, make_rod, save_nifti, smooth_field, squared_distance

_CONTRAST, _BACKGROUND, _NOISE = 1.0, 1.5, 0.2
_UNITS = 100  # voxels are stored as 16-bit integers, this many to the contrast


def list_pairs(folder: Path, options: Synthetic) -> list[Callable[[], None]]:
    return [partial(_write_pair, folder, options, index) for index in range(options.cases)]


def make_volume(seed: int, index: int, size: Size) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Return (image_xyz, label_xyz); a pure function of its arguments."""
    rng = np.random.default_rng([seed, index])
    grid = make_grid(size)
    shortest = min(size)
    balls = np.zeros(size, dtype=bool)
    rods = np.zeros(size, dtype=bool)
    for _ in range(rng.integers(3, 6)):
        radius = rng.uniform(0.12, 0.2) * shortest
        balls |= squared_distance(grid, rng.uniform(radius, np.array(size) - radius)) < radius**2
    for _ in range(rng.integers(6, 10)):
        centre, direction = rng.uniform(0, size), rng.normal(size=3)
        rods |= make_rod(grid, centre, direction, radius=0.025 * shortest, half_length=0.4 * shortest)
    background = _BACKGROUND * smooth_field(rng, size)
    image = background + _CONTRAST * (balls | rods) + rng.normal(scale=_NOISE, size=size)
    return np.round(image * _UNITS).astype(np.int16), balls.astype(np.uint8)


def _write_pair(folder: Path, options: Synthetic, index: int) -> None:
    image, label = make_volume(options.seed, index, options.size)
    save_nifti(folder / f"img{index}.nii.gz", image, np.eye(4))
    save_nifti(folder / f"seg{index}.nii.gz", label, np.eye(4))
