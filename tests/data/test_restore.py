"""Predictions come back to the very voxels of the image; where the resolution changed, with smooth borders."""

from __future__ import annotations

import tracemalloc

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates
from test_geometry import TURNS, geometries, kept_voxels, labels_like

from voxscale.config.data import Data
from voxscale.data.geometry import Geometry, make_geometry
from voxscale.data.restore import restore_channel, restore_codes

MANY = settings(max_examples=80, deadline=None)


def interpolated(volume: NDArray[np.float64], geometry: Geometry) -> NDArray[np.float64]:
    """The whole volume at the places of the turned and cropped image, by SciPy."""
    shape = [high - low for low, high in geometry.crop]
    axes = [(np.arange(new) + 0.5) * old / new - 0.5 for old, new in zip(volume.shape, shape, strict=True)]
    return map_coordinates(volume, np.meshgrid(*axes, indexing="ij"), order=1, mode="nearest")


def put_back(inside: NDArray[np.float64], geometry: Geometry, outside: float) -> NDArray[np.float64]:
    whole = np.full(geometry.shape, float(outside))
    x, y, z = (slice(*bounds) for bounds in geometry.crop)
    geometry.turn(whole)[x, y, z] = inside
    return whole


@pytest.mark.parametrize(("axes", "signs"), TURNS)
def test_from_each_of_the_48_orientations(axes: tuple[int, ...], signs: tuple[int, ...]) -> None:
    affine = np.zeros((4, 4))
    affine[axes, range(3)] = np.array(signs) * [1.0, 2.0, 3.0]
    affine[:, 3] = 10, 20, 30, 1
    codes = labels_like((4, 5, 6))
    prepared = np.asarray(nib.as_closest_canonical(nib.Nifti1Image(codes, affine)).dataobj)
    geometry = make_geometry(codes[None].astype(np.float32), affine, Data(source="x"))
    assert np.array_equal(restore_codes(prepared, geometry, overlapping=False), codes)


@MANY
@given(geometries(grow=False), st.booleans())
def test_without_resampling_the_way_back_is_exact(geometry: Geometry, overlapping: bool) -> None:
    label = labels_like(geometry.shape)
    restored = restore_codes(geometry.apply(label, linear=False), geometry, overlapping=overlapping)
    assert restored.dtype == label.dtype
    assert np.array_equal(restored, np.where(kept_voxels(geometry), label, 0))


@MANY
@given(geometries(), st.integers(1, 5), st.integers(0, 99))
def test_the_class_with_the_largest_share_wins(geometry: Geometry, classes: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, classes + 1, geometry.size, dtype=np.uint8)
    shares = np.stack([interpolated((codes == code).astype(float), geometry) for code in range(classes + 1)])
    ordered = np.sort(shares, axis=0)
    clear = ordered[-1] - ordered[-2] > 1e-4
    expected = put_back(shares.argmax(0), geometry, 0)
    restored = restore_codes(codes, geometry, overlapping=False)
    assert restored.dtype == np.uint8
    assert np.array_equal(np.where(put_back(clear, geometry, 1) > 0, restored, expected), expected)


@MANY
@given(geometries(), st.sampled_from([np.uint8, np.uint32]), st.integers(0, 99))
def test_each_region_is_where_more_than_half_is_inside(geometry: Geometry, dtype: type, seed: int) -> None:
    bits = np.dtype(dtype).itemsize * 8
    codes = np.random.default_rng(seed).integers(0, 2**bits, geometry.size, dtype=dtype)
    restored = restore_codes(codes, geometry, overlapping=True)
    for bit in (0, bits // 2, bits - 1):
        share = put_back(interpolated((codes >> bit & 1).astype(float), geometry), geometry, 0)
        clear = np.abs(share - 0.5) > 1e-4
        assert np.array_equal((restored >> bit & 1)[clear], (share > 0.5)[clear])


@MANY
@given(geometries(), st.integers(0, 99))
def test_probabilities_are_interpolated(geometry: Geometry, seed: int) -> None:
    channel = np.random.default_rng(seed).random(geometry.size, dtype=np.float32)
    restored = restore_channel(channel, geometry, outside=1.0)
    assert restored.dtype == np.float32
    assert np.allclose(restored, put_back(interpolated(channel.astype(float), geometry), geometry, 1.0), atol=1e-5)


def ball(shape: tuple[int, ...], radius: float) -> NDArray[np.bool_]:
    places = np.meshgrid(*[(np.arange(n) + 0.5) / n - 0.5 for n in shape], indexing="ij")
    return np.asarray(sum(place**2 for place in places) < radius**2)


def dice(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    return float(2 * (one & other).sum() / (one.sum() + other.sum()))


def test_borders_are_smoother_than_by_the_nearest_voxel() -> None:
    shape, affine = (60, 60, 60), np.eye(4)
    geometry = make_geometry(np.zeros((1, *shape), np.float32), affine, Data(source="x", spacing=(4.0, 4.0, 4.0)))
    coarse, truth = ball(geometry.size, 0.4).astype(np.uint8), ball(shape, 0.4)
    smooth = dice(restore_codes(coarse, geometry, overlapping=False) == 1, truth)
    steps = dice(geometry.restore(coarse) == 1, truth)
    assert smooth > steps + 0.005


def test_memory_stays_within_a_slab() -> None:
    shape = (160, 320, 320)
    geometry = make_geometry(
        np.zeros((1, *shape), np.float32), np.eye(4), Data(source="x", size=(80, 160, 160), orientation=None)
    )
    codes = ball(geometry.size, 0.45).astype(np.uint8) + ball(geometry.size, 0.3)
    tracemalloc.start()
    restored = restore_codes(codes, geometry, overlapping=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert set(np.unique(restored)) == {0, 1, 2}
    assert peak < restored.nbytes + 100 * 2**20
    assert restored.size * 4 * 3 > 180 * 2**20, "three floats a voxel would not have fitted"
