"""A batch on its device: as on the host, whatever else is in the batch. The functions for GPUs, run here on the CPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from voxscale.config.base import Section
from voxscale.config.training import (
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
)
from voxscale.data import augment_batch
from voxscale.data.augment import Drawn, adjust, draw, place, source_region
from voxscale.data.augment_batch import adjust_batch, place_batch
from voxscale.data.filters import Scratch

SIZE = (12, 12, 16)  # a multiple of 16 voxels: a generator's numbers are then the same for a row and for its channels
CHANNELS = 2
SPACE: tuple[Section, ...] = (Affine(p_rotate=0.4, p_scale=0.4), Rotate90(), Flip())
BY_ELEMENT: tuple[Section, ...] = (Noise(p=0.5), Scale(p=0.5), Shift(p=0.5), Brightness(p=0.5))
CURVES: tuple[Section, ...] = (Contrast(p=0.5), Gamma(p=0.5), Gamma(p=0.5, invert=True))
FILTERS: tuple[Section, ...] = (Blur(p=0.5, sigma=(0.3, 2)), LowRes(p=0.5, zoom=(0.2, 1)))
# Of values up to 5. What follows a product with matrices may enlarge what that rounded, a bend near its edge most.
EXACT, PRODUCTS, HOST = 0.0, 1e-5, 2e-4

seeds = st.integers(0, 2**32)
Row = tuple[Drawn, tuple[torch.Tensor, torch.Tensor], tuple[int, int, int]]


def make_rows(seed: int, count: int, transforms: tuple[Section, ...] = SPACE) -> list[Row]:
    """Samples, some cut by the end of their case, one of them beside it if it is interpolated."""
    rows: list[Row] = []
    for row in range(count):
        rng = np.random.default_rng((seed, row))
        drawn = draw(transforms, rng, channels=CHANNELS)
        region = source_region(drawn, (0, 0, 0), SIZE)[1]
        x, y, z = (int(rng.integers(0, 4)) if rng.random() < 0.5 else 0 for _ in range(3))
        shape = [n - o for n, o in zip(region, (x, y, z), strict=True)]
        if drawn.matrix is not None and rng.random() < 0.1:
            shape[0] = 0
        image = torch.from_numpy(rng.normal(size=(CHANNELS, *shape)).astype(np.float16))
        rows.append((drawn, (image, torch.from_numpy(rng.integers(1, 5, shape).astype(np.uint8))), (x, y, z)))
    return rows


def placed(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch, which held something else before."""
    drawn, sources, origins = zip(*rows, strict=True)
    out = torch.full((len(rows), CHANNELS, *SIZE), 77.0), torch.full((len(rows), *SIZE), 77, dtype=torch.uint8)
    place_batch(drawn, sources, origins, out_image=out[0], out_label=out[1])
    return out


def make_batch(seed: int, transforms: tuple[Section, ...], count: int) -> tuple[torch.Tensor, list[Drawn]]:
    drawn = [draw(transforms, np.random.default_rng((seed, row)), channels=CHANNELS) for row in range(count)]
    return torch.randn((count, CHANNELS, *SIZE), generator=torch.Generator().manual_seed(seed)), drawn


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())


@given(seeds)
@settings(max_examples=15, deadline=None)
def test_placing_is_the_hosts(seed: int) -> None:
    rows = make_rows(seed, 5)
    images, labels = placed(rows)
    for (drawn, source, origin), image, label in zip(rows, images, labels, strict=True):
        row = torch.empty((CHANNELS, *SIZE)), torch.empty(SIZE, dtype=torch.uint8)
        place(drawn, *source, origin=origin, out_image=row[0], out_label=row[1], scratch=Scratch())
        assert torch.equal(image, row[0]) if drawn.matrix is None else torch.allclose(image, row[0], atol=1e-4)
        assert torch.equal(label, row[1])


@pytest.mark.parametrize(
    ("flips", "turns"),
    [*product([(), (0,), (1, 2), (0, 1, 2)], [(), ((1, (0, 1)),), ((3, (1, 0)),), ((2, (0, 2)), (1, (0, 1)))])],
)
def test_flips_and_turns_are_numpys(flips: tuple[int, ...], turns: Any) -> None:
    (_, (image, label), _), *_ = make_rows(3, 1, ())
    copy, turned = placed([(Drawn(None, flips, turns, ()), (image, label), (0, 0, 0))])
    for tensor, source in ((copy[0], image), (turned[0], label)):
        wanted = np.flip(source.numpy(), tuple(axis - 3 for axis in flips))
        for count, (first, second) in turns:
            wanted = np.rot90(wanted, count, (first - 3, second - 3))
        assert np.array_equal(tensor, wanted)


@given(seeds)
@settings(max_examples=15, deadline=None)
def test_a_row_is_placed_the_same_alone_and_in_a_batch(seed: int) -> None:
    rows = make_rows(seed, 5)
    images, labels = placed(rows)
    for first, last in ((0, 1), (1, 2), (2, 5)):
        some = placed(rows[first:last])
        assert torch.equal(some[0], images[first:last])
        assert torch.equal(some[1], labels[first:last])


def test_large_grids_come_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(1, 6, (Affine(p_rotate=1, p_scale=1),))
    whole = placed(rows)
    monkeypatch.setattr(augment_batch, "_SLAB_VOXELS", 5 * SIZE[1] * SIZE[2])
    for first, second in zip(whole, placed(rows), strict=True):
        assert torch.equal(first, second)


def test_a_source_outside_its_region_is_refused() -> None:
    (_, source, _), *_ = make_rows(0, 1, ())
    with pytest.raises(ValueError, match="leaves its region"):
        placed([(Drawn(None, (), (), ()), source, (9, 9, 9))])


@pytest.mark.parametrize(
    ("transforms", "tolerance"),
    [(BY_ELEMENT, EXACT), (CURVES, EXACT), (BY_ELEMENT + CURVES, EXACT), (FILTERS, PRODUCTS)],
    ids=["by element", "curves", "both", "filters"],
)
def test_a_row_changes_the_same_alone_and_in_a_batch(transforms: tuple[Section, ...], tolerance: float) -> None:
    for seed in range(6):
        batch, drawn = make_batch(seed, transforms, 5)
        before = batch.clone()
        adjust_batch(batch, drawn)
        for first, last in ((0, 1), (1, 2), (2, 5)):
            some = before[first:last].clone()
            adjust_batch(some, drawn[first:last])
            assert distance(some, batch[first:last]) <= tolerance


@pytest.mark.parametrize("transforms", [BY_ELEMENT, CURVES, FILTERS, FILTERS + CURVES + BY_ELEMENT])
def test_a_batch_changes_as_on_the_host(transforms: tuple[Section, ...]) -> None:
    for seed in range(6):
        batch, drawn = make_batch(seed, transforms, 5)
        rows = batch.clone()
        adjust_batch(batch, drawn)
        for row, one in zip(rows, drawn, strict=True):
            adjust(row, one, scratch=Scratch())
        assert distance(batch, rows) <= HOST


def test_what_was_not_drawn_is_left_to_the_last_bit() -> None:
    batch, drawn = make_batch(0, (Scale(p=1), Brightness(p=1), Gamma(p=1), Blur(p=1, p_channel=1)), 3)
    batch[1] = -0.0
    before = batch.clone()
    adjust_batch(batch, [drawn[0], Drawn(None, (), (), (None,) * 4), drawn[2]])
    assert torch.equal(batch[1].view(torch.int32), before[1].view(torch.int32))
    assert all(not torch.equal(batch[row], before[row]) for row in (0, 2))


def test_many_volumes_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, drawn = make_batch(0, CURVES + FILTERS, 5)
    parts = batch.clone()
    adjust_batch(batch, drawn)
    monkeypatch.setattr(augment_batch, "_VOXELS_AT_ONCE", 3 * batch[0, 0].numel())
    adjust_batch(parts, drawn)
    assert distance(parts, batch) <= HOST


class Kernels(TorchFunctionMode):
    """Names what is called with tensors, but for views, allocations and questions."""

    _FREE = """__get__ __getitem__ chunk dim empty_like flatten numel reshape t to unbind view manual_seed
        _set_grad_enabled"""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in self._FREE.split():
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def kernels_of(count: int, *transforms: Section) -> int:
    _, drawn = make_batch(0, transforms, count)
    batch = torch.ones((count, CHANNELS, 4, 4, 4))
    with Kernels() as kernels:
        adjust_batch(batch, drawn)
    return len(kernels.names)


def test_more_rows_take_no_more_kernels() -> None:
    certain: list[Section] = [kind(p=1) for kind in (Scale, Shift, Brightness, Contrast, Gamma)]
    certain += [Blur(p=1, p_channel=1), LowRes(p=1, p_channel=1)]
    assert kernels_of(1, *certain) == kernels_of(8, *certain) < 120
    assert kernels_of(8, Scale(p=1), Shift(p=1)) == 1
    assert kernels_of(8, Noise(p=1)) == 8 * kernels_of(1, Noise(p=1)) == 16, "each row has its own generator"
