"""The 3D U-Net of DistMIS: plain convolutions, max-pooling down, transposed convolutions up, skips concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from voxscale.config.models import DistMISOptions


class DistMISUNet(nn.Module):
    """`channels` are the filters from the finest level to the coarsest; each level halves the image."""

    def __init__(self, in_channels: int, out_channels: int, options: DistMISOptions) -> None:
        super().__init__()
        channels = options.channels
        self.down = nn.ModuleList(
            _level(before, after, options) for before, after in zip((in_channels, *channels), channels, strict=False)
        )
        self.widen = nn.ModuleList(
            nn.ConvTranspose3d(below, here, kernel_size=2, stride=2) for here, below in _upwards(channels)
        )
        self.up = nn.ModuleList(_level(2 * here, here, options) for here, _ in _upwards(channels))
        self.pool = nn.MaxPool3d(2)
        self.head = nn.Conv3d(channels[0], out_channels, kernel_size=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skips = [self.down[0](image)]
        for level in self.down[1:]:
            skips.append(level(self.pool(skips[-1])))
        features = skips.pop()
        for widen, level in zip(self.widen, self.up, strict=True):
            features = level(torch.cat([skips.pop(), widen(features)], dim=1))
        output: torch.Tensor = self.head(features)
        return output


def build_distmis_unet(
    options: DistMISOptions, in_channels: int, out_channels: int, patch: tuple[int, int, int]
) -> nn.Module:
    return DistMISUNet(in_channels, out_channels, options)


def _level(before: int, after: int, options: DistMISOptions) -> nn.Sequential:
    """Two convolutions, each normalised; the norm has a bias, so the convolution needs none."""
    layers: list[nn.Module] = []
    for width in (before, after):
        layers += [nn.Conv3d(width, after, kernel_size=3, padding=1, bias=False), _norm(after, options), nn.ReLU()]
    if options.dropout:
        layers.append(nn.Dropout3d(options.dropout))
    return nn.Sequential(*layers)


def _norm(channels: int, options: DistMISOptions) -> nn.Module:
    return nn.BatchNorm3d(channels) if options.norm == "batch" else nn.GroupNorm(options.groups, channels)


def _upwards(channels: Sequence[int]) -> list[tuple[int, int]]:
    """(channels here, channels of the level below), from the coarsest pair up."""
    return list(pairwise(channels))[::-1]
