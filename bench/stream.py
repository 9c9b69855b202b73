"""Time and memory of the split and of a rank's start, at scale.

    python bench/stream.py --cases 1000000 --json

Two processes, as in a run. One splits the cases, writes split.csv and the index of a store of them. The other is one
rank, by the calls of `train/job.py`: it opens the store, reads split.csv and compares it with the store case by case,
shuffles an epoch, and computes its positions for every step of the epoch, for each world size; its total counts the
slowest world. `peak_mb` is the most that it held for itself above what it held after its imports; the pages of the
index, which the ranks of a node share, are counted apart. The first rank of a node checks the store for all: the hash
of the index, and the sizes of all files, which are measured on some cases (`--files`) and reckoned for all.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from voxscale.config.data import SplitShares
from voxscale.data.sampler import Stream
from voxscale.data.split import ROLES, assign_roles, recorded_roles
from voxscale.data.store import FILES, ROW, SCHEMA_VERSION, damaged_rows, describe_store, open_store, seal
from voxscale.files import sha256_of, write_csv, write_json

WORLDS = [2**n for n in range(13)]
PER_RANK = 2  # samples of a rank in a step
GOAL_S, GOAL_MB = 2.0, 200.0


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def private_peak() -> Iterator[Callable[[], float]]:
    """The most that this process holds for itself meanwhile, in MB above what it held at first."""

    def held() -> float:
        return int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024

    first, most, over = held(), [0.0], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], held() - first)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield lambda: max(most[0], held() - first)
    finally:
        over.set()
        looking.join()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def measure_split(path: Path, num_cases: int, num_files: int) -> dict[str, float]:
    """The launcher's part: once per run. It leaves a store that is whole but for its cases, and a small one."""
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
    peak = peak_mb() - base
    make_store(path.with_name("store"), num_cases)
    make_store(path.with_name("sample"), num_files, with_files=True)
    return {
        "split_s": split_s,
        "write_s": write_s,
        "manifest_mb": manifest_mb,
        "split_peak_mb": split_mb,
        "peak_mb": peak,
    }


def make_store(folder: Path, num_cases: int, *, with_files: bool = False) -> None:
    rows = np.zeros(num_cases, ROW)
    rows["id"] = [f"case-{n:07d}".encode() for n in range(num_cases)]
    rows["shape"] = 96
    folder.mkdir()
    np.save(folder / "index.npy", rows)
    header = {"schema": SCHEMA_VERSION, "index_sha256": sha256_of(folder / "index.npy"), "channels": 1}
    header |= {"dtype": "float16", "digest": "", "labels": [0, 1]}
    write_json(folder / "index.json", {**header, "seal": seal(header)})
    for n in range(num_cases if with_files else 0):
        inside = folder / "cases" / f"case-{n:07d}"
        inside.mkdir(parents=True)
        for name in FILES:
            (inside / name).touch()


def count_positions(stream: Stream, rank: int, world_size: int) -> int:
    """Compute a rank's positions for every step of an epoch."""
    return sum(len(stream.share(step, rank, world_size)) for step in range(1, stream.steps_per_epoch + 1))


def measure_rank(path: Path) -> dict[str, Any]:
    """A rank's part: at its start, and over an epoch."""
    base = peak_mb()
    cpu = time.process_time()
    with private_peak() as held_mb:
        store, open_s = timed(lambda: open_store(path.with_name("store"), check="header"))
        _, describe_s = timed(lambda: describe_store(store))
        roles, read_s = timed(lambda: recorded_roles(path, store.ids))
        rows = np.flatnonzero(roles == 0).astype(np.int32)
        read_mb = held_mb()
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
        peak = held_mb()
    with_shared = peak_mb() - base
    _, index_s = timed(lambda: open_store(path.with_name("store"), check="index"))
    sample = open_store(path.with_name("sample"), check="header")
    _, sizes_s = timed(lambda: damaged_rows(sample))
    slowest = max(row["s"] for row in positions)
    return {
        "rank": {
            "num_train": len(rows),
            "open_s": open_s + describe_s,
            "read_s": read_s,
            "read_peak_mb": read_mb,
            "shuffle_s": shuffle_s,
            "positions_s": slowest,
            "total_s": open_s + describe_s + read_s + shuffle_s + slowest,
            "total_cpu_s": cpu_s + max(row["cpu_s"] for row in positions),
            "peak_mb": peak,
            "peak_with_shared_mb": with_shared,
        },
        "first_rank_of_node": {"index_s": index_s, "sizes_s": sizes_s / len(sample) * len(store)},
        "positions": positions,
    }


def run_part(part: str, path: Path, options: argparse.Namespace) -> Any:
    command = [sys.executable, __file__, "--cases", str(options.cases), "--files", str(options.files)]
    command += ["--part", part, "--file", str(path)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=5_000, help="cases of which the files are there")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=("split", "rank"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        if options.part == "split":
            print(json.dumps(measure_split(options.file, options.cases, options.files)))
        else:
            print(json.dumps(measure_rank(options.file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "split.csv"
        found = {"cases": options.cases, "split": run_part("split", path, options)}
        found |= run_part("rank", path, options)
    rank = found["rank"]
    found["goal"] = {"s": GOAL_S, "mb": GOAL_MB, "met": rank["total_s"] < GOAL_S and rank["peak_mb"] < GOAL_MB}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for part in ("split", "rank", "first_rank_of_node"):
        print(part, *(f"{key} {value:.3g}" for key, value in found[part].items()), sep="\n  ")
    for row in found["positions"]:
        print(f"  world {row['world']:5d}: {row['steps']} steps in {row['s']:.3f} s")


if __name__ == "__main__":
    main()
