"""Options of losses, optimizers, schedules and augmentation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from voxscale.config.base import Fraction, Section, chosen_by_name

Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]
Axis = Literal[0, 1, 2]


class DiceOptions(Section):
    """Soft Dice. `batch` sums over the whole global batch first; `squared` squares the denominator's terms."""

    name: Literal["dice"] = "dice"
    batch: bool = False
    squared: bool = False
    background: bool = True


class DiceCEOptions(Section):
    """Soft Dice plus cross-entropy (binary cross-entropy for regions)."""

    name: Literal["dice_ce"] = "dice_ce"
    batch: bool = False
    squared: bool = False
    background: bool = True


LossOptions = Annotated[
    Annotated[DiceOptions, Tag("dice")] | Annotated[DiceCEOptions, Tag("dice_ce")],
    Discriminator(chosen_by_name("dice_ce")),
]


class AdamOptions(Section):
    name: Literal["adam"] = "adam"
    lr: Rate = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    weight_decay: Decay = 0.0
    amsgrad: bool = False


class AdamWOptions(Section):
    name: Literal["adamw"] = "adamw"
    lr: Rate = 1e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    weight_decay: Decay = 1e-5
    amsgrad: bool = False


class SGDOptions(Section):
    name: Literal["sgd"] = "sgd"
    lr: Rate = 1e-2
    momentum: Fraction = 0.9
    nesterov: bool = True
    weight_decay: Decay = 0.0


OptimizerOptions = Annotated[
    Annotated[AdamOptions, Tag("adam")] | Annotated[AdamWOptions, Tag("adamw")] | Annotated[SGDOptions, Tag("sgd")],
    Discriminator(chosen_by_name("adamw")),
]


class Schedule(Section):
    """How the learning rate moves over the run: `none` keeps it, `cosine` takes it to zero."""

    name: Literal["none", "cosine"] = "cosine"


class Flip(Section):
    """Mirror along each of `axes` with probability `p`."""

    name: Literal["flip"] = "flip"
    p: Fraction = 0.5
    axes: tuple[Axis, ...] = (0, 1, 2)


class Rotate90(Section):
    """With probability `p`, turn by 90, 180 or 270 degrees in the plane of two `axes`."""

    name: Literal["rotate90"] = "rotate90"
    p: Fraction = 0.5
    axes: tuple[Axis, Axis] = (0, 1)


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


Transform = Annotated[
    Annotated[Flip, Tag("flip")]
    | Annotated[Rotate90, Tag("rotate90")]
    | Annotated[Scale, Tag("scale")]
    | Annotated[Shift, Tag("shift")],
    Discriminator(chosen_by_name("")),
]

AUGMENT_PRESETS: dict[str, tuple[Section, ...]] = {
    "none": (),
    "light": (Flip(), Scale(), Shift()),
}
