"""Synthetic volumes that a threshold cannot solve: balls to find, rods of the same brightness to ignore.

Both stand on a smooth background that varies more than their contrast, under noise. Files are named as
row 0's: `img{i}.nii.gz` and `seg{i}.nii.gz`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from voxscale.config.load import plain
from voxscale.config.schema import Synthetic
from voxscale.errors import DataError, InfrastructureError
from voxscale.files import locked, publish, read_json, write_json
from voxscale.terminal import progress

_CONTRAST, _BACKGROUND, _NOISE = 1.0, 1.5, 0.2
_RECORD = "synthetic.json"
_UNITS = 100  # voxels are stored as 16-bit integers, this many to the contrast


def ensure_synthetic(folder: Path, options: Synthetic, *, threads: int = 1) -> None:
    """Fill `folder` with generated pairs unless it is there. It appears whole or not at all."""
    try:
        if not folder.exists():
            with locked(folder.parent / f".{folder.name}.lock"):
                if not folder.exists():
                    _write_pairs(folder, options, threads)
    except OSError as error:
        raise InfrastructureError(
            f"data.source {folder}: cannot be written: {error.strerror}", fix="choose a place that can be written"
        ) from error
    try:
        made_from = read_json(folder / _RECORD)
    except (OSError, ValueError):
        made_from = None
    if made_from != plain(options):
        raise DataError(
            f"data.source {folder}: made from {made_from or 'something else'}, expected {plain(options)}",
            fix="name a folder that does not exist, or drop data.synthetic to use what is there",
        )


def make_volume(seed: int, index: int, size: tuple[int, int, int]) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Return (image_xyz, label_xyz); a pure function of its arguments."""
    rng = np.random.default_rng([seed, index])
    grid = np.stack(np.meshgrid(*(np.arange(n, dtype=np.float32) for n in size), indexing="ij"))
    shortest = min(size)
    balls = np.zeros(size, dtype=bool)
    rods = np.zeros(size, dtype=bool)
    for _ in range(rng.integers(3, 6)):
        radius = rng.uniform(0.12, 0.2) * shortest
        balls |= _squared_distance(grid, rng.uniform(radius, np.array(size) - radius)) < radius**2
    for _ in range(rng.integers(6, 10)):
        centre, direction = rng.uniform(0, size), rng.normal(size=3)
        direction /= np.linalg.norm(direction)
        along = np.tensordot(direction, grid - centre[:, None, None, None], axes=1)
        off_axis = _squared_distance(grid, centre) - along**2
        rods |= (off_axis < (0.025 * shortest) ** 2) & (np.abs(along) < 0.4 * shortest)
    background = ndimage.zoom(rng.normal(size=(4, 4, 4)), np.array(size) / 4, order=3)
    background *= _BACKGROUND / np.abs(background).max()
    image = background + _CONTRAST * (balls | rods) + rng.normal(scale=_NOISE, size=size)
    return np.round(image * _UNITS).astype(np.int16), balls.astype(np.uint8)


def _squared_distance(grid: NDArray[np.float32], point: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(sum((axis - at) ** 2 for axis, at in zip(grid, point, strict=True)))


def _write_pairs(folder: Path, options: Synthetic, threads: int) -> None:
    with (
        publish(folder) as temporary,
        progress("making volumes", options.cases) as advance,
        ThreadPoolExecutor(threads) as pool,
    ):
        temporary.mkdir()

        def write(index: int) -> None:
            image, label = make_volume(options.seed, index, options.size)
            nib.save(nib.Nifti1Image(image, np.eye(4)), temporary / f"img{index}.nii.gz")
            nib.save(nib.Nifti1Image(label, np.eye(4)), temporary / f"seg{index}.nii.gz")
            advance()

        write_json(temporary / _RECORD, plain(options))
        for done in [pool.submit(write, index) for index in range(options.cases)]:
            done.result()
