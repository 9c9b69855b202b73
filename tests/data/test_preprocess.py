"""Preprocessing: intensities as the obvious formula has them, labels with the values they had."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from voxscale.config.data import Data, Intensity
from voxscale.data.preprocess import normalise, preprocess
from voxscale.data.volumes import RawCase

MANY = settings(max_examples=80, deadline=None)


@st.composite
def images(draw: st.DrawFn) -> NDArray[np.float32]:
    """Two channels on scales of their own, with a share of zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    levels, spreads = draw(st.tuples(*[st.floats(-500, 500)] * 2)), draw(st.tuples(*[st.floats(0.5, 300)] * 2))
    shape = draw(st.tuples(*[st.integers(2, 6)] * 3))
    image = np.stack([rng.normal(level, spread, shape) for level, spread in zip(levels, spreads, strict=True)])
    image[rng.random(image.shape) < draw(st.floats(0, 0.9))] = 0
    return image.astype(np.float32)


def raw_case(image: NDArray[Any], label: NDArray[np.uint8] | None = None, affine: Any = None) -> RawCase:
    return RawCase(np.ascontiguousarray(image, np.float32), label, np.eye(4) if affine is None else affine, "")


@MANY
@given(images())
def test_zscore_over_nonzero_voxels_is_per_channel(image: NDArray[np.float32]) -> None:
    for channel, scaled in zip(image, normalise(image, Intensity(zscore="nonzero")), strict=True):
        inside = channel != 0
        assert (scaled[~inside] == 0).all(), "background stays where it is"
        if len(set(channel[inside].tolist())) > 1:
            values = channel[inside].astype(np.float64)
            assert np.allclose(scaled[inside], (values - values.mean()) / values.std(), atol=1e-4)


@MANY
@given(images())
def test_zscore_over_all_voxels(image: NDArray[np.float32]) -> None:
    for channel, scaled in zip(image, normalise(image, Intensity(zscore="all")), strict=True):
        values = channel.astype(np.float64)
        assert np.allclose(scaled, (values - values.mean()) / (values.std() or 1), atol=1e-4)


@pytest.mark.parametrize("zscore", ["nonzero", "all"])
@pytest.mark.parametrize("zeros", [0.0, 0.4, 0.999])
def test_zscore_by_blocks_is_that_of_the_whole_to_the_last_bit(zscore: Any, zeros: float) -> None:
    """Stores keep their key, so what is in them must not change."""
    rng = np.random.default_rng(0)
    image = np.rint(rng.normal(300, 250, (2, 90, 110, 101))).astype(np.float32)
    image[rng.random(image.shape) < zeros] = 0
    turned = np.flip(image.transpose(0, 3, 1, 2), 2)
    for channel, scaled in zip(turned, normalise(turned, Intensity(zscore=zscore)), strict=True):
        inside = channel != 0 if zscore == "nonzero" else np.ones(channel.shape, bool)
        values = channel[inside].astype(np.float64)
        expected = np.where(inside, (channel.astype(np.float64) - values.mean()) / values.std(), 0)
        assert np.array_equal(scaled, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("intensity", "bytes_per_voxel"),
    [
        (Intensity(zscore="nonzero"), 4),
        (Intensity(zscore="all"), 4),
        (Intensity(window=(-100, 300)), 4),
        (Intensity(percentiles=(0.5, 99.5)), 8),
    ],
)
def test_no_volume_in_double_precision_is_made(intensity: Intensity, bytes_per_voxel: int) -> None:
    image = np.random.default_rng(0).normal(100, 50, (1, 160, 160, 150)).astype(np.float32)
    tracemalloc.start()
    normalise(image, intensity)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (bytes_per_voxel + 0.5) * image.size + 2**23


@MANY
@given(images(), st.floats(-400, 300), st.floats(1, 500))
def test_a_window_goes_to_zero_and_one(image: NDArray[np.float32], low: float, width: float) -> None:
    scaled = normalise(image, Intensity(window=(low, low + width)))
    assert np.allclose(scaled, np.interp(image, [low, low + width], [0, 1]), atol=1e-5)


@MANY
@given(images(), st.floats(0, 40), st.floats(60, 100))
def test_percentiles_go_to_zero_and_one(image: NDArray[np.float32], low: float, high: float) -> None:
    for channel, scaled in zip(image, normalise(image, Intensity(percentiles=(low, high))), strict=True):
        ends = np.percentile(channel.astype(np.float64), [low, high])
        assert scaled.min() >= 0
        assert scaled.max() <= 1
        if ends[1] - ends[0] > 0.1:
            assert np.allclose(scaled, np.interp(channel, ends, [0, 1]), atol=1e-3)


@pytest.mark.parametrize(
    "intensity", [Intensity(zscore="nonzero"), Intensity(zscore="all"), Intensity(percentiles=(0.5, 99.5))]
)
@pytest.mark.parametrize("level", [0.0, 7.0, 0.1, -1e30])
def test_a_constant_channel_has_no_spread_to_divide_by(intensity: Intensity, level: float) -> None:
    scaled = normalise(np.full((1, 5, 6, 7), level, np.float32), intensity)
    assert (scaled == 0).all()


def test_no_intensity_leaves_voxels_alone() -> None:
    image = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    assert np.array_equal(normalise(image, Intensity()), image)


@MANY
@given(
    st.integers(0, 2**32), st.lists(st.integers(0, 255), min_size=1, max_size=6), st.tuples(*[st.integers(1, 12)] * 3)
)
def test_resampling_gives_labels_no_new_value(seed: int, values: list[int], size: tuple[int, int, int]) -> None:
    label = np.random.default_rng(seed).choice(np.array(values, np.uint8), (5, 6, 4))
    prepared = preprocess(raw_case(label[None], label), Data(source="x", size=size))
    assert prepared.label_xyz is not None
    assert prepared.label_xyz.shape == prepared.image_cxyz.shape[1:] == size
    assert prepared.label_xyz.dtype == np.uint8
    assert set(prepared.label_xyz.ravel().tolist()) <= set(values)


def test_image_and_label_take_the_same_steps_in_the_stated_order() -> None:
    """Slices of the file, then the turn, then the crop; statistics are of what is left."""
    rng = np.random.default_rng(0)
    label = np.zeros((8, 7, 6), np.uint8)
    label[2:6, 1:5, 2:5] = rng.integers(1, 4, (4, 4, 3))
    image = label[None] * 10.0
    image[0, 0] = 1000  # bright, in a slice that is dropped
    affine = np.diag([-1.0, 1, 1, 1])
    data = Data.model_validate({"source": "x", "slices": {"x": [1, None]}, "crop_foreground": True})
    prepared = preprocess(raw_case(image, label, affine), data)
    expected = label[2:6, 1:5, 2:5][::-1]
    assert prepared.label_xyz is not None
    assert np.array_equal(prepared.label_xyz, expected)
    values = expected * 10.0
    assert np.allclose(prepared.image_cxyz[0], (values - values.mean()) / values.std(), atol=1e-5)
    assert np.array_equal(prepared.geometry.restore(prepared.label_xyz), label)


def test_a_case_without_a_label_stays_without_one() -> None:
    assert preprocess(raw_case(np.ones((1, 2, 3, 4))), Data(source="x")).label_xyz is None
