"""The page of a search: its trials, what their fields have to do with how good they are, the best config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from voxscale.config.load import read_config, render_fields
from voxscale.config.schema import Config
from voxscale.errors import VoxscaleError
from voxscale.files import read_csv
from voxscale.report.blocks import (
    Block,
    Section,
    column,
    curve,
    facts,
    number,
    plot,
    section,
    table,
    unit_of,
    with_unit,
    words,
)
from voxscale.report.forecast import duration
from voxscale.report.learning import points
from voxscale.report.private import without_places
from voxscale.report.reading import ReadRun, as_number, read_object
from voxscale.report.run_page import page_of
from voxscale.report.settings import code_block, differences_block, shown_fields
from voxscale.runs import RunFolder, SearchFolder

_CURVES = 12  # of the best trials
_CHOICES = 6  # that an axis names one by one
_ABOUT = ("trial", "state", "steps", "wall_s", "configuration", "seed", "run", "why")


def search_page(search: SearchFolder) -> dict[str, Any]:
    metrics = read_object(RunFolder(search.root), "metrics")
    trials = _trials(search)
    metric = str(metrics.get("metric", ""))
    fields = [name for name in (trials[0] if trials else {}) if name not in (*_ABOUT, metric)]
    state = ReadRun(RunFolder(search.root)).row.state
    sections = [
        section("", facts(_headline(metrics))),
        _fields_section(trials, fields, metric, minimal=metrics.get("mode") == "min"),
        section("Trials", _table(trials, fields, metric, minimal=metrics.get("mode") == "min")),
        _curves(search, trials, metric, minimal=metrics.get("mode") == "min"),
        _best_section(search),
    ]
    return page_of(search.root.name, "search", state, sections)


def _trials(search: SearchFolder) -> list[dict[str, str]]:
    try:
        trials = read_csv(search.table)
        return [
            {**each, "why": without_places(each.get("why", ""), search.trial(int(each["trial"])))} for each in trials
        ]
    except (OSError, ValueError, KeyError):
        return []


def _headline(metrics: dict[str, Any]) -> list[tuple[str, str, str] | None]:
    counts = metrics.get("trials") or {}
    best = metrics.get("best")
    others = ", ".join(f"{count} {state}" for state, count in counts.items() if state != "all")
    return [
        (f"best {metrics.get('metric')}", number(best["value"]), f"trial {best['trial']}") if best else None,
        ("trials", str(counts.get("all", "–")), others),
        ("steps", f"{metrics['steps']:,}", "of all trials") if metrics.get("steps") else None,
        ("time", duration(metrics["wall_s"]), "") if metrics.get("wall_s") else None,
        *((name, words(value), "of the best trial") for name, value in (best or {}).get("params", {}).items()),
    ]


def _table(trials: list[dict[str, str]], fields: list[str], metric: str, *, minimal: bool) -> Block | None:
    numeric = {name for name in (*fields, metric) if any(as_number(trial.get(name)) is not None for trial in trials)}
    columns = {
        "trial": column("trial", number=True),
        "state": column("state"),
        **{name: column(name, number=name in numeric, unit=unit_of(name)) for name in (metric, *fields)},
        "steps": column("steps", number=True),
        "wall_s": column("time", number=True, unit="s"),
        "why": column("why"),
    }
    rows = [
        [as_number(trial.get(name)) if c["number"] else trial.get(name, "") for name, c in columns.items()]
        for trial in trials
    ]
    return table(list(columns.values()), rows, sort=metric, descending=not minimal, search=len(rows) > 8)


def _fields_section(trials: list[dict[str, str]], fields: list[str], metric: str, *, minimal: bool) -> Section | None:
    known = [trial for trial in trials if as_number(trial.get(metric)) is not None]
    if not known:
        return None
    axes: list[Block] = []
    for name in (*fields, metric):
        cells = [trial.get(name, "") for trial in known]
        numbers = [value for cell in cells if (value := as_number(cell)) is not None]
        is_number = len(numbers) == len(cells)
        axis = {"name": name, "number": is_number, "values": numbers if is_number else cells}
        axes.append({**axis, **(ticks_of(numbers) if is_number else {})})
    parallel: Block = {
        "type": "parallel",
        "title": "Parallel coordinates",
        "axes": axes,
        "names": [f"trial {trial['trial']}" for trial in known],
        "minimal": minimal,
    }
    drawn = [
        plot(
            f"{metric} over {axis['name']}",
            str(axis["name"]),
            with_unit(metric),
            [curve("trials", axis["values"], axes[-1]["values"], "points", tips=parallel["names"])],
            log_x=_is_wide(axis["values"]),
            whole=axis["whole"],
            choices=axis["choices"],
        )
        for axis in axes[:-1]
        if axis["number"]
    ]
    return section("Fields and results", parallel, *drawn)


def ticks_of(values: Sequence[float]) -> dict[str, Any]:
    """Of an axis: between whole numbers there is nothing, nor between a few values that were chosen from."""
    whole = all(value.is_integer() for value in values)
    found = sorted(set(values))
    were_chosen = len(found) <= _CHOICES and (whole or len(found) < len(values))
    return {"whole": whole, "choices": found if were_chosen else None}


def _is_wide(values: Any) -> bool:
    return bool(min(values) > 0 and max(values) / min(values) > 20)


def _curves(search: SearchFolder, trials: list[dict[str, str]], metric: str, *, minimal: bool) -> Section | None:
    known = [(value, int(t["trial"])) for t in trials if (value := as_number(t.get(metric))) is not None]
    best = sorted(known, reverse=not minimal)[:_CURVES]
    series = [
        points(ReadRun(search.trial(index)).of_kind("validate"), metric, f"trial {index}", kind="both")
        for _, index in best
    ]
    title = f"Validation: {metric}" + (f" of the best {_CURVES}" if len(known) > _CURVES else "")
    return section("Learning curves", plot(title, "step", with_unit(metric), series))


def _best_section(search: SearchFolder) -> Section | None:
    best = _config(search)
    if best is None:
        return None
    return section(
        "Best config",
        differences_block(best),
        code_block("best.yaml", render_fields(shown_fields(best))),
        about="voxscale train best.yaml trains it again, to the same metrics.",
    )


def _config(search: SearchFolder) -> Config | None:
    try:
        return read_config(search.best)
    except (OSError, VoxscaleError):
        return None
