"""What all parts of the config share: frozen, no unknown keys, variants chosen by their `name`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_truth(value: Any) -> Any:
    """YAML's true and false are no numbers, though Python counts them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"found {value}, expected a number")
    return value


Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, BeforeValidator(_no_truth), Field(ge=1)]
Edge = Annotated[int, Field(ge=1, le=4096)]
Size = tuple[Edge, Edge, Edge]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    """A part of the config. Options of models, losses and optimizers are sections too."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


def chosen_by_name(default: str) -> Callable[[Any], str | None]:
    """A discriminator: the variant's `name`, or the default where a mapping does not say."""

    def choose(value: Any) -> str | None:
        if isinstance(value, Section):
            return str(getattr(value, "name", default))
        return str(value.get("name", default)) if isinstance(value, dict) else None

    return choose
