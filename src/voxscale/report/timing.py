"""Where the time and the memory of a run went, beside what was expected."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from voxscale.report.blocks import Block, Section, columns_of, curve, plot, section, table, thinned
from voxscale.report.forecast import duration, size
from voxscale.report.reading import Event, ReadRun

_WARM = 2  # first steps, which are slower


def timing_section(run: ReadRun) -> Section | None:
    steps, waited = run.of_kind("train"), communication_of(run)
    return section(
        "Time and memory",
        _split_block(run, steps, waited),
        _memory_block(run.usage),
        _step_plot(steps),
        _plan_table(run, steps, waited),
    )


def communication_of(run: ReadRun) -> list[float | None]:
    """What each rank waited for gradients in a step; None: not known."""
    return next((list(event["communication_s"]) for event in run.of_kind("end") if "communication_s" in event), [])


def split_step(steps: list[Event], waited: list[float | None]) -> dict[str, float] | None:
    """Seconds of a step in the middle, by what they are spent on."""
    timed = [event for event in steps[_WARM:] or steps if event.get("step_s") is not None]
    if not timed:
        return None
    total, data = median(event["step_s"] for event in timed), median(event["data_s"] for event in timed)
    known = [seconds for seconds in waited if seconds is not None]
    communication = min(fmean(known) if known else 0.0, max(0.0, total - data))
    return {"data": data, "computing": max(0.0, total - data - communication), "communication": communication}


def _split_block(run: ReadRun, steps: list[Event], waited: list[float | None]) -> Block | None:
    split = split_step(steps, waited)
    if split is None:
        return None
    bars = [_bar("a step (the median)", split)]
    stepping = sum(event.get("step_s") or 0.0 for event in steps)
    if (wall := run.metrics.get("wall_s")) and wall > stepping:
        bars.append(_bar("the whole run", {"steps": stepping, "validation and saving": wall - stepping}))
    is_known = len(waited) < 2 or None not in waited
    note = "" if is_known else "Communication was not measured: it counts as computing."
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


def _plan_table(run: ReadRun, steps: list[Event], waited: list[float | None]) -> Block | None:
    """What the plan said, and what came."""
    plan, metrics, expected = run.plan, run.metrics, run.forecast
    split = split_step(steps, waited) or {}
    taken = max((event["step"] for event in steps), default=0)
    rows: list[tuple[str, Any, Any]] = [
        ("devices", plan.get("world_size"), metrics.get("world_size") or _started(run, "world_size")),
        ("steps", plan.get("num_steps"), metrics.get("steps") or taken),
        ("global batch", plan.get("global_batch"), _batch(steps)),
        ("cases to train on", plan.get("num_train"), len({case for event in steps for case in event["cases"]}) or None),
    ]
    step_s, wall = expected.get("step_s") or {}, metrics.get("wall_s")
    names = {"data": "data", "compute": "computing", "communication": "communication"}
    for name, measured in names.items():
        if name in step_s:
            rows.append((f"a step, {measured}", duration(step_s[name]), duration(split.get(measured, 0.0))))
    if step_s:
        rows.append(("a step", duration(sum(step_s.values())), duration(sum(split.values()))))
    if wall is not None:
        total = expected.get("total_s")
        rows.append(("training and validating", None if total is None else duration(total), duration(wall)))
    if expected.get("memory_bytes") and run.usage:
        held = sum(int(rank["memory_peak_bytes"]) for rank in run.usage)
        rows.append(("memory of the node", size(expected["memory_bytes"]), size(held)))
    cells = [[name, _text(planned), _text(measured)] for name, planned, measured in rows if planned or measured]
    columns = columns_of("", "planned", "measured")
    note = "" if expected else "For planned times, run voxscale plan on the machine before it trains there."
    return table(columns, cells, title="Plan against measured", plain=True, note=note)


def _batch(steps: list[Event]) -> int | None:
    return max((len(event["cases"]) for event in steps), default=None)


def _started(run: ReadRun, field: str) -> Any:
    return next((event.get(field) for event in reversed(run.of_kind("start"))), None)


def _text(value: Any) -> str:
    return "–" if value is None else str(value)
