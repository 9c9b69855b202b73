"""MONAI's networks, built from our options."""

from __future__ import annotations

import torch
from monai.networks.nets.segresnet import SegResNet
from monai.networks.nets.unet import UNet

from voxscale.config.models import SegResNetOptions, UNetOptions


def build_unet(options: UNetOptions, in_channels: int, out_channels: int) -> torch.nn.Module:
    model: torch.nn.Module = UNet(
        spatial_dims=3,
        in_channels=in_channels,
        out_channels=out_channels,
        channels=options.channels,
        strides=(2,) * (len(options.channels) - 1),
        num_res_units=options.residual_units,
        norm=options.norm.upper(),
        dropout=options.dropout,
    )
    return model


def build_segresnet(options: SegResNetOptions, in_channels: int, out_channels: int) -> torch.nn.Module:
    model: torch.nn.Module = SegResNet(
        spatial_dims=3,
        in_channels=in_channels,
        out_channels=out_channels,
        init_filters=options.channels[0],
        blocks_down=options.blocks_down,
        blocks_up=options.blocks_up,
        dropout_prob=options.dropout or None,
    )
    return model
