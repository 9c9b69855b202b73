"""The table of networks. A builder takes its options, the numbers of channels and the patch; it knows no ranks,
no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from voxscale.config.own import OWN
from voxscale.models.distmis import build_distmis_unet
from voxscale.models.networks import build_dynunet, build_plain, build_unetr
from voxscale.models.own import build_own

Size = tuple[int, int, int]
Builder = Callable[[Any, int, int, Size], torch.nn.Module]

MODELS: dict[str, Builder] = {
    "unet": build_plain,
    "segresnet": build_plain,
    "unetr": build_unetr,
    "swin_unetr": build_plain,
    "dynunet": build_dynunet,
    "distmis_unet": build_distmis_unet,
    OWN: build_own,
}


def build_model(options: Any, in_channels: int, out_channels: int, *, patch: Size, seed: int) -> torch.nn.Module:
    """A network with weights that depend on the seed alone. `patch` is what it sees at once in training.

    In training it returns (n, c, x, y, z) or, supervised on several levels, (n, levels, c, x, y, z) with the finest
    first; in evaluation always the former.
    """
    build = MODELS[OWN if ":" in options.name else options.name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(options, in_channels, out_channels, patch)
