"""From a case as its files have it to what is trained on: one grid, one intensity scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from voxscale.config.schema import Data, Intensity
from voxscale.data.geometry import Geometry, make_geometry
from voxscale.data.volumes import Floats, Labels, RawCase


@dataclass(frozen=True)
class PreparedCase:
    image_cxyz: Floats
    label_xyz: Labels | None
    geometry: Geometry


def preprocess(raw: RawCase, data: Data) -> PreparedCase:
    """Slices, orientation, crop, resampling, intensity: in this order."""
    geometry = make_geometry(raw.image_cxyz, raw.affine, data)
    image_cxyz = normalise(geometry.apply(raw.image_cxyz, linear=True), data.intensity)
    label_xyz = None if raw.label_xyz is None else geometry.apply(raw.label_xyz, linear=False)
    return PreparedCase(image_cxyz, label_xyz, geometry)


def normalise(image_cxyz: Floats, intensity: Intensity) -> Floats:
    """Bring each channel to one scale."""
    return np.stack([_normalise_channel(channel, intensity) for channel in image_cxyz])


def _normalise_channel(channel: Floats, intensity: Intensity) -> Floats:
    if intensity.window is not None:
        return _rescale(channel, *intensity.window)
    if intensity.percentiles is not None:
        low, high = np.percentile(channel, intensity.percentiles)
        return _rescale(channel, float(low), float(high))
    if intensity.zscore is None:
        return channel
    mask = channel != 0 if intensity.zscore == "nonzero" else np.ones(channel.shape, dtype=bool)
    if not mask.any():
        return channel
    values = channel[mask].astype(np.float64)
    deviation = values.std() or 1.0
    return np.where(mask, (channel - values.mean()) / deviation, 0).astype(np.float32)


def _rescale(channel: Floats, low: float, high: float) -> Floats:
    return np.asarray(np.clip((channel - low) / max(high - low, 1e-8), 0, 1), dtype=np.float32)
