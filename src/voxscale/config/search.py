"""The `search` section: which fields are varied, how trials are chosen, placed, stopped and judged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from voxscale.config.base import Positive, Section

DEFAULT_TRIALS = 24
_MOST_DEVICES = 99_999
LEAST_SHARE = 0.01  # of a device or a CPU
_LARGEST = 2**53  # whole numbers up to here survive JSON and are exact as floats

_ONE_SPLIT = "all trials share the data and one split, so that their metrics compare"
_NO_RESULT = "it does not change a result"
_REFUSED = {
    "search": "a search does not vary itself",
    "data.split": _ONE_SPLIT,
    "data.source": _ONE_SPLIT,
    "data.format": _ONE_SPLIT,
    "data.pattern": _ONE_SPLIT,
    "data.columns": _ONE_SPLIT,
    "data.patient": _ONE_SPLIT,
    "data.synthetic": _ONE_SPLIT,
    "data.store": _NO_RESULT,
    "loader": _NO_RESULT,
    "checkpoint": _NO_RESULT,
    "log": _NO_RESULT,
    "track": _NO_RESULT,
    "train.seed": "expected search.seeds, the number of runs of each configuration",
    "train.devices": "expected search.per_trial.devices",
    "train.stop_after": "expected search.scheduler, which stops trials",
    "validate.metric": "expected search.metric, by which all trials are compared",
}


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"found {value}, expected a number")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_number), Field(ge=-_LARGEST, le=_LARGEST)]
Values = tuple[JsonValue, ...]


def canonical(value: JsonValue) -> str:
    """A text that is the same for values which are the same in a config: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_settled(value), sort_keys=True)


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _settled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_settled(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Dimension(Section):
    """What one field may be. Exactly one of the keys.

    `grid` and `choice` list values of any kind; a grid sampler takes each, others draw one. `uniform` and `loguniform`
    are [lowest, highest]. `randint` is [lowest, end): the end itself is left out, as in NumPy and Ray Tune.
    """

    grid: Values | None = None
    choice: Values | None = None
    uniform: tuple[Number, Number] | None = None
    loguniform: tuple[Number, Number] | None = None
    randint: tuple[Whole, Whole] | None = None

    @property
    def kind(self) -> str:
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def values(self) -> Sequence[JsonValue] | None:
        """Every value there is, in order; None where there is a continuum of them."""
        if self.randint is not None:
            return range(*self.randint)
        return self.grid or self.choice

    @field_validator("grid", "choice")
    @classmethod
    def _each_once(cls, values: tuple[JsonValue, ...] | None) -> tuple[JsonValue, ...] | None:
        if values == ():
            raise ValueError("found [], expected at least one value")
        written = [canonical(value) for value in values or ()]
        repeated = [text for text in dict.fromkeys(written) if written.count(text) > 1]
        if repeated:
            raise ValueError(f"found {', '.join(repeated)} more than once; expected each value once")
        return values

    @field_validator("uniform", "loguniform", "randint")
    @classmethod
    def _ascends(cls, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        if ends is not None and not ends[0] < ends[1]:
            raise ValueError(f"found {list(ends)}; expected [low, high] with low < high")
        if ends is not None and not math.isfinite(ends[1] - ends[0]):
            raise ValueError(f"found {list(ends)}; expected a range whose width is a finite number")
        return ends

    @field_validator("loguniform")
    @classmethod
    def _has_a_logarithm(cls, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        if ends is not None and ends[0] <= 0:
            raise ValueError(f"found {list(ends)}; expected both above 0, as their logarithms are drawn from")
        return ends

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        names = list(type(self).model_fields)
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"found {' and '.join(given) or 'none'}; expected one of {', '.join(names)}")
        return self

    @model_serializer(mode="wrap")
    def _given_alone(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class Asha(Section):
    """Stop what is not among the best 1/`reduction` after `grace` validations, and after each `reduction` times as
    many as before."""

    name: Literal["asha"] = "asha"
    reduction: Annotated[int, BeforeValidator(_number), Field(ge=2)] = 3
    grace: Positive = 1


def _scheduler_from_name(value: Any) -> Any:
    if value is None or value in ("none", {"name": "none"}):
        return "none"
    if value == "asha":
        return {"name": "asha"}
    if not isinstance(value, dict | Asha):
        raise ValueError(f"found {value!r}, expected none, asha or e.g. {{name: asha, reduction: 3, grace: 1}}")
    return value


def _scheduler_kind(value: Any) -> str:
    return "none" if value == "none" else "asha"


Scheduler = Annotated[
    Annotated[Literal["none"], Tag("none")] | Annotated[Asha, Tag("asha")], Discriminator(_scheduler_kind)
]


def _share_of_devices(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 1 <= value <= _MOST_DEVICES and value == int(value):
        return int(value)
    if value == "all" or (is_number and LEAST_SHARE <= value < 1):
        return value
    raise ValueError(
        f"found {value!r}, expected a whole number of devices, a share of one such as 0.5, or 'all', those of a node"
    )


class PerTrial(Section):
    """What one trial holds: `devices` of one node, or a share of one device; `auto` cpus are the devices' part."""

    devices: Annotated[Literal["all"] | int | float, BeforeValidator(_share_of_devices)] = 1
    cpus: Literal["auto"] | Annotated[Number, Field(ge=LEAST_SHARE)] = "auto"


class Search(Section):
    """Many runs of one config, each with other values of the fields in `space`.

    `metric` null is validate.metric. `mode: auto` is as better values of it go: less of an error, more of a score.
    `sampler: auto` is grid where every dimension is a `grid`, else random; a
    `grid` dimension under another sampler is drawn from like a `choice`. Every configuration runs `seeds` times, with
    train.seed, train.seed + 1 and so on.
    """

    metric: Annotated[str, Field(min_length=1)] | None = None
    mode: Literal["auto", "max", "min"] = "auto"
    trials: Positive | None = None
    sampler: Literal["auto", "grid", "random", "tpe"] = "auto"
    seed: Annotated[int, BeforeValidator(_number), Field(ge=0, lt=2**63)] = 0
    seeds: Annotated[Positive, Field(le=1000)] = 1
    scheduler: Annotated[Scheduler, BeforeValidator(_scheduler_from_name)] = "none"
    retries: Annotated[int, BeforeValidator(_number), Field(ge=0)] = 2
    max_concurrent: Literal["auto"] | Positive = "auto"
    per_trial: PerTrial = PerTrial()
    space: dict[str, Dimension]

    @property
    def chosen_sampler(self) -> Literal["grid", "random", "tpe"]:
        if self.sampler != "auto":
            return self.sampler
        return "grid" if all(dimension.kind == "grid" for dimension in self.space.values()) else "random"

    @property
    def direction(self) -> Literal["max", "min"]:
        """Which of two values is the better one. `auto` is settled when the search is opened."""
        return "min" if self.mode == "min" else "max"

    @property
    def num_points(self) -> int:
        """How many configurations are tried; each runs `seeds` times."""
        if self.chosen_sampler == "grid":
            return math.prod(len(dimension.values or ()) for dimension in self.space.values())
        return self.trials or DEFAULT_TRIALS

    @field_validator("space")
    @classmethod
    def _can_be_searched(cls, space: dict[str, Dimension]) -> dict[str, Dimension]:
        if not space:
            raise ValueError("found no field; expected at least one, e.g. optimizer.lr: {loguniform: [1e-4, 1e-2]}")
        problems = [problem for path in space for problem in _path_problems(path, space)]
        if problems:
            raise ValueError("\n".join(problems))
        return space

    @model_validator(mode="after")
    def _validates_alike(self) -> Self:
        varied = [path for path in self.space if path in ("train.epochs", "validate.every", "train", "validate")]
        if varied and self.scheduler != "none":
            raise ValueError(
                f"scheduler asha with {', '.join(varied)} in the space: trials would not be validated equally often; "
                "expected scheduler none, or these fields fixed"
            )
        return self

    @model_validator(mode="after")
    def _fits_the_sampler(self) -> Self:
        if self.chosen_sampler != "grid":
            return self
        endless = [f"{path} ({dimension.kind})" for path, dimension in self.space.items() if dimension.values is None]
        if endless:
            raise ValueError(
                f"sampler grid with {', '.join(endless)}, which has no end of values; "
                "expected grid, choice or randint, or sampler random or tpe"
            )
        if self.trials not in (None, self.num_points):
            raise ValueError(
                f"trials: found {self.trials}, expected null or {self.num_points}, the number of points of the grid; "
                "sampler random takes some of them"
            )
        return self


def _path_problems(path: str, space: dict[str, Dimension]) -> list[str]:
    """Why a field is not to be searched, or not beside the others."""
    if not all(path.split(".")):
        return [f"{path!r}: expected the path of a field, such as optimizer.lr"]
    problems = [
        f"{path}: not to be searched: {reason}"
        if is_within(path, refused)
        else f"{path}: not to be searched as a whole, as {refused} is in it: {reason}"
        for refused, reason in _REFUSED.items()
        if is_within(path, refused) or is_within(refused, path)
    ]
    outer = [other for other in space if other != path and is_within(path, other)]
    return problems[:1] + [f"{path}: found {other} too, which contains it; expected one of them" for other in outer]


def is_within(path: str, section: str) -> bool:
    return path == section or path.startswith(f"{section}.")
