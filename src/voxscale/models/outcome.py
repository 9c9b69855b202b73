"""Networks for outcomes: from an image, and the features of its table row, to a few numbers per case."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from voxscale.models.encoders import build_encoder
from voxscale.models.own import build_own_outcome

Size = tuple[int, int, int]

EMBEDDED = 32  # numbers that a row's features become
_START = 0.1


class OutcomeModel(nn.Module):
    """An encoder's deepest features, averaged over the image, beside the embedded features; one linear layer on both.

    The features get a layer of their own first: raw, five of them would be lost beside hundreds from the image, and
    could only add up; so they are of like number and size, and may act jointly.
    """

    def __init__(
        self, encoder: nn.Module, width: int, num_features: int, out_channels: int, *, dropout: float, flat: bool
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.embed = nn.Sequential(nn.Linear(num_features, EMBEDDED), nn.ReLU()) if num_features else None
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width + (EMBEDDED if num_features else 0), out_channels)
        self._flat = flat
        nn.init.normal_(self.head.weight, std=_START / self.head.in_features**0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """(n, c, x, y, z) and (n, f) to (n, out_channels) in float32, whatever the encoder computes in.

        A mean rather than adaptive pooling, which has no deterministic backward pass on GPUs.
        """
        deepest: torch.Tensor = self.encoder(image.squeeze(-1) if self._flat else image)
        with torch.autocast(image.device.type, enabled=False):  # half precision would make ties of risks
            joint = deepest.float().flatten(2).mean(2)
            if self.embed is not None:
                joint = torch.cat([joint, self.embed(features.float())], dim=1)
            output: torch.Tensor = self.head(self.dropout(joint))
        return output


def build_outcome_model(
    options: Any, in_channels: int, num_features: int, out_channels: int, *, patch: Size, seed: int
) -> nn.Module:
    """A network called as model(image, features), with weights that depend on the seed alone.

    Its outputs start near 0. `patch` is the size of the images that it sees in training.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" in options.name:
            return build_own_outcome(options, in_channels, num_features, out_channels)
        encoder, width = build_encoder(options, in_channels, patch)
        return OutcomeModel(encoder, width, num_features, out_channels, dropout=options.dropout, flat=options.flat)
