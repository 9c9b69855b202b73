"""Sliding windows: a whole volume through a network that sees patches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.nn import functional

Size = tuple[int, int, int]


def predict_volume(
    network: Callable[[torch.Tensor], torch.Tensor], image_cxyz: torch.Tensor, window: Size, overlap: float
) -> torch.Tensor:
    """Raw outputs (c, x, y, z) for the whole volume; windows overlap and are weighted by a Gaussian.

    A volume smaller than the window is padded with zeros all around and cut back. The result depends on the arguments
    alone, not on what ran before or on which rank it runs.
    """
    shape = image_cxyz.shape[1:]
    missing = [max(0, n - whole) for n, whole in zip(window, shape, strict=True)]
    before = [amount // 2 for amount in missing]  # as small cases lie in their patches when they are trained on
    around = [(first, amount - first) for first, amount in zip(before, missing, strict=True)]
    padded = functional.pad(image_cxyz, [amount for axis in reversed(around) for amount in axis])
    weight = _gaussian(window, image_cxyz.device)
    total: torch.Tensor | None = None
    weights = torch.zeros(padded.shape[1:], device=padded.device)
    for corner in itertools.product(*(starts(n, w, overlap) for n, w in zip(padded.shape[1:], window, strict=True))):
        box = tuple(slice(at, at + n) for at, n in zip(corner, window, strict=True))
        output = network(padded[(slice(None), *box)][None])[0].float()
        if total is None:
            total = torch.zeros((len(output), *padded.shape[1:]), device=padded.device)
        total[(slice(None), *box)] += output * weight
        weights[box] += weight
    assert total is not None  # noqa: S101 - a volume has at least one window
    inside = (slice(first, first + n) for first, n in zip(before, shape, strict=True))
    return (total / weights)[(slice(None), *inside)]


def starts(length: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along an axis: evenly spread, the last one ends with the axis."""
    if length <= window:
        return [0]
    step = max(1, int(window * (1 - overlap)))
    count = -(-(length - window) // step) + 1
    return [round(index * (length - window) / (count - 1)) for index in range(count)]


def _gaussian(window: Size, device: torch.device) -> torch.Tensor:
    """Weights that fall from the centre to the rim (σ an eighth of the window), never to nothing."""
    axes = []
    for n in window:
        distance = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
        axes.append(torch.exp(-0.5 * (distance / (n / 8)) ** 2))
    weight = axes[0][:, None, None] * axes[1][None, :, None] * axes[2][None, None, :]
    return weight.clamp_min(1e-3).float().to(device)
