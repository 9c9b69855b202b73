"""An abdomen in CT with thirteen organs, in Hounsfield units.

Organs lie at their places in the body, each moved, stretched and brightened a little from case to case. Their contrast
is better than a scanner's, but kidneys and adrenals are alike on both sides, and some organs are nearly as bright as
others: brightness alone does not name them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from voxscale.data.synthetic.shapes import Size, make_unit_grid, smooth_field, squared_distance


class Organ(NamedTuple):
    """An ellipsoid: `centre` and `radii` as shares of half the body, along right, anterior and superior."""

    name: str
    hounsfield: float
    centre: tuple[float, float, float]
    radii: tuple[float, float, float]


# In the order of BTCV's labels, from 1.
ORGANS = (
    Organ("spleen", 150, (-0.60, -0.20, 0.40), (0.20, 0.28, 0.28)),
    Organ("rkid", 215, (0.44, -0.42, -0.28), (0.19, 0.19, 0.30)),
    Organ("lkid", 215, (-0.44, -0.42, -0.22), (0.19, 0.19, 0.30)),
    Organ("gall", -10, (0.32, 0.40, -0.12), (0.16, 0.17, 0.18)),
    Organ("eso", 40, (-0.06, -0.04, 0.80), (0.12, 0.12, 0.28)),
    Organ("liver", 120, (0.38, 0.08, 0.38), (0.40, 0.46, 0.38)),
    Organ("sto", 75, (-0.36, 0.30, 0.38), (0.26, 0.28, 0.28)),
    Organ("aorta", 240, (-0.10, -0.28, 0.00), (0.11, 0.11, 1.60)),
    Organ("IVC", 185, (0.15, -0.24, 0.00), (0.11, 0.11, 1.60)),
    Organ("veins", 170, (0.08, 0.06, 0.16), (0.34, 0.12, 0.12)),
    Organ("pancreas", 100, (-0.10, 0.14, -0.14), (0.34, 0.15, 0.14)),
    Organ("rad", 15, (0.32, -0.34, 0.16), (0.13, 0.12, 0.13)),
    Organ("lad", 15, (-0.32, -0.34, 0.18), (0.13, 0.12, 0.13)),
)

_AIR, _FAT, _MUSCLE, _BONE = -1000, -100, 50, 450
_NOISE, _TEXTURE = 8.0, 8.0


def make_abdomen(seed: int, index: int, size: Size) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Return (image_xyz in HU, label_xyz), axes to the right, to the front and up; a pure function of its arguments."""
    rng = np.random.default_rng([seed, index])
    grid = make_unit_grid(size)
    girth = rng.uniform(0.86, 0.94)
    around = np.sqrt(squared_distance(grid[:2], (0, 0), (girth, 0.8 * girth)))
    image = np.select([around > 1, around > rng.uniform(0.86, 0.92)], [_AIR, _FAT], _MUSCLE).astype(np.float64)
    image[squared_distance(grid[:2], (0, -0.56), (0.13, 0.13)) < 1] = _BONE
    label = np.zeros(size, np.uint8)
    # The small ones last: they lie on what is larger and must not vanish below it.
    for value, organ in sorted(enumerate(ORGANS, start=1), key=lambda item: -np.prod(item[1].radii)):
        mask = _place(rng, organ, grid, girth)
        image[mask] = organ.hounsfield + rng.normal(scale=5)
        label[mask] = value
    body = around <= 1
    image += np.where(body, _TEXTURE * smooth_field(rng, size, knots=8), 0) + rng.normal(scale=_NOISE, size=size)
    return np.clip(np.round(image), -1024, 3071).astype(np.int16), label


def _place(rng: np.random.Generator, organ: Organ, grid: NDArray[np.float32], girth: float) -> NDArray[np.bool_]:
    """The organ's voxels in this body; at least the one at its centre, however coarse the grid."""
    centre = girth * (np.array(organ.centre) + rng.uniform(-0.03, 0.03, 3))
    distance = squared_distance(grid, centre, girth * np.array(organ.radii) * rng.uniform(0.9, 1.1, 3))
    return np.asarray(distance < max(1.0, distance.min() * 1.0001))
