"""What `voxscale plan` says beside what a run then takes: seconds of a step, and the memory of a node at its most.

    python bench/plan.py [--ranks 1 2] [--steps 40] [--only quick] [--json]

Each recipe, shrunk so that a run is short, is planned and trained in turn, on one rank and on two. Seconds are the
median of a run's steps after the first few; memory is what all its processes hold for themselves, looked at 50 times a
second from outside. Memory can be judged on any machine; seconds only on one that is quiet from beginning to end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from voxscale.launch.demo import write_demo

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = os.sysconf("SC_PAGE_SIZE")
GOAL = 0.15
FIRST = 4  # steps that do not count
RECIPES: dict[str, tuple[str, ...]] = {  # a demo's name and what differs from it
    "quick": ("data.synthetic={cases: 16, size: [64, 64, 64]}", "train.batch=4"),
    "brats": (
        "data.synthetic={cases: 12, size: [96, 96, 64]}",
        "patches.size=[80, 80, 48]",
        "train.batch=2",
        "validate.window=[80, 80, 48]",
    ),
    "btcv": (
        "data.spacing=[5.0, 5.0, 5.0]",
        "patches={size: [32, 32, 32], per_case: 4, foreground: 0.5}",
        "model={name: unetr, feature_size: 16, hidden: 192, mlp: 768, heads: 6}",
        "train.batch=4",
        "validate.window=[32, 32, 32]",
    ),
}


def words_of(name: str, folder: Path, steps: int) -> list[str]:
    """A config and overrides."""
    fields = [*RECIPES[name], "validate.every=1000", "track=none", "log=quiet", f"train.epochs={max(2, steps // 4)}"]
    if name == "quick":
        return [str(REPOSITORY / "recipes" / "quick.yaml"), f"data.source={folder / name}", *fields]
    if not (folder / name / "config.yaml").exists():
        write_demo(name, folder / name, fields)
    return [str(folder / name / "config.yaml")]


def planned(words: list[str], ranks: int, environ: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "voxscale", "plan", *words, "--devices", str(ranks), "--json"]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def trained(words: list[str], ranks: int, run: Path, environ: dict[str, str]) -> tuple[float, int]:
    """Median seconds of a step, and the most bytes that the processes of the run held for themselves at once."""
    command = [sys.executable, "-m", "voxscale", "train", *words, "--devices", str(ranks), "--run", str(run)]
    process, most = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL), 0
    while process.poll() is None:
        most = max(most, sum(private_bytes(each) for each in family(process.pid)))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return median([each["step_s"] for each in events if each["event"] == "train"][FIRST:]), most


def family(root: int) -> list[int]:
    """A process and all that come from it."""
    found = [root]
    for process in found:
        try:
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        except OSError:
            continue
    return found


def private_bytes(process: int) -> int:
    try:
        _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * PAGE


def compare(name: str, ranks: int, folder: Path, steps: int) -> dict[str, Any]:
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    words = words_of(name, folder / "data", steps)
    said = planned(words, ranks, environ)
    step_s, node_bytes = trained(words, ranks, folder / f"run-{name}-{ranks}", environ)
    of_step, of_node = sum(said["step_s"].values()), said["memory"]["node_bytes"]
    return {
        "recipe": name,
        "ranks": ranks,
        "step_s": {"planned": round(of_step, 4), "measured": round(step_s, 4), "ratio": round(of_step / step_s, 3)},
        "node_mb": {
            "planned": of_node >> 20,
            "measured": node_bytes >> 20,
            "ratio": round(of_node / node_bytes, 3),
        },
        "memory": {key: value >> 20 for key, value in said["memory"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=40, help="about how many a run has")
    parser.add_argument("--only", choices=RECIPES, nargs="+", default=list(RECIPES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="voxscale-bench-") as folder:
        rows = [compare(name, ranks, Path(folder), options.steps) for name in options.only for ranks in options.ranks]
    if options.json:
        off = {f"off.{name}": max(abs(row[name]["ratio"] - 1) for row in rows) for name in ("step_s", "node_mb")}
        print(json.dumps({**{name: round(most, 3) for name, most in off.items()}, "rows": rows, "goal": GOAL}))
        return
    print(
        f"{'recipe':<18} ranks   step: planned  measured  ratio   node: planned  measured  ratio   (goal: ±{GOAL:.0%})"
    )
    for row in rows:
        step, node = row["step_s"], row["node_mb"]
        print(
            f"{row['recipe']:<18} {row['ranks']:>5}  {step['planned']:>12.3f} s {step['measured']:>7.3f} s "
            f"{step['ratio']:>6.2f}  {node['planned']:>12} MB {node['measured']:>6} MB {node['ratio']:>6.2f}"
        )


if __name__ == "__main__":
    main()
