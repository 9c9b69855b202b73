"""From a file's grid to the prepared one and back: nothing changes its place in the world, labels keep their values."""

from __future__ import annotations

import itertools
import json
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from numpy.typing import NDArray

from voxscale.config.data import Data
from voxscale.data.geometry import Geometry, Ranges, Shape, make_geometry, resample
from voxscale.errors import DataError

TURNS: list[tuple[Any, Any]] = list(
    itertools.product(itertools.permutations(range(3)), itertools.product((1, -1), repeat=3))
)
TARGETS = ["".join(codes) for codes in itertools.product("RL", "AP", "SI")]
SHAPES = st.tuples(*[st.integers(1, 7)] * 3)
MANY = settings(max_examples=150, deadline=None)


@st.composite
def affines(draw: st.DrawFn) -> NDArray[np.float64]:
    """Any of the 48 orientations, any spacing and origin, rotated and sheared by a little."""
    axes, signs = draw(st.sampled_from(TURNS))
    turned = np.zeros((3, 3))
    turned[axes, range(3)] = signs
    little = st.floats(-0.15, 0.15)
    tilt = np.array(draw(st.lists(little, min_size=9, max_size=9))).reshape(3, 3)
    spacing = draw(st.tuples(*[st.floats(0.2, 8)] * 3))
    affine = np.eye(4)
    affine[:3, :3] = (turned + tilt) * spacing
    affine[:3, 3] = draw(st.tuples(*[st.floats(-300, 300)] * 3))
    return affine


@st.composite
def ranges(draw: st.DrawFn, shape: Shape) -> Ranges:
    lows = [draw(st.integers(0, n - 1)) for n in shape]
    x, y, z = ((low, draw(st.integers(low + 1, n))) for low, n in zip(lows, shape, strict=True))
    return x, y, z


@st.composite
def geometries(draw: st.DrawFn, *, grow: bool | None = None) -> Geometry:
    """Any steps at all; `grow`: to a size no smaller than before, False: without resampling."""
    shape, affine = draw(SHAPES), draw(affines())
    slices = draw(ranges(shape))
    axes, signs = draw(st.sampled_from(TURNS))
    kept = [slices[axis][1] - slices[axis][0] for axis in axes]
    crop = draw(ranges((kept[0], kept[1], kept[2])))
    cropped = [high - low for low, high in crop]
    if grow is False:
        x, y, z = cropped
    else:
        x, y, z = (draw(st.integers(n if grow else 1, n + 9)) for n in cropped)
    flips = signs[0] < 0, signs[1] < 0, signs[2] < 0
    return Geometry(shape, tuple(map(tuple, affine.tolist())), slices, axes, flips, crop, (x, y, z))


def labels_like(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


def kept_voxels(geometry: Geometry) -> NDArray[np.bool_]:
    """Which voxels of the file survive slices and crop, found voxel by voxel."""
    kept = np.zeros(geometry.shape, bool)
    for place in itertools.product(*(range(*bounds) for bounds in geometry.crop)):
        kept[tuple(np.rint(source_place(geometry, np.array(place, float), size=None)).astype(int))] = True
    return kept


def source_place(geometry: Geometry, place: NDArray[np.float64], size: Shape | None) -> NDArray[np.float64]:
    """Where a point of the prepared grid lies in the file's grid, in voxels, step by step.

    Without `size`, `place` is in the turned grid, before crop and resampling.
    """
    if size is not None:
        edges = [(high - low) / new for (low, high), new in zip(geometry.crop, size, strict=True)]
        place = (place + 0.5) * edges - 0.5 + [low for low, _ in geometry.crop]
    source = np.empty(3)
    for target, (axis, flipped) in enumerate(zip(geometry.axes, geometry.flips, strict=True)):
        low, high = geometry.slices[axis]
        source[axis] = high - 1 - place[target] if flipped else low + place[target]
    return source


@MANY
@given(affines(), SHAPES, st.sampled_from(TARGETS))
def test_turning_is_what_nibabel_does(affine: NDArray[np.float64], shape: Shape, target: str) -> None:
    voxels = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    geometry = make_geometry(voxels[None], affine, Data(source="x", orientation=target))
    image = nib.Nifti1Image(voxels, affine)
    reference = image.as_reoriented(ornt_transform(io_orientation(affine), axcodes2ornt(tuple(target))))
    assert np.array_equal(geometry.apply(voxels, linear=True), np.asarray(reference.dataobj))
    assert np.allclose(geometry.prepared_affine, reference.affine)
    if target == "RAS":
        assert np.array_equal(geometry.turn(voxels), np.asarray(nib.as_closest_canonical(image).dataobj))


@pytest.mark.parametrize(("axes", "signs"), TURNS)
def test_each_of_the_48_orientations(axes: tuple[int, ...], signs: tuple[int, ...]) -> None:
    """A voxel is found again in the prepared grid at its place in the world, and back in the file's."""
    affine = np.zeros((4, 4))
    affine[axes, range(3)] = np.array(signs) * [1.0, 2.0, 3.0]
    affine[:, 3] = 10, 20, 30, 1
    voxels = np.zeros((4, 5, 6), np.float32)
    voxels[1, 2, 4] = 9
    geometry = make_geometry(voxels[None], affine, Data(source="x"))
    prepared = geometry.apply(voxels, linear=True)
    (place,) = np.argwhere(prepared == 9)
    assert np.allclose(geometry.prepared_affine @ [*place, 1], affine @ [1, 2, 4, 1])
    assert (np.diag(geometry.prepared_affine) > 0).all()
    assert np.array_equal(geometry.restore(prepared), voxels)


@MANY
@given(geometries(), st.data())
def test_prepared_voxels_keep_their_place_in_the_world(geometry: Geometry, data: st.DataObject) -> None:
    place = np.array([data.draw(st.integers(0, n - 1)) for n in geometry.size], float)
    expected = np.array(geometry.affine) @ [*source_place(geometry, place, geometry.size), 1]
    assert np.allclose(geometry.prepared_affine @ [*place, 1], expected, atol=1e-6)


@MANY
@given(geometries(grow=False))
def test_without_resampling_the_way_back_is_exact_and_zero_outside(geometry: Geometry) -> None:
    label = labels_like(geometry.shape)
    prepared = geometry.apply(label, linear=False)
    assert prepared.shape == geometry.size
    restored = geometry.restore(prepared)
    assert restored.dtype == label.dtype
    assert np.array_equal(restored, np.where(kept_voxels(geometry), label, 0))


@MANY
@given(geometries(grow=True))
def test_labels_come_back_exactly_from_a_finer_grid(geometry: Geometry) -> None:
    label = labels_like(geometry.shape)
    restored = geometry.restore(geometry.apply(label, linear=False))
    assert np.array_equal(restored, np.where(kept_voxels(geometry), label, 0))


@MANY
@given(geometries())
def test_labels_get_no_new_values_there_or_back(geometry: Geometry) -> None:
    label = labels_like(geometry.shape)
    prepared = geometry.apply(label, linear=False)
    assert set(np.unique(prepared)) <= set(np.unique(label))
    assert set(np.unique(geometry.restore(prepared))) <= set(np.unique(label)) | {0}


@MANY
@given(geometries(), st.floats(-(2.0**100), 2.0**100, width=32))
def test_what_is_constant_stays_constant(geometry: Geometry, level: float) -> None:
    volume = np.full(geometry.shape, level, np.float32)
    prepared = geometry.apply(volume, linear=True)
    assert prepared.dtype == np.float32
    assert (prepared == np.float32(level)).all()
    restored = geometry.restore(prepared, linear=True)
    assert (restored == np.where(kept_voxels(geometry), np.float32(level), 0)).all()


@MANY
@given(SHAPES, st.tuples(*[st.integers(1, 16)] * 3), st.tuples(*[st.floats(-50, 50)] * 4))
def test_a_linear_ramp_stays_one(shape: Shape, size: Shape, slopes: tuple[float, ...]) -> None:
    """Exactly so between the outermost voxel centres; beyond them the border continues."""
    *steps, base = slopes

    def ramp(places: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        grid = np.meshgrid(*places, indexing="ij")
        return np.asarray(base + np.sum([step * axis for step, axis in zip(steps, grid, strict=True)], axis=0))

    volume = ramp([np.arange(n, dtype=float) for n in shape]).astype(np.float32)
    found = resample(volume, size, linear=True)
    centres = [(np.arange(new) + 0.5) * old / new - 0.5 for old, new in zip(shape, size, strict=True)]
    expected = ramp([np.clip(at, 0, old - 1) for at, old in zip(centres, shape, strict=True)])
    assert found.shape == size
    assert np.allclose(found, expected, atol=1e-3)


@MANY
@given(geometries())
def test_channels_are_carried_along(geometry: Geometry) -> None:
    image = np.random.default_rng(0).normal(size=(2, *geometry.shape)).astype(np.float32)
    prepared = geometry.apply(image, linear=True)
    assert prepared.shape == (2, *geometry.size)
    alone = [geometry.apply(channel, linear=True) for channel in image]
    assert np.array_equal(prepared, np.stack(alone))
    assert np.array_equal(geometry.restore(prepared)[1], geometry.restore(alone[1]))


@MANY
@given(geometries())
def test_a_geometry_survives_json(geometry: Geometry) -> None:
    again = Geometry.from_json(json.loads(json.dumps(geometry.as_json(), allow_nan=False)))
    assert again == geometry
    assert hash(again) == hash(geometry), "nested lists have become tuples"


@MANY
@given(affines(), SHAPES, st.tuples(*[st.floats(0.5, 4)] * 3), st.sampled_from([None, *TARGETS]))
def test_the_asked_spacing_is_met_as_nearly_as_whole_voxels_allow(
    affine: NDArray[np.float64], shape: Shape, spacing: tuple[float, float, float], target: str | None
) -> None:
    image = np.ones((1, *shape), np.float32)
    geometry = make_geometry(image, affine, Data(source="x", spacing=spacing, orientation=target))
    extents = np.linalg.norm(affine[:3, :3], axis=0)[list(geometry.axes)] * [shape[axis] for axis in geometry.axes]
    for size, extent, wanted in zip(geometry.size, extents, spacing, strict=True):
        assert size == 1 or abs(size - extent / wanted) <= 0.5 + 1e-6
    found = np.linalg.norm(geometry.prepared_affine[:3, :3], axis=0)
    assert np.allclose(found * geometry.size, extents), "the volume covers what it did"


def test_slices_are_dropped_in_the_files_own_axes() -> None:
    image = np.arange(4 * 5 * 6, dtype=np.float32).reshape(1, 4, 5, 6)
    affine = np.eye(4)[[2, 0, 1, 3]]  # x runs to A, y to S, z to R
    geometry = make_geometry(
        image, affine, Data.model_validate({"source": "x", "slices": {"z": [2, -1], "x": [1, None]}})
    )
    assert geometry.slices == ((1, 4), (0, 5), (2, 5))
    assert np.array_equal(geometry.apply(image, linear=True), image[:, 1:, :, 2:5].transpose(0, 3, 1, 2))


@MANY
@given(st.data(), affines(), st.booleans())
def test_the_crop_is_the_tightest_box_around_the_foreground(
    data: st.DataObject, affine: NDArray[np.float64], windowed: bool
) -> None:
    """Foreground is what is not zero; with a window, what is above its lower end."""
    shape = data.draw(SHAPES)
    places = data.draw(st.lists(st.tuples(*(st.integers(0, n - 1) for n in shape)), min_size=1, max_size=4))
    image = np.full((2, *shape), -1000 if windowed else 0, np.float32)
    for n, place in enumerate(places):
        image[(n % 2, *place)] = 50
    asked: dict[str, Any] = {"source": "x", "crop_foreground": True}
    geometry = make_geometry(
        image, affine, Data.model_validate({**asked, "intensity": {"window": [-175, 250]} if windowed else {}})
    )
    cropped = geometry.apply(image, linear=True) == 50
    assert cropped.sum() == (image == 50).sum(), "no foreground is lost"
    for axis in range(3):
        sides = cropped.any(axis=0).swapaxes(0, axis)[[0, -1]]
        assert sides.any(axis=(1, 2)).all(), "each side of the box touches it"


def test_an_image_without_foreground_is_kept_whole() -> None:
    image = np.zeros((1, 3, 4, 5), np.float32)
    assert make_geometry(image, np.eye(4), Data(source="x", crop_foreground=True)).size == (3, 4, 5)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"slices": {"z": [3, -3]}}, r"data.slices z \[3, -3\] leaves nothing of 6 slices"),
        ({"slices": {"x": [9, None]}}, "leaves nothing of 4 slices"),
        ({"spacing": [0.001, 0.001, 0.001]}, "more voxels than a volume may have"),
    ],
)
def test_steps_that_cannot_be_taken_are_refused(asked: dict[str, Any], complaint: str) -> None:
    image = np.ones((1, 4, 5, 6), np.float32)
    with pytest.raises(DataError, match=complaint) as refusal:
        make_geometry(image, np.eye(4), Data.model_validate({"source": "x", **asked}))
    assert refusal.value.fix
