"""The config of a run, in what it differs from a recipe or from the defaults; and what it ran on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from voxscale.config.load import make_config, plain, render_fields
from voxscale.config.schema import Config
from voxscale.errors import VoxscaleError
from voxscale.launch.demo import read_recipe
from voxscale.report.blocks import Block, Section, columns_of, pairs_table, section, table, words
from voxscale.report.private import without_folders
from voxscale.report.reading import ReadRun

DEFAULTS = "the defaults"
_OWN = ("data.source", "data.store", "data.synthetic")  # of each user


def settings_section(run: ReadRun) -> Section | None:
    if run.config is None:
        return section("Environment", _environment(run))
    all_fields = code_block("All fields", render_fields(shown_fields(run.config)))
    return section("Config and environment", differences_block(run.config), _environment(run), all_fields)


def _environment(run: ReadRun) -> Block | None:
    """Versions and devices of the last start."""
    started = [event for event in run.of_kind("start") if event.get("environment")]
    if not started:
        return None
    about = {**started[-1]["environment"], "starts of the run": len(run.of_kind("start"))}
    return pairs_table(about, title="Environment")


def code_block(title: str, text: str) -> Block:
    return {"type": "code", "title": title, "text": text}


def differences_block(config: Config) -> Block | None:
    """Beside the recipe that is nearest, or the defaults where no recipe is nearer."""
    found = {name: fields_that_differ(config, other) for name, other in _known(config.task)}
    nearest = min(found, key=lambda name: len(found[name]))
    rows = [[path, words(there), words(here)] for path, here, there in found[nearest]]
    columns = columns_of("field", "recipe" if nearest != DEFAULTS else "default", "this run")
    title = f"Differences from {nearest}"
    return table(columns, rows or [["none", "", ""]], title=title, plain=True)


def fields_that_differ(config: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """(Field, its value here, its value there)."""
    here, there = dict(flat(shown_fields(config))), dict(flat(shown_fields(other)))
    names = dict.fromkeys((*here, *there))
    return [
        (name, here.get(name), there.get(name))
        for name in names
        if here.get(name) != there.get(name) and not name.startswith(_OWN)
    ]


def flat(fields: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(fields, dict) and fields:
        for key, value in fields.items():
            yield from flat(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, fields


def shown_fields(config: Config) -> dict[str, Any]:
    """The config with the names of files alone."""
    fields: dict[str, Any] = without_folders(plain(config))
    return fields


@cache
def _known(task: str) -> list[tuple[str, Config]]:
    """The defaults of the task, and the recipes of it."""
    found = [(DEFAULTS, make_config({"task": task, "data": {"source": "."}}, name=DEFAULTS, base=Path()))]
    for entry in sorted(files("voxscale").joinpath("recipes").iterdir(), key=lambda entry: entry.name):
        name = entry.name.removesuffix(".yaml")
        try:
            recipe = make_config(read_recipe(name), name=name, base=Path())
        except (VoxscaleError, OSError):
            continue
        if recipe.task == task:
            found.append((f"recipe {name}", recipe))
    return found
