"""A summary of metrics as a table in a terminal: a row per class, a column per metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MEAN, _ALL = "mean", "all"  # over classes; of the cases as a whole, whatever their classes
_LAST = (_MEAN, _ALL)


def render_summary(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """Means over cases; those over all classes come last, with their bootstrap interval below."""
    table: dict[str, dict[str, Mapping[str, Any]]] = {}
    for key, entry in summary.items():
        metric, _, name = key.partition("/")
        table.setdefault(metric, {})[name or _ALL] = entry
    by_length = sorted(table.values(), key=len, reverse=True)  # all in one order, some with gaps
    classes = sorted(dict.fromkeys(name for column in by_length for name in column), key=_LAST.count)
    rows = [["", *table], *([name, *(_mean(column.get(name)) for column in table.values())] for name in classes)]
    overall = [column.get(_MEAN, column.get(_ALL)) for column in table.values()]
    if any(overall):
        rows.append(["95 %", *map(_interval, overall)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_line(row, widths) for row in rows)


def render_training(metrics: Mapping[str, Any]) -> str:
    """What one run reached."""
    best = metrics.get("best")
    score = f"best {best['metric']} {best['value']:.4f} at step {best['step']}, " if best else ""
    return f"done: {score}{metrics.get('wall_s', 0):.0f} s of training"


def render_folds(metrics: Mapping[str, Any]) -> str:
    """What cross-validation reached: each case by the fold that held it out, test cases by all folds as one."""
    reached = ", ".join(f"fold {fold['fold']} {fold['best']['value']:.4f}" for fold in metrics["folds"] if fold["best"])
    parts = [f"{metrics['metric']}: {reached}", "cases held out:", render_summary(metrics["summary"])]
    if "test" in metrics:
        parts += ["test cases, all folds as one:", render_summary(metrics["test"])]
    return "\n".join(parts)


def _mean(entry: Mapping[str, Any] | None) -> str:
    return "" if entry is None else _number(entry["mean"])


def _interval(entry: Mapping[str, Any] | None) -> str:
    return "" if entry is None else "–".join(map(_number, entry["ci95"]))


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _line(row: list[str], widths: list[int]) -> str:
    name, *cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join([name.lstrip().ljust(widths[0]), *cells]).rstrip()
