"""A user's own loss, named as `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from voxscale.config.losses import OwnLossOptions
from voxscale.config.own import find_function, told
from voxscale.errors import ConfigError


@dataclass(frozen=True)
class OwnLoss:
    """Its functions are looked up when they are first used: evaluation and prediction do without them."""

    options: OwnLossOptions

    @classmethod
    def of(cls, options: Any) -> OwnLoss | None:
        return cls(options) if isinstance(options, OwnLossOptions) else None

    def check(self) -> None:
        """Refuse, before anything runs, functions that are not there or cannot be called as they will be."""
        _refuse_call("loss.name", self.options.name, self._make_rows, (None, None), self.options.options)
        if self._reduce is not None:
            _refuse_call("loss.reduce", str(self.options.reduce), self._reduce, (None,), {})

    def rows(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """(n, k): what the function makes of raw outputs and targets, a row for each sample."""
        if output.ndim == 6:
            raise ConfigError(
                f"loss.name {self.options.name}: found outputs of several levels, expected one",
                fix="set model.deep_supervision to 0, or take a loss of voxscale's",
            )
        rows = self._make_rows(output.float(), target, **self.options.options)
        if not isinstance(rows, torch.Tensor) or rows.ndim not in (1, 2) or len(rows) != len(output):
            raise ConfigError(
                f"loss.name {self.options.name}: found {_kind(rows)} returned, expected [{len(output)}] or "
                f"[{len(output)}, k]: a number, or a row of numbers, for each sample",
                fix="average over voxels and classes alone; loss.reduce is for what couples samples",
            )
        if output.requires_grad and not rows.requires_grad:
            raise ConfigError(
                f"loss.name {self.options.name}: found a loss without gradient, expected one of the output",
                fix="compute it with torch from the output, without detach, argmax or numpy",
            )
        return rows if rows.ndim == 2 else rows[:, None]

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        if self._reduce is None:
            return rows.mean()
        loss = self._reduce(rows)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"loss.reduce {self.options.reduce}: found {_kind(loss)} returned, expected a tensor of one number",
                fix="let it make one loss of the rows of all samples",
            )
        return loss.reshape(())

    @cached_property
    def _make_rows(self) -> Callable[..., Any]:
        return find_function("loss.name", self.options.name)

    @cached_property
    def _reduce(self) -> Callable[..., Any] | None:
        return None if self.options.reduce is None else find_function("loss.reduce", self.options.reduce)


def _refuse_call(
    field: str, name: str, function: Callable[..., Any], arguments: tuple[None, ...], options: dict[str, Any]
) -> None:
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        expected = ["output", "target"][: len(arguments)] if len(arguments) > 1 else ["rows"]
        call = ", ".join([*expected, *(f"{key}={value!r}" for key, value in options.items())])
        raise ConfigError(
            f"{field} {name}: found {told(error)}, expected a function that takes ({call})",
            fix="correct the function, or loss.options to what it takes",
        ) from error
    except ValueError:  # compiled code tells nothing of itself
        return


def _kind(returned: Any) -> str:
    return str(list(returned.shape)) if isinstance(returned, torch.Tensor) else type(returned).__name__
