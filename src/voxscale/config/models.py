"""Options of the networks.

Each says by which factor its input must divide (`stride`), whether it works at the trained patch size alone
(`fixed_size`), whether it takes single slices (`flat`), and what makes its results depend on how a batch is spread
(`batch_statistics`, `dropout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from voxscale.config.base import Positive, Section
from voxscale.config.own import OWN, FunctionName, chosen_by_name_or_own

Dropout = Annotated[float, Field(ge=0, lt=1)]
Levels = Annotated[tuple[Positive, ...], Field(min_length=2)]
Four = tuple[Positive, Positive, Positive, Positive]


class Network(Section):
    """What holds for a network unless it says otherwise."""

    @property
    def stride(self) -> int:
        """By what every edge of the input must divide."""
        return 1

    @property
    def reduction(self) -> int:
        """How many voxels of the input, along an axis, one of the coarsest level stands for."""
        return self.stride

    @property
    def flat(self) -> bool:
        """Whether the input is a single slice: (x, y, 1)."""
        return False

    @property
    def batch_statistics(self) -> bool:
        return False

    @property
    def fixed_size(self) -> bool:
        return False

    @property
    def takes_one_voxel(self) -> bool:
        """Whether one voxel at the coarsest level will do: an instance or batch norm cannot train on a single one."""
        return True


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("\n".join(problems))


def _indivisible(field: str, numbers: Sequence[int], of: str, divisors: Sequence[int]) -> list[str]:
    """A complaint for each number that its divisor does not divide."""
    return [
        f"{field} {number}: expected a multiple of {divisor}{of}"
        for number, divisor in zip(numbers, divisors, strict=True)
        if number % divisor
    ]


class UNetOptions(Network):
    """MONAI's UNet: residual encoder and decoder, halving the image at every level."""

    name: Literal["unet"] = "unet"
    channels: Levels = (16, 32, 64, 128, 256)
    residual_units: Annotated[int, Field(ge=0)] = 2
    norm: Literal["instance", "batch"] = "instance"
    dropout: Dropout = 0.0

    @property
    def stride(self) -> int:
        return int(2 ** (len(self.channels) - 1))

    @property
    def batch_statistics(self) -> bool:
        return self.norm == "batch"

    @property
    def takes_one_voxel(self) -> bool:
        return False


class SegResNetOptions(Network):
    """MONAI's SegResNet: residual encoder with more blocks than the decoder, group normalisation."""

    name: Literal["segresnet"] = "segresnet"
    channels: Levels = (16, 32, 64, 128)
    blocks_down: tuple[Positive, ...] = ()
    blocks_up: tuple[Positive, ...] = ()
    dropout: Dropout = 0.0

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
        problems = []
        if self.channels != tuple(self.channels[0] * 2**level for level in range(levels)):
            problems.append(f"channels {list(self.channels)}: expected each twice the one before, as [16, 32, 64, 128]")
        problems += _indivisible("channels", self.channels[:1], ", its groups", (8,))
        if (len(self.blocks_down), len(self.blocks_up)) != (levels, levels - 1):
            problems.append(
                f"found {len(self.blocks_down)} blocks_down and {len(self.blocks_up)} blocks_up, expected {levels} and "
                f"{levels - 1} for {levels} channels"
            )
        _refuse(problems)
        return self

    @property
    def stride(self) -> int:
        return int(2 ** (len(self.channels) - 1))


class UNETROptions(Network):
    """MONAI's UNETR: a vision transformer over 16³ tokens with a convolutional decoder. Its positions are learnt, so
    it works at the patch size alone."""

    name: Literal["unetr"] = "unetr"
    feature_size: Positive = 16
    hidden: Positive = 768
    mlp: Positive = 3072
    heads: Positive = 12
    dropout: Dropout = 0.0

    @model_validator(mode="after")
    def _heads_share_hidden(self) -> Self:
        _refuse(_indivisible("hidden", (self.hidden,), ", its heads", (self.heads,)))
        return self

    @property
    def stride(self) -> int:
        return 16

    @property
    def fixed_size(self) -> bool:
        return True


class SwinUNETROptions(Network):
    """MONAI's SwinUNETR: shifted-window attention in four stages. `checkpoint` trades time for memory."""

    name: Literal["swin_unetr"] = "swin_unetr"
    feature_size: Positive = 24
    depths: Four = (2, 2, 2, 2)
    heads: Four = (3, 6, 12, 24)
    dropout: Dropout = 0.0
    checkpoint: bool = False

    @model_validator(mode="after")
    def _heads_share_features(self) -> Self:
        stages = [self.feature_size * 2**stage for stage in range(4)]
        names = [f"stage {stage} features" for stage in range(1, 5)]
        _refuse(
            [
                *_indivisible("feature_size", (self.feature_size,), "", (12,)),
                *(
                    problem
                    for name, features, heads in zip(names, stages, self.heads, strict=True)
                    for problem in _indivisible(name, (features,), ", its heads", (heads,))
                ),
            ]
        )
        return self

    @property
    def stride(self) -> int:
        return 32

    @property
    def takes_one_voxel(self) -> bool:
        return False


class DynUNetOptions(Network):
    """MONAI's DynUNet, the network of nnU-Net.

    `deep_supervision` is how many of the coarser levels are trained against the labels too; 0: none.
    """

    name: Literal["dynunet"] = "dynunet"
    channels: Annotated[tuple[Positive, ...], Field(min_length=3)] = (32, 64, 128, 256, 320)
    residual: bool = False
    deep_supervision: Annotated[int, Field(ge=0)] = 0
    norm: Literal["instance", "batch"] = "instance"
    dropout: Dropout = 0.0

    @model_validator(mode="after")
    def _supervises_levels_it_has(self) -> Self:
        most = len(self.channels) - 2
        if self.deep_supervision > most:
            raise ValueError(
                f"deep_supervision {self.deep_supervision}: expected 0 to {most} for {len(self.channels)} channels"
            )
        return self

    @property
    def stride(self) -> int:
        return int(2 ** (len(self.channels) - 1))

    @property
    def batch_statistics(self) -> bool:
        return self.norm == "batch"

    @property
    def takes_one_voxel(self) -> bool:
        return False


class DistMISOptions(Network):
    """The 3D U-Net of DistMIS, normalised over channels: per batch, or in `groups` of channels per sample."""

    name: Literal["distmis_unet"] = "distmis_unet"
    channels: Levels = (8, 16, 32, 64)
    norm: Literal["batch", "group"] = "batch"
    groups: Positive = 4
    dropout: Dropout = 0.0

    @model_validator(mode="after")
    def _groups_share_channels(self) -> Self:
        if self.norm == "group":
            _refuse(_indivisible("channels", self.channels, ", the groups", (self.groups,) * len(self.channels)))
        return self

    @property
    def stride(self) -> int:
        return int(2 ** (len(self.channels) - 1))

    @property
    def batch_statistics(self) -> bool:
        return self.norm == "batch"

    @property
    def takes_one_voxel(self) -> bool:
        return self.norm == "group"


class ResNetOptions(Network):
    """MONAI's ResNet, for outcomes alone. It takes any size: what does not divide is rounded up at each level.

    `width` is the number of channels of the first stage. The large stem (7 voxels wide, then pooling) makes the image
    four times smaller before the first stage; the small one (3 voxels) keeps its size, for images of 32 × 32.
    `group` is the default norm, as it works per sample: in small batches, and alike on any number of ranks.
    """

    name: Literal["resnet"] = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 18
    dims: Literal[2, 3] = 3
    width: Positive = 64
    stem: Literal["large", "small"] = "large"
    norm: Literal["group", "batch", "instance"] = "group"
    groups: Positive = 8
    dropout: Dropout = 0.0

    @model_validator(mode="after")
    def _groups_share_width(self) -> Self:
        if self.norm == "group":
            _refuse(_indivisible("width", (self.width,), ", the groups", (self.groups,)))
        return self

    @property
    def reduction(self) -> int:
        return 32 if self.stem == "large" else 8

    @property
    def flat(self) -> bool:
        return self.dims == 2

    @property
    def batch_statistics(self) -> bool:
        return self.norm == "batch"

    @property
    def takes_one_voxel(self) -> bool:
        return self.norm == "group"


class OwnOptions(Section):
    """A user's own network: `function(in_channels=…, out_channels=…, **options)` returns it.

    What the other networks know of themselves is stated here: by what each edge must divide, and the rest.
    """

    name: FunctionName = OWN
    options: dict[str, JsonValue] = Field(default_factory=dict)
    stride: Positive = 1
    fixed_size: bool = False
    batch_statistics: bool = False
    dropout: Dropout = 0.0

    @property
    def reduction(self) -> int:
        return self.stride

    @property
    def flat(self) -> bool:
        return False

    @property
    def takes_one_voxel(self) -> bool:
        return True

    @model_validator(mode="after")
    def _channels_are_ours(self) -> Self:
        taken = [f"options.{key}: comes from the data; leave it out" for key in self.options if key in _DERIVED]
        _refuse(taken)
        return self


_DERIVED = ("in_channels", "out_channels")


ModelOptions = Annotated[
    Annotated[UNetOptions, Tag("unet")]
    | Annotated[SegResNetOptions, Tag("segresnet")]
    | Annotated[UNETROptions, Tag("unetr")]
    | Annotated[SwinUNETROptions, Tag("swin_unetr")]
    | Annotated[DynUNetOptions, Tag("dynunet")]
    | Annotated[DistMISOptions, Tag("distmis_unet")]
    | Annotated[ResNetOptions, Tag("resnet")]
    | Annotated[OwnOptions, Tag(OWN)],
    Discriminator(chosen_by_name_or_own("unet")),
]


_LARGEST_STRIDE = 2**20  # an edge that no volume has


def size_problems(model: Any, field: str, size: tuple[int, int, int]) -> list[str]:
    """Why the network cannot take an input of this size, if it cannot."""
    if model.flat and size[2] != 1:
        return [f"{field} {list(size)}: found {size[2]} slices, expected 1 as model.dims is 2, or model.dims 3"]
    if model.stride > _LARGEST_STRIDE:
        return [f"{field} {list(size)} does not fit the model's strides, beyond {_LARGEST_STRIDE}; take levels out"]
    nearest = [max(model.stride, round(n / model.stride) * model.stride) for n in size]
    if any(n % model.stride for n in size):
        return [f"{field} {list(size)} does not fit the model's strides ({model.stride}); nearest: {nearest}"]
    if not model.takes_one_voxel and max(size) <= model.reduction:
        return [
            f"{field} {list(size)} leaves one voxel at the coarsest level, which its norm cannot train on; "
            f"expected an edge of at least {model.reduction + model.stride}"
        ]
    return []
