"""Classes as one small number per voxel: what is decided, kept, compared with labels and written back.

Exclusive classes are numbered from 1, background is 0. Overlapping regions are bits: the i-th is set where the i-th
region is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from voxscale.data.volumes import Labels
from voxscale.errors import ConfigError

MAX_REGIONS = 32
Box = tuple[slice, slice, slice]

_BYTE = 256
_AT_ONCE = 2**18  # voxels whose numbers stay in the processor's cache while they are counted


@dataclass(frozen=True)
class Counts:
    """Voxels of each class: in the prediction, in the label, in both."""

    predicted: list[int]
    labelled: list[int]
    both: list[int]


class Codes:
    """`classes` maps each class to the label values that it consists of."""

    def __init__(self, classes: Mapping[str, tuple[int, ...]], *, exclusive: bool) -> None:
        self.names = tuple(classes)
        self.labels = tuple(frozenset(labels) for labels in classes.values())
        self.exclusive = exclusive
        self.dtype: np.dtype[Any] = np.dtype(np.uint8 if exclusive or len(classes) <= 8 else np.uint32)

    def has(self, codes: NDArray[Any], index: int) -> NDArray[np.bool_]:
        """Where the class is."""
        return np.asarray(codes == index + 1 if self.exclusive else codes & self.dtype.type(1 << index) != 0)

    def labelled(self, label_xyz: Labels, index: int) -> NDArray[np.bool_]:
        """Where the label has the class."""
        inside = np.zeros(label_xyz.shape, np.bool_)
        for label in self.labels[index]:
            inside |= label_xyz == label
        return inside

    def encode(self, label_xyz: Labels) -> NDArray[np.integer[Any]]:
        """The codes that a perfect prediction has."""
        table = np.zeros(_BYTE, self.dtype)
        for index, labels in enumerate(self.labels):
            table[list(labels)] |= self.dtype.type(index + 1 if self.exclusive else 1 << index)
        return table[label_xyz]

    def masks(self, codes_xyz: NDArray[Any]) -> NDArray[np.uint8]:
        """(class, x, y, z) of zeros and ones."""
        out = np.empty((len(self.names), *codes_xyz.shape), np.uint8)
        for index, mask in enumerate(out):
            mask[...] = self.has(codes_xyz, index)
        return out

    def count(self, codes_xyz: NDArray[Any], label_xyz: Labels) -> Counts:
        """One pass over the voxels, however many classes there are."""
        tables = [_joint(label_xyz, plane) for plane in self._planes(codes_xyz)]
        predicted, labelled, both = [], [], []
        for index in range(len(self.names)):
            plane, values = self._values(index)
            table = tables[plane]  # voxels by label value and code
            of_class = table[sorted(self.labels[index])]
            predicted.append(int(table[:, values].sum()))
            labelled.append(int(of_class.sum()))
            both.append(int(of_class[:, values].sum()))
        return Counts(predicted, labelled, both)

    def boxes(self, codes_xyz: NDArray[Any], label_xyz: Labels) -> list[Box | None]:
        """For each class the box around all of it, in prediction and label; None where it is in neither."""
        by_code = [ndimage.find_objects(plane, _BYTE) for plane in self._planes(codes_xyz)]
        by_label = ndimage.find_objects(label_xyz, _BYTE)
        boxes = []
        for index in range(len(self.names)):
            plane, values = self._values(index)
            of_code = [by_code[plane][value - 1] for value in values]
            boxes.append(_around([*of_code, *(by_label[label - 1] for label in self.labels[index])]))
        return boxes

    @cached_property
    def can_map(self) -> str | None:
        """Why the classes cannot be written as one map of labels; None where they can."""
        vague = {name: own for name, own in zip(self.names, self._own, strict=True) if len(own) != 1}
        if not vague:
            return None
        found = "; ".join(f"{name} has {sorted(own) or 'none'}" for name, own in vague.items())
        return f"data.regions: {found}; expected one label in each region that no smaller region within it has"

    def label_map(self, codes_xyz: NDArray[Any]) -> NDArray[np.uint8]:
        """The data's own label values; large regions are painted first, what lies within them over it."""
        if self.can_map is not None:
            raise ConfigError(self.can_map, fix="ask for --masks or --probabilities in place of one map")
        if self.dtype == np.uint8:
            return np.take(self._paint(np.arange(_BYTE, dtype=np.uint8)), codes_xyz)
        return self._paint(codes_xyz)

    @property
    def painting(self) -> list[tuple[int, int]]:
        """(Class, its label) in the order in which a label map is painted, where one can be made."""
        order = sorted(range(len(self.names)), key=lambda index: -len(self.labels[index]))
        return [(index, next(iter(self._own[index]))) for index in order]

    @cached_property
    def _own(self) -> list[frozenset[int]]:
        """For each class the labels that stand in no smaller class within it."""
        within = [frozenset().union(*(other for other in self.labels if other < labels)) for labels in self.labels]
        return [labels - inner for labels, inner in zip(self.labels, within, strict=True)]

    def _paint(self, codes: NDArray[Any]) -> NDArray[np.uint8]:
        out = np.zeros(codes.shape, np.uint8)
        for index, label in self.painting:
            out[self.has(codes, index)] = label
        return out

    def _planes(self, codes_xyz: NDArray[Any]) -> list[NDArray[np.uint8]]:
        """The codes byte by byte."""
        if self.dtype == np.uint8:
            return [codes_xyz]
        return [(codes_xyz >> 8 * plane).astype(np.uint8) for plane in range(-(-len(self.names) // 8))]

    def _values(self, index: int) -> tuple[int, list[int]]:
        """Which byte of a code tells of the class, and the values of it that say it is there."""
        if self.exclusive:
            return 0, [index + 1]
        return index // 8, [value for value in range(_BYTE) if value >> index % 8 & 1]


def _joint(label_xyz: Labels, code_xyz: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How many voxels have each pair of label and code, (256, 256)."""
    table = np.zeros(_BYTE * _BYTE, np.int64)
    label, code = label_xyz.reshape(-1), code_xyz.reshape(-1)
    for start in range(0, len(label), _AT_ONCE):
        pair = label[start : start + _AT_ONCE].astype(np.intp)
        pair <<= 8
        pair |= code[start : start + _AT_ONCE]
        table += np.bincount(pair, minlength=len(table))
    return table.reshape(_BYTE, _BYTE)


def _around(boxes: list[Box | None]) -> Box | None:
    found = [box for box in boxes if box is not None]
    if not found:
        return None
    x, y, z = (
        slice(min(edge.start for edge in axis), max(edge.stop for edge in axis)) for axis in zip(*found, strict=True)
    )
    return x, y, z
