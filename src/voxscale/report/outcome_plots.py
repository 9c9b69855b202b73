"""What predicted outcomes look like: Kaplan and Meier's curves, calibration, ROC, confusion, predicted against true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from voxscale.report.blocks import Block, curve, plot, rounded
from voxscale.report.reading import Cells, as_number

_GROUPS = {2: ("lower risk", "higher risk"), 3: ("low risk", "middle risk", "high risk")}
_MANY = 18  # cases, from which on there are three groups


def outcome_plots(
    task: str,
    rows: Sequence[Cells],
    details: Mapping[str, Any],
    metrics: Mapping[str, Any],
    split: str,
    title: str,
    time_unit: str,
) -> list[Block | None]:
    """The plots of a task for the cases of one split."""
    if task == "survival":
        summary = metrics.get("test" if split == "test" else "summary") or {}
        return [_kaplan_meier(rows, title, time_unit), *_calibration(details, title), _auc_over_time(summary, title)]
    if task == "classification":
        return [*_confusion(details, title), _roc(rows, title)]
    if task == "regression":
        return _against_true(rows, title)
    return []


def survival_curve(times: Sequence[float], events: Sequence[bool]) -> tuple[list[float], list[float], list[int]]:
    """Kaplan and Meier's estimate: (times, survival from each on, how many are at risk just before it)."""
    order = sorted(zip(times, events, strict=True))
    at_risk, survival = len(order), 1.0
    x, y, counts = [0.0], [1.0], [at_risk]
    place = 0
    while place < len(order):
        time, died, left = order[place][0], 0, 0
        while place < len(order) and order[place][0] == time:
            died, left, place = died + int(order[place][1]), left + 1, place + 1
        survival *= 1 - died / at_risk
        x.append(time)
        y.append(survival)
        counts.append(at_risk)
        at_risk -= left
    return x, y, counts


def _kaplan_meier(rows: Sequence[Cells], title: str, time_unit: str) -> Block | None:
    known = [
        (risk, time, event == 1)
        for risk, time, event in ((as_number(row.get(name)) for name in ("risk", "time", "event")) for row in rows)
        if risk is not None and time is not None and event is not None
    ]
    if len(known) < 4:
        return None
    known.sort(key=lambda each: each[0])
    names = _GROUPS[3 if len(known) >= _MANY else 2]
    series = []
    for number, name in enumerate(names):
        group = known[len(known) * number // len(names) : len(known) * (number + 1) // len(names)]
        x, y, at_risk = survival_curve([time for _, time, _ in group], [event for _, _, event in group])
        deaths = sum(event for _, _, event in group)
        label = f"{name} ({len(group)} cases, {deaths} event{'' if deaths == 1 else 's'})"
        series.append(curve(label, x, y, "step", tips=[f"{n} at risk" for n in at_risk]))
    return plot(
        f"Kaplan–Meier by predicted risk, {title}",
        f"time ({time_unit})" if time_unit else "time",
        "event-free",
        series,
        note="Groups of equal size by predicted risk.",
        yRange=[0, 1],
    )


def _calibration(details: Mapping[str, Any], title: str) -> list[Block | None]:
    tables = details.get("calibration") or {}
    series = [
        curve(
            horizon,
            [group["predicted"] for group in groups if group["observed"] is not None],
            [group["observed"] for group in groups if group["observed"] is not None],
            "both",
            tips=[f"{group['cases']} cases" for group in groups if group["observed"] is not None],
        )
        for horizon, groups in tables.items()
    ]
    if not any(each["x"] for each in series):
        return []
    guide = curve("perfect", [0, 1], [0, 1], "guide")
    return [
        plot(
            f"Calibration, {title}",
            "predicted survival",
            "observed survival",
            [*series, guide],
            xRange=[0, 1],
            yRange=[0, 1],
            square=True,
        )
    ]


def _auc_over_time(summary: Mapping[str, Any], title: str) -> Block | None:
    found = {name.partition("/")[2]: entry for name, entry in summary.items() if name.startswith("auc/")}
    if not found:
        return None
    rows = [
        {"name": name, "mean": entry["mean"], "low": entry["ci95"][0], "high": entry["ci95"][1]}
        for name, entry in found.items()
    ]
    return {"type": "overTime", "title": f"Time-dependent AUC, {title}", "rows": rows, "chance": 0.5}


def _confusion(details: Mapping[str, Any], title: str) -> list[Block | None]:
    found = details.get("confusion") or {}
    if "classes" in found and "cases" in found:
        shown = {"": (found["classes"], found["cases"])}
    else:
        shown = {name: (["0", "1"], matrix) for name, matrix in found.items()}
    return [
        {
            "type": "matrix",
            "title": f"Confusion{f' of {name}' if name else ''}, {title}",
            "names": names,
            "cells": cells,
        }
        for name, (names, cells) in shown.items()
    ]


def roc_curve(truth: Sequence[bool], score: Sequence[float]) -> tuple[list[float], list[float], float]:
    """(False positive rate, true positive rate, area) over all thresholds; cases of one score fall together."""
    order = sorted(zip(score, truth, strict=True), key=lambda pair: -pair[0])
    positives = sum(truth)
    negatives = len(order) - positives
    x, y, area, place, true, false = [0.0], [0.0], 0.0, 0, 0, 0
    while place < len(order):
        threshold = order[place][0]
        while place < len(order) and order[place][0] == threshold:
            true, false, place = true + int(order[place][1]), false + int(not order[place][1]), place + 1
        x.append(false / negatives)
        y.append(true / positives)
        area += (x[-1] - x[-2]) * (y[-1] + y[-2]) / 2
    return x, y, area


def _roc(rows: Sequence[Cells], title: str) -> Block | None:
    names = [name.partition("/")[2] for name in (rows[0] if rows else ()) if name.startswith("probability/")]
    one_column = bool(rows) and "class" in rows[0]
    if one_column and len(names) == 2:
        names = names[1:]  # the other is its mirror image
    series = []
    for name in names:
        scores = [as_number(row.get(f"probability/{name}")) for row in rows]
        truth = [row["class"] == name if one_column else as_number(row.get(f"class/{name}")) == 1 for row in rows]
        known = [(score, is_so) for score, is_so in zip(scores, truth, strict=True) if score is not None]
        if known and 0 < sum(is_so for _, is_so in known) < len(known):
            x, y, area = roc_curve([is_so for _, is_so in known], [score for score, _ in known])
            series.append(curve(f"{name}: area {area:.3f}", x, y, "line"))
    if not series:
        return None
    guide = curve("chance", [0, 1], [0, 1], "guide")
    axes = ("false positive rate", "true positive rate")
    return plot(f"ROC, {title}", *axes, [*series, guide], xRange=[0, 1], yRange=[0, 1], square=True)


def _against_true(rows: Sequence[Cells], title: str) -> list[Block | None]:
    names = [name.partition("/")[2] for name in (rows[0] if rows else ()) if name.startswith("target/")]
    blocks: list[Block | None] = []
    for name in names:
        pairs = [
            (row["case"], target, predicted)
            for row in rows
            if (target := as_number(row.get(f"target/{name}"))) is not None
            and (predicted := as_number(row.get(f"predicted/{name}"))) is not None
        ]
        if not pairs:
            continue
        values = rounded(value for _, *both in pairs for value in both)
        ends = [min(values), max(values)]
        series = [
            curve(
                "cases", [t for _, t, _ in pairs], [p for *_, p in pairs], "points", tips=[case for case, *_ in pairs]
            ),
            curve("perfect", ends, ends, "guide"),
        ]
        blocks.append(plot(f"{name}, {title}", f"true {name}", f"predicted {name}", series, square=True))
    return blocks
