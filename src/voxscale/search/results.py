"""What a search leaves: `trials.csv`, `configurations.csv` where seeds were asked for, `best.yaml`, `metrics.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from voxscale.config.load import read_config, render_config
from voxscale.config.schema import Config
from voxscale.files import read_csv, read_json, remove, write_csv, write_json, write_text
from voxscale.plan.plan import Plan
from voxscale.runs import SearchFolder
from voxscale.search.ledger import DONE, Trial, best_trial, read_ledger
from voxscale.search.opening import OpenedSearch

_SHOWN = 10  # trials


def write_results(opened: OpenedSearch, trials: Sequence[Trial], *, state: str, wall_s: float) -> dict[str, Any]:
    """Write the tables and, if any trial reached a value, the best config. Returns `metrics.json`."""
    folder = opened.folder
    _write_table(opened, trials)
    if opened.search.seeds > 1:
        _write_configurations(opened, trials)
    best = best_of_search(opened, trials)
    if best is None:
        remove(folder.best)
    else:
        write_text(folder.best, render_best(opened, best))
    metrics = {
        "task": "search",
        "state": state,
        "metric": opened.metric,
        "mode": opened.search.direction,
        "best": None
        if best is None
        else {"trial": best.index, "metric": opened.metric, "value": best.value, "params": best.params},
        "trials": {"all": opened.num_trials, **Counter(trial.state for trial in trials)},
        "steps": sum(trial.steps for trial in trials),
        "wall_s": round(wall_s, 3),
    }
    write_json(folder.metrics, metrics)
    return metrics


def read_finished(folder: SearchFolder, config: Config) -> dict[str, Any] | None:
    """`metrics.json` of a search that has nothing left to do; None of any other."""
    if not folder.exists or not folder.metrics.exists() or config.search is None:
        return None
    metrics: dict[str, Any] = read_json(folder.metrics)
    trials = read_ledger(folder.ledger).trials
    wanted = config.search.num_points * config.search.seeds
    again = any(trial.may_be_tried_again(config.search.retries) for trial in trials)
    is_over = metrics["state"] == "done" and len(trials) >= wanted and all(trial.has_ended for trial in trials)
    return metrics if is_over and not again and metrics["best"] else None


def wall_s_of(folder: SearchFolder) -> float:
    """What earlier starts took, as far as they could write it down."""
    try:
        return float(read_json(folder.metrics)["wall_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def best_of_search(opened: OpenedSearch, trials: Sequence[Trial]) -> Trial | None:
    """The best trial; where each configuration ran with several seeds, the first run of the one with the best mean."""
    if opened.search.seeds == 1:
        return best_trial(trials, opened.search.direction)
    rows = [row for row in _configurations(opened, trials) if row["runs"] == opened.search.seeds]
    if not rows:
        return best_trial(trials, opened.search.direction)
    sign = 1 if opened.search.direction == "max" else -1
    chosen = max(rows, key=lambda row: (sign * row["mean"], -row["configuration"]))
    return trials[int(chosen["configuration"]) * opened.search.seeds]


def render_best(opened: OpenedSearch, trial: Trial) -> str:
    """The config of a trial, ready to be trained: with as many ranks as the trial had, to the same numbers."""
    config = read_config(opened.folder.trial(trial.index).config)
    ranks = Plan.read(opened.folder.trial(trial.index).plan).world_size
    config = config.model_copy(update={"train": config.train.model_copy(update={"devices": ranks})})
    return f"# {_described(opened, trial)}\n# voxscale train best.yaml trains it again, to the same metrics.\n" + (
        render_config(config)
    )


def _described(opened: OpenedSearch, trial: Trial) -> str:
    runs = f" with seed {trial.seed} of {opened.search.seeds}" if opened.search.seeds > 1 else ""
    return f"Trial {trial.index} of {opened.num_trials}{runs}: {opened.metric} {trial.value!r}"


def _write_table(opened: OpenedSearch, trials: Sequence[Trial]) -> None:
    fields = list(opened.search.space)
    columns = ("trial", "state", *fields, opened.metric, "steps", "wall_s", "configuration", "seed", "run", "why")
    rows = [
        {
            "trial": trial.index,
            "state": trial.state,
            **{path: _cell(trial.params[path]) for path in fields},
            opened.metric: "" if trial.value is None else trial.value,
            "steps": trial.steps,
            "wall_s": trial.wall_s,
            "configuration": trial.configuration,
            "seed": opened.config.train.seed + trial.seed,
            "run": str(opened.folder.trial(trial.index).root.relative_to(opened.folder.root)),
            "why": trial.why.replace("\n", "; "),
        }
        for trial in trials
    ]
    write_csv(opened.folder.table, columns, rows)


def _configurations(opened: OpenedSearch, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    rows = []
    seeds = opened.search.seeds
    for first in range(0, len(trials), seeds):
        values = [t.value for t in trials[first : first + seeds] if t.state == DONE and t.value is not None]
        if values:
            rows.append(
                {
                    "configuration": first // seeds,
                    **{path: _cell(value) for path, value in trials[first].params.items()},
                    "runs": len(values),
                    "mean": mean(values),
                    "std": stdev(values) if len(values) > 1 else "",
                }
            )
    return rows


def _write_configurations(opened: OpenedSearch, trials: Sequence[Trial]) -> None:
    columns = ("configuration", *opened.search.space, "runs", "mean", "std")
    write_csv(opened.folder.configurations, columns, _configurations(opened, trials))


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)


def render_outcome(root: Path, metrics: dict[str, Any]) -> str:
    """The best trials in a terminal, and where the rest is; read from the folder."""
    folder = SearchFolder(root)
    metric = metrics["metric"]
    config = read_config(folder.config)
    rows = [row for row in read_csv(folder.table) if row[metric]]
    sign = 1 if config.search is None or config.search.direction == "max" else -1
    rows.sort(key=lambda row: (-sign * float(row[metric]), int(row["trial"])))
    paths = list(config.search.space) if config.search is not None else []
    cells = [["trial", "state", *paths, metric, "steps"]]
    cells += [
        [row["trial"], row["state"], *(_text(row[path]) for path in paths), f"{float(row[metric]):.4f}", row["steps"]]
        for row in rows[:_SHOWN]
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    if len(rows) > _SHOWN:
        lines.append(f"{len(rows) - _SHOWN} more in {folder.table}")
    counts = ", ".join(f"{count} {state}" for state, count in metrics["trials"].items() if state != "all")
    best = f", best config {folder.best}" if metrics["best"] else ""
    return "\n".join([*lines, f"{metrics['trials']['all']} trials: {counts}; search folder {root}{best}"])


def _text(cell: str) -> str:
    try:
        return f"{float(cell):.4g}"
    except ValueError:
        return cell
