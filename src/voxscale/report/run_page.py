"""The page of one run."""

from __future__ import annotations

from typing import Any

from voxscale.report.blocks import Section, attempted, facts, number, section
from voxscale.report.forecast import duration
from voxscale.report.learning import learning_section
from voxscale.report.quality import cases_section, evaluations_section, quality_section
from voxscale.report.reading import ReadRun
from voxscale.report.settings import settings_section
from voxscale.report.timing import timing_section
from voxscale.runs import RunFolder

STATES = {
    "done": "The run came to its end.",
    "stopped": "The run stopped early; the same command continues it.",
    "failed": "The run failed.",
    "interrupted": "The run was interrupted; the same command continues it.",
    "running": "The run is still going on: this page shows what there was when it was written.",
    "queued": "The run waits in a queue.",
    "new": "The run has not begun.",
}


def run_page(run: RunFolder) -> dict[str, Any]:
    read = ReadRun(run)
    if read.metrics.get("task") == "script":
        return script_page(read)
    sections = [
        attempted("Headline", headline_section, read),
        attempted("Learning curves", learning_section, read),
        attempted("Quality", quality_section, read),
        attempted("Cases", cases_section, read),
        attempted("Evaluations", evaluations_section, read),
        attempted("Time and memory", timing_section, read),
        attempted("Config and environment", settings_section, read),
    ]
    return page_of(read.title, read.task, read.row.state, sections, read.why, read.damaged)


def page_of(
    title: str, kind: str, state: str, sections: list[dict[str, Any] | None], why: str = "", damaged: str = ""
) -> dict[str, Any]:
    parts = [why or ("" if state == "done" else STATES.get(state, ""))]
    parts += [f"Damaged, and left out where it is so: {damaged}."] if damaged else []
    about = " ".join(filter(None, parts))
    return {"title": title, "kind": kind, "state": state, "about": about, "sections": [s for s in sections if s]}


def headline_section(run: ReadRun) -> Section | None:
    return section("", facts(headline(run)))


def headline(run: ReadRun) -> list[tuple[str, str, str] | None]:
    """Best metric with its interval, progress, time, devices, cases."""
    row, metrics, plan = run.row, run.metrics, run.plan
    return [
        best_fact(run),
        _held_out(run),
        ("steps", f"{row.step:,}" if row.step == row.steps else f"{row.step:,} of {row.steps:,}", _epochs(run)),
        ("time", duration(metrics["wall_s"]), "of training and validating") if metrics.get("wall_s") else None,
        ("devices", str(plan["world_size"]), _device(run)) if plan.get("world_size") else None,
        ("cases", f"{plan['num_train']:,}", f"to train on, {plan.get('num_val', 0):,} validate")
        if plan.get("num_train")
        else None,
    ]


def best_fact(run: ReadRun) -> tuple[str, str, str] | None:
    row = run.row
    if row.best is None or row.metric is None:
        return None
    entry = (run.metrics.get("summary") or {}).get(row.metric)
    at = (run.metrics.get("best") or {}).get("step")
    note = [interval(entry)] if entry else []
    note += [f"at step {at:,}"] if at is not None else []
    return (f"best {row.metric}", number(row.best), ", ".join(note))


def _held_out(run: ReadRun) -> tuple[str, str, str] | None:
    entry = (run.metrics.get("test") or {}).get(run.row.metric or "")
    return (f"test {run.row.metric}", number(entry["mean"]), interval(entry)) if entry else None


def interval(entry: dict[str, Any]) -> str:
    low, high = entry.get("ci95") or (entry["mean"], entry["mean"])
    return f"95 %: {number(low)} – {number(high)}"


def _epochs(run: ReadRun) -> str:
    per_epoch = run.plan.get("steps_per_epoch")
    return f"{run.row.step / per_epoch:.3g} epochs" if per_epoch else ""


def _device(run: ReadRun) -> str:
    starts = [event["environment"] for event in run.of_kind("start") if event.get("environment")]
    return str(starts[-1].get("device", "")) if starts else ""


def script_page(run: ReadRun) -> dict[str, Any]:
    """Of a user's own script: how it ended, and how long it took."""
    metrics = run.metrics
    rows: list[tuple[str, str, str] | None] = [
        ("exit code", str(metrics.get("exit_code", "–")), ""),
        ("time", duration(metrics.get("wall_s", 0.0)), ""),
        ("ranks", str(metrics.get("world_size", "–")), f"on {metrics.get('nodes', 1)} node(s)"),
    ]
    state = str(metrics.get("state", run.row.state))
    return page_of(run.title, "script", state, [section("", facts(rows))], run.why, run.damaged)
