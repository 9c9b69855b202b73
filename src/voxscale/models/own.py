"""A user's own network, named as `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from voxscale.config.models import OwnOptions
from voxscale.config.own import find_function, told
from voxscale.errors import ConfigError


def build_own(options: OwnOptions, in_channels: int, out_channels: int, patch: tuple[int, int, int]) -> torch.nn.Module:
    return _call(
        options, find_function("model.name", options.name), {"in_channels": in_channels, "out_channels": out_channels}
    )


def build_own_outcome(options: OwnOptions, in_channels: int, num_features: int, out_channels: int) -> torch.nn.Module:
    """The network as the function returns it, under its own names, called with (image, features).

    Its forward takes both, or the image alone. A function that asks for `num_features` is told how many there are.
    """
    function = find_function("model.name", options.name)
    given = {"in_channels": in_channels, "out_channels": out_channels}
    if "num_features" in _required(function) and "num_features" not in options.options:
        given["num_features"] = num_features
    model = _call(options, function, given)
    if not _takes_features(model):
        if num_features:
            raise ConfigError(
                f"model.name {options.name}: found a network that takes the image alone, and {num_features} features; "
                "expected forward(image, features)",
                fix="let its forward take both, or leave data.columns.features empty",
            )
        model.register_forward_pre_hook(_without_features)
    # Hooks, not a module around it: the names of its parameters stay those that it has in segmentation.
    model.register_forward_hook(partial(_check_output, options.name, out_channels))
    return model


def _call(options: OwnOptions, function: Callable[..., Any], given: dict[str, int]) -> torch.nn.Module:
    """Call the function; whatever goes wrong in it is the config's error, told without a traceback."""
    try:
        model = function(**given, **options.options)
    except (Exception, SystemExit) as error:
        arguments = {**given, **options.options}
        raise ConfigError(
            f"model.name {options.name}: found {told(error)} when it was called with "
            f"{', '.join(f'{key}={value!r}' for key, value in arguments.items())}; expected a network",
            fix="correct the function, or model.options to what it takes",
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model.name {options.name}: found {type(model).__name__} returned, expected a torch.nn.Module",
            fix="let the function return the network",
        )
    return model


def _required(function: Callable[..., Any]) -> list[str]:
    """Names that it cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of compiled code
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]


def _takes_features(model: torch.nn.Module) -> bool:
    """Whether a second positional argument is awaited, and not merely some option of its own."""
    positional = [
        each
        for each in inspect.signature(model.forward).parameters.values()
        if each.kind not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    ]
    return any(
        each.name == "features" or each.default is each.empty or each.kind is inspect.Parameter.VAR_POSITIONAL
        for each in positional[1:]
    )


def _without_features(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return inputs[:1]


def _check_output(
    name: str, out_channels: int, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: Any
) -> None:
    expected = (len(inputs[0]), out_channels)
    found = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if found != expected:
        raise ConfigError(
            f"model.name {name}: found an output of {found}, expected {expected}: a row per case, of out_channels",
            fix="let its forward return that",
        )
