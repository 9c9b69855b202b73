"""Where the time and the memory of a run went, beside what was expected."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from voxscale.report.blocks import Block, Section, columns_of, curve, plot, section, table, thinned
from voxscale.report.forecast import duration, size
from voxscale.report.reading import Event, ReadRun

_WARM = 2  # first steps, which are slower
_COMMUNICATION = "communication"


def timing_section(run: ReadRun) -> Section | None:
    steps, split = run.of_kind("train"), split_step(run)
    return section(
        "Time and memory",
        _split_block(run, steps, split),
        _memory_block(run.usage),
        _step_plot(steps),
        _plan_table(run, steps, split or {}),
    )


def split_step(run: ReadRun) -> dict[str, float] | None:
    """Seconds of a step in the middle, by what they are spent on; without communication where that is not known."""
    steps = run.of_kind("train")
    timed = [event for event in steps[_WARM:] or steps if None not in (event.get("step_s"), event.get("data_s"))]
    if not timed:
        return None
    total, data = median(event["step_s"] for event in timed), median(event["data_s"] for event in timed)
    waited = _communication_of(run)
    if waited is None:
        return {"data": data, "computing": max(0.0, total - data)}
    communication = min(waited, max(0.0, total - data))
    return {"data": data, "computing": max(0.0, total - data - communication), _COMMUNICATION: communication}


def _communication_of(run: ReadRun) -> float | None:
    """What ranks waited for gradients in a step, on average. They say so at their end: None until then, or where one
    could not measure it."""
    if _world_size(run) == 1:
        return 0.0
    said = (event["communication_s"] for event in reversed(run.of_kind("end")) if "communication_s" in event)
    waited: list[float | None] = next(said, [])
    known = [seconds for seconds in waited if seconds is not None]
    return fmean(known) if known and len(known) == len(waited) else None


def _world_size(run: ReadRun) -> Any:
    return run.metrics.get("world_size") or _started(run, "world_size") or run.plan.get("world_size")


def _split_block(run: ReadRun, steps: list[Event], split: dict[str, float] | None) -> Block | None:
    if split is None:
        return None
    bars = [_bar("a step (the median)", split)]
    stepping = sum(event.get("step_s") or 0.0 for event in steps)
    if (wall := run.metrics.get("wall_s")) and wall > stepping:
        bars.append(_bar("the whole run", {"steps": stepping, "validation and saving": wall - stepping}))
    note = "" if _COMMUNICATION in split else "Communication is not known: it counts as computing."
    return {"type": "bars", "title": "Where the time goes", "bars": bars, "note": note}


def _bar(name: str, parts: dict[str, float]) -> dict[str, Any]:
    whole = sum(parts.values()) or 1.0
    shown = [
        {"name": part, "share": value / whole, "text": f"{duration(value)} ({value / whole:.0%})"}
        for part, value in parts.items()
    ]
    return {"name": f"{name}: {duration(whole)}", "parts": shown}


def _memory_block(ranks: list[dict[str, Any]]) -> Block | None:
    peaks = [(f"rank {rank['rank']}, memory of the process", int(rank["memory_peak_bytes"])) for rank in ranks]
    peaks += [
        (f"rank {rank['rank']}, memory of the GPU", int(rank["gpu"]["peak_bytes"])) for rank in ranks if rank["gpu"]
    ]
    most = max((peak for _, peak in peaks), default=0)
    if not most:
        return None
    bars = [{"name": f"{name}: {size(peak)}", "parts": [_filled(peak, most)]} for name, peak in peaks]
    note = "The most that each process held for itself; files that it maps, as the store, do not count."
    return {"type": "bars", "title": "Peak memory", "bars": bars, "note": note}


def _filled(amount: float, most: float) -> dict[str, Any]:
    return {"name": "peak", "share": amount / most, "text": size(amount)}


def _step_plot(steps: list[Event]) -> Block | None:
    series = []
    for field, name in (("step_s", "step"), ("data_s", "of it waiting for data")):
        known = [(event["step"], event[field]) for event in steps if event.get(field) is not None]
        x, y = thinned([float(step) for step, _ in known], [float(value) for _, value in known])
        series.append(curve(name, x, y))
    return plot("Seconds per step", "step", "s", series, fromZero=True)


def _plan_table(run: ReadRun, steps: list[Event], split: dict[str, float]) -> Block | None:
    """What the plan said, and what came."""
    plan, metrics, expected = run.plan, run.metrics, run.forecast
    taken = max((event["step"] for event in steps), default=0)
    rows: list[tuple[str, Any, Any]] = [
        ("devices", plan.get("world_size"), metrics.get("world_size") or _started(run, "world_size")),
        ("steps", plan.get("num_steps"), metrics.get("steps") or taken),
        ("global batch", plan.get("global_batch"), _batch(steps)),
        (
            "cases to train on",
            plan.get("num_train"),
            len({case for event in steps for case in event.get("cases", ())}) or None,
        ),
    ]
    step_s, wall = expected.get("step_s") or {}, metrics.get("wall_s")
    names = {"data": "data", "compute": "computing", "communication": _COMMUNICATION}
    for name, measured in names.items():
        if name in step_s:
            rows.append((f"a step, {measured}", duration(step_s[name]), _duration(split.get(measured))))
    if step_s:
        rows.append(("a step", duration(sum(step_s.values())), _duration(sum(split.values()) or None)))
    if wall is not None:
        rows.append(("training and validating", _duration(expected.get("training_s")), duration(wall)))
    if expected.get("memory_bytes") and run.usage:
        held = sum(int(rank["memory_peak_bytes"]) for rank in run.usage)
        rows.append(("memory of the node", size(expected["memory_bytes"]), size(held)))
    cells = [[name, _text(planned), _text(measured)] for name, planned, measured in rows if planned or measured]
    columns = columns_of("", "planned", "measured")
    note = "" if expected else "Planned times are there of local runs, if voxscale plan was run there before."
    return table(columns, cells, title="Plan against measured", plain=True, note=note)


def _batch(steps: list[Event]) -> int | None:
    return max((len(event.get("cases", ())) for event in steps), default=None)


def _started(run: ReadRun, field: str) -> Any:
    return next((event.get(field) for event in reversed(run.of_kind("start"))), None)


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else duration(seconds)


def _text(value: Any) -> str:
    return "–" if value is None else str(value)
