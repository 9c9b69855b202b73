"""Images in CIFAR-10's binary form, of ten classes that differ in shape and colour."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from voxscale.data.formats.cifar10 import BATCHES, NAMES
from voxscale.data.images import CIFAR10_EDGE
from voxscale.files import publish

# In the order of their numbers. Five shapes in two colours: neither shape nor colour alone names a class.
CLASSES = (
    *("warm disc", "warm ring", "warm square", "warm cross", "warm stripes"),
    *("cold disc", "cold ring", "cold square", "cold cross", "cold stripes"),
)
_WARM, _COLD = (210.0, 110.0, 60.0), (60.0, 110.0, 210.0)
_NOISE = 20.0

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]


def write_cifar10(folder: Path, *, per_batch: int, seed: int = 0) -> None:
    """Make a new folder with the six batches, `per_batch` records in each, and the names of the classes."""
    with publish(folder) as temporary:
        temporary.mkdir()
        (temporary / NAMES).write_text("".join(f"{name}\n" for name in CLASSES) + "\n")  # as the original ends
        for number, name in enumerate(BATCHES):
            _write_batch(temporary / name, per_batch, [seed, number])


def make_picture(rng: np.random.Generator, number: int) -> Pixels:
    """(3, y, x): the class of that number, at a place, size and shade of its own."""
    base = np.array(_WARM if number < 5 else _COLD)[:, None, None] * rng.uniform(0.8, 1.2)
    mask = _SHAPES[number % 5](*_place(rng), rng.uniform(0.35, 0.6))
    background = rng.uniform(40, 200) + np.zeros((3, 1, 1))
    picture = np.where(mask, base, background) + rng.normal(scale=_NOISE, size=(3, CIFAR10_EDGE, CIFAR10_EDGE))
    return np.clip(np.round(picture), 0, 255).astype(np.uint8)


def _write_batch(path: Path, records: int, seed: list[int]) -> None:
    """The classes in turn, so that each has its share, however few records there are; then in no order."""
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(np.arange(records) % len(CLASSES)).tolist()
    path.write_bytes(b"".join(bytes([number]) + make_picture(rng, number).tobytes() for number in numbers))


def _place(rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(x, y) of every pixel, seen from somewhere near the middle, the picture reaching from -1 to 1."""
    axis = (np.arange(CIFAR10_EDGE) + 0.5) * 2 / CIFAR10_EDGE - 1
    x, y = rng.uniform(-0.25, 0.25, 2)
    return axis[None, :] - x, axis[:, None] - y


def _disc(x: NDArray[np.float64], y: NDArray[np.float64], radius: float) -> Mask:
    return np.asarray(x**2 + y**2 < radius**2)


def _ring(x: NDArray[np.float64], y: NDArray[np.float64], radius: float) -> Mask:
    return np.asarray(_disc(x, y, radius) & ~_disc(x, y, 0.55 * radius))


def _square(x: NDArray[np.float64], y: NDArray[np.float64], radius: float) -> Mask:
    return np.asarray(np.maximum(np.abs(x), np.abs(y)) < 0.85 * radius)


def _cross(x: NDArray[np.float64], y: NDArray[np.float64], radius: float) -> Mask:
    arms = np.minimum(np.abs(x), np.abs(y)) < 0.25 * radius
    return np.asarray(arms & (np.maximum(np.abs(x), np.abs(y)) < radius))


def _stripes(x: NDArray[np.float64], y: NDArray[np.float64], radius: float) -> Mask:
    return np.asarray((np.floor(3 * x / radius) % 2 == 0) & (np.abs(x) < radius) & (np.abs(y) < radius))


_SHAPES = (_disc, _ring, _square, _cross, _stripes)
