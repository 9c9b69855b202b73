"""Distances between surfaces, against MONAI's and against every pair of voxels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from monai.metrics import compute_hausdorff_distance, compute_surface_dice
from monai.metrics.utils import get_edge_surface_distance
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial.distance import cdist

from voxscale.tasks.surface import Spacing, hd95, surface_dice, surface_distances

EDGES = some.sampled_from([0.4, 0.7, 1.0, 1.5, 3.0])
SPACINGS = some.tuples(EDGES, EDGES, EDGES)
SHAPES = some.tuples(some.integers(1, 14), some.integers(1, 14), some.integers(1, 14))


def blob(seed: int, shape: tuple[int, int, int], share: float) -> NDArray[np.bool_]:
    """A smooth random mask of about that share of the voxels, one at least; it may touch the borders."""
    field = ndimage.gaussian_filter(np.random.default_rng(seed).standard_normal(shape), 1.5)
    return np.asarray(field >= np.quantile(field, 1 - share))


@settings(max_examples=80, deadline=None)
@given(some.integers(0, 2**32), SHAPES, some.floats(0, 0.9), some.floats(0, 0.9), SPACINGS, some.floats(0.1, 5))
def test_agrees_with_monai(
    seed: int, shape: tuple[int, int, int], first: float, second: float, spacing: Spacing, tolerance: float
) -> None:
    masks = blob(seed, shape, first), blob(seed + 1, shape, second)
    distances = surface_distances(*masks, spacing)
    pair = [torch.from_numpy(mask) for mask in masks]
    _, theirs, _ = get_edge_surface_distance(*pair, spacing=spacing, symmetric=True)
    assert hd95(distances) == pytest.approx(max(np.percentile(part.double(), 95) for part in theirs), rel=1e-6)
    predicted, labelled = (mask[None, None] for mask in pair)
    far = compute_hausdorff_distance(predicted, labelled, include_background=True, percentile=95, spacing=spacing)
    assert hd95(distances) == pytest.approx(float(far), rel=1e-4), "MONAI takes the percentile in single precision"
    near = compute_surface_dice(predicted, labelled, [tolerance], include_background=True, spacing=spacing)
    assert surface_dice(distances, tolerance) == pytest.approx(float(near), rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(some.integers(0, 2**32), SPACINGS, some.integers(1, 3), some.sampled_from([0, 1, 2]))
def test_a_distance_of_just_the_tolerance_is_within_it(seed: int, spacing: Spacing, steps: int, axis: int) -> None:
    """However 3 × 0.7 mm comes out in binary."""
    at = np.random.default_rng(seed).integers(0, 6, 3)
    masks = np.zeros((2, 9, 9, 9), np.bool_)
    masks[0][tuple(at)] = True
    at[axis] += steps
    masks[1][tuple(at)] = True
    distances = surface_distances(*masks, spacing)
    assert surface_dice(distances, steps * spacing[axis]) == 1.0
    assert surface_dice(distances, steps * spacing[axis] * 0.999) == 0.0


@settings(max_examples=50, deadline=None)
@given(some.integers(0, 2**32), some.floats(0, 0.6), some.floats(0, 0.6), SPACINGS)
def test_distances_are_those_to_the_nearest(seed: int, first: float, second: float, spacing: Spacing) -> None:
    masks = [blob(seed + n, (7, 8, 6), share) for n, share in enumerate((first, second))]
    places = [np.argwhere(mask & ~ndimage.binary_erosion(mask)) * spacing for mask in masks]
    pairs = cdist(*places)
    there, back = surface_distances(*masks, spacing)
    assert np.allclose(np.sort(there), np.sort(pairs.min(1)), rtol=1e-12)
    assert np.allclose(np.sort(back), np.sort(pairs.min(0)), rtol=1e-12)


def test_two_planes_two_millimetres_apart() -> None:
    masks = np.zeros((2, 5, 4, 4), np.bool_)
    masks[0][1] = masks[1][2] = True
    distances = surface_distances(*masks, (2.0, 1.0, 1.0))
    assert hd95(distances) == 2.0
    assert (surface_dice(distances, 1.9), surface_dice(distances, 2.0)) == (0.0, 1.0)
