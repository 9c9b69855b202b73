"""Functions of a user's own, named in a config as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from voxscale.config.base import chosen_by_name
from voxscale.errors import ConfigError

OWN = "package.module:function"
FunctionName = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")]


def chosen_by_name_or_own(default: str) -> Callable[[Any], str | None]:
    """A discriminator as `chosen_by_name`, to which a name with a colon is a function of the user's."""
    by_name = chosen_by_name(default)

    def choose(value: Any) -> str | None:
        name = by_name(value)
        return OWN if name is not None and ":" in name else name

    return choose


def find_function(field: str, name: str) -> Callable[..., Any]:
    """Looked up as Python does, and last in the current folder, which a console script does not search.

    `field` of the config named it.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{field} {name}: found {told(error)} when {module_name} was imported; expected a Python module",
            fix=f"install it, or start in the folder it stands in (searched: {here})",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{field} {name}: found {found} called {function_name} in {module.__file__ or module_name}, "
            f"expected a function; it has {', '.join(names[:10]) or 'none'}",
            fix="name one of its functions",
        )
    return function  # type: ignore[no-any-return]


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
