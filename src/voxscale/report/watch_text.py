"""What is watched as lines of text: for a terminal all that is known, for a log one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from voxscale.errors import printable
from voxscale.report.forecast import size
from voxscale.report.watched import GroupView, RunView, View
from voxscale.terminal import clock

_BAR = 30
_MOST_RANKS = 16
_LATE_S = 20.0  # since a rank last wrote: it does so every 5 s
_BLOCKS = "▁▂▃▄▅▆▇█"


def render_view(view: View) -> list[str]:
    """All that is known, a line each."""
    lines = _group_lines(view) if isinstance(view, GroupView) else _run_lines(view)
    return [printable(line) for line in lines]


def fitted(lines: Sequence[str], width: int, height: int) -> list[str]:
    """As many of the lines as a terminal has room for, broken where they are too long, and how many are left out."""
    rows = [max(1, -(-len(line) // width)) for line in lines]
    if sum(rows) < height:
        return list(lines)
    room = height - 2  # for what is left out, and the cursor
    shown = max((count for count in range(1, len(lines)) if sum(rows[:count]) <= room), default=1)
    return [*lines[:shown], f"… {len(lines) - shown} lines more: in a higher window, or with --once"]


def render_line(view: View) -> str:
    """The present state in one line."""
    if isinstance(view, GroupView):
        running = ", ".join(f"{_name(run)} at step {run.step}/{run.steps}" for run in view.runs if _is_busy(run))
        return printable("  ".join(filter(None, [_group_title(view), running])))
    parts = [_title(view)]
    if view.steps and view.step:
        parts.append(f"step {view.step}/{view.steps}  epoch {view.epoch}/{view.epochs}")
    parts += [f"loss {view.loss:.4f}"] if view.loss is not None else []
    parts += [_score("", view.validation)] if view.validation else []
    parts += [f"{clock(view.left_s)} left"] if view.left_s is not None else []
    return printable("  ".join(parts))


def sparkline(values: Sequence[float]) -> str:
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)


def _title(view: RunView) -> str:
    ranks = f" on {view.world_size} rank{'s' if view.world_size > 1 else ''}" if view.state == "running" else ""
    job = f", job {view.job}" if view.job is not None else ""
    about = view.why or view.doing
    return f"{view.run}  {view.state}{ranks}{job}" + (f": {about}" if about else "")


def _run_lines(view: RunView) -> list[str]:
    lines = [_title(view)]
    if view.steps and view.step:
        lines += [_progress(view), *_times(view)]
    if view.patches_per_s is not None and view.step_s is not None:
        waiting = f", {100 * (view.data_share or 0):.0f} % of it waiting for data"
        lines.append(f"speed      {view.patches_per_s:.3g} patches/s, {view.step_s:.3g} s a step{waiting}")
    if view.loss is not None:
        lines.append(f"loss       {view.loss:.4f}  {sparkline(view.losses)}")
    if view.lr is not None:
        lines.append(f"rate       {view.lr:.3g}")
    if view.validation is not None:
        lines.append(_score("validated  ", view.validation))
    if view.best is not None:
        lines.append(_score("best       ", view.best))
    return [*lines, *_rank_lines(view.ranks)]


def _progress(view: RunView) -> str:
    full = _BAR * view.step // view.steps
    words = f"{view.step}/{view.steps} steps ({100 * view.step // view.steps} %), epoch {view.epoch}/{view.epochs}"
    return f"{'━' * full}{'╌' * (_BAR - full)} {words}"


def _times(view: RunView) -> list[str]:
    words = [f"{clock(view.elapsed_s)} since it was started"] if view.elapsed_s is not None else []
    words += [f"{clock(view.left_s)} left"] if view.left_s is not None else []
    return [f"time       {', '.join(words)}"] if words else []


def _score(label: str, score: dict[str, Any]) -> str:
    value = "undefined" if score["value"] is None else f"{score['value']:.4f}"
    return f"{label}{score['metric']} {value} at step {score['step']}"


def _rank_lines(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each rank, of many for the first ones and those that are silent, and what they have in common."""
    if not ranks:
        return []
    rows = [_rank_cells(rank) for rank in ranks]
    late = [row for row, rank in zip(rows, ranks, strict=True) if _is_late(rank)]
    shown = rows if len(rows) <= _MOST_RANKS else [*late, *(row for row in rows if row not in late)][:_MOST_RANKS]
    table = [("rank", "host", "device", "memory", "at most", "CPU", "GPU memory", "GPU", ""), *shown]
    used = [column for column in range(len(table[0])) if any(row[column] for row in table[1:])]
    widths = {column: max(len(row[column]) for row in table) for column in used}
    lines = ["  ".join(row[column].ljust(widths[column]) for column in used).rstrip() for row in table]
    if len(rows) > len(shown):
        memory = [int(rank["memory_bytes"]) for rank in ranks]
        lines.append(
            f"of all {len(rows)} ranks: memory {_size(min(memory))} to {_size(max(memory))}, {len(late)} silent"
        )
    return lines


def _rank_cells(rank: dict[str, Any]) -> tuple[str, ...]:
    gpu = rank.get("gpu") or {}
    memory = f"{_size(gpu['reserved_bytes'])} of {_size(gpu['total_bytes'])}" if gpu else ""
    note = f"silent for {rank['silent_s']:.0f} s" if _is_late(rank) else "ended" if rank.get("ended") else ""
    return (
        str(rank.get("rank")),
        str(rank.get("host")),
        str(rank.get("device")),
        _size(rank.get("memory_bytes")),
        _size(rank.get("memory_peak_bytes")),
        _percent(rank.get("cpu_percent")),
        memory,
        _percent(gpu.get("utilisation_percent")),
        note,
    )


def _is_late(rank: dict[str, Any]) -> bool:
    return not rank.get("ended") and float(rank.get("silent_s", 0)) > _LATE_S


def _size(count: Any) -> str:
    return size(count) if isinstance(count, int) else ""


def _percent(value: Any) -> str:
    return f"{value:.0f} %" if isinstance(value, int | float) else ""


def _group_title(view: GroupView) -> str:
    what = "trials" if view.kind == "search" else "folds"
    best = f", best {view.best['metric']} {view.best['value']:.4f}" if view.best else ""
    about = f": {view.why}" if view.why else ""
    return f"{view.run}  {view.state}{about}: {view.ended} of {view.all} {what} done{best}"


def _group_lines(view: GroupView) -> list[str]:
    lines = [_group_title(view)]
    for run in view.runs:
        if view.kind == "folds" and not _is_busy(run):
            lines.append(f"  {_name(run)}  {_described(run)}")
        else:
            _, *rest = _run_lines(run)
            lines += [f"  {_name(run)}  {_described(run)}", *(f"    {line}" for line in rest)]
    return lines


def _described(run: RunView) -> str:
    about = run.why or run.doing
    best = f", {_score('best ', run.best)}" if run.best and not _is_busy(run) else ""
    return f"{run.state}" + (f": {about}" if about else "") + best


def _is_busy(run: RunView) -> bool:
    return run.state in ("running", "queued")


def _name(run: RunView) -> str:
    return run.run.rpartition("/")[2]
