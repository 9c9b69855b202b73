"""MONAI's ResNet from our options. Imported when one is built, as MONAI takes seconds."""

from __future__ import annotations

from typing import Any

from monai.networks.nets.resnet import ResNet
from torch import nn

from voxscale.config.models import ResNetOptions

BLOCKS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}


class ResNetOfOneNorm(ResNet):  # type: ignore[misc]
    """MONAI gives `norm` to the stem alone and batch norm to every block: here all have the norm that is asked for."""

    def __init__(self, options: ResNetOptions, in_channels: int) -> None:
        self._norm = _norm(options)  # before the blocks are made
        block, layers = BLOCKS[options.depth]
        is_large = options.stem == "large"
        super().__init__(
            block=block,
            layers=layers,
            block_inplanes=[options.width * 2**stage for stage in range(4)],
            spatial_dims=options.dims,
            n_input_channels=in_channels,
            conv1_t_size=7 if is_large else 3,
            conv1_t_stride=2 if is_large else 1,
            no_max_pool=not is_large,
            feed_forward=False,
            bias_downsample=False,  # the norm that follows has one
            norm=self._norm,
        )
        if not is_large:
            self.maxpool = nn.Identity()

    def _make_layer(self, *args: Any, **named: Any) -> nn.Sequential:
        layer: nn.Sequential = super()._make_layer(*args, **{**named, "norm": self._norm})
        return layer


def _norm(options: ResNetOptions) -> tuple[str, dict[str, Any]]:
    details: dict[str, dict[str, Any]] = {"group": {"num_groups": options.groups}, "instance": {"affine": True}}
    return options.norm, details.get(options.norm, {})
