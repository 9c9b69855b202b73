"""Scaling as a table and as a plot."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxscale.files import write_bytes
from voxscale.plan.scaling import ADVICE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render_scaling(rows: Sequence[Mapping[str, Any]], bottleneck: str) -> str:
    """What `voxscale scale` prints of a config."""
    lines = ["scaling  world  batch   step s  patches/s  speed-up  efficiency   data  compute  communication"]
    for row in rows:
        data, compute, communication = (
            "not known" if row[name] is None else f"{row[name]:.0%}"
            for name in ("data_share", "compute_share", "communication_share")
        )
        lines.append(
            f"{row['kind']:<7}  {row['world']:>5}  {row['global_batch']:>5}  {row['step_s']:>7.3f}  "
            f"{row['patches_per_s']:>9.3g}  {_gain(row)}  {data:>5}  {compute:>7}  {communication:>13}"
        )
    return "\n".join([*lines, f"what holds it back: {ADVICE[bottleneck]}"])


def render_times(rows: Sequence[Mapping[str, Any]]) -> str:
    """What `voxscale scale --script` prints."""
    lines = ["world   wall time  speed-up  efficiency"]
    lines += [f"{row['world']:>5}  {row['wall_s']:>8.1f} s  {_gain(row)}" for row in rows]
    return "\n".join(lines)


def plot_speedup(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Speed-up over the number of devices, beside what would be perfect, as an SVG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    worlds = [devices_of(row) for row in rows]
    most = max(worlds)
    axes.plot([1, most], [1, most], color="0.7", linestyle="--", label="perfect")
    for kind in dict.fromkeys(row.get("kind", "wall time") for row in rows):
        own = [row for row in rows if row.get("kind", "wall time") == kind]
        axes.plot([devices_of(row) for row in own], [row["speedup"] for row in own], marker="o", label=kind)
    axes.set(xlabel="devices", ylabel="speed-up", title=title, xticks=sorted(set(worlds)))
    axes.grid(alpha=0.3)
    axes.legend()
    write_svg(figure, path)


def write_svg(figure: Figure, path: Path) -> None:
    """Write a figure, the same to the byte each time."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    write_bytes(path, content.getvalue())


def _gain(row: Mapping[str, Any]) -> str:
    return f"{row['speedup']:>7.2f}×  {row['efficiency']:>9.0%}"


def devices_of(row: Mapping[str, Any]) -> int:
    nodes, devices = row["world"].split("x")
    return int(nodes) * int(devices)
