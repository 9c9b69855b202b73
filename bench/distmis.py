"""DistMIS in both its ways, shrunk: the same experiments several at once on a device each, or one after another on all.

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
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:
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
    from voxscale.config.data import Synthetic
    from voxscale.data.synthetic import ensure_like

    ensure_like(scratch / "data", "distmis", Synthetic(cases=CASES, size=SIZE), threads=2)
    run(scratch, ["prepare", str(RECIPES / WAYS["experiments"]), *shrinking(scratch)])


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
    """Search by a recipe. Returns its metrics.json, with the seconds and the memory of the whole command."""
    folder = scratch / name
    watched = run(scratch, ["search", str(RECIPES / recipe), *shrinking(scratch), *changes, "--run", str(folder)])
    metrics = json.loads((folder / "metrics.json").read_text())
    if metrics["trials"].get("done", 0) + metrics["trials"].get("pruned", 0) < metrics["trials"]["all"]:
        raise SystemExit(f"{name}: not every trial came to its end: {metrics['trials']}")
    return {**metrics, "total_s": watched.wall_s, "peak_mb": watched.peak_mb}


def run(scratch: Path, words: list[str]) -> Watched:
    return watch([sys.executable, "-m", "voxscale", *words], scratch)


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Times are medians; the steps and the best of every round are the same."""
    best = runs[0]["best"]
    return {
        "total_s": round(statistics.median(run["total_s"] for run in runs), 2),
        "trials_s": round(statistics.median(run["wall_s"] for run in runs), 2),
        "peak_mb": round(statistics.median(run["peak_mb"] for run in runs)),
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
            f"({side['trials_s']:.1f} s from the first start to the last end)",
            f"  best {side['best']['metric']} {side['best']['value']:.3f}: {params}",
        ]
    lines.append(f"ratio {result['ratio']:.2f} ({result['ratio.trials']:.2f} of the trials alone)")
    return "\n".join(lines)


# ASHA, for bench/search.py


def measure_asha(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    make_data(scratch)
    recipe = WAYS["experiments"]
    space = f"search.space={json.dumps(first_points(recipe, options.points))}"
    seeds = []
    for seed in range(options.seeds):
        changes = [space, f"train.epochs={options.epochs}", f"train.seed={seed}"]
        full = search(recipe, scratch, f"full-{seed}", changes)
        asha = search(recipe, scratch, f"asha-{seed}", [*changes, "search.scheduler=asha"])
        seeds.append(compare(full, asha))
    names = seeds[0].keys()
    means = {f"mean.{name}": round(statistics.fmean(row[name] for row in seeds), 4) for name in names}
    return {**means, "seeds": seeds, "points": options.points, "epochs": options.epochs}


def compare(full: dict[str, Any], asha: dict[str, Any]) -> dict[str, float]:
    return {
        "full.steps": full["steps"],
        "asha.steps": asha["steps"],
        "share_of_steps": round(asha["steps"] / full["steps"], 4),
        "full.best": round(full["best"]["value"], 4),
        "asha.best": round(asha["best"]["value"], 4),
        "difference": round(asha["best"]["value"] - full["best"]["value"], 4),
        "same_trial": int(asha["best"]["trial"] == full["best"]["trial"]),
        "full.total_s": round(full["total_s"], 1),
        "asha.total_s": round(asha["total_s"], 1),
        "share_of_time": round(asha["total_s"] / full["total_s"], 4),
    }


def render_asha(result: dict[str, Any]) -> str:
    lines = [
        f"seed {seed}: full {row['full.steps']} steps, best {row['full.best']:.4f}; ASHA {row['asha.steps']} steps "
        f"({row['share_of_steps']:.0%}), best {row['asha.best']:.4f}"
        for seed, row in enumerate(result["seeds"])
    ]
    return "\n".join(
        [
            *lines,
            f"mean over {len(lines)} seeds of {result['points']} points: {result['mean.share_of_steps']:.0%} of the "
            f"steps, {result['mean.share_of_time']:.0%} of the time, best {result['mean.difference']:+.4f}",
        ]
    )


# watching, for it too


@dataclass
class Watched:
    """A command that has ended; marks in seconds from its start."""

    wall_s: float = 0.0
    peak_mb: float = 0.0
    marks: dict[str, float] = field(default_factory=dict)


def watch(command: list[str], scratch: Path, marks: Callable[[], Iterable[str]] = lambda: ()) -> Watched:
    """Run a command, noting when each of its marks is first seen, and the most memory it has."""
    seen, over = Watched(), threading.Event()
    with tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        process = subprocess.Popen(command, env=watched_environ(scratch), stdout=output, stderr=output)
        sampler = threading.Thread(target=sample_memory, args=(process.pid, seen, over))
        sampler.start()
        try:
            while process.poll() is None:
                for mark in marks():
                    seen.marks.setdefault(mark, time.monotonic() - began)
                if time.monotonic() - began > TIMEOUT_S:
                    raise SystemExit(f"{' '.join(command)}\nstill runs after {TIMEOUT_S:.0f} s")
                time.sleep(0.1)
            seen.wall_s = time.monotonic() - began
        finally:
            over.set()
            sampler.join()
            if process.poll() is None:
                process.terminate()
                process.wait(60)
        for mark in marks():
            seen.marks.setdefault(mark, seen.wall_s)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}\n{output.read()}")
    return seen


def watched_environ(scratch: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def sample_memory(root: int, seen: Watched, over: threading.Event) -> None:
    tree = {root}
    while not over.wait(3.0):
        parents = read_parents()
        tree &= parents.keys()
        while found := {pid for pid, parent in parents.items() if parent in tree} - tree:
            tree |= found
        seen.peak_mb = max(seen.peak_mb, sum(map(read_pss_mb, tree)))


def read_parents() -> dict[int, int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has ended
            continue
    return parents


def read_pss_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What a file of one JSON object a line holds so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    main()
