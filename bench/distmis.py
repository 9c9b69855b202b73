"""DistMIS in both its ways, shrunk: the same experiments two at once on one device each, and one after another on all.

    python bench/distmis.py --points 8 --json

Runs recipes/distmis_search.yaml and recipes/distmis_data_parallel.yaml on this machine, by `voxscale search`, as they
are but for fields that shrink them: small synthetic shards in place of BraTS, one thread and plain float32 on each
device, and the first points of the grid. The shards are prepared before, once. A total goes from the start of the
command to its end, with Ray's start-up in it; `trials_s` is the time of the trials alone. On all n devices the batch is
n times as large, so there are n times fewer steps, at a learning rate n times as high: DistMIS's own terms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
WAYS = {"experiments": "distmis_search.yaml", "data": "distmis_data_parallel.yaml"}
CASES, SIZE = 24, (32, 32, 16)
TIMEOUT_S = 7200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--points", type=int, default=4, choices=(1, 2, 4, 8, 16, 32), help="how many of the grid, from its first"
    )
    parser.add_argument("--epochs", type=int, default=20, help="of each experiment; 20 is the recipes'")
    parser.add_argument("--rounds", type=int, default=1, help="both ways take turns so often")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        result = measure(options, Path(folder))
    print(json.dumps(result) if options.json else render(result))


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    make_data(scratch)
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for turn in range(options.rounds):
        for way in sorted(WAYS, reverse=turn % 2 == 0):
            space = first_points(WAYS[way], options.points)
            changes = [f"train.epochs={options.epochs}", f"search.space={json.dumps(space)}"]
            rounds[way].append(search(WAYS[way], scratch, f"{way}-{turn}", changes))
    sides = {way: summarise(runs) for way, runs in rounds.items()}
    experiments, data = sides["experiments"], sides["data"]
    return {
        **sides,
        "ratio": round(data["total_s"] / experiments["total_s"], 3),
        "ratio.trials": round(data["trials_s"] / experiments["trials_s"], 3),
        "points": options.points,
        "epochs": options.epochs,
        "rounds": options.rounds,
        "cases": CASES,
        "size": SIZE,
        "cpus": len(os.sched_getaffinity(0)),
    }


def make_data(scratch: Path) -> None:
    """Shards as DistMIS's, and their store, which both recipes share."""
    from voxscale.config.schema import Synthetic
    from voxscale.data.synthetic import ensure_like

    ensure_like(scratch / "data", "distmis", Synthetic(cases=CASES, size=SIZE), threads=2)
    run(["prepare", str(RECIPES / WAYS["experiments"]), *shrinking(scratch)])


def shrinking(scratch: Path) -> list[str]:
    """What makes a recipe small. How to compute is stated: finding out what is best takes steps of its own."""
    return [
        f"data.source={scratch / 'data'}",
        f"data.store={scratch / 'store'}",
        "train.threads=1",
        "train.precision=fp32",
        "train.compile=false",
        "train.channels_last=false",
        "track=none",
        "log=quiet",
    ]


def first_points(recipe: str, count: int) -> dict[str, Any]:
    """The part of a recipe's grid that is its first `count` points: the last field changes fastest."""
    from voxscale.config.load import parse_yaml

    space = parse_yaml((RECIPES / recipe).read_text(), recipe)["search"]["space"]
    part: dict[str, Any] = {}
    for path, dimension in reversed(space.items()):
        part[path] = {"grid": dimension["grid"][:count]}
        count = max(1, count // len(dimension["grid"]))
    return {path: part[path] for path in space}


def search(recipe: str, scratch: Path, name: str, changes: list[str]) -> dict[str, Any]:
    """Search by a recipe. Returns its metrics.json and the whole command's seconds."""
    folder = scratch / name
    began = time.monotonic()
    run(["search", str(RECIPES / recipe), *shrinking(scratch), *changes, "--run", str(folder)])
    total_s = time.monotonic() - began
    metrics = json.loads((folder / "metrics.json").read_text())
    if metrics["trials"].get("done", 0) + metrics["trials"].get("pruned", 0) < metrics["trials"]["all"]:
        raise SystemExit(f"{name}: not every trial came to its end: {metrics['trials']}")
    return {**metrics, "total_s": total_s}


def run(words: list[str]) -> None:
    command = [sys.executable, "-m", "voxscale", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Times are medians; the steps and the best of every round are the same."""
    best = runs[0]["best"]
    return {
        "total_s": round(statistics.median(run["total_s"] for run in runs), 2),
        "trials_s": round(statistics.median(run["wall_s"] for run in runs), 2),
        "trials": runs[0]["trials"]["all"],
        "steps": runs[0]["steps"],
        "best": {"value": round(best["value"], 4), "metric": best["metric"], "params": best["params"]},
    }


def render(result: dict[str, Any]) -> str:
    titles = {"experiments": "one device each, several at once", "data": "all devices each, one after another"}
    lines = []
    for way, title in titles.items():
        side = result[way]
        params = ", ".join(f"{path} {value}" for path, value in side["best"]["params"].items())
        lines += [
            f"{title}: {side['total_s']:.1f} s for {side['trials']} experiments, {side['steps']} steps "
            f"({side['trials_s']:.1f} s without Ray's start-up)",
            f"  best {side['best']['metric']} {side['best']['value']:.3f}: {params}",
        ]
    lines.append(f"ratio {result['ratio']:.2f} ({result['ratio.trials']:.2f} without Ray's start-up)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
