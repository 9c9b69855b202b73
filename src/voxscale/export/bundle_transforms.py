"""Transforms of this bundle that MONAI has not, or not to the last bit: resampling, standardising, and decisions.

They need MONAI, torch and numpy alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import InvertibleTransform, MapTransform

Data = dict[Hashable, Any]


class ResampleLinearlyd(MapTransform, InvertibleTransform):
    """Bring an image to `size`, or to about `spacing` in millimetres; the outer borders of its grid stay in place.

    The inverse brings what lies on the new grid, as masks, back to the old one, linearly too.
    """

    def __init__(
        self,
        keys: KeysCollection,
        spacing: Sequence[float] | None = None,
        size: Sequence[int] | None = None,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.spacing, self.size = spacing, size

    def __call__(self, data: Mapping[Hashable, Any]) -> Data:
        found = dict(data)
        for key in self.key_iterator(found):
            image = found[key]
            old = tuple(image.shape[1:])
            to = self.spacing or image.pixdim
            new = self.size or [
                max(1, round(n * float(own) / mm)) for n, own, mm in zip(old, image.pixdim, to, strict=True)
            ]
            affine = image.affine.clone()
            scale = [before / after for before, after in zip(old, new, strict=True)]
            zoom = torch.diag(torch.tensor([*scale, 1.0], dtype=affine.dtype))
            zoom[:3, 3] = torch.tensor([(step - 1) / 2 for step in scale], dtype=affine.dtype)
            out = MetaTensor(resampled(image, new), meta=image.meta, applied_operations=image.applied_operations)
            out.affine = affine @ zoom
            self.push_transform(out, orig_size=old, extra_info={"affine": affine})
            found[key] = out
        return found

    def inverse(self, data: Mapping[Hashable, Any]) -> Data:
        found = dict(data)
        for key in self.key_iterator(found):
            image = found[key]
            step = self.pop_transform(image)
            out = MetaTensor(
                resampled(image, step["orig_size"]), meta=image.meta, applied_operations=image.applied_operations
            )
            out.affine = step["extra_info"]["affine"]
            found[key] = out
        return found


def resampled(image: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Interpolate (c, x, y, z) axis by axis, in the middle of voxels, without going beyond the outermost ones."""
    voxels = image.detach().cpu().as_tensor().numpy() if isinstance(image, MetaTensor) else image.numpy()
    for axis, new in enumerate(size, start=1):
        old = voxels.shape[axis]
        if old == new:
            continue
        at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        low = at.astype(np.intp)
        weight = (at - low).astype(np.float32).reshape(-1, *[1] * (voxels.ndim - 1 - axis))
        first, second = voxels.take(low, axis), voxels.take(np.minimum(low + 1, old - 1), axis)
        voxels = (first + (second - first) * weight).astype(voxels.dtype)
    return torch.from_numpy(np.ascontiguousarray(voxels)).to(image.device)


class Normalised(MapTransform):
    """Bring each channel to one scale: by mean and deviation in double precision (`zscore` of the voxels that are not
    zero, or of all), or between two percentiles to 0..1."""

    def __init__(
        self,
        keys: KeysCollection,
        zscore: str | None = None,
        percentiles: Sequence[float] | None = None,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.zscore, self.percentiles = zscore, percentiles

    def __call__(self, data: Mapping[Hashable, Any]) -> Data:
        found = dict(data)
        for key in self.key_iterator(found):
            for channel in found[key]:
                channel.copy_(self._scaled(channel))
        return found

    def _scaled(self, channel: torch.Tensor) -> torch.Tensor:
        if self.percentiles is not None:
            between = channel.cpu().numpy().copy()
            low, high = np.percentile(between, self.percentiles)
            between -= float(low)
            between /= max(float(high) - float(low), 1e-8)
            return torch.from_numpy(np.clip(between, 0, 1))
        voxels = torch.as_tensor(np.asarray(channel.cpu()), dtype=torch.float64)
        counts = torch.ones_like(voxels, dtype=torch.bool) if self.zscore == "all" else voxels != 0
        if not counts.any():
            return channel
        mean = voxels[counts].mean()
        deviation = (voxels[counts] - mean).square().mean().sqrt()
        scaled = (voxels - mean) / (deviation if deviation > 0 else 1.0)
        return torch.where(counts, scaled, 0.0).float()


class ToMasksd(MapTransform):
    """Decide from the network's raw outputs: a mask for each class with background first, of which one holds, or a
    mask for each of the regions, which may overlap."""

    def __init__(self, keys: KeysCollection, exclusive: bool, allow_missing_keys: bool = False) -> None:
        super().__init__(keys, allow_missing_keys)
        self.exclusive = exclusive

    def __call__(self, data: Mapping[Hashable, Any]) -> Data:
        found = dict(data)
        for key in self.key_iterator(found):
            output = found[key].float()
            if self.exclusive:
                winner = output.max(0, keepdim=True).indices
                found[key] = torch.zeros_like(output).scatter_(0, winner, 1.0)
            else:
                found[key] = (output > 0).float()
        return found


class ToLabelsd(MapTransform):
    """One map of labels from masks, or from shares of masks where those were interpolated; 0 where nothing holds.

    `labels` are those of the channels. Exclusive classes: the largest share. Regions: what is more than half inside,
    painted in the `order` given, so that the last one stays.
    """

    def __init__(
        self,
        keys: KeysCollection,
        exclusive: bool,
        labels: Sequence[int],
        order: Sequence[int] = (),
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.exclusive, self.labels, self.order = exclusive, labels, order

    def __call__(self, data: Mapping[Hashable, Any]) -> Data:
        found = dict(data)
        for key in self.key_iterator(found):
            shares = found[key]
            if self.exclusive:
                winner = shares.max(0, keepdim=True).indices
                values = torch.tensor(self.labels, dtype=torch.uint8, device=shares.device)
                painted = torch.zeros_like(shares[:1], dtype=torch.uint8)
                painted.copy_(values[torch.as_tensor(np.asarray(winner.cpu()), device=shares.device)])
            else:
                painted = torch.zeros_like(shares[:1], dtype=torch.uint8)
                for channel in self.order:
                    painted[shares[channel : channel + 1] > 0.5] = self.labels[channel]
            found[key] = painted
        return found


class ToRegionsd(MapTransform):
    """A mask for each region, of what is more than half inside."""

    def __call__(self, data: Mapping[Hashable, Any]) -> Data:
        found = dict(data)
        for key in self.key_iterator(found):
            found[key] = (found[key] > 0.5).to(torch.uint8)
        return found
