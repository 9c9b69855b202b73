"""How good a run is: its metrics with their intervals, each class, each case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from voxscale.report.blocks import Block, Section, column, section, table, unit_of, with_unit
from voxscale.report.learning import told_apart
from voxscale.report.outcome_plots import outcome_plots
from voxscale.report.reading import NOT_METRICS, Cells, ReadRun, as_number, numbers_of, read_previews

LOW_IS_GOOD = ("hd95", "brier", "calibration", "calibration_error", "mae", "rmse", "loss")
_SPREAD = ("dice", "hd95")  # metrics whose cases are drawn
_SECONDARY = ("iou", "sensitivity", "precision", "surface_dice", "volume", "volume_label")
_SPLITS = {"val": "validation cases", "test": "test cases", "train": "training cases"}


def quality_section(run: ReadRun) -> Section | None:
    """Summaries of validation and test cases; of outcomes what they predict."""
    summaries = {split: run.metrics.get(name) for split, name in (("val", "summary"), ("test", "test"))}
    known = [split for split, summary in summaries.items() if summary]
    drawn: list[Block | None] = []
    for split in dict.fromkeys((*known, *(row.get("split", "") for row in run.cases))):
        rows = [row for row in run.cases if row.get("split", "") == split]
        title = _SPLITS.get(split, "cases")
        drawn.append(summary_block(summaries.get(split) or {}, f"Of the {title}"))
        drawn += [_spread(rows, metric, title) for metric in _SPREAD]
        drawn += outcome_plots(run.task, rows, _details(run.metrics, split), run.metrics, split, title, run.time_unit)
    return section("Quality", *drawn, about="Intervals hold 95 % of resampled cohorts.")


def evaluations_section(run: ReadRun) -> Section | None:
    blocks: list[Block | None] = []
    for each in run.evaluations():
        what = _SPLITS.get(str(each.metrics.get("split")), str(each.metrics.get("data", "")))
        blocks.append(summary_block(each.metrics.get("summary") or {}, f"{each.title}: {what}"))
    return section("Evaluations", *blocks, about="What voxscale evaluate has left in the run folder.")


def cases_section(run: ReadRun) -> Section | None:
    """The table, worst cases first, and the pictures; of evaluations too, as far as they fit."""
    blocks: list[Block | None] = []
    previews, left = read_previews(run.run)
    blocks += [case_table(run.cases, run.task, previews, scales=run.scales), viewer(previews, "cases")]
    for each in run.evaluations():
        previews, left = read_previews(each.run, most_bytes=left)
        title = f"Evaluation {each.title}"
        blocks += [
            case_table(each.cases, run.task, previews, scales=run.scales, title=title),
            viewer(previews, each.title, title),
        ]
    return section("Cases", *blocks)


def viewer(previews: Mapping[str, Any] | None, name: str, title: str = "") -> Block | None:
    return {"type": "viewer", "name": name, "title": title, **previews} if previews is not None else None


def case_table(
    rows: Sequence[Cells],
    task: str,
    previews: Mapping[str, Any] | None,
    *,
    scales: Mapping[str, float],
    title: str = "",
) -> Block | None:
    """One row per case; the patient is left out, as a page may travel further than a run folder. `scales` are the
    deviations of what is predicted, so that errors of several targets can be added."""
    if not rows:
        return None
    names = _metrics_in(rows)
    fold = ["fold"] if "fold" in rows[0] else []
    numeric = [name for name in names if any(as_number(row.get(name)) is not None for row in rows)]
    columns = [column(name, number=name in numeric, unit=unit_of(name)) for name in ("case", "split", *fold, *names)]
    cells = [[_short(row.get(c["name"])) if c["number"] else row.get(c["name"]) for c in columns] for row in rows]
    first, descending = _worst_first(names, task)
    if first == _ERROR:
        columns.insert(2 + len(fold), column(_ERROR, number=True, unit="in deviations" if scales else ""))
        for line, row in zip(cells, rows, strict=True):
            line.insert(2 + len(fold), _error(row, task, scales))
    shown = {each["case"]: number for number, each in enumerate(previews["cases"])} if previews else {}
    opens = [shown.get(row.get("case", "")) for row in rows] if shown else None
    hidden = secondary(names)
    more = {"opens": opens, "search": len(rows) > 8, "hidden": hidden, "ordered": True}
    return table(columns, cells, title=title, sort=first, descending=descending, **more)


def in_table_order(
    previews: Mapping[str, Any] | None, rows: Sequence[Cells], task: str, scales: Mapping[str, float]
) -> Mapping[str, Any] | None:
    """The pictures of cases as `case_table` has them: the worst first."""
    if previews is None:
        return None
    first, descending = _worst_first(_metrics_in(rows), task)

    def badness(row: Cells) -> tuple[bool, float]:
        value = _error(row, task, scales) if first == _ERROR else _short(row.get(first))
        return value is None, (-1 if descending else 1) * (value or 0.0)

    places = {row.get("case", ""): place for place, row in enumerate(sorted(rows, key=badness))}
    return {**previews, "cases": sorted(previews["cases"], key=lambda each: places.get(each["case"], len(places)))}


def secondary(metrics: Sequence[str]) -> list[str]:
    """Those whose columns are shown when asked for."""
    return [name for name in metrics if name.partition("/")[0] in _SECONDARY]


def _metrics_in(rows: Sequence[Cells]) -> list[str]:
    return _mean_first([name for name in (rows[0] if rows else ()) if name not in NOT_METRICS])


def _mean_first(names: Sequence[str]) -> list[str]:
    """Of each metric the mean before its classes, which may be many."""
    metrics = {name: number for number, name in reversed(list(enumerate(name.partition("/")[0] for name in names)))}
    return sorted(names, key=lambda name: (metrics[name.partition("/")[0]], not name.endswith("/mean")))


_ERROR = "error"


def _worst_first(names: Sequence[str], task: str) -> tuple[str, bool]:
    """By which column, and whether its largest come first."""
    if task in ("classification", "regression"):
        return _ERROR, True
    if task == "survival":
        return "risk", True
    dice = [name for name in names if name.startswith("dice/")]
    return ("dice/mean" if "dice/mean" in dice else dice[0] if dice else names[0] if names else "case"), False


def _error(row: Cells, task: str, scales: Mapping[str, float]) -> float | None:
    """Of a class, the probability that went elsewhere; of numbers, how far the predictions are off, on average."""
    if task == "classification" and "class" in row:
        right = as_number(row.get(f"probability/{row['class']}"))
        return None if right is None else _short(str(1 - right))
    kinds = ("class", "probability") if task == "classification" else ("target", "predicted")
    names = [name.partition("/")[2] for name in row if name.startswith(f"{kinds[0]}/")]
    errors = [
        abs(is_so - said) / (scales.get(name) or 1.0)
        for name in names
        if (is_so := as_number(row.get(f"{kinds[0]}/{name}"))) is not None
        and (said := as_number(row.get(f"{kinds[1]}/{name}"))) is not None
    ]
    return _short(str(sum(errors) / len(errors))) if errors else None


def _short(cell: str | None) -> float | None:
    value = as_number(cell)
    return None if value is None else float(f"{value:.5g}")


def summary_block(summary: Mapping[str, Any], title: str) -> Block | None:
    """Each metric with its interval, by metric: a row for each class."""
    groups: dict[str, list[dict[str, Any]]] = {}
    classes: dict[str, list[str]] = {}
    for name in summary:
        classes.setdefault(name.partition("/")[0], []).append(name)
    for name in (name for names in classes.values() for name in told_apart(names)):
        metric, _, of_class = name.partition("/")
        if metric.startswith("volume"):
            continue  # how much there is says nothing of how well it was found
        entry = summary[name]
        low, high = entry.get("ci95") or (entry["mean"], entry["mean"])
        row = {"name": of_class or "all", "mean": entry["mean"], "low": low, "high": high}
        groups.setdefault(metric, []).append(row)
    shown = [
        {"metric": metric, "low": metric in LOW_IS_GOOD, "unit": unit_of(metric), "rows": rows}
        for metric, rows in groups.items()
    ]
    return {"type": "intervals", "title": title, "groups": shown} if shown else None


def _spread(rows: Sequence[Cells], metric: str, title: str) -> Block | None:
    """Every case's value of a metric, a line for each class."""
    columns = [name for name in (rows[0] if rows else ()) if name.startswith(f"{metric}/")]
    groups = []
    for index, key in enumerate(told_apart(columns)):
        known = [
            (row["case"], value) for row, value in zip(rows, numbers_of(rows, key), strict=True) if value is not None
        ]
        if known:
            name, values = key.partition("/")[2], [float(f"{value:.5g}") for _, value in known]
            groups.append({"name": name, "index": index, "values": values, "cases": [case for case, _ in known]})
    if not groups:
        return None
    about = {"title": f"{with_unit(metric)} of the {title}", "share": not unit_of(metric)}
    return {"type": "spread", **about, "groups": groups}


def _details(metrics: Mapping[str, Any], split: str) -> Mapping[str, Any]:
    details = metrics.get("details") or {}
    return details.get(split, details if "split" in metrics else {}) or {}
