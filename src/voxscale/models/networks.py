"""MONAI's networks, built from our options. Each is imported when it is built: together they take seconds."""

from __future__ import annotations

import torch

from voxscale.config.models import (
    DynUNetOptions,
    SegResNetOptions,
    SwinUNETROptions,
    UNetOptions,
    UNETROptions,
)

Size = tuple[int, int, int]


def build_unet(options: UNetOptions, in_channels: int, out_channels: int, patch: Size) -> torch.nn.Module:
    from monai.networks.nets.unet import UNet

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


def build_segresnet(options: SegResNetOptions, in_channels: int, out_channels: int, patch: Size) -> torch.nn.Module:
    from monai.networks.nets.segresnet import SegResNet

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


def build_unetr(options: UNETROptions, in_channels: int, out_channels: int, patch: Size) -> torch.nn.Module:
    from monai.networks.nets.unetr import UNETR

    model: torch.nn.Module = UNETR(
        in_channels=in_channels,
        out_channels=out_channels,
        img_size=patch,
        feature_size=options.feature_size,
        hidden_size=options.hidden,
        mlp_dim=options.mlp,
        num_heads=options.heads,
        dropout_rate=options.dropout,
    )
    return _without_unused(model)


def build_swin_unetr(options: SwinUNETROptions, in_channels: int, out_channels: int, patch: Size) -> torch.nn.Module:
    from monai.networks.nets.swin_unetr import SwinUNETR

    model: torch.nn.Module = SwinUNETR(
        in_channels=in_channels,
        out_channels=out_channels,
        feature_size=options.feature_size,
        depths=options.depths,
        num_heads=options.heads,
        drop_rate=options.dropout,
        use_checkpoint=options.checkpoint,
    )
    return model


def build_dynunet(options: DynUNetOptions, in_channels: int, out_channels: int, patch: Size) -> torch.nn.Module:
    from monai.networks.nets.dynunet import DynUNet

    levels = len(options.channels)
    model: torch.nn.Module = DynUNet(
        spatial_dims=3,
        in_channels=in_channels,
        out_channels=out_channels,
        kernel_size=(3,) * levels,
        strides=(1, *(2,) * (levels - 1)),
        upsample_kernel_size=(2,) * (levels - 1),
        filters=options.channels,
        dropout=options.dropout or None,
        norm_name=(options.norm.upper(), {"affine": True}),
        deep_supervision=options.deep_supervision > 0,
        deep_supr_num=max(1, options.deep_supervision),
        res_block=options.residual,
    )
    return _with_one_name_each(model)


def _without_unused(model: torch.nn.Module) -> torch.nn.Module:
    """Take out what transformer blocks hold for cross-attention they do not do: DDP would wait for its gradient."""
    for module in model.modules():
        if getattr(module, "with_cross_attention", True) is False:
            module.norm_cross_attn = torch.nn.Identity()
    return model


def _with_one_name_each(model: torch.nn.Module) -> torch.nn.Module:
    """Keep DynUNet's chain of layers out of its registered modules.

    The chain holds the same blocks under second names, so that every weight would be saved twice.
    """
    chain = model.skip_layers
    del model.skip_layers
    model.__dict__["skip_layers"] = chain
    return model
