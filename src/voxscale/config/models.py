"""Options of the networks. Each says by which factor its input must divide (`stride`)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from voxscale.config.base import Positive, Section, chosen_by_name

Norm = Literal["instance", "batch"]


class UNetOptions(Section):
    """MONAI's UNet: residual encoder and decoder, halving the image at every level."""

    name: Literal["unet"] = "unet"
    channels: Annotated[tuple[Positive, ...], Field(min_length=2)] = (16, 32, 64, 128, 256)
    residual_units: Annotated[int, Field(ge=0)] = 2
    norm: Norm = "instance"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def stride(self) -> int:
        return int(2 ** (len(self.channels) - 1))

    @property
    def batch_statistics(self) -> bool:
        return self.norm == "batch"


class SegResNetOptions(Section):
    """MONAI's SegResNet: residual encoder with more blocks than the decoder, group normalisation."""

    name: Literal["segresnet"] = "segresnet"
    filters: Positive = 16
    blocks_down: tuple[Positive, ...] = (1, 2, 2, 4)
    blocks_up: tuple[Positive, ...] = (1, 1, 1)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _levels_match(self) -> Self:
        if len(self.blocks_up) != len(self.blocks_down) - 1:
            raise ValueError(
                f"blocks_up has {len(self.blocks_up)} levels, expected one fewer than blocks_down "
                f"({len(self.blocks_down)})"
            )
        return self

    @property
    def stride(self) -> int:
        return int(2 ** (len(self.blocks_down) - 1))

    @property
    def batch_statistics(self) -> bool:
        return False


ModelOptions = Annotated[
    Annotated[UNetOptions, Tag("unet")] | Annotated[SegResNetOptions, Tag("segresnet")],
    Discriminator(chosen_by_name("unet")),
]
