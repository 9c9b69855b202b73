"""The encoder of every network: what leads to its deepest features, under the names that it has in the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from voxscale.config.models import ResNetOptions, UNetOptions
from voxscale.models.distmis import build_distmis_unet
from voxscale.models.networks import build_dynunet, build_plain, build_unetr

Size = tuple[int, int, int]
Way = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How an encoder is made: from which network, of which parts; the way through them; the channels at its end."""

    build: Callable[[Any, int, int, Size], nn.Module]
    parts: tuple[str, ...]
    way: Way
    width: Callable[[Any], int]


class Encoder(nn.Module):
    """Parts of a network, run along their way to its deepest features (n, width, …)."""

    def __init__(self, network: nn.Module, parts: tuple[str, ...], way: Way) -> None:
        super().__init__()
        for name, part in network.named_children():
            if name in parts:
                self.add_module(name, part)
        self._way = way

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self._way(self, image)


def build_encoder(options: Any, in_channels: int, patch: Size) -> tuple[Encoder, int]:
    """The encoder alone, so that no parameter waits for a gradient, and the number of its features."""
    recipe = ENCODERS[options.name]
    network = recipe.build(options, in_channels, 1, patch)
    return Encoder(network, recipe.parts, recipe.way), recipe.width(options)


def _build_unet(options: UNetOptions, in_channels: int, out_channels: int, patch: Size) -> nn.Module:
    """MONAI nests the levels: each holds its way down, the level below, and its way up, which is taken out."""
    network: Any = build_plain(options, in_channels, out_channels, patch)
    level = network.model
    for _ in options.channels[1:]:
        del level[2]
        level = level[1].submodule
    return network  # type: ignore[no-any-return]


def _build_resnet(options: ResNetOptions, in_channels: int, out_channels: int, patch: Size) -> nn.Module:
    from voxscale.models.resnet import ResNetOfOneNorm

    return ResNetOfOneNorm(options, in_channels)


def _through(layers: Iterable[nn.Module], features: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        features = layer(features)
    return features


def _down_unet(unet: Any, image: torch.Tensor) -> torch.Tensor:
    level, features = unet.model, image
    while isinstance(level, nn.Sequential) and hasattr(level[-1], "submodule"):
        features, level = level[0](features), level[-1].submodule
    return _through([level], features)


def _down_segresnet(segresnet: Any, image: torch.Tensor) -> torch.Tensor:
    dropout = [segresnet.dropout] if hasattr(segresnet, "dropout") else []
    return _through([segresnet.convInit, *dropout, *segresnet.down_layers], image)


def _down_unetr(unetr: Any, image: torch.Tensor) -> torch.Tensor:
    tokens: torch.Tensor = unetr.vit(image)[0]
    return tokens.transpose(1, 2)


def _down_swin_unetr(swin_unetr: Any, image: torch.Tensor) -> torch.Tensor:
    """The block that follows in the network is left out: after its instance norm, averages tell little."""
    deepest: torch.Tensor = swin_unetr.swinViT(image)[-1]
    return deepest


def _down_dynunet(dynunet: Any, image: torch.Tensor) -> torch.Tensor:
    return _through([dynunet.input_block, *dynunet.downsamples, dynunet.bottleneck], image)


def _down_distmis_unet(unet: Any, image: torch.Tensor) -> torch.Tensor:
    first, *below = unet.down
    return _through([first, *(layer for level in below for layer in (unet.pool, level))], image)


_RESNET = ("conv1", "bn1", "act", "maxpool", "layer1", "layer2", "layer3", "layer4")


def _down_resnet(resnet: Any, image: torch.Tensor) -> torch.Tensor:
    return _through([getattr(resnet, name) for name in _RESNET], image)


def _last_channels(options: Any) -> int:
    return int(options.channels[-1])


def _resnet_width(options: ResNetOptions) -> int:
    return options.width * 8 * (4 if options.depth >= 50 else 1)


ENCODERS: dict[str, Recipe] = {
    "unet": Recipe(_build_unet, ("model",), _down_unet, _last_channels),
    "segresnet": Recipe(build_plain, ("convInit", "dropout", "down_layers"), _down_segresnet, _last_channels),
    "unetr": Recipe(build_unetr, ("vit",), _down_unetr, lambda options: int(options.hidden)),
    "swin_unetr": Recipe(build_plain, ("swinViT",), _down_swin_unetr, lambda options: int(16 * options.feature_size)),
    "dynunet": Recipe(build_dynunet, ("input_block", "downsamples", "bottleneck"), _down_dynunet, _last_channels),
    "distmis_unet": Recipe(build_distmis_unet, ("down", "pool"), _down_distmis_unet, _last_channels),
    "resnet": Recipe(_build_resnet, _RESNET, _down_resnet, _resnet_width),
}
