"""A brain with a tumour in four MR sequences: nothing in it is told by one threshold.

Oedema shines in FLAIR as much as parts of the cortex do, the tumour's rim in T1 with contrast as much as vessels do,
and fluid in T2; a smooth bias brightens one side of every sequence over the other, under noise. What lies where, and
the sequences together, tell them apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from voxscale.data.synthetic.shapes import Size, make_rod, make_unit_grid, smooth_field, squared_distance

CHANNELS = ("FLAIR", "T1w", "t1gd", "T2w")
EDEMA, CORE, ENHANCING = 1, 2, 3

# Brightness of each tissue in each sequence, in the order of CHANNELS.
_WHITE, _GREY, _FLUID = (0.50, 0.75, 0.75, 0.42), (0.78, 0.55, 0.55, 0.68), (0.15, 0.20, 0.20, 1.00)
_VESSEL = (0.45, 0.60, 1.15, 0.35)
_TUMOUR = {EDEMA: (1.00, 0.50, 0.50, 0.85), CORE: (0.65, 0.30, 0.30, 0.80), ENHANCING: (0.85, 0.50, 1.15, 0.72)}
_BIAS, _NOISE, _BLUR = 0.40, 0.08, 0.5
_UNITS = 400  # voxels are whole numbers, as scanners write them


def make_brain(seed: int, index: int, size: Size) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return (image_cxyz, label_xyz), zero outside the brain; a pure function of its arguments.

    Labels are Decathlon's: 1 oedema, 2 non-enhancing core, 3 enhancing rim around the core.
    """
    rng = np.random.default_rng([seed, index])
    grid = make_unit_grid(size)
    depth = 1 - np.sqrt(squared_distance(grid, rng.uniform(-0.05, 0.05, 3), rng.uniform(0.82, 0.92, 3)))
    depth += 0.05 * smooth_field(rng, size)
    brain = depth > 0
    tissue = np.where((depth < 0.18 + 0.08 * smooth_field(rng, size, knots=8))[..., None], _GREY, _WHITE)
    tissue[_make_ventricles(rng, grid)] = _FLUID
    for _ in range(rng.integers(8, 13)):
        centre, direction = rng.uniform(-0.6, 0.6, 3), rng.normal(size=3)
        tissue[make_rod(grid, centre, direction, radius=2.4 / min(size), half_length=0.5)] = _VESSEL
    label = np.where(brain, _make_tumour(rng, grid, size), 0).astype(np.uint8)
    for value, brightness in _TUMOUR.items():
        tissue[label == value] = brightness
    image = np.stack([_scan(rng, channel, size) for channel in np.moveaxis(tissue, -1, 0)])
    return np.where(brain, np.maximum(1, np.round(image * _UNITS)), 0).astype(np.float32), label


def _make_ventricles(rng: np.random.Generator, grid: NDArray[np.float32]) -> NDArray[np.bool_]:
    wide, long = rng.uniform(0.08, 0.13), rng.uniform(0.3, 0.45)
    sides = [squared_distance(grid, (side, 0.05, 0.1), (wide, long, 0.22)) < 1 for side in (-0.15, 0.15)]
    return np.asarray(sides[0] | sides[1])


def _make_tumour(rng: np.random.Generator, grid: NDArray[np.float32], size: Size) -> NDArray[np.uint8]:
    """Nested by construction: the core lies in the rim, the rim in the oedema."""
    side = rng.choice([-1, 1])
    centre = np.array([side * rng.uniform(0.25, 0.45), rng.uniform(-0.4, 0.4), rng.uniform(-0.3, 0.3)])
    whole = rng.uniform(0.34, 0.5)
    rough = 0.25 * smooth_field(rng, size, knots=8)
    radii = whole * rng.uniform(0.85, 1.15, 3)
    outer = np.sqrt(squared_distance(grid, centre, radii)) + rough
    inner_centre = centre + radii * rng.uniform(-0.12, 0.12, 3)
    inner = np.sqrt(squared_distance(grid, inner_centre, radii * rng.uniform(0.6, 0.7))) + rough
    return np.select([(outer < 1) & (inner < 0.55), (outer < 1) & (inner < 1), outer < 1], [CORE, ENHANCING, EDEMA], 0)


def _scan(rng: np.random.Generator, channel: NDArray[np.float64], size: Size) -> NDArray[np.float64]:
    """What a scanner makes of it: blurred, brighter on one side, at a gain of its own, noisy."""
    blurred = ndimage.gaussian_filter(channel, _BLUR)
    bias = 1 + _BIAS * smooth_field(rng, size, knots=2)
    return np.asarray(rng.uniform(0.8, 1.25) * (blurred * bias + rng.normal(scale=_NOISE, size=size)))
