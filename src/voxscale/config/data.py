"""The `data` section: where cases are, how they are split and prepared, and what a table's columns hold."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from voxscale.config.base import Fraction, Positive, Section, Seed, Size
from voxscale.config.horizons import TimeUnit

Millimetres = Annotated[float, Field(gt=0, le=1000)]
Spacing = tuple[Millimetres, Millimetres, Millimetres]
Names = Annotated[tuple[str, ...], Field(min_length=1)]


class SplitShares(Section):
    """Shares of the patients, or `folds` equal parts of which the `fold`-th validates; the rest trains.

    What shares its `group` stays together: the patient, or in a table what has the same entry in that column. With
    `keep_test`, cases that the data itself states as test stay so; shares and folds are of the others.
    """

    val: Fraction = 0.2
    test: Fraction = 0.0
    folds: Annotated[int, Field(ge=2, le=1000)] | None = None
    fold: Positive = 1
    seed: int = 0
    group: str = "patient"
    stratify: bool = True
    keep_test: bool = False

    @model_validator(mode="after")
    def _leaves_training_cases(self) -> Self:
        if self.val + self.test >= 1:
            raise ValueError(f"val {self.val} + test {self.test} leave no case for training; expected a sum below 1")
        if self.keep_test and self.test:
            raise ValueError(
                f"test {self.test} with keep_test, which leaves the data's own test cases; expected test 0"
            )
        if self.folds is None and self.fold != 1:
            raise ValueError(f"fold {self.fold} without folds; expected e.g. {{folds: 5, fold: {self.fold}}}")
        if self.folds is not None and self.fold > self.folds:
            raise ValueError(f"fold {self.fold}: expected 1 to {self.folds}, which is folds")
        return self


class SplitColumns(Section):
    """The split as the data states it, in a column of a table; of several, the `fold`-th counts."""

    column: str | Names
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

    image: str | Names
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
    """Which columns of a table hold what; null: found by their names, `targets` and `features`: none.

    `time` and `event` are those of a survival, `targets` of a regression; of a classification `classes` is one column
    of names, or several of 0 and 1 that may hold at once.
    """

    image: str | Names | None = None
    label: str | None = None
    case: str | None = None
    patient: str | None = None
    time: str | None = None
    event: str | None = None
    targets: Names | None = None
    classes: str | Names | None = None
    features: tuple[str, ...] | None = None

    @field_validator("image", "targets", "classes", "features")
    @classmethod
    def _each_once(cls, names: Any) -> Any:
        twice = [name for name, count in Counter(names).items() if count > 1] if isinstance(names, tuple) else []
        if twice:
            raise ValueError(f"found {', '.join(map(repr, twice))} more than once, expected each column once")
        return names


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
    format: Literal["auto", "decathlon", "nnunet", "list", "table", "tfrecord", "pairs", "classes", "cifar10"] = "auto"
    pattern: Pattern | None = None
    columns: Columns = Columns()
    time_unit: TimeUnit = "days"
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
        shown = reprlib.repr(pattern)
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"{shown} is no regular expression: {error}") from None
        except (OverflowError, RecursionError):
            raise ValueError(f"{shown} is too large a regular expression, or nested too deep") from None
        if groups != 1:
            raise ValueError(f"{shown}: found {groups} groups, expected one, e.g. ^(sub-[0-9]+)")
        return pattern

    @field_validator("stage")
    @classmethod
    def _stage_is_somewhere(cls, stage: str | None) -> str | None:
        if stage is not None and "$" not in stage and not stage.startswith("/"):
            raise ValueError(f"{stage!r}: expected an absolute path, or a variable of the node, e.g. $TMPDIR")
        return stage

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
