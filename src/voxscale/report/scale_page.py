"""The page of what `voxscale scale` measured."""

from __future__ import annotations

from typing import Any

from voxscale.plan.scaling import ADVICE
from voxscale.report.blocks import Block, column, curve, facts, number, plot, section, table
from voxscale.report.forecast import duration
from voxscale.report.run_page import page_of
from voxscale.report.scaling import devices_of
from voxscale.runs import ScaleFolder

_PARTS = {"data_share": "data", "compute_share": "computing", "communication_share": "communication"}
_KINDS = {"strong": "strong: one batch, shared out", "weak": "weak: the batch grows"}
_COLUMNS = {
    "world": column("nodes × devices"),
    "kind": column("scaling"),
    "global_batch": column("batch", number=True),
    "step_s": column("step", number=True, unit="s"),
    "wall_s": column("time", number=True, unit="s"),
    "patches_per_s": column("patches/s", number=True),
    "speedup": column("speed-up", number=True),
    "efficiency": column("efficiency", number=True),
    **{field: column(name, number=True, unit="share") for field, name in _PARTS.items()},
}


def scale_page(folder: ScaleFolder, content: dict[str, Any]) -> dict[str, Any]:
    rows = content["rows"]
    most = max(devices_of(row) for row in rows)
    kinds = dict.fromkeys(row.get("kind", "wall time") for row in rows)
    series = [
        curve(
            _KINDS.get(kind, kind),
            [devices_of(row) for row in rows if row.get("kind", "wall time") == kind],
            [row["speedup"] for row in rows if row.get("kind", "wall time") == kind],
            "both",
            tips=[f"{row['world']}, {row['efficiency']:.0%}" for row in rows if row.get("kind", "wall time") == kind],
        )
        for kind in kinds
    ]
    guide = curve("perfect", [1, most], [1, most], "guide")
    bottleneck = content.get("bottleneck")
    sections = [
        section("", facts(_headline(rows, bottleneck))),
        section(
            "Speed-up",
            plot("Speed-up over devices", "devices", "speed-up", [*series, guide], fromZero=True, withGuide=True),
            _shares(rows),
            _table(rows),
            about=f"What holds it back: {ADVICE[bottleneck]}" if bottleneck in ADVICE else "",
        ),
    ]
    return page_of(folder.root.name, "scaling", "done", sections)


def _headline(rows: list[dict[str, Any]], bottleneck: Any) -> list[tuple[str, str, str] | None]:
    last = max(rows, key=devices_of)
    kind = last.get("kind", "")
    return [
        ("speed-up", f"{last['speedup']:.2f}×", f"on {last['world']} (nodes × devices)"),
        ("efficiency", f"{last['efficiency']:.0%}", f"{kind} scaling" if kind else ""),
        ("patches a second", _speed(last["patches_per_s"]), f"on {last['world']}") if "patches_per_s" in last else None,
        ("wall time", duration(last["wall_s"]), f"on {last['world']}") if "wall_s" in last else None,
        ("holds it back", _PARTS.get(f"{bottleneck}_share", str(bottleneck)), "") if bottleneck else None,
    ]


def _shares(rows: list[dict[str, Any]]) -> Block | None:
    if "data_share" not in rows[0]:
        return None
    bars = [
        {
            "name": f"{row['kind']} {row['world']}: {duration(row['step_s'])} a step",
            "parts": [
                {"name": name, "share": row[field], "text": f"{row[field]:.0%}"}
                for field, name in _PARTS.items()
                if row[field] is not None
            ],
        }
        for row in rows
    ]
    return {"type": "bars", "title": "What a step is spent on", "bars": bars}


def _table(rows: list[dict[str, Any]]) -> Block | None:
    names = [name for name in _COLUMNS if name in rows[0]]
    columns = [_COLUMNS[name] for name in names]
    hidden = [part for field, part in _PARTS.items() if field in names]  # the bars show them
    return table(columns, [[row.get(name) for name in names] for row in rows], title="All figures", hidden=hidden)


def _speed(patches_per_s: float) -> str:
    return number(patches_per_s, digits=1 if patches_per_s >= 1 else 3)
