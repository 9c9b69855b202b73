"""From a search's config to its trials' configs, and everything that is wrong with the space before one starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from voxscale.config.load import check_section, plain
from voxscale.config.schema import Config
from voxscale.config.search import Dimension, Search
from voxscale.errors import ConfigError
from voxscale.search.samplers import propose

MAX_CHECKED = 2000
_MAX_SHOWN = 20
_PLACE = "search.space"
# Where in a range the value inside is taken: hardly ever at a whole number, which a field of such would accept.
_INSIDE = 0.3819660112501051


def with_params(config: Config, params: Mapping[str, Any]) -> Config:
    """The config of a trial: the base config with `params` set by path, checked as a file is, and without `search`.

    Each value replaces what the base config has there, defaults included; nothing beside it changes. So `model.name`
    alone keeps the other keys of `model`, while a mapping for `model` replaces them all. A number in a path is an index
    into a list.
    """
    content = plain(config.model_copy(update={"search": None}))
    copied = json.loads(json.dumps(dict(params), allow_nan=False))
    problems = [(path, _set_field(content, path.split("."), value)) for path, value in copied.items()]
    if any(problem for _, problem in problems):
        raise ConfigError.from_findings(
            [f"{_PLACE}: {path}: {problem}" for path, problem in problems if problem], fix="correct the paths above"
        )
    return check_section(Config, content, _PLACE)


def render_trials(config: Config) -> tuple[list[dict[str, Any]], str]:
    """The trials that are known before the search begins, as data and as text: all but those that TPE will choose."""
    search = config.search
    if search is None or search.chosen_sampler == "tpe":
        return [], f"{search.num_points if search else 0} trials, chosen by TPE as the search goes on"
    points = [propose(search, index, ()) for index in range(min(search.num_points, MAX_CHECKED))]
    lines = [
        f"{index}: " + ", ".join(f"{path}={_short(value)}" for path, value in point.items())
        for index, point in enumerate(points)
    ]
    each = f", each with {search.seeds} seeds" if search.seeds > 1 else ""
    return points, "\n".join([*lines, f"{search.num_points} configurations{each}"])


def check_space(config: Config) -> None:
    """Refuse a search of which some trial could not start, with all findings at once.

    Every choice and some of every range are tried alone over the base config; then, for grid and random, whose points
    are known beforehand, all points together up to `MAX_CHECKED`.
    """
    if config.search is None:
        raise ConfigError(
            "search: missing; expected what to search", fix="e.g. search.space='{optimizer.lr: {grid: [1e-4, 1e-3]}}'"
        )
    if config.train.stop_after is not None:
        raise ConfigError(
            "train.stop_after: found in the config of a search, whose trials would all end early",
            fix="add train.stop_after=null; search.scheduler stops trials that are not worth going on with",
        )
    findings = [
        finding
        for path, dimension in config.search.space.items()
        for finding in _check_dimension(config, config.search, path, dimension)
    ]
    findings = findings or _check_points(config, config.search)
    if findings:
        raise ConfigError.from_findings(
            [f"{_PLACE}: {finding}" for finding in findings],
            fix="correct the space; fields that only fit together are searched as one, e.g. "
            "model: {choice: [{name: unet}, {name: segresnet}]}",
        )


def _check_dimension(config: Config, search: Search, path: str, dimension: Dimension) -> list[str]:
    """What is wrong with values of one field; what is said of them all is said once."""
    first = {other: next(_samples(inner)) for other, inner in search.space.items()}
    complaints: dict[str, list[str]] = {}
    samples = list(_samples(dimension))
    for value in samples:
        # A value that the base config alone cannot have may be fine beside what the other fields are to be.
        alone = _faults(config, {path: value})
        if alone and _faults(config, {**first, path: value}):
            for fault in alone:
                complaints.setdefault(fault, []).append(_short(value))
    findings = []
    for fault, values in complaints.items():
        said_of_all = len(values) == len(samples) > 1 or fault.startswith(f"{path}: unknown key")
        place = path if said_of_all else f"{path}={' and '.join(values)}"
        findings.append(f"{place}: {fault.removeprefix(f'{path}: ')}{_unfit_variant(config, path, fault)}")
    return findings


def _samples(dimension: Dimension) -> Iterator[Any]:
    """Values that stand for all of a dimension: each of a list; of a range its ends and one inside."""
    if dimension.randint is not None:
        low, end = dimension.randint
        yield from dict.fromkeys((low, end - 1))
    elif ends := dimension.uniform or dimension.loguniform:
        yield from (ends[0], ends[0] + _INSIDE * (ends[1] - ends[0]), ends[1])
    else:
        yield from dimension.values or ()


def _check_points(config: Config, search: Search) -> list[str]:
    """Findings about values that are fine alone and not together."""
    if search.chosen_sampler == "tpe":
        return []
    complaints: dict[str, list[dict[str, Any]]] = {}
    for index in range(min(search.num_points, MAX_CHECKED)):
        point = propose(search, index, ())
        for fault in _faults(config, point):
            complaints.setdefault(fault, []).append(point)
    findings = [_of_points(fault, points) for fault, points in complaints.items()]
    rest = len(findings) - _MAX_SHOWN
    return findings[:_MAX_SHOWN] + ([f"and {rest} more of this kind"] if rest > 0 else [])


def _of_points(fault: str, points: list[dict[str, Any]]) -> str:
    example = ", ".join(f"{path}={_short(value)}" for path, value in points[0].items())
    others = f" and in {len(points) - 1} more points" if len(points) > 1 else ""
    return f"{example}{others}: {fault}"


def _faults(config: Config, params: Mapping[str, Any]) -> list[str]:
    try:
        with_params(config, params)
    except ConfigError as error:
        return [line.removeprefix(f"{_PLACE}: ") for line in error.message.splitlines()]
    return []


def _unfit_variant(config: Config, path: str, fault: str) -> str:
    """Why a key is unknown that the user never searched: the variant changed under it."""
    section, _, key = path.rpartition(".")
    if key != "name" or not fault.startswith(f"{section}.") or "unknown key" not in fault:
        return ""
    held = plain(config).get(section)
    base = held.get("name") if isinstance(held, dict) else None
    return f" ({section} is {base} in the config, and its other keys stay; search {section} as a whole)"


def _set_field(node: Any, parts: Sequence[str], value: Any) -> str:
    """Set the field in place and return what is wrong with the path, or nothing.

    What stands in the way is replaced, as by `key=value` on a command line.
    """
    part, *rest = parts
    if isinstance(node, list) and part not in map(str, range(len(node))):
        return f"found {part!r}, expected an index into a list of {len(node)}, the first being 0"
    key: Any = int(part) if isinstance(node, list) else part
    if not rest:
        node[key] = value
        return ""
    inner = node[key] if isinstance(node, list) else node.get(key)
    node[key] = inner if isinstance(inner, dict | list) else {}
    return _set_field(node[key], rest, value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
