"""Time and memory of the split and the sample stream, at scale.

    python bench/stream.py --cases 1000000 --json

Two processes, as in a run. One splits the cases and writes split.csv. The other is one rank: it reads split.csv,
shuffles an epoch, and computes its positions for every step of the epoch, for each world size; its total counts
the slowest world. Memory is the peak above what the process held after its imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from voxscale.config.data import SplitShares
from voxscale.data.sampler import Stream
from voxscale.data.split import ROLES, assign_roles, training_rows
from voxscale.files import write_csv

WORLDS = [2**n for n in range(13)]
PER_RANK = 2  # samples of a rank in a step
GOAL_S, GOAL_MB = 2.0, 200.0


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def measure_split(path: Path, num_cases: int) -> dict[str, float]:
    """The launcher's part: once per run."""
    base = peak_mb()
    patients = [f"patient-{n:07d}" for n in range(num_cases)]
    manifest_mb = peak_mb() - base
    roles, split_s = timed(lambda: assign_roles(patients, None, SplitShares(val=0.1, test=0.1)))
    split_mb = peak_mb() - base
    rows = (
        {"case": f"case-{n:07d}", "patient": patient, "split": ROLES[role]}
        for n, (patient, role) in enumerate(zip(patients, roles, strict=True))
    )
    _, write_s = timed(lambda: write_csv(path, ("case", "patient", "split"), rows))
    return {
        "split_s": split_s,
        "write_s": write_s,
        "manifest_mb": manifest_mb,
        "split_peak_mb": split_mb,
        "peak_mb": peak_mb() - base,
    }


def count_positions(stream: Stream, rank: int, world_size: int) -> int:
    """Compute a rank's positions for every step of an epoch."""
    return sum(len(stream.share(step, rank, world_size)) for step in range(1, stream.steps_per_epoch + 1))


def measure_rank(path: Path) -> dict[str, Any]:
    """A rank's part: at its start, and over an epoch."""
    base = peak_mb()
    cpu = time.process_time()
    rows, read_s = timed(lambda: training_rows(path))
    read_mb = peak_mb() - base
    _, shuffle_s = timed(lambda: Stream(0, len(rows), 1, PER_RANK).cases(1))
    cpu_s = time.process_time() - cpu  # on a busy machine the fairer figure
    positions: list[dict[str, float]] = []
    for world_size in WORLDS:
        stream = Stream(0, len(rows), 1, PER_RANK * world_size)
        rank = world_size // 2
        cpu = time.process_time()
        count, seconds = timed(partial(count_positions, stream, rank, world_size))
        positions.append(
            {
                "world": world_size,
                "steps": stream.steps_per_epoch,
                "samples": count,
                "s": seconds,
                "cpu_s": time.process_time() - cpu,
            }
        )
    slowest = max(row["s"] for row in positions)
    return {
        "rank": {
            "num_train": len(rows),
            "read_s": read_s,
            "read_peak_mb": read_mb,
            "shuffle_s": shuffle_s,
            "positions_s": slowest,
            "total_s": read_s + shuffle_s + slowest,
            "total_cpu_s": cpu_s + max(row["cpu_s"] for row in positions),
            "peak_mb": peak_mb() - base,
        },
        "positions": positions,
    }


def run_part(part: str, path: Path, num_cases: int) -> Any:
    command = [sys.executable, __file__, "--cases", str(num_cases), "--part", part, "--file", str(path)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=("split", "rank"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        work = measure_split(options.file, options.cases) if options.part == "split" else measure_rank(options.file)
        print(json.dumps(work))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "split.csv"
        found = {"cases": options.cases, "split": run_part("split", path, options.cases)}
        found |= run_part("rank", path, options.cases)
    rank = found["rank"]
    found["goal"] = {"s": GOAL_S, "mb": GOAL_MB, "met": rank["total_s"] < GOAL_S and rank["peak_mb"] < GOAL_MB}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for part in ("split", "rank"):
        print(part, *(f"{key} {value:.3g}" for key, value in found[part].items()), sep="\n  ")
    for row in found["positions"]:
        print(f"  world {row['world']:5d}: {row['steps']} steps in {row['s']:.3f} s")


if __name__ == "__main__":
    main()
