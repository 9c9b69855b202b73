"""The whole config, top to bottom, as `design` and users see it. Field order is the order in `config.yaml`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from voxscale.config.base import Fraction, Positive, Section, Size
from voxscale.config.models import ModelOptions, UNetOptions, size_problems
from voxscale.config.search import Search
from voxscale.config.training import (
    AUGMENT_PRESETS,
    AdamWOptions,
    Cosine,
    DiceCEOptions,
    LossOptions,
    OptimizerOptions,
    Rotate90,
    ScheduleOptions,
    Transform,
    check_schedule,
    check_transforms,
)

Millimetres = Annotated[float, Field(gt=0, le=1000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Spacing = tuple[Millimetres, Millimetres, Millimetres]
Batch = Annotated[Positive, Field(le=1_000_000)]


class SplitShares(Section):
    """Shares of the patients, or `folds` equal parts of which the `fold`-th validates; the rest trains.

    What shares its `group` stays together: the patient, or in a table what has the same entry in that column.
    """

    val: Fraction = 0.2
    test: Fraction = 0.0
    folds: Annotated[int, Field(ge=2, le=1000)] | None = None
    fold: Positive = 1
    seed: int = 0
    group: str = "patient"
    stratify: bool = True

    @model_validator(mode="after")
    def _leaves_training_cases(self) -> Self:
        if self.val + self.test >= 1:
            raise ValueError(f"val {self.val} + test {self.test} leave no case for training; expected a sum below 1")
        if self.folds is None and self.fold != 1:
            raise ValueError(f"fold {self.fold} without folds; expected e.g. {{folds: 5, fold: {self.fold}}}")
        if self.folds is not None and self.fold > self.folds:
            raise ValueError(f"fold {self.fold}: expected 1 to {self.folds}, which is folds")
        return self


class SplitColumns(Section):
    """The split as the data states it, in a column of a table; of several, the `fold`-th counts."""

    column: str | Annotated[tuple[str, ...], Field(min_length=1)]
    train: str = "train"
    val: str = "val"
    test: str = "test"
    fold: Positive = 1
    group: str = "patient"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if isinstance(self.column, str) else self.column

    @model_validator(mode="after")
    def _fold_is_a_column(self) -> Self:
        if self.fold > len(self.columns):
            raise ValueError(f"fold {self.fold}: expected 1 to {len(self.columns)}, the number of columns")
        if len({self.train, self.val, self.test}) < 3:
            raise ValueError(f"train {self.train!r}, val {self.val!r}, test {self.test!r}: expected three names")
        return self


def _split_kind(value: Any) -> str:
    by_column = "column" in value if isinstance(value, dict) else isinstance(value, SplitColumns)
    return "columns" if by_column else "shares"


Split = Annotated[
    Annotated[SplitShares, Tag("shares")] | Annotated[SplitColumns, Tag("columns")], Discriminator(_split_kind)
]


class Pattern(Section):
    """How files are named, below `source`: `{case}` stands in each, `{patient}` may; several images are channels."""

    image: str | Annotated[tuple[str, ...], Field(min_length=1)]
    label: str

    @property
    def images(self) -> tuple[str, ...]:
        return (self.image,) if isinstance(self.image, str) else self.image

    @model_validator(mode="after")
    def _names_the_case(self) -> Self:
        for pattern in (*self.images, self.label):
            fields = re.findall(r"{(.*?)}", pattern)
            if "case" not in fields or not set(fields) <= {"case", "patient"}:
                raise ValueError(f"{pattern!r}: expected {{case}}, and at most {{patient}} besides")
            if pattern.startswith("/") or ".." in pattern.split("/"):
                raise ValueError(f"{pattern!r}: expected a path below data.source")
        return self


class Columns(Section):
    """Which columns of a table hold what; null: found by their names."""

    image: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    label: str | None = None
    case: str | None = None
    patient: str | None = None


class Slices(Section):
    """Slices that are kept, along the file's own axes: {z: [2, -1]} drops two at the start and one at the end."""

    x: tuple[int, int | None] | None = None
    y: tuple[int, int | None] | None = None
    z: tuple[int, int | None] | None = None


class Intensity(Section):
    """How voxel values are brought to one scale. Exactly one of the fields, or `none`."""

    zscore: Literal["nonzero", "all"] | None = None
    window: tuple[float, float] | None = None
    percentiles: tuple[Annotated[float, Field(ge=0, le=100)], Annotated[float, Field(ge=0, le=100)]] | None = None

    @model_validator(mode="after")
    def _one_and_ordered(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"found {' and '.join(given)}; expected one of them")
        for name in ("window", "percentiles"):
            low_high = getattr(self, name)
            if low_high is not None and not low_high[0] < low_high[1]:
                raise ValueError(f"{name} {list(low_high)}: expected the lower bound first")
        return self


class Synthetic(Section):
    """Generated volumes: `source` is filled with them where it does not exist yet."""

    cases: Positive = 40
    size: Size = (48, 48, 48)
    seed: Seed = 0


class Cache(Section):
    """Where patches are cut from: the store's files, the node's memory, or the device's.

    `share: rank` gives each rank its own cases. `rate` is the share of the cases that is held; with `replace` above
    zero an epoch trains on what is held, and that share of it is exchanged for other cases after each epoch.
    """

    where: Literal["store", "host", "device"] = "store"
    share: Literal["all", "rank"] = "all"
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    replace: Fraction = 0.0

    @model_validator(mode="after")
    def _rotates_in_memory(self) -> Self:
        if self.replace and self.rate == 1:
            raise ValueError(f"replace {self.replace} with rate 1: all cases are held; expected a rate below 1")
        return self


class Data(Section):
    source: Annotated[str, Field(min_length=1)]
    format: Literal["auto", "decathlon", "nnunet", "list", "table", "tfrecord", "pairs"] = "auto"
    pattern: Pattern | None = None
    columns: Columns = Columns()
    patient: str | None = None
    synthetic: Synthetic | None = None
    split: Split | None = None
    slices: Slices | None = None
    orientation: Annotated[str, Field(pattern="^[RL][AP][SI]$")] | None = "RAS"
    crop_foreground: bool = False
    spacing: Spacing | None = None
    size: Size | None = None
    intensity: Intensity = Intensity(zscore="nonzero")
    regions: dict[str, tuple[Positive, ...]] | None = None
    store: str | None = None
    stage: str | None = None
    cache: Cache = Cache()

    @field_validator("patient")
    @classmethod
    def _patient_is_a_pattern(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"{pattern!r}: found {groups} groups, expected one, e.g. ^(sub-[0-9]+)")
        return pattern

    @model_validator(mode="after")
    def _one_grid(self) -> Self:
        if self.spacing is not None and self.size is not None:
            raise ValueError("found spacing and size; expected one of them")
        return self

    @field_validator("regions")
    @classmethod
    def _regions_hold_labels(cls, regions: dict[str, tuple[int, ...]] | None) -> dict[str, tuple[int, ...]] | None:
        for name in regions or {}:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name) or name == "mean":
                raise ValueError(
                    f"region {name!r}: expected letters, digits, . _ + - and not 'mean', which is the average"
                )
        empty = [name for name, labels in (regions or {}).items() if not labels]
        if empty or regions == {}:
            raise ValueError(
                f"region without labels: {', '.join(empty) or 'none given'}; expected e.g. {{WT: [1, 2, 3]}}"
            )
        return regions


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
    deterministic: bool = True
    stop_after: StopAfter | None = None

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
    metric: str = "dice/mean"


class Checkpoint(Section):
    every_minutes: Annotated[float, Field(gt=0)] = 10
    keep: Positive = 2


def _expand_preset(value: Any) -> Any:
    if isinstance(value, str):
        if value not in AUGMENT_PRESETS:
            raise ValueError(f"found {value!r}; expected {', '.join(AUGMENT_PRESETS)} or a list of transforms")
        return AUGMENT_PRESETS[value]
    return value


class Config(Section):
    """One config for every scale: nothing in it depends on how many devices train it."""

    task: Literal["segmentation"] = "segmentation"
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


def turning_problems(augment: tuple[Any, ...], patch: tuple[int, int, int]) -> list[str]:
    """Quarter turns that would not fit back into the patch."""
    return [
        f"augment: rotate90 in axes {list(turn.axes)} needs equal patches.size there, "
        f"found {patch[turn.axes[0]]} and {patch[turn.axes[1]]}"
        for turn in augment
        if isinstance(turn, Rotate90) and patch[turn.axes[0]] != patch[turn.axes[1]]
    ]
