"""What a user gives to be worked on: a config, or data that speak for themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from voxscale.config.load import given_fields, make_config, read_config
from voxscale.config.schema import Config
from voxscale.data.build import default_store
from voxscale.data.guess import guess_config, is_data
from voxscale.errors import ConfigError
from voxscale.runs import RunFolder, runs_of


def config_or_data(
    path: Path, overrides: Sequence[str] | None, environ: Mapping[str, str], *, strict: bool = True
) -> Config:
    """Read the config, or guess one for data; not `strict`: also for data that could not be trained on."""
    if is_data(path):
        of_data = [override for override in overrides or () if override.startswith("data.")]
        others = [override for override in overrides or () if override not in of_data]
        given = given_fields(of_data, "data")
        try:
            content = guess_config(path, default_store(environ), given, strict=strict)
        except ValidationError:  # said in words by the same check of the whole
            content = {"data": {"source": str(path), **given}}
        return make_config(content, others, name=str(path), base=Path())
    return read_config(path, overrides or ())


def given_runs(path: Path) -> list[RunFolder]:
    """The run in a folder, or those of the folds in it."""
    runs = runs_of(path)
    if not runs:
        raise ConfigError(f"{path}: not a run folder", fix="give a folder that `voxscale runs` lists")
    return runs


def plain_name(name: str) -> str:
    """A name that can become part of a path and nothing more."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{name!r}: found characters that a name cannot have", fix="use letters, digits, . _ -")
    return name


def evaluation_name(split: str | None, data: Path | None, checkpoint: str, mirror: bool | None) -> str:
    """What an evaluation is called unless it is given a name: by its cases, and by what differs from the usual."""
    if split is not None and data is not None:
        raise ConfigError(
            f"--split {split} and --data: expected one of them", fix="leave --split out: all of --data is evaluated"
        )
    of_data = re.sub(r"[^A-Za-z0-9._-]", "_", data.resolve().name).lstrip("._-") if data is not None else ""
    parts = [of_data or (split or "val")]
    parts += [plain_name(checkpoint)] if checkpoint != "best" else []
    parts += [] if mirror is None else ["mirrored" if mirror else "unmirrored"]
    return "-".join(parts)
