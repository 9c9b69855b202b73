"""The table of networks. A builder takes its options and the numbers of channels; it knows no ranks, no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from voxscale.models.networks import build_segresnet, build_unet

Builder = Callable[[Any, int, int], torch.nn.Module]

MODELS: dict[str, Builder] = {"unet": build_unet, "segresnet": build_segresnet}


def build_model(options: Any, in_channels: int, out_channels: int, *, seed: int) -> torch.nn.Module:
    """A network with weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[options.name](options, in_channels, out_channels)
