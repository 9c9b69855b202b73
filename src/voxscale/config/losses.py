"""Options of losses, and which task takes which."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag

from voxscale.config.base import Section
from voxscale.config.own import OWN, FunctionName, chosen_by_name_or_own

Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]


class OverlapOptions(Section):
    """What all losses with a Dice part share.

    `batch` sums over the whole global batch first; `squared` squares the probabilities in the denominator;
    `background` false leaves it out of the Dice of exclusive classes (regions have none).
    """

    name: str
    batch: bool = False
    squared: bool = False
    background: bool = True


class DiceOptions(OverlapOptions):
    """Soft Dice, averaged over classes."""

    name: Literal["dice"] = "dice"


class DiceCEOptions(OverlapOptions):
    """Soft Dice plus cross-entropy (binary cross-entropy for regions)."""

    name: Literal["dice_ce"] = "dice_ce"


class DiceFocalOptions(OverlapOptions):
    """Soft Dice plus `weight` times the focal loss, which turns from easy voxels the more the larger `gamma`."""

    name: Literal["dice_focal"] = "dice_focal"
    gamma: Annotated[float, Field(ge=0, le=10)] = 2.0
    weight: Decay = 1.0


class SoftDiceOptions(OverlapOptions):
    """DistMIS's Dice: as `dice`, with `smooth` added above and below, so that small structures weigh less."""

    name: Literal["soft_dice"] = "soft_dice"
    smooth: Rate = 1.0


class OutcomeLoss(Section):
    """What the losses of outcomes share."""

    name: str

    @property
    def batch(self) -> bool:
        """Whether a sample's share of the loss depends on the other samples of the batch."""
        return False


class CoxOptions(OutcomeLoss):
    """Cox's partial likelihood over the whole global batch."""

    name: Literal["cox"] = "cox"
    ties: Literal["efron", "breslow"] = "efron"

    @property
    def batch(self) -> bool:
        return True


class MSEOptions(OutcomeLoss):
    """The mean squared error, of targets brought to one scale."""

    name: Literal["mse"] = "mse"


class HuberOptions(OutcomeLoss):
    """Squared up to `delta` (in deviations of the target), straight beyond: outliers pull less."""

    name: Literal["huber"] = "huber"
    delta: Rate = 1.0


def _by_name(weights: Any) -> Any:
    """Classes called 0 and 1 are numbers to YAML, and yes and no truths."""
    if not isinstance(weights, dict):
        return weights
    if truths := [name for name in weights if isinstance(name, bool)]:
        quoted = "'yes' or 'true'" if truths[0] else "'no' or 'false'"
        raise ValueError(f"found the class {truths[0]}; expected its name, in quotes where YAML takes it: {quoted}")
    if weights and not any(weights.values()):
        raise ValueError("found no weight above 0; expected at least one")
    return {str(name) if isinstance(name, int) else name: weight for name, weight in weights.items()}


class CrossEntropyOptions(OutcomeLoss):
    """Cross-entropy; binary for classes that may hold at once. `balanced` weights make every class count the same."""

    name: Literal["cross_entropy"] = "cross_entropy"
    class_weights: Annotated[Literal["none", "balanced"] | dict[str, Decay], BeforeValidator(_by_name)] = "none"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0


class OwnLossOptions(Section):
    """A user's own loss, of whatever task: `function(output, target, **options)` returns a number, or a row of
    numbers, for each sample. `reduce` makes one number of the rows of the whole global batch; null: their mean.
    """

    name: FunctionName = OWN
    options: dict[str, JsonValue] = Field(default_factory=dict)
    reduce: FunctionName | None = None

    @property
    def batch(self) -> bool:
        return self.reduce is not None


LossOptions = Annotated[
    Annotated[DiceOptions, Tag("dice")]
    | Annotated[DiceCEOptions, Tag("dice_ce")]
    | Annotated[DiceFocalOptions, Tag("dice_focal")]
    | Annotated[SoftDiceOptions, Tag("soft_dice")]
    | Annotated[CoxOptions, Tag("cox")]
    | Annotated[MSEOptions, Tag("mse")]
    | Annotated[HuberOptions, Tag("huber")]
    | Annotated[CrossEntropyOptions, Tag("cross_entropy")]
    | Annotated[OwnLossOptions, Tag(OWN)],
    Discriminator(chosen_by_name_or_own("dice_ce")),
]
LOSSES: dict[str, tuple[str, ...]] = {
    "segmentation": ("dice", "dice_ce", "dice_focal", "soft_dice"),
    "survival": ("cox",),
    "regression": ("mse", "huber"),
    "classification": ("cross_entropy",),
}
