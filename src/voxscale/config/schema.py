"""The whole config, top to bottom, as `design` and users see it. Field order is the order in `config.yaml`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from voxscale.config.base import Fraction, Positive, Section, Seed, Size
from voxscale.config.data import Data
from voxscale.config.horizons import Horizon
from voxscale.config.losses import LOSSES, DiceCEOptions, LossOptions, OwnLossOptions
from voxscale.config.models import ModelOptions, OwnOptions, UNetOptions, size_problems
from voxscale.config.search import Search
from voxscale.config.training import (
    AUGMENT_PRESETS,
    AdamWOptions,
    Cosine,
    OptimizerOptions,
    Rotate90,
    ScheduleOptions,
    Transform,
    check_schedule,
    check_transforms,
)

Batch = Annotated[Positive, Field(le=1_000_000)]


class Patches(Section):
    size: Size | Literal["full"] = (96, 96, 96)
    per_case: Positive = 1
    foreground: Fraction = 0.33


class Loader(Section):
    """Only speed depends on these."""

    workers: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = "auto"
    prefetch: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    pin_memory: Literal["auto"] | bool = "auto"


class PerDevice(Section):
    per_device: Batch


class StopAfter(Section):
    """Stop early, save, and be ready to continue: after so many steps of this start, or so many minutes."""

    steps: Positive | None = None
    minutes: Annotated[float, Field(gt=0)] | None = None


def _batch_kind(value: Any) -> str:
    return "each" if isinstance(value, dict | PerDevice) else "whole"


class Freeze(Section):
    """For how many epochs, from the first, the encoder keeps its weights while the rest trains."""

    encoder: Positive


class Train(Section):
    epochs: Positive = 100
    batch: Annotated[Annotated[Batch, Tag("whole")] | Annotated[PerDevice, Tag("each")], Discriminator(_batch_kind)] = 2
    micro_batch: Positive | None = None
    devices: Literal["auto"] | Annotated[Positive, Field(le=99_999)] = "auto"
    seed: Seed = 0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: Literal["auto"] | bool = "auto"
    channels_last: Literal["auto"] | bool = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    threads: Literal["auto"] | Positive = "auto"
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    balance: bool = False
    init_from: str | None = None
    freeze: Freeze | None = None
    deterministic: bool | Literal["exact"] = True
    timeout_s: Annotated[float, Field(ge=1)] = 1800
    stop_after: StopAfter | None = None

    @model_validator(mode="before")
    @classmethod
    def _exact_is_plain(cls, fields: Any) -> Any:
        """What depends on the machine is not left open where every machine is to give the same result."""
        if not isinstance(fields, dict) or fields.get("deterministic") != "exact":
            return fields
        plain = {"precision": "fp32", "compile": False, "channels_last": False, "threads": 1}
        opened = {name: value for name, value in plain.items() if fields.get(name, "auto") == "auto"}
        micro_batch = {"micro_batch": 1} if fields.get("micro_batch") is None else {}
        return {**fields, **opened, **micro_batch}

    @property
    def global_batch(self) -> int:
        """The batch over all ranks; only for a config whose `per_device` has been resolved."""
        if isinstance(self.batch, PerDevice):
            raise ValueError("train.batch is still per device; resolve the config first")
        return self.batch


class Validate(Section):
    every: Positive = 5
    window: Size | None = None
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    weights: Literal["gaussian", "constant"] = "gaussian"
    mirror: bool = False
    tolerance_mm: Annotated[float, Field(gt=0)] = 1.0
    horizons: tuple[Horizon, ...] | None = None
    metric: str = "dice/mean"
    previews: Annotated[int, Field(ge=0, le=500)] = 20


class Checkpoint(Section):
    """When the state is saved, beside each validation: whichever comes first."""

    every_minutes: Annotated[float, Field(gt=0)] = 10
    every_steps: Positive | None = None
    every_epochs: Positive | None = None
    keep: Positive = 2


def _expand_preset(value: Any) -> Any:
    if isinstance(value, str):
        if value not in AUGMENT_PRESETS:
            raise ValueError(f"found {value!r}; expected {', '.join(AUGMENT_PRESETS)} or a list of transforms")
        return AUGMENT_PRESETS[value]
    return value


Task = Literal["segmentation", "survival", "regression", "classification"]
_OUTCOMES: dict[str, dict[str, dict[str, str]]] = {
    "survival": {"loss": {"name": "cox"}, "validate": {"metric": "cindex/harrell"}},
    "regression": {"loss": {"name": "mse"}, "validate": {"metric": "r2/mean"}},
    "classification": {"loss": {"name": "cross_entropy"}, "validate": {"metric": "auroc/mean"}},
}


class Config(Section):
    """One config for every scale: nothing in it depends on how many devices train it."""

    task: Task = "segmentation"
    data: Data
    patches: Patches = Patches()
    augment: Annotated[tuple[Transform, ...], BeforeValidator(_expand_preset)] = AUGMENT_PRESETS["light"]  # type: ignore[assignment]
    loader: Loader = Loader()
    model: ModelOptions = UNetOptions()
    loss: LossOptions = DiceCEOptions()
    optimizer: OptimizerOptions = AdamWOptions()
    schedule: ScheduleOptions = Cosine()
    train: Train = Train()
    validation: Validate = Field(Validate(), alias="validate")
    checkpoint: Checkpoint = Checkpoint()
    search: Search | None = None
    log: Literal["quiet", "epoch", "step"] = "epoch"
    track: Literal["none", "tensorboard"] = "tensorboard"

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_task(cls, fields: Any) -> Any:
        """An outcome is a matter of the whole volume, and has losses and metrics of its own."""
        task = fields.get("task") if isinstance(fields, dict) else None
        own = _OUTCOMES.get(task) if isinstance(task, str) else None
        if own is None:
            return fields
        given = {**fields}
        for section, defaults in {"patches": {"size": "full"}, "model": {"name": "resnet"}, **own}.items():
            if isinstance(found := given.get(section, {}), dict):
                given[section] = {**defaults, **found}
        return given

    @property
    def predicts_outcomes(self) -> bool:
        """Whether a case's target is a few numbers of a table rather than a volume of labels."""
        return self.task != "segmentation"

    @model_serializer(mode="wrap")
    def _no_search_unless_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A run's config does not name what it has not: neither its text nor its hash depends on that section."""
        return {name: value for name, value in dump(self).items() if name != "search" or value is not None}

    @property
    def can_compile(self) -> bool:
        """Batch Dice with accumulation looks at a batch twice: its dropout must be the same both times."""
        return not (self.model.dropout and self.loss.batch)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        patch = None if self.patches.size == "full" else self.patches.size
        window = self.validation.window
        sizes = (("patches.size", patch), ("validate.window", window))
        problems = [
            problem for field, size in sizes if size is not None for problem in size_problems(self.model, field, size)
        ]
        if self.model.fixed_size and window is not None and window != patch:
            problems.append(
                f"validate.window: found {list(window)}, expected null or patches.size, "
                f"as {self.model.name} works at one size alone"
            )
        problems += task_problems(self)
        problems += exact_problems(self) if self.train.deterministic == "exact" else []
        problems += turning_problems(self.augment, patch) if patch is not None else []
        problems += check_transforms(self.augment)
        problems += check_schedule(self.schedule, self.train.epochs)
        if self.train.compile is True and not self.can_compile:
            problems.append(
                "train.compile: found true with model.dropout and loss.batch, which looks at a batch twice and must "
                "drop the same, as compiled passes do not; expected one of the three off"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


def exact_problems(config: Config) -> list[str]:
    """What would make a sample's gradient depend on the others that a rank has."""
    found = {
        "model.norm: found batch": config.model.batch_statistics,
        "data.cache.share: found rank": config.data.cache.share == "rank",
        f"train.micro_batch: found {config.train.micro_batch}": config.train.micro_batch != 1,
        "train.compile: found true": config.train.compile is True,
    }
    return [f"{what}, which train.deterministic: exact cannot have" for what, is_so in found.items() if is_so]


def task_problems(config: Config) -> list[str]:
    """What does not go with the task."""
    problems = []
    is_own = isinstance(config.loss, OwnLossOptions)
    if not is_own and config.loss.name not in (expected := LOSSES[config.task]):
        problems.append(f"loss: found {config.loss.name}, expected {' or '.join(expected)} for {config.task}")
    if config.predicts_outcomes:
        if config.data.regions is not None:
            problems.append(f"data.regions: found with task {config.task}; expected with segmentation alone")
        if config.patches.per_case != 1:
            problems.append(f"patches.per_case: found {config.patches.per_case}, expected 1, as a case has one outcome")
    elif config.model.name == "resnet":
        problems.append("model: found resnet, which has no decoder; expected a network that segments, e.g. unet")
    elif config.train.balance:
        problems.append("train.balance: expected with outcomes alone; patches.foreground balances a segmentation")
    if config.task == "regression" and config.train.balance:
        problems.append("train.balance: found true with task regression; expected with events or classes to balance")
    if config.train.balance and config.data.cache.share == "rank":
        problems.append(
            "train.balance: found true with data.cache.share: rank, which fixes each rank's cases; expected all"
        )
    if config.task != "survival" and config.validation.horizons is not None:
        problems.append(f"validate.horizons: found with task {config.task}; expected with survival alone")
    if config.model.flat and config.train.channels_last is True:
        problems.append("train.channels_last: found true with a network of single slices; expected auto or false")
    return problems + freeze_problems(config)


def freeze_problems(config: Config) -> list[str]:
    """Without an encoder, or an epoch in which it trains; networks of the user's own are asked when they are built."""
    freeze, problems = config.train.freeze, []
    if freeze is not None and not config.predicts_outcomes and not isinstance(config.model, OwnOptions):
        problems.append(
            "train.freeze: found with task segmentation, whose networks have no encoder apart; expected null"
        )
    if freeze is not None and freeze.encoder >= config.train.epochs:
        problems.append(f"train.freeze: found {freeze.encoder} epochs of {config.train.epochs}; expected fewer")
    return problems


def turning_problems(augment: tuple[Any, ...], patch: tuple[int, int, int]) -> list[str]:
    """Quarter turns that would not fit back into the patch."""
    return [
        f"augment: rotate90 in axes {list(turn.axes)} needs equal patches.size there, "
        f"found {patch[turn.axes[0]]} and {patch[turn.axes[1]]}"
        for turn in augment
        if isinstance(turn, Rotate90) and patch[turn.axes[0]] != patch[turn.axes[1]]
    ]
