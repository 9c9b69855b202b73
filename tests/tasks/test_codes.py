"""Classes as one number per voxel: counted, boxed, and turned back into labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray

from voxscale.errors import ConfigError
from voxscale.tasks.codes import Codes

BRATS = {"TC": (2, 3), "WT": (1, 2, 3), "ET": (3,)}
REGIONS = some.dictionaries(
    some.text("abcdefgh", min_size=1, max_size=3),
    some.lists(some.integers(1, 9), min_size=1, unique=True).map(tuple),
    min_size=1,
    max_size=20,
)


@some.composite
def codings(draw: some.DrawFn) -> Codes:
    """Regions of all sorts, more than a byte holds among them, or exclusive classes."""
    if draw(some.booleans()):
        return Codes(draw(REGIONS), exclusive=False)
    labels = draw(some.lists(some.integers(1, 255), min_size=1, max_size=20, unique=True))
    return Codes({str(label): (label,) for label in labels}, exclusive=True)


def volumes(coding: Codes, seed: int) -> tuple[NDArray[np.integer], NDArray[np.uint8]]:
    """Codes and labels of some corner of a volume; labels of no class are among them."""
    rng = np.random.default_rng(seed)
    values = [0, 0, 77, *(label for labels in coding.labels for label in labels)]
    label = np.zeros((6, 7, 5), np.uint8)
    label[1:5, 2:, :4] = rng.choice(values, (4, 5, 4))
    most = len(coding.names) + 1 if coding.exclusive else 1 << len(coding.names)
    codes = np.zeros(label.shape, coding.dtype)
    codes[:4, 1:6, 1:3] = rng.integers(0, most, (4, 5, 2))
    return codes, label


@settings(max_examples=150, deadline=None)
@given(codings(), some.integers(0, 2**32))
def test_counts_and_boxes_are_those_of_the_masks(coding: Codes, seed: int) -> None:
    codes, label = volumes(coding, seed)
    counts, boxes = coding.count(codes, label), coding.boxes(codes, label)
    masks = coding.masks(codes)
    assert masks.shape == (len(coding.names), *codes.shape)
    for index, (mask, labels) in enumerate(zip(masks.astype(bool), coding.labels, strict=True)):
        truth = np.isin(label, list(labels))
        assert np.array_equal(coding.labelled(label, index), truth)
        found = counts.predicted[index], counts.labelled[index], counts.both[index]
        assert found == (mask.sum(), truth.sum(), (mask & truth).sum())
        places = np.argwhere(mask | truth)
        expected = (
            tuple(slice(*ends) for ends in zip(places.min(0), places.max(0) + 1, strict=True)) if len(places) else None
        )
        assert boxes[index] == expected


@settings(max_examples=200, deadline=None)
@given(codings(), some.integers(0, 2**32))
def test_labels_survive_the_way_into_codes_and_back(coding: Codes, seed: int) -> None:
    assume(coding.can_map is None)
    known = [0, *(label for labels in coding.labels for label in labels)]
    label = np.random.default_rng(seed).choice(known, (4, 5, 6)).astype(np.uint8)
    back = coding.label_map(coding.encode(label))
    assert back.dtype == np.uint8
    assert np.array_equal(back, label)


def test_nested_regions_beyond_a_byte_come_back() -> None:
    coding = Codes({f"r{n}": tuple(range(n, 21)) for n in range(1, 21)}, exclusive=False)
    label = np.arange(21, dtype=np.uint8).reshape(3, 7, 1)
    codes = coding.encode(label)
    assert codes.dtype == np.uint32
    assert np.array_equal(coding.label_map(codes), label)


def test_brats_is_painted_from_large_to_small() -> None:
    coding = Codes(BRATS, exclusive=False)
    assert coding.can_map is None
    tc, wt, et = 1, 2, 4
    codes = np.array([0, wt, wt | tc, wt | tc | et, et, tc], np.uint8).reshape(6, 1, 1)
    assert coding.label_map(codes).ravel().tolist() == [0, 1, 2, 3, 3, 2], "also where the network nests them wrongly"


@pytest.mark.parametrize(
    ("regions", "why"),
    [
        ({"any": (1, 2), "two": (3,)}, r"any has \[1, 2\]"),
        ({"all": (1, 2), "one": (1,), "other": (2,)}, "all has none"),
        ({"left": (1, 2), "right": (2, 3)}, r"left has \[1, 2\]; right has \[2, 3\]"),
    ],
)
def test_regions_without_a_label_of_their_own_cannot_be_mapped(regions: dict[str, tuple[int, ...]], why: str) -> None:
    coding = Codes(regions, exclusive=False)
    with pytest.raises(ConfigError, match=f"data.regions: {why}; expected one label in each region") as raised:
        coding.label_map(np.zeros((1, 1, 1), np.uint8))
    assert raised.value.message == coding.can_map
    assert "--masks" in raised.value.fix


def test_large_volumes_are_counted_whole() -> None:
    coding = Codes({str(label): (label,) for label in (1, 2, 200)}, exclusive=True)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4, (90, 80, 75)).astype(np.uint8)
    label = rng.choice([0, 1, 2, 200], codes.shape).astype(np.uint8)
    counts = coding.count(codes, label)
    for index, value in enumerate((1, 2, 200)):
        mask, truth = codes == index + 1, label == value
        found = counts.predicted[index], counts.labelled[index], counts.both[index]
        assert found == (mask.sum(), truth.sum(), (mask & truth).sum())
