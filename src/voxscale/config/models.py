"""Options of the networks. Each says by which factor its input must divide (`stride`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

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
    channels: Annotated[tuple[Positive, ...], Field(min_length=2)] = (16, 32, 64, 128)
    blocks_down: tuple[Positive, ...] = ()
    blocks_up: tuple[Positive, ...] = ()
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _fill_blocks(cls, fields: Any) -> Any:
        """One block on the first level, two on the middle ones, four on the last; one on each level up."""
        channels = fields.get("channels", cls.model_fields["channels"].default) if isinstance(fields, dict) else None
        if not isinstance(channels, list | tuple) or len(channels) < 2:
            return fields
        down, up = (1, *(2,) * (len(channels) - 2), 4), (1,) * (len(channels) - 1)
        return {"blocks_down": down, "blocks_up": up, **fields}

    @model_validator(mode="after")
    def _levels_match(self) -> Self:
        levels = len(self.channels)
        if self.channels != tuple(self.channels[0] * 2**level for level in range(levels)):
            raise ValueError(
                f"channels {list(self.channels)}: expected each twice the one before, as [16, 32, 64, 128]"
            )
        if (len(self.blocks_down), len(self.blocks_up)) != (levels, levels - 1):
            raise ValueError(
                f"found {len(self.blocks_down)} blocks_down and {len(self.blocks_up)} blocks_up, expected {levels} and "
                f"{levels - 1} for {levels} channels"
            )
        return self

    @property
    def stride(self) -> int:
        return int(2 ** (len(self.channels) - 1))

    @property
    def batch_statistics(self) -> bool:
        return False


ModelOptions = Annotated[
    Annotated[UNetOptions, Tag("unet")] | Annotated[SegResNetOptions, Tag("segresnet")],
    Discriminator(chosen_by_name("unet")),
]
