"""Options of optimizers, schedules and augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from voxscale.config.base import Fraction, Positive, Section, chosen_by_name

Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]
Memory = Annotated[float, Field(ge=0, lt=1)]
Axis = Literal[0, 1, 2]
Zoom = Annotated[float, Field(ge=0.1, le=10)]
Share = Annotated[float, Field(ge=0.1, le=1)]
Sigma = Annotated[float, Field(ge=0.1, le=10)]
Exponent = Annotated[float, Field(ge=0.1, le=10)]
Angle = Annotated[float, Field(ge=0, le=180)]


def _ascending(limits: tuple[float, float]) -> tuple[float, float]:
    low, high = limits
    if low > high:
        raise ValueError(f"found {[low, high]}; expected [low, high] with low <= high")
    return limits


def _two_axes(axes: tuple[Axis, Axis]) -> tuple[Axis, Axis]:
    if axes[0] == axes[1]:
        raise ValueError(f"found {list(axes)}; expected two different axes, such as [0, 1]")
    return axes


def _one_per_axis(value: Any) -> Any:
    return [value] * 3 if isinstance(value, int | float) else value


Ascending = AfterValidator(_ascending)


class RatePerDevice(Section):
    """The learning rate of one device: over all of them it is as many times as high, as their batch is as large."""

    per_device: Annotated[float, Field(gt=0, le=1e6)]


def _rate_kind(value: Any) -> str:
    return "each" if isinstance(value, dict | RatePerDevice) else "whole"


LearningRate = Annotated[
    Annotated[Rate, Tag("whole")] | Annotated[RatePerDevice, Tag("each")], Discriminator(_rate_kind)
]


class Paced(Section):
    """What all optimizers share. The field `lr` is held as `rate`, so that who reads `lr` sees a number or nothing."""

    name: str
    rate: LearningRate = Field(alias="lr")

    @property
    def lr(self) -> float:
        """The rate over all ranks; only for a config whose `per_device` has been resolved."""
        if isinstance(self.rate, RatePerDevice):
            raise ValueError("optimizer.lr is still per device; resolve the config first")
        return self.rate

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"lr" if name == "rate" else name: value for name, value in dump(self).items()}


class AdamOptions(Paced):
    name: Literal["adam"] = "adam"
    rate: LearningRate = Field(1e-3, alias="lr")
    betas: tuple[Memory, Memory] = (0.9, 0.999)
    weight_decay: Decay = 0.0
    amsgrad: bool = False


class AdamWOptions(Paced):
    name: Literal["adamw"] = "adamw"
    rate: LearningRate = Field(1e-4, alias="lr")
    betas: tuple[Memory, Memory] = (0.9, 0.999)
    weight_decay: Decay = 1e-5
    amsgrad: bool = False


class SGDOptions(Paced):
    name: Literal["sgd"] = "sgd"
    rate: LearningRate = Field(1e-2, alias="lr")
    momentum: Memory = 0.9
    nesterov: bool = True
    weight_decay: Decay = 0.0

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov true with momentum 0; expected a momentum above 0, or nesterov false")
        return self


class NovogradOptions(Paced):
    """Adam with one second moment per layer, MONAI's. `averaging` weighs new gradients by 1 - the first beta."""

    name: Literal["novograd"] = "novograd"
    rate: LearningRate = Field(1e-4, alias="lr")
    betas: tuple[Memory, Memory] = (0.9, 0.98)
    weight_decay: Decay = 0.0
    averaging: bool = False
    amsgrad: bool = False


OptimizerOptions = Annotated[
    Annotated[AdamOptions, Tag("adam")]
    | Annotated[AdamWOptions, Tag("adamw")]
    | Annotated[SGDOptions, Tag("sgd")]
    | Annotated[NovogradOptions, Tag("novograd")],
    Discriminator(chosen_by_name("adamw")),
]


class Warmed(Section):
    """A schedule of the learning rate before which, over `warmup` epochs, it climbs in a line to `optimizer.lr`."""

    name: str
    warmup: Annotated[float, Field(ge=0)] = 0.0


class Constant(Warmed):
    """Always `optimizer.lr`."""

    name: Literal["none"] = "none"


class Cosine(Warmed):
    """Down half a cosine to `final` times the rate at the end of the run."""

    name: Literal["cosine"] = "cosine"
    final: Fraction = 0.0


class Polynomial(Warmed):
    """Down to zero as the share of the run that is left, to the `power`."""

    name: Literal["poly"] = "poly"
    power: Rate = 0.9


class OneCycle(Section):
    """Up from `start` times `optimizer.lr` over the share `warm` of the run, then down to `final` times where it
    began, both on half a cosine."""

    name: Literal["one_cycle"] = "one_cycle"
    warm: Annotated[float, Field(gt=0, lt=1)] = 0.3
    start: Annotated[float, Field(gt=0, le=1)] = 1 / 25
    final: Annotated[float, Field(gt=0, le=1)] = 1e-4


class Restarts(Warmed):
    """Cosines to zero one after the other: the first takes `first` epochs, each next `factor` times as many."""

    name: Literal["restarts"] = "restarts"
    first: Positive = 10
    factor: Positive = 2


ScheduleOptions = Annotated[
    Annotated[Constant, Tag("none")]
    | Annotated[Cosine, Tag("cosine")]
    | Annotated[Polynomial, Tag("poly")]
    | Annotated[OneCycle, Tag("one_cycle")]
    | Annotated[Restarts, Tag("restarts")],
    Discriminator(chosen_by_name("cosine")),
]


def check_schedule(schedule: Any, epochs: int) -> list[str]:
    """What of a schedule does not fit into a run of so many epochs."""
    warmup = getattr(schedule, "warmup", 0.0)
    if warmup < epochs:
        return []
    return [f"schedule.warmup {warmup:g}: expected fewer epochs than train.epochs, {epochs}, so that training follows"]


class Flip(Section):
    """Mirror along each of `axes` with probability `p`."""

    name: Literal["flip"] = "flip"
    p: Fraction = 0.5
    axes: tuple[Axis, ...] = (0, 1, 2)


class Rotate90(Section):
    """With probability `p`, turn by 90, 180 or 270 degrees in the plane of two `axes`."""

    name: Literal["rotate90"] = "rotate90"
    p: Fraction = 0.5
    axes: Annotated[tuple[Axis, Axis], AfterValidator(_two_axes)] = (0, 1)


class Scale(Section):
    """With probability `p`, multiply intensities by a factor from 1 ± `by`."""

    name: Literal["scale"] = "scale"
    p: Fraction = 0.5
    by: Annotated[float, Field(ge=0, lt=1)] = 0.1


class Shift(Section):
    """With probability `p`, add an offset from ± `by` to intensities."""

    name: Literal["shift"] = "shift"
    p: Fraction = 0.5
    by: Annotated[float, Field(ge=0)] = 0.1


class Affine(Section):
    """Rotation by up to `degrees` about each axis and one factor of size, each by chance, in one interpolation.

    One number of degrees stands for all axes. A factor of 1.4 shows everything 1.4 times as large. Voxels are taken as
    cubes.
    """

    name: Literal["affine"] = "affine"
    p_rotate: Fraction = 0.2
    degrees: Annotated[tuple[Angle, Angle, Angle], BeforeValidator(_one_per_axis)] = (30.0, 30.0, 30.0)
    p_scale: Fraction = 0.2
    scale: Annotated[tuple[Zoom, Zoom], Ascending] = (0.7, 1.4)


class Noise(Section):
    """With probability `p`, add Gaussian noise whose standard deviation is drawn from `std`."""

    name: Literal["noise"] = "noise"
    p: Fraction = 0.1
    std: Annotated[tuple[Decay, Decay], Ascending] = (0.0, 0.1)


class Blur(Section):
    """With probability `p`, smooth each channel with probability `p_channel`; one `sigma` (voxels) for each axis."""

    name: Literal["blur"] = "blur"
    p: Fraction = 0.2
    p_channel: Fraction = 0.5
    sigma: Annotated[tuple[Sigma, Sigma], Ascending] = (0.5, 1.0)


class Brightness(Section):
    """With probability `p`, multiply each channel by its own factor."""

    name: Literal["brightness"] = "brightness"
    p: Fraction = 0.15
    factor: Annotated[tuple[Rate, Rate], Ascending] = (0.75, 1.25)


class Contrast(Section):
    """With probability `p`, stretch each channel about its mean by its own factor; its range is kept."""

    name: Literal["contrast"] = "contrast"
    p: Fraction = 0.15
    factor: Annotated[tuple[Rate, Rate], Ascending] = (0.75, 1.25)


class LowRes(Section):
    """With probability `p`, show each channel, with probability `p_channel`, at `zoom` times its resolution."""

    name: Literal["lowres"] = "lowres"
    p: Fraction = 0.25
    p_channel: Fraction = 0.5
    zoom: Annotated[tuple[Share, Share], Ascending] = (0.5, 1.0)


class Gamma(Section):
    """With probability `p`, bend each channel's range by its own `gamma`, or the negated channel's with `invert`.

    Mean and standard deviation of each channel are kept.
    """

    name: Literal["gamma"] = "gamma"
    p: Fraction = 0.3
    gamma: Annotated[tuple[Exponent, Exponent], Ascending] = (0.7, 1.5)
    invert: bool = False


Transform = Annotated[
    Annotated[Flip, Tag("flip")]
    | Annotated[Rotate90, Tag("rotate90")]
    | Annotated[Affine, Tag("affine")]
    | Annotated[Scale, Tag("scale")]
    | Annotated[Shift, Tag("shift")]
    | Annotated[Noise, Tag("noise")]
    | Annotated[Blur, Tag("blur")]
    | Annotated[Brightness, Tag("brightness")]
    | Annotated[Contrast, Tag("contrast")]
    | Annotated[LowRes, Tag("lowres")]
    | Annotated[Gamma, Tag("gamma")],
    Discriminator(chosen_by_name("")),
]

# `full` follows nnU-Net v2's default for 3D, in its order.
AUGMENT_PRESETS: dict[str, tuple[Section, ...]] = {
    "none": (),
    "light": (Flip(), Scale(), Shift()),
    "full": (
        Affine(),
        Noise(),
        Blur(),
        Brightness(),
        Contrast(),
        LowRes(),
        Gamma(p=0.1, invert=True),
        Gamma(p=0.3),
        Flip(),
    ),
}


def check_transforms(transforms: Sequence[Section]) -> list[str]:
    """What is wrong with the list as a whole; each transform has been checked by itself."""
    found = sum(isinstance(transform, Affine) for transform in transforms)
    if found <= 1:
        return []
    return [f"augment: found {found} affine; expected at most one, as each would interpolate again; merge them"]
