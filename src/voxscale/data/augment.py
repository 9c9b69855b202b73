"""Augmentation on the device: parameters are sampled first, from the sample's own random numbers, then applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from voxscale.config.training import Flip, Rotate90, Scale, Shift

Parameters = dict[str, Any]


def sample_parameters(transforms: Sequence[Any], rng: np.random.Generator) -> list[Parameters]:
    """What each transform will do to one sample. Draws the same count of numbers whatever comes out."""
    return [_sample(transform, rng) for transform in transforms]


def apply_parameters(
    image_cxyz: torch.Tensor, label_xyz: torch.Tensor, parameters: Sequence[Parameters]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply what was sampled, in order; the label follows in space and keeps its values."""
    for chosen in parameters:
        if axes := chosen.get("flip"):
            image_cxyz = image_cxyz.flip([axis + 1 for axis in axes])
            label_xyz = label_xyz.flip(list(axes))
        if turns := chosen.get("turns"):
            first, second = chosen["plane"]
            image_cxyz = image_cxyz.rot90(turns, (first + 1, second + 1))
            label_xyz = label_xyz.rot90(turns, (first, second))
        if "factor" in chosen:
            image_cxyz = image_cxyz * chosen["factor"]
        if "offset" in chosen:
            image_cxyz = image_cxyz + chosen["offset"]
    return image_cxyz, label_xyz


def _sample(transform: Any, rng: np.random.Generator) -> Parameters:
    match transform:
        case Flip():
            drawn = rng.random(3)
            return {"flip": tuple(axis for axis in transform.axes if drawn[axis] < transform.p)}
        case Rotate90():
            drawn = rng.random(2)
            turns = 1 + int(drawn[1] * 3)
            return {"turns": turns, "plane": transform.axes} if drawn[0] < transform.p else {}
        case Scale():
            drawn = rng.random(2)
            return {"factor": 1 + transform.by * (2 * drawn[1] - 1)} if drawn[0] < transform.p else {}
        case Shift():
            drawn = rng.random(2)
            return {"offset": transform.by * (2 * drawn[1] - 1)} if drawn[0] < transform.p else {}
    raise TypeError(f"no such transform: {transform!r}")
