"""What all parts of the config share: frozen, no unknown keys, variants chosen by their `name`."""

from __future__ import annotations

import reprlib
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator


def _no_truth(value: Any, words: Sequence[str] = ()) -> Any:
    """YAML's true and false are no numbers, though Python counts them as 1 and 0; `words` may stand there as well."""
    if isinstance(value, bool):
        raise ValueError(f"found {value}, expected {' or '.join([*map(repr, words), 'a number'])}")
    return value


Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, BeforeValidator(lambda value: _no_truth(value)), Field(ge=1)]
Edge = Annotated[int, Field(ge=1, le=4096)]
Size = tuple[Edge, Edge, Edge]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    """A part of the config. Options of models, losses and optimizers are sections too."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        has_own_words = any(isinstance(rule, BeforeValidator) for rule in field.metadata)
        kinds = _kinds(field.annotation)
        if bool not in kinds and kinds & {int, float} and not has_own_words:
            for each in value if isinstance(value, list | tuple) else (value,):
                _no_truth(each, _words_of(field.annotation))
        return value


def _words_of(annotation: Any) -> list[str]:
    """The words that may stand in place of a value."""
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return [word for word in inner if isinstance(word, str)]
    return [word for each in inner for word in _words_of(each)]


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of."""
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return set(map(type, inner))
    return {annotation} if not inner and isinstance(annotation, type) else set().union(*map(_kinds, inner))


def chosen_by_name(default: str) -> Callable[[Any], str | None]:
    """A discriminator: the variant's `name`, or the default where a mapping does not say."""

    def choose(value: Any) -> str | None:
        if isinstance(value, Section):
            return str(getattr(value, "name", default))
        if not isinstance(value, dict):
            return None
        name = value.get("name", default)
        return name if isinstance(name, str) else reprlib.repr(name)

    return choose
