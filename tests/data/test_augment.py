"""Augmentation: drawn, then applied; the label follows in space and keeps its values."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from voxscale.config.base import Section
from voxscale.config.training import (
    AUGMENT_PRESETS,
    Affine,
    Blur,
    Brightness,
    Contrast,
    Flip,
    Gamma,
    LowRes,
    Noise,
    Rotate90,
    Scale,
    Shift,
    check_transforms,
)
from voxscale.data.augment import Drawn, Linear, adjust, draw, place, source_region
from voxscale.data.filters import Scratch

SIZE = (12, 12, 12)
NOTHING = Drawn(None, (), (), ())
EVERYTHING: tuple[Section, ...] = (
    Affine(p_rotate=0.5, p_scale=0.5),
    Rotate90(),
    Flip(),
    *(kind(p=0.5) for kind in (Noise, Blur, Brightness, Contrast, LowRes, Gamma, Scale, Shift)),
)
seeds = st.integers(0, 2**32)
cuts = st.tuples(st.integers(0, 4), st.integers(0, 9))  # voxels missing before and behind


def make_source(shape: tuple[int, ...], seed: int = 0, channels: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    image = torch.from_numpy(rng.normal(size=(channels, *shape)).astype(np.float16))
    return image, torch.from_numpy(rng.integers(1, 5, shape).astype(np.uint8))


def placed(
    drawn: Drawn, image: torch.Tensor, label: torch.Tensor, origin: tuple[int, int, int] = (0, 0, 0)
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row, which held something else before."""
    row = torch.full((len(image), *SIZE), 77.0), torch.full(SIZE, 77, dtype=torch.uint8)
    place(drawn, image, label, origin=origin, out_image=row[0], out_label=row[1], scratch=Scratch())
    return row


def oblique(seed: int, *transforms: Section) -> Drawn:
    return draw([Affine(p_rotate=1, p_scale=0.5), *transforms], np.random.default_rng(seed), channels=2)


def turned(array: np.ndarray[Any, Any], drawn: Drawn) -> np.ndarray[Any, Any]:
    """Flips and turns of the last three axes, by NumPy."""
    array = np.flip(array, tuple(axis - 3 for axis in drawn.flips))
    for count, (first, second) in drawn.turns:
        array = np.rot90(array, count, (first - 3, second - 3))
    return array


SPACE = [
    Drawn(None, flips, turns, ())
    for flips, turns in product(
        [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)],
        [(), ((1, (0, 1)),), ((3, (2, 0)),), ((2, (0, 2)), (1, (1, 2)))],
    )
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("drawn", SPACE, ids=lambda drawn: f"{drawn.flips}{drawn.turns}")
def test_flips_and_turns_are_numpys(drawn: Drawn, dtype: torch.dtype) -> None:
    source_image, source_label = make_source(SIZE)
    image, label = placed(drawn, source_image.to(dtype), source_label)
    assert np.array_equal(image, turned(source_image.float().numpy(), drawn))
    assert np.array_equal(label, turned(source_label.numpy(), drawn))


@pytest.mark.parametrize("drawn", SPACE, ids=lambda drawn: f"{drawn.flips}{drawn.turns}")
def test_an_identity_matrix_is_a_copy(drawn: Drawn) -> None:
    image, label = make_source(SIZE)
    by_matrix = Drawn(np.eye(3), drawn.flips, drawn.turns, ())
    start, size = source_region(by_matrix, (0, 0, 0), SIZE)
    assert all(low <= 0 and low + n >= 12 for low, n in zip(start, size, strict=True))
    origin = (-start[0], -start[1], -start[2])
    copy, interpolated = placed(drawn, image, label), placed(by_matrix, image, label, origin)
    assert torch.equal(copy[0], interpolated[0])
    assert torch.equal(copy[1], interpolated[1])


@pytest.mark.parametrize(("axis", "plane"), [(0, (1, 2)), (1, (0, 2)), (2, (0, 1))])
def test_a_matrix_of_90_degrees_is_a_turn(axis: int, plane: tuple[int, int]) -> None:
    image, label = make_source(SIZE)
    quarter = np.eye(3)
    quarter[[axis - 1, axis - 2]] = 0
    quarter[plane[0], plane[1]], quarter[plane[1], plane[0]] = 1, -1
    quarter += 1e-9 * (1 - np.abs(quarter))  # as sines and cosines have it: the path of oblique rotations
    drawn = Drawn(quarter, (), (), ())
    origin = tuple(-low for low in source_region(drawn, (0, 0, 0), SIZE)[0])
    shown_image, shown_label = placed(drawn, image, label, origin)  # type: ignore[arg-type]
    assert np.abs(shown_image.numpy() - np.rot90(image.float().numpy(), 1, (plane[0] + 1, plane[1] + 1))).max() < 1e-4
    assert np.array_equal(shown_label, np.rot90(label.numpy(), 1, plane))


@given(
    seeds, st.sampled_from([(1, 0), (0, 1), (1, 1)]), st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 9))] * 3)
)
@settings(max_examples=60, deadline=None)
def test_interpolation_is_scipys(seed: int, p: tuple[int, int], cut: tuple[tuple[int, int], ...]) -> None:
    """Any matrix with any flips and turns, of a source of which some voxels before and behind are missing."""
    transforms = [Affine(p_rotate=p[0], p_scale=p[1]), Flip(), Rotate90(axes=(0, 2))]
    drawn = draw(transforms, np.random.default_rng(seed), channels=2)
    start, region = source_region(drawn, (0, 0, 0), SIZE)
    origin = tuple(min(before, n - 1) for (before, _), n in zip(cut, region, strict=True))
    shape = tuple(max(0, n - o - behind) for (_, behind), n, o in zip(cut, region, origin, strict=True))
    image, label = make_source(shape, seed)
    shown_image, shown_label = placed(drawn, image, label, origin)  # type: ignore[arg-type]

    points = points_of(drawn) - np.add(start, origin)[:, None, None, None]
    volumes = np.pad(image.numpy().astype(float), [(0, 0), *[(2, 2)] * 3])
    expected = np.stack([map_coordinates(volume, points + 2, order=1, mode="constant") for volume in volumes])
    assert np.abs(shown_image.numpy() - turned(expected, drawn)).max() < 1e-4
    clear = (np.abs(points - np.floor(points) - 0.5) > 1e-3).all(axis=0)  # either neighbour may be nearest
    labels = map_coordinates(np.pad(label.numpy(), 2), points + 2, order=0, mode="constant")
    assert np.array_equal(shown_label.numpy()[turned(clear, drawn)], turned(labels, drawn)[turned(clear, drawn)])


def points_of(drawn: Drawn) -> np.ndarray[Any, Any]:
    """Where the patch's voxels lie before flips and turns, if it starts at 0."""
    assert drawn.matrix is not None
    half = (np.array(SIZE) - 1) / 2
    offsets = np.stack(np.meshgrid(*(np.arange(n) - (n - 1) / 2 for n in SIZE), indexing="ij"))
    return np.asarray(np.einsum("ij,jxyz->ixyz", drawn.matrix, offsets) + half[:, None, None, None])


@given(seeds, st.tuples(*[st.integers(-50, 300)] * 3))
@settings(max_examples=50, deadline=None)
def test_source_region_holds_all_that_is_sampled(seed: int, start: tuple[int, int, int]) -> None:
    drawn = oblique(seed)
    first, size = source_region(drawn, start, SIZE)
    points = points_of(drawn) + np.array(start)[:, None, None, None]
    low, high = points.min(axis=(1, 2, 3)), points.max(axis=(1, 2, 3))
    assert (np.floor(low) >= first).all()
    assert (np.ceil(high) <= np.add(first, size) - 1).all()
    assert (np.array(size) <= np.ceil(high - low) + 4).all(), "reads far more than it needs"
    assert source_region(NOTHING, start, SIZE) == (start, SIZE)


def test_a_source_outside_its_region_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(12, 12, 12\) at \(1, 0, 0\) leaves its region of \(12, 12, 12\)"):
        placed(NOTHING, *make_source(SIZE), origin=(1, 0, 0))


@pytest.mark.parametrize("drawn", [NOTHING, SPACE[7], oblique(3), Drawn(np.eye(3) * 0.9, (1,), (), ())])
def test_precision_and_strides_of_the_source_do_not_matter(drawn: Drawn) -> None:
    shape = source_region(drawn, (0, 0, 0), SIZE)[1]
    image, label = make_source(shape)
    expected = placed(drawn, image, label)
    spread = torch.zeros(2, *(2 * n for n in shape), dtype=torch.float16)[:, ::2, ::2, ::2]
    spread.copy_(image)
    turned_label = label.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not spread.is_contiguous()
    for other in (placed(drawn, image.float(), label), placed(drawn, spread, turned_label)):
        assert torch.equal(other[0], expected[0])
        assert torch.equal(other[1], expected[1])


def test_drawing_is_pure_and_takes_a_constant_count() -> None:
    for channels in (1, 4):
        after = set()
        for seed in range(40):
            rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
            first, second = draw(EVERYTHING, rng, channels=channels), draw(EVERYTHING, again, channels=channels)
            assert (first.flips, first.turns, first.intensity) == (second.flips, second.turns, second.intensity)
            assert np.array_equal(first.matrix, second.matrix)  # type: ignore[arg-type]
            count = np.random.default_rng(seed)
            numbers = count.random(400)
            after.add(int(np.flatnonzero(numbers == rng.random())[0]))
        assert len(after) == 1


@given(seeds)
@settings(max_examples=15, deadline=None)
def test_what_a_scratch_held_before_does_not_show(seed: int) -> None:
    drawn = draw(EVERYTHING, np.random.default_rng(seed), channels=2)
    image = make_source(SIZE)[0].float()
    again, used = image.clone(), Scratch()
    adjust(image, drawn, scratch=used)
    adjust(again.clone(), draw(EVERYTHING, np.random.default_rng(seed + 1), channels=2), scratch=used)
    adjust(again, drawn, scratch=used)
    assert torch.equal(again, image)


def test_each_transform_has_a_place_of_its_own() -> None:
    """The same place is the same transform in every sample, drawn or not; scales and shifts side by side share one."""
    transforms = [
        Noise(p=0.5),
        Scale(p=0.5),
        Shift(p=0.5),
        Flip(),
        Gamma(p=0.5),
        Blur(p=0.5),
        Gamma(p=0.5, invert=True),
    ]
    drawn = [draw(transforms, np.random.default_rng(seed), channels=1).intensity for seed in range(60)]
    kinds = [{type(step).__name__ for step in place if step is not None} for place in zip(*drawn, strict=True)]
    assert kinds == [{"AddNoise"}, {"Linear"}, {"Power"}, {"Smooth"}, {"Power"}]
    assert all(None in place for place in zip(*drawn, strict=True))


def test_probabilities_are_kept() -> None:
    rng = np.random.default_rng(0)
    transforms = [Flip(p=0.3, axes=(0,)), Rotate90(p=0.5), Affine(p_rotate=0.2, p_scale=0.4), Scale(p=0.2)]
    drawn = [draw(transforms, rng, channels=1) for _ in range(4000)]
    assert abs(np.mean([len(one.flips) for one in drawn]) - 0.3) < 0.03
    turns = np.array([sum(count for count, _ in one.turns) for one in drawn])
    assert all(abs(np.mean(turns == n) - 1 / 6) < 0.03 for n in (1, 2, 3))
    matrices = [one.matrix for one in drawn if one.matrix is not None]
    assert abs(len(matrices) / 4000 - 0.52) < 0.03
    assert abs(np.mean([np.count_nonzero(matrix) == 9 for matrix in matrices]) - 0.2 / 0.52) < 0.04
    assert abs(np.mean([one.intensity != (None,) for one in drawn]) - 0.2) < 0.03


def test_matrices_keep_to_their_limits() -> None:
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(500):
        matrix = draw([Affine(p_rotate=1, degrees=[0, 0, 20], p_scale=1)], rng, channels=1).matrix
        assert matrix is not None
        sizes.append(1 / np.cbrt(np.linalg.det(matrix)))
        turn = matrix * sizes[-1]
        assert np.allclose(turn @ turn.T, np.eye(3))
        assert turn[2, 2] == pytest.approx(1), "no rotation about the other axes was asked for"
        assert abs(np.degrees(np.arctan2(turn[1, 0], turn[0, 0]))) <= 20
    assert min(sizes) >= 0.7 and max(sizes) <= 1.4
    assert abs(np.mean(np.array(sizes) > 1) - 0.5) < 0.07


def test_scales_and_shifts_become_one_pass() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        (step,) = draw([Scale(p=1, by=0.1), Shift(p=1, by=0.2)], rng, channels=3).intensity
        assert isinstance(step, Linear)
        assert 0.9 <= step.factor <= 1.1
        assert -0.2 <= step.offset <= 0.2
    one, two, both = (
        draw(transforms, np.random.default_rng(0), channels=1).intensity
        for transforms in ([Shift(p=1)], [Shift(p=1), Scale(p=0)], [Shift(p=1), Scale(p=1), Shift(p=1)])
    )
    assert one == two
    (first,), (merged,) = one, both
    apart = [draw([Scale(p=1), Blur(p=p), Shift(p=1)], np.random.default_rng(0), channels=1).intensity for p in (0, 1)]
    assert [[type(step).__name__ for step in steps if step is not None] for steps in apart] == [
        ["Linear"],
        ["Linear", "Smooth", "Linear"],
    ]
    assert isinstance(first, Linear) and isinstance(merged, Linear)
    rng = np.random.default_rng(0)
    offset, factor, last = (2 * rng.random(2)[1] - 1 for _ in range(3))
    assert merged.offset == pytest.approx(0.1 * offset * (1 + 0.1 * factor) + 0.1 * last)
    image = make_source(SIZE)[0].float()
    changed = image.clone()
    adjust(changed, Drawn(None, (), (), (Linear(1.1, -0.05),)), scratch=Scratch())
    assert torch.allclose(changed, image * 1.1 - 0.05, atol=1e-6)


def test_presets() -> None:
    flip, scale, shift = AUGMENT_PRESETS["light"]
    assert flip == Flip(p=0.5, axes=(0, 1, 2))
    assert scale == Scale(p=0.5, by=0.1)
    assert shift == Shift(p=0.5, by=0.1)
    names = [getattr(transform, "name", "") for transform in AUGMENT_PRESETS["full"]]
    assert names == ["affine", "noise", "blur", "brightness", "contrast", "lowres", "gamma", "gamma", "flip"]


def test_one_interpolation_at_most() -> None:
    assert check_transforms(AUGMENT_PRESETS["full"]) == []
    (problem,) = check_transforms([Affine(), Flip(), Affine()])
    assert "found 2 affine; expected at most one" in problem


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (Affine, {"scale": [1.4, 0.7]}, "expected [low, high] with low <= high"),
        (Rotate90, {"axes": [1, 1]}, "expected two different axes"),
        (Blur, {"sigma": [0, 1]}, "greater than or equal to 0.1"),
        (Affine, {"degrees": 200}, "less than or equal to 180"),
    ],
)
def test_options_are_checked(kind: Any, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        kind(**options)
    assert expected in str(caught.value)


def test_one_number_of_degrees_is_for_all_axes() -> None:
    assert Affine.model_validate({"degrees": 15}).degrees == (15, 15, 15)
