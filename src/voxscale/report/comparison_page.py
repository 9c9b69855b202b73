"""Several runs side by side; the folds of a cross-validation are such."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from voxscale.report.blocks import (
    Block,
    Section,
    attempted,
    column,
    columns_of,
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
from voxscale.report.learning import HOW_TO_ZOOM, metrics_of, points
from voxscale.report.quality import (
    LOW_IS_GOOD,
    case_table,
    evaluations_section,
    in_table_order,
    secondary,
    summary_block,
    viewer,
)
from voxscale.report.reading import MOST_PREVIEW_BYTES, ReadRun, as_number, read_object, read_previews
from voxscale.report.run_page import interval, page_of
from voxscale.report.settings import flat, shown_fields
from voxscale.report.timing import split_step
from voxscale.runs import RunFolder

_METRICS = 3  # whose curves are drawn


def comparison_page(runs: Sequence[RunFolder], title: str, folds: Path | None = None) -> dict[str, Any]:
    """`folds` is the folder of a cross-validation."""
    read = [ReadRun(run) for run in runs]
    names = _names(read)
    together = read_object(RunFolder(folds), "metrics") if folds is not None else {}
    sections = [
        attempted("Headline", lambda: section("", facts([*_together(together), *_headline(read, names)]))),
        attempted("All folds together", _folds_section, folds, together, read),
        attempted("Runs", lambda: section("Runs", _overview(read, names))),
        attempted("Learning curves", _curves, read, names),
        attempted("Cases", _cases, read, names),
        attempted("Evaluations", evaluations_section, ReadRun(RunFolder(folds))) if folds is not None else None,
        attempted("Time", _costs, read, names),
        attempted("Config", lambda: section("Config", _config_table(read, names))),
    ]
    damaged = "; ".join(f"{run.damaged} of {name}" for run, name in zip(read, names, strict=True) if run.damaged)
    states = {run.row.state for run in read}
    state = states.pop() if len(states) == 1 else "mixed"
    kind = "cross-validation" if folds is not None else "comparison"
    return page_of(title, kind, str(together.get("state") or state), sections, damaged=damaged)


def _names(runs: Sequence[ReadRun]) -> list[str]:
    """Each run's own name; where several are called alike, with as many of the folders above as tell them apart. The
    same run given twice is numbered."""
    roots, names = [run.run.root for run in runs], [run.title for run in runs]
    for depth in range(2, max(len(root.parts) for root in roots)):
        of_name = {name: {root for root, other in zip(roots, names, strict=True) if other == name} for name in names}
        alike = {name for name, called_so in of_name.items() if len(called_so) > 1}
        names = [
            "/".join(root.parts[1:][-depth:]) if name in alike else name
            for name, root in zip(names, roots, strict=True)
        ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]


def _together(metrics: dict[str, Any]) -> list[tuple[str, str, str] | None]:
    """Of folds, what all of them come to: each case scored by the fold that held it out."""
    summary = metrics.get("summary") or {}
    name = next((name for name in summary if name.endswith("/mean") or "/" not in name), next(iter(summary), None))
    return [(name, number(summary[name]["mean"]), interval(summary[name]))] if name is not None else []


def _headline(runs: Sequence[ReadRun], names: Sequence[str]) -> list[tuple[str, str, str] | None]:
    metrics = {run.row.metric for run in runs if run.row.metric}
    rows: list[tuple[str, str, str] | None] = [("runs", str(len(runs)), "")]
    known = [(run.row.best, name) for run, name in zip(runs, names, strict=True) if run.row.best is not None]
    if len(metrics) == 1 and known:
        metric = metrics.pop()
        value, name = (min if metric.partition("/")[0] in LOW_IS_GOOD else max)(known)
        rows.append((f"best {metric}", number(value), name))
        values = [value for value, _ in known]
        rows.append(("range", f"{number(min(values))} – {number(max(values))}", ""))
    walls = [run.metrics["wall_s"] for run in runs if run.metrics.get("wall_s")]
    return [*rows, ("time", duration(sum(walls)), "of all runs together") if walls else None]


def _overview(runs: Sequence[ReadRun], names: Sequence[str]) -> Block | None:
    metrics = list(dict.fromkeys(name for run in runs for name in (run.metrics.get("summary") or {})))
    shown = [name for name in metrics if name.endswith("/mean") or "/" not in name or len(metrics) <= 12]
    columns = [
        *columns_of("run", "state"),
        *(column(name, number=True) for name in ("best", "steps", "devices")),
        column("time", number=True, unit="s"),
        *(column(name, number=True, unit=unit_of(name)) for name in shown),
    ]
    rows = []
    for run, name in zip(runs, names, strict=True):
        summary = run.metrics.get("summary") or {}
        about = [run.row.best, run.row.step, run.plan.get("world_size"), run.metrics.get("wall_s") or None]
        rows.append([name, run.row.state, *about, *(summary.get(metric, {}).get("mean") for metric in shown)])
    if any(run.why for run in runs):
        columns.append(column("why"))
        rows = [[*row, run.why] for row, run in zip(rows, runs, strict=True)]
    return table(columns, rows, hidden=secondary(shown))


def _curves(runs: Sequence[ReadRun], names: Sequence[str]) -> Section | None:
    both = list(zip(runs, names, strict=True))
    losses = [points(run.of_kind("train"), "loss", name, smooth=True) for run, name in both]
    metrics = list(dict.fromkeys(metric for run in runs for metric in _means(run)))[:_METRICS]
    return section(
        "Learning curves",
        plot("Training loss", "step", "loss", losses),
        *(
            plot(f"Validation: {metric}", "step", with_unit(metric), [
                points(run.of_kind("validate"), metric, name, kind="both") for run, name in both
            ])
            for metric in metrics
        ),
        about=HOW_TO_ZOOM,
    )  # fmt: skip


def _means(run: ReadRun) -> list[str]:
    """The metrics of a run's validations: the means over classes, or those of the cohort."""
    validated = run.of_kind("validate")
    names = [name for event in validated for name in event]
    found = [[f"{metric}/mean", metric] for metric in metrics_of(validated)]
    means = [next((name for name in pair if name in names), None) for pair in found]
    known = list(dict.fromkeys(name for name in means if name is not None))
    return known or [name for name in dict.fromkeys(names) if "/" in name]


def _cases(runs: Sequence[ReadRun], names: Sequence[str]) -> Section | None:
    """Cases that more than one run was scored on, by the metric that all chose their best by."""
    metric = next((run.row.metric for run in runs if run.row.metric), None)
    scores: dict[str, dict[int, float]] = {}  # by the places of the runs
    for place, run in enumerate(runs):
        for row in run.cases:
            if metric is not None and (value := as_number(row.get(metric))) is not None:
                scores.setdefault(row.get("case", ""), {})[place] = float(f"{value:.5g}")
    shared = {case: found for case, found in scores.items() if len(found) > 1}
    columns = [column("case"), *(column(name, number=True) for name in names)]
    rows = [[case, *(found.get(place) for place in range(len(runs)))] for case, found in shared.items()]
    places = {place for found in shared.values() for place in found}
    first = names[min(places)] if places else None
    return section(f"Cases: {with_unit(str(metric))}", table(columns, rows, sort=first, search=len(rows) > 8))


def _costs(runs: Sequence[ReadRun], names: Sequence[str]) -> Section | None:
    series, bars = [], []
    metrics = {run.row.metric for run in runs if run.row.metric}
    metric = metrics.pop() if len(metrics) == 1 else None
    for run, name in zip(runs, names, strict=True):
        split = split_step(run)
        if split is not None:
            whole = sum(split.values()) or 1.0
            parts = [
                {"name": part, "share": value / whole, "text": f"{duration(value)} ({value / whole:.0%})"}
                for part, value in split.items()
            ]
            bars.append({"name": f"{name}: {duration(whole)} a step", "parts": parts})
        known = [(at, event[metric]) for at, event in run.timed("validate") if metric and event.get(metric) is not None]
        series.append(curve(name, [at for at, _ in known], [float(value) for _, value in known], "both"))
    block: Block | None = {"type": "bars", "title": "Where the time goes", "bars": bars} if bars else None
    return section("Time", block, plot(f"Validation over time: {metric}", "seconds", with_unit(str(metric)), series))


def _config_table(runs: Sequence[ReadRun], names: Sequence[str]) -> Block | None:
    """Fields in which the runs differ."""
    fields = [dict(flat(shown_fields(run.config))) if run.config is not None else {} for run in runs]
    paths = dict.fromkeys(path for each in fields for path in each)
    rows = [
        [path, *(words(each.get(path)) for each in fields)]
        for path in paths
        if any(each.get(path) != fields[0].get(path) for each in fields) and not path.startswith("data.store")
    ]
    columns = columns_of("field", *names)
    return table(columns, rows or [["none differs", *("" for _ in names)]], plain=True)


def _folds_section(folder: Path | None, together: dict[str, Any], folds: Sequence[ReadRun]) -> Section | None:
    if folder is None or not together:
        return None
    cases, task, scales = ReadRun(RunFolder(folder)).cases, str(together.get("task")), folds[0].scales if folds else {}
    previews = in_table_order(_held_out(folds), cases, task, scales)
    return section(
        "All folds together",
        summary_block(together.get("summary") or {}, "Cases by the fold that held them out"),
        summary_block(together.get("test") or {}, "Test cases, by all folds as one"),
        case_table(cases, task, previews, scales=scales),
        viewer(previews, "cases"),
    )


def _held_out(folds: Sequence[ReadRun]) -> dict[str, Any] | None:
    """The pictures of what each fold held out, as many of each as fit together."""
    share = MOST_PREVIEW_BYTES // len(folds)
    shown = [previews for fold in folds if (previews := read_previews(fold.run, most_bytes=share)[0]) is not None]
    cases = [case for previews in shown for case in previews["cases"] if case.get("split") == "val"]
    return {**shown[0], "cases": cases} if cases else None
