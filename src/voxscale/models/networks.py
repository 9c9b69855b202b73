"""MONAI's networks, built from our options. Each is imported when it is built: together they take seconds.

`describe_network` says in plain data what is built, for those who build it without voxscale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from voxscale.config.models import (
    DynUNetOptions,
    SegResNetOptions,
    SwinUNETROptions,
    UNetOptions,
    UNETROptions,
)

Size = tuple[int, int, int]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Described:
    """A network of `monai.networks.nets` and what it is made with: plain data."""

    module: str
    name: str
    arguments: Arguments

    @property
    def target(self) -> str:
        return f"monai.networks.nets.{self.name}"

    def build(self) -> torch.nn.Module:
        """The network as MONAI makes it."""
        made: torch.nn.Module = getattr(import_module(f"monai.networks.nets.{self.module}"), self.name)(
            **self.arguments
        )
        return made


def describe_network(options: Any, in_channels: int, out_channels: int, patch: Size) -> Described | None:
    """Which of MONAI's networks it is; None where it is none of them."""
    if options.name not in _ARGUMENTS:
        return None
    module, name, arguments_of = _ARGUMENTS[options.name]
    channels = {"in_channels": in_channels, "out_channels": out_channels}
    return Described(module, name, {**channels, **arguments_of(options, patch)})


def build_plain(options: Any, in_channels: int, out_channels: int, patch: Size) -> torch.nn.Module:
    described = describe_network(options, in_channels, out_channels, patch)
    assert described is not None  # noqa: S101 - the table of networks says so
    return described.build()


def build_unetr(options: UNETROptions, in_channels: int, out_channels: int, patch: Size) -> torch.nn.Module:
    return _without_unused(build_plain(options, in_channels, out_channels, patch))


def build_dynunet(options: DynUNetOptions, in_channels: int, out_channels: int, patch: Size) -> torch.nn.Module:
    return _with_one_name_each(build_plain(options, in_channels, out_channels, patch))


def _unet(options: UNetOptions, patch: Size) -> Arguments:
    return {
        "spatial_dims": 3,
        "channels": options.channels,
        "strides": (2,) * (len(options.channels) - 1),
        "num_res_units": options.residual_units,
        "norm": options.norm.upper(),
        "dropout": options.dropout,
    }


def _segresnet(options: SegResNetOptions, patch: Size) -> Arguments:
    return {
        "spatial_dims": 3,
        "init_filters": options.channels[0],
        "blocks_down": options.blocks_down,
        "blocks_up": options.blocks_up,
        "dropout_prob": options.dropout or None,
    }


def _unetr(options: UNETROptions, patch: Size) -> Arguments:
    return {
        "img_size": patch,
        "feature_size": options.feature_size,
        "hidden_size": options.hidden,
        "mlp_dim": options.mlp,
        "num_heads": options.heads,
        "dropout_rate": options.dropout,
    }


def _swin_unetr(options: SwinUNETROptions, patch: Size) -> Arguments:
    return {
        "feature_size": options.feature_size,
        "depths": options.depths,
        "num_heads": options.heads,
        "drop_rate": options.dropout,
        "use_checkpoint": options.checkpoint,
    }


def _dynunet(options: DynUNetOptions, patch: Size) -> Arguments:
    levels = len(options.channels)
    return {
        "spatial_dims": 3,
        "kernel_size": (3,) * levels,
        "strides": (1, *(2,) * (levels - 1)),
        "upsample_kernel_size": (2,) * (levels - 1),
        "filters": options.channels,
        "dropout": options.dropout or None,
        "norm_name": (options.norm.upper(), {"affine": True}),
        "deep_supervision": options.deep_supervision > 0,
        "deep_supr_num": max(1, options.deep_supervision),
        "res_block": options.residual,
    }


_ARGUMENTS: dict[str, tuple[str, str, Callable[[Any, Size], Arguments]]] = {
    "unet": ("unet", "UNet", _unet),
    "segresnet": ("segresnet", "SegResNet", _segresnet),
    "unetr": ("unetr", "UNETR", _unetr),
    "swin_unetr": ("swin_unetr", "SwinUNETR", _swin_unetr),
    "dynunet": ("dynunet", "DynUNet", _dynunet),
}


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
