"""The page of a search: its trials, what their fields have to do with how good they are, the best config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from voxscale.config.load import read_config, render_fields
from voxscale.config.schema import Config
from voxscale.config.search import Search
from voxscale.errors import VoxscaleError
from voxscale.report.blocks import (
    Block,
    Section,
    attempted,
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
from voxscale.report.private import without_folders, without_places
from voxscale.report.reading import ReadRun
from voxscale.report.run_page import page_of
from voxscale.report.settings import code_block, differences_block, shown_fields
from voxscale.report.trials import SeenTrial, SeenTrials
from voxscale.runs import RunFolder, SearchFolder

_CURVES = 12  # of the best trials
_CHOICES = 6  # that an axis names one by one


def search_page(search: SearchFolder) -> dict[str, Any]:
    seen = _Seen(ReadRun(RunFolder(search.root)), search)
    sections = [
        attempted("Headline", lambda: section("", facts(_headline(seen)))),
        attempted("Fields and results", _fields_section, seen),
        attempted("Trials", lambda: section("Trials", _table(seen))),
        attempted("Learning curves", _curves, seen),
        attempted("Best config", _best_section, search),
    ]
    return page_of(search.root.name, "search", seen.state, sections, damaged=seen.read.damaged)


@dataclass(frozen=True)
class _Seen:
    """A search as its config and its ledger tell of it, which are there from its first trial on."""

    read: ReadRun
    search: SearchFolder

    @cached_property
    def section(self) -> Search | None:
        try:
            return read_config(self.search.config).search
        except (OSError, VoxscaleError):
            return None

    @property
    def state(self) -> str:
        return self.read.row.state

    @property
    def metric(self) -> str:
        chosen = self.section.metric if self.section is not None else None
        return chosen or str(self.read.metrics.get("metric", "metric"))

    @property
    def minimal(self) -> bool:
        return self.section is not None and self.section.direction == "min"

    @property
    def num_trials(self) -> int:
        planned = self.section.num_points * self.section.seeds if self.section is not None else 0
        return max(planned, len(self.trials.all))

    @cached_property
    def trials(self) -> SeenTrials:
        """Those that run are as far as their folders say, and interrupted if nobody searches any more."""
        try:
            trials = SeenTrials(self.search.ledger.read_bytes().splitlines())
        except OSError:
            return SeenTrials()
        for trial in trials.all:
            run = self.search.trial(trial.index)
            trial.why = without_places(trial.why, run)
            if trial.state == "running":
                trial.state = "running" if self.state == "running" else "interrupted"
                trial.steps = ReadRun(run).row.step
        return trials

    @property
    def fields(self) -> list[str]:
        return list(dict.fromkeys(name for trial in self.trials.all for name in trial.params))

    @property
    def valued(self) -> list[tuple[float, SeenTrial]]:
        return [(trial.value, trial) for trial in self.trials.all if trial.value is not None]


def _headline(seen: _Seen) -> list[tuple[str, str, str] | None]:
    metrics, trials = seen.read.metrics, seen.trials
    best = trials.best("min" if seen.minimal else "max")
    chosen = metrics.get("best") or ({"trial": best.index, "value": best.value, "params": best.params} if best else {})
    counts = Counter(trial.state for trial in trials.all)
    steps = sum(trial.steps for trial in trials.all)
    return [
        (f"best {seen.metric}", number(chosen["value"]), f"trial {chosen['trial']}") if chosen else None,
        ("trials", str(seen.num_trials), ", ".join(f"{count} {state}" for state, count in counts.items())),
        ("steps", f"{steps:,}", "of all trials") if steps else None,
        ("time", duration(metrics["wall_s"]), "") if metrics.get("wall_s") else None,
        *((name, _text(value), "of the best trial") for name, value in chosen.get("params", {}).items()),
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return words(without_folders(value))


def _table(seen: _Seen) -> Block | None:
    trials = seen.trials.all
    values = {name: [trial.params.get(name) for trial in trials] for name in seen.fields}
    numeric = {name for name, found in values.items() if all(value is None or _is_number(value) for value in found)}
    columns = [
        column("trial", number=True),
        column("state"),
        column(seen.metric, number=True, unit=unit_of(seen.metric)),
        *(column(name, number=name in numeric, exact=True) for name in seen.fields),
        column("steps", number=True),
        column("time", number=True, unit="s"),
        column("why"),
    ]
    rows = [
        [
            *(trial.index, trial.state, trial.value),
            *(value if name in numeric else _text(value) for name in seen.fields for value in [trial.params.get(name)]),
            *(trial.steps, trial.wall_s, trial.why),
        ]
        for trial in trials
    ]
    return table(columns, rows, sort=seen.metric, descending=not seen.minimal, search=len(rows) > 8)


def _fields_section(seen: _Seen) -> Section | None:
    known, metric = seen.valued, seen.metric
    if not known:
        return None
    axes: list[Block] = []
    names = [f"trial {trial.index}" for _, trial in known]
    for name in seen.fields:
        values = [trial.params.get(name) for _, trial in known]
        numbers = [float(value) for value in values if isinstance(value, int | float) and _is_number(value)]
        if len(numbers) == len(values):
            axes.append({"name": name, "number": True, "values": numbers, **ticks_of(numbers)})
        else:
            axes.append({"name": name, "number": False, "values": list(map(_text, values))})
    results = [value for value, _ in known]
    last = {"name": metric, "number": True, "values": results, **ticks_of(results)}
    drawn = [
        plot(
            f"{metric} over {axis['name']}",
            str(axis["name"]),
            with_unit(metric),
            [curve("trials", axis["values"], results, "points", tips=names)],
            log_x=_is_wide(axis["values"]),
            whole=axis["whole"],
            choices=axis["choices"],
        )
        for axis in axes
        if axis["number"]
    ]
    parallel = {"type": "parallel", "title": "Parallel coordinates", "axes": [*axes, last], "names": names}
    return section("Fields and results", {**parallel, "minimal": seen.minimal}, *drawn)


def ticks_of(values: Sequence[float]) -> dict[str, Any]:
    """Of an axis: between whole numbers there is nothing, nor between a few values that were chosen from."""
    whole = all(value.is_integer() for value in values)
    found = sorted(set(values))
    were_chosen = len(found) <= _CHOICES and (whole or len(found) < len(values))
    return {"whole": whole, "choices": found if were_chosen else None}


def _is_wide(values: Any) -> bool:
    return bool(min(values) > 0 and max(values) / min(values) > 20)


def _curves(seen: _Seen) -> Section | None:
    """Of the best trials, then of those that have no value yet."""
    best = [trial for _, trial in sorted(seen.valued, key=lambda each: each[0], reverse=not seen.minimal)]
    drawn = [*best, *(trial for trial in seen.trials.all if trial.steps and trial.value is None)]
    series = [
        points(
            ReadRun(seen.search.trial(trial.index)).of_kind("validate"),
            seen.metric,
            f"trial {trial.index}",
            kind="both",
        )
        for trial in drawn[:_CURVES]
    ]
    title = f"Validation: {seen.metric}" + (f" of the best {_CURVES}" if len(drawn) > _CURVES else "")
    return section("Learning curves", plot(title, "step", with_unit(seen.metric), series))


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
