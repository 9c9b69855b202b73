"""How a run learnt: losses, validation and rates over its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from voxscale.report.blocks import Block, Section, curve, plot, section, thinned, with_unit
from voxscale.report.reading import Event, ReadRun

_FIRST = ("dice", "cindex", "auroc", "r2", "auc", "accuracy", "balanced_accuracy", "f1", "mae")


HOW_TO_ZOOM = "Drag to zoom, double-click to see all again. By keyboard: + and − zoom, arrows move, 0 shows all."


def learning_section(run: ReadRun) -> Section | None:
    trained, validated = run.of_kind("train"), run.of_kind("validate")
    return section(
        "Learning curves",
        plot("Training loss", "step", "loss", [points(trained, "loss", "loss", smooth=True)]),
        *(_validation_plot(validated, metric, best=_best_step(run)) for metric in metrics_of(validated)[:2]),
        plot("Learning rate", "step", "rate", [points(trained, "lr", "rate")]),
        about=HOW_TO_ZOOM,
    )


def points(events: Sequence[Event], field: str, name: str, **more: Any) -> Block:
    """A field of events over their steps."""
    known = [(event["step"], event[field]) for event in events if event.get(field) is not None]
    x, y = thinned([float(step) for step, _ in known], [float(value) for _, value in known])
    return curve(name, x, y, **more)


def metrics_of(validated: Sequence[Event]) -> list[str]:
    """The metrics of validations, without their classes; those that are looked at most come first."""
    names = dict.fromkeys(name.partition("/")[0] for event in validated for name in event if _is_metric(event, name))
    return sorted(names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))


def _is_metric(event: Event, name: str) -> bool:
    return isinstance(event[name], float) and name != "time_s" and not name.startswith("volume")


def _validation_plot(validated: Sequence[Event], metric: str, *, best: int | None) -> Block | None:
    names = dict.fromkeys(name for event in validated for name in event if name.partition("/")[0] == metric)
    series = [points(validated, name, name.partition("/")[2] or metric, kind="both") for name in told_apart(names)]
    note = "The dotted line is at the best model." if best is not None else ""
    return plot(f"Validation: {metric}", "step", with_unit(metric), series, mark=best, note=note)


def told_apart(names: Iterable[str]) -> list[str]:
    """Of the classes of a metric those worth drawing: the mean of a single class is that class once more."""
    found = list(names)
    return [name for name in found if len(found) != 2 or not name.endswith("/mean")]


def _best_step(run: ReadRun) -> int | None:
    best = run.metrics.get("best") or next((e for e in reversed(run.of_kind("checkpoint")) if e.get("best")), {})
    return best.get("step") if isinstance(best, dict) else None
