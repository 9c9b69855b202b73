"""A user's own network, named as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from voxscale.config.models import OwnOptions
from voxscale.errors import ConfigError


def build_own(options: OwnOptions, in_channels: int, out_channels: int, patch: tuple[int, int, int]) -> torch.nn.Module:
    """Call the function; whatever goes wrong in it is the config's error, told without a traceback."""
    function = find_function(options.name)
    try:
        model = function(in_channels=in_channels, out_channels=out_channels, **options.options)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"model.name {options.name}: found {_told(error)} when it was called with in_channels={in_channels}, "
            f"out_channels={out_channels}{''.join(f', {key}={value!r}' for key, value in options.options.items())}; "
            "expected a network",
            fix="correct the function, or model.options to what it takes",
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model.name {options.name}: found {type(model).__name__} returned, expected a torch.nn.Module",
            fix="let the function return the network",
        )
    return model


def find_function(name: str) -> Callable[..., Any]:
    """Looked up as Python does, and last in the current folder, which a console script does not search."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"model.name {name}: found {_told(error)} when {module_name} was imported; expected a Python module",
            fix=f"install it, or start in the folder it stands in (searched: {here})",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"model.name {name}: found {found} called {function_name} in {module.__file__ or module_name}, "
            f"expected a function; it has {', '.join(names[:10]) or 'none'}",
            fix="name one of its functions",
        )
    return function  # type: ignore[no-any-return]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
