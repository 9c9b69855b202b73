"""Sliding windows: a whole volume through a network that sees patches, in memory that does not grow with the volume.

Windows stand where MONAI's `sliding_window_inference` puts them and weigh what they weigh there. They are run in layers
along one axis; once no later layer reaches a slab of the volume, it is normalised, handed out, and its memory used
again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from voxscale.errors import ConfigError

Size = tuple[int, int, int]
Box = tuple[slice, slice, slice]
Network = Callable[[torch.Tensor], torch.Tensor]

_FLIPS = tuple(axes for count in range(4) for axes in itertools.combinations((2, 3, 4), count))
_PIECES = 4  # parts of a window's length in which finished slabs are handed out: bounds what the caller makes of each


@dataclass(frozen=True)
class Windows:
    """How windows slide: their size, the share of it that neighbours have in common, and how outputs are averaged.

    `mirror` runs each window in all eight mirror images and takes the mean of the outputs.
    """

    size: Size
    overlap: float = 0.5
    weights: Literal["gaussian", "constant"] = "gaussian"
    mirror: bool = False


def predict_volume(
    network: Network, image_cxyz: torch.Tensor, windows: Windows, *, device: torch.device | None = None
) -> torch.Tensor:
    """Raw outputs (c, x, y, z) of the whole volume, float32 on `device` (the image's own where none is named)."""
    device = device or image_cxyz.device
    whole: torch.Tensor | None = None
    for box, output in predict_slabs(network, image_cxyz, windows, device=device):
        if whole is None:
            whole = torch.empty((len(output), *image_cxyz.shape[1:]), device=device)
        whole[(slice(None), *box)] = output
    assert whole is not None  # noqa: S101 - a volume has at least one window
    return whole


@torch.no_grad()
def predict_slabs(
    network: Network, image_cxyz: torch.Tensor, windows: Windows, *, device: torch.device
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield (box in the volume, raw outputs (c, *box) float32 on `device`), in order, disjoint, covering the volume.

    Each tensor is good until the next is asked for: its memory is used again. Windows are copied to `device` one by
    one, so the image may stay on the host, in half precision. A volume smaller than the window is padded with zeros all
    around. What is yielded depends on the arguments alone, not on what ran before or on which rank it runs.
    """
    from monai.data.utils import compute_importance_map  # a second of imports

    grid = _Grid.over(image_cxyz.shape[1:], windows)
    passes = len(_FLIPS) if windows.mirror else 1
    weight = compute_importance_map(windows.size, mode=windows.weights, device=device)[grid.inside]
    patch = torch.zeros((1, len(image_cxyz), *windows.size), device=device)
    slab: _Slab | None = None
    for layer in range(len(grid.layers)):
        for box in grid.boxes(layer):
            if grid.is_padded:
                patch.zero_()  # a network may have changed its input in place
            patch[(0, slice(None), *grid.inside)] = image_cxyz[(slice(None), *box)].to(device, non_blocking=True)
            output = _run(network, patch, mirror=windows.mirror)[(slice(None), *grid.inside)]
            if grid.is_single:
                yield box, output.float() / passes
                return
            slab = slab or _Slab(grid, len(output), weight, passes=passes)
            slab.add(output, box)
            del output  # or it would stand beside the next window's activations
        assert slab is not None  # noqa: S101 - a layer has at least one window
        yield from slab.finish(layer)


def starts(length: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along an axis: a fixed step apart, the last one moved to end with the axis."""
    if length <= window:
        return [0]
    step = max(1, int(window * (1 - overlap)))
    return [*range(0, length - window, step), length - window]


def _run(network: Network, patch: torch.Tensor, *, mirror: bool) -> torch.Tensor:
    """The network's output (c, x, y, z) for one window; mirrored, the sum over the eight mirror images."""
    if not mirror:
        return _checked(network(patch), patch)
    total = torch.zeros((), device=patch.device)
    for axes in _FLIPS:  # flips are copies: a network that works in place leaves the patch for the next one
        total = total + _checked(network(patch.flip(axes)), patch).float().flip([axis - 1 for axis in axes])
    return total


def _checked(output: torch.Tensor, patch: torch.Tensor) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise ConfigError(
            f"the model: found {type(output).__name__} as its output in evaluation mode, expected one tensor",
            fix="return the finest level alone",
        )
    if output.ndim == 5 and output.shape[2:] == patch.shape[2:] and len(output) == 1:
        return output[0]
    raise ConfigError(
        f"the model gave an output of shape {list(output.shape)} for an input of shape {list(patch.shape)}; "
        "sliding windows need [1, classes, x, y, z] with the x, y, z of the input",
        fix="make the model's output as large as its input in evaluation mode",
    )


@dataclass(frozen=True)
class _Grid:
    """Where the windows of a volume lie. Layers are the windows' starts along `axis`."""

    shape: Size
    inside: Box  # the part of a window that is volume, not padding
    corners: tuple[list[int], list[int], list[int]]
    axis: int

    @classmethod
    def over(cls, shape: torch.Size | Size, windows: Windows) -> _Grid:
        x, y, z = (_within(length, size) for length, size in zip(shape, windows.size, strict=True))
        corners = tuple(starts(n, size, windows.overlap) for n, size in zip(shape, windows.size, strict=True))
        reach = [axis.stop - axis.start for axis in (x, y, z)]
        axis = min(range(3), key=lambda axis: reach[axis] / shape[axis])  # the smallest slab
        return cls(tuple(shape), (x, y, z), corners, axis)  # type: ignore[arg-type]

    @property
    def layers(self) -> list[int]:
        return self.corners[self.axis]

    @property
    def reach(self) -> Size:
        """How much of the volume a window covers."""
        x, y, z = (axis.stop - axis.start for axis in self.inside)
        return x, y, z

    @property
    def is_padded(self) -> bool:
        return any(axis.start for axis in self.inside) or self.reach != tuple(axis.stop for axis in self.inside)

    @property
    def is_single(self) -> bool:
        """Whether one window covers the volume, so that there is nothing to average."""
        return all(len(starts) == 1 for starts in self.corners)

    def boxes(self, layer: int) -> Iterator[Box]:
        """The windows of a layer, as boxes in the volume."""
        along = list(self.corners)
        along[self.axis] = [self.layers[layer]]
        for corner in itertools.product(*along):
            x, y, z = (slice(at, at + n) for at, n in zip(corner, self.reach, strict=True))
            yield x, y, z

    def finished(self, layer: int) -> tuple[int, int]:
        """The part of `axis` that this layer reaches and no later one does."""
        ends = [*self.layers, self.shape[self.axis]]
        return ends[layer], ends[layer + 1]


def _within(length: int, window: int) -> slice:
    """Where in a window an axis lies: in the middle if it is shorter, as small cases lie in training patches."""
    before = max(0, window - length) // 2
    return slice(before, before + min(length, window))


class _Slab:
    """Sums of weighted outputs over the part of the volume that windows still touch.

    The memory is a ring along the grid's axis: what lies at n of the volume lies at n modulo the ring's length, so that
    nothing moves when the windows go on.
    """

    def __init__(self, grid: _Grid, channels: int, weight: torch.Tensor, *, passes: int) -> None:
        self._grid, self._weight, self._passes = grid, weight, passes
        self._length = grid.reach[grid.axis]
        self._most = max(1, self._length // _PIECES)
        self._sums = torch.zeros((channels, *self._shape(self._length)), device=weight.device)
        self._scale = torch.empty(self._shape(self._most), device=weight.device)
        self._layer_weights = torch.zeros(self._shape(self._length), device=weight.device)
        for box in grid.boxes(0):  # the windows of one layer; every other layer weighs the same
            self._layer_weights[box] += weight

    def add(self, output: torch.Tensor, box: Box) -> None:
        """Add a window's output (c, *box)."""
        axis, output = self._grid.axis, output.float()
        for at, part in self._parts(box[axis].start, box[axis].stop, most=self._length):
            target = self._sums[(slice(None), *_replaced(box, axis, part))]
            first, length = at - box[axis].start, part.stop - part.start
            target.addcmul_(output.narrow(axis + 1, first, length), self._weight.narrow(axis, first, length))

    def finish(self, layer: int) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the means of what no later layer touches, then empty it for what follows."""
        axis, (begin, end) = self._grid.axis, self._grid.finished(layer)
        x, y, z = (slice(0, n) for n in self._grid.shape)
        for at, part in self._parts(begin, end, most=self._most):
            length = part.stop - part.start
            means = self._sums.narrow(axis + 1, part.start, length)
            means.mul_(self._scale_at(layer, at, length))
            yield _replaced((x, y, z), axis, slice(at, at + length)), means
            means.zero_()

    def _shape(self, length: int) -> Size:
        """The volume's shape, cut to a length along the axis."""
        x, y, z = (length if axis == self._grid.axis else n for axis, n in enumerate(self._grid.shape))
        return x, y, z

    def _parts(self, begin: int, end: int, *, most: int) -> Iterator[tuple[int, slice]]:
        """Where begin:end of the axis lies in the ring, in pieces no longer than `most` that do not pass its end."""
        while begin < end:
            first = begin % self._length
            length = min(end - begin, self._length - first, most)
            yield begin, slice(first, first + length)
            begin += length

    def _scale_at(self, layer: int, at: int, length: int) -> torch.Tensor:
        """Factors that turn sums into means, for a piece of what this layer finishes: one by the sum of the weights."""
        axis, layers = self._grid.axis, self._grid.layers
        scale = self._scale.narrow(axis, 0, length)
        scale.copy_(self._layer_weights.narrow(axis, at - layers[layer], length))
        for first in layers[:layer]:
            reached = min(at + length, first + self._length) - at
            if reached > 0:
                scale.narrow(axis, 0, reached).add_(self._layer_weights.narrow(axis, at - first, reached))
        return scale.mul_(self._passes).reciprocal_()


def _replaced(box: Box, axis: int, part: slice) -> Box:
    x, y, z = (part if index == axis else each for index, each in enumerate(box))
    return x, y, z
