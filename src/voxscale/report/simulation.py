"""What was simulated, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from voxscale.report.forecast import duration
from voxscale.report.scaling import write_svg


def render_simulation(content: Mapping[str, Any]) -> str:
    """What `voxscale plan --simulate` prints."""
    lines = ["simulated, nobody has measured this; assumed:"]
    lines += [f"  - {assumption}" for assumption in content["assumptions"]]
    lines += ["", "devices    step  communication  speed-up  efficiency"]
    lines += [
        f"{row['devices']:>7}  {duration(row['step_s']):>6}  {row['communication_s'] / row['step_s']:>13.0%}  "
        f"{row['speedup']:>7.1f}×  {row['efficiency']:>9.0%}"
        for row in content["rows"]
    ]
    if content["search"]:
        lines += ["", "a search of so many trials", "devices  trials  steps taken      time  speed-up  device-hours"]
        lines += [
            f"{row['devices']:>7}  {row['trials']:>6}  {row['steps_share']:>11.0%}  {duration(row['seconds']):>8}  "
            f"{row['speedup']:>7.1f}×  {row['device_hours']:>12.2f}"
            for row in content["search"]
        ]
    lines += ["", "published elsewhere, not fitted"]
    lines += [f"{point['devices']:>7}  {point['speedup']:>7.1f}×  {point['source']}" for point in content["published"]]
    return "\n".join(lines)


def plot_simulation(content: Mapping[str, Any], path: Path) -> None:
    """The curve, what would be perfect, and the published points, as an SVG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    devices = [row["devices"] for row in content["rows"]]
    axes.plot(devices, devices, color="0.7", linestyle="--", label="perfect")
    axes.plot(devices, [row["speedup"] for row in content["rows"]], marker="o", label="simulated, one run")
    if content["search"]:
        axes.plot(
            [row["devices"] for row in content["search"]],
            [row["speedup"] for row in content["search"]],
            marker="s",
            label="simulated, the search",
        )
    points = content["published"]
    axes.scatter(
        [each["devices"] for each in points],
        [each["speedup"] for each in points],
        marker="x",
        color="0.3",
        label="published",
    )
    axes.set(xlabel="devices", ylabel="speed-up")
    axes.grid(alpha=0.3)
    axes.legend()
    write_svg(figure, path)
