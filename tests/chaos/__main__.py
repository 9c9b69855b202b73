"""All the faults, by the hundred: `make chaos`.

    cd tests && python -m chaos [--seed 0] [--kills 200] [--only saves,disk,kills,hangs,rivals,slurm,ray] [--json]

Needs root, for small file systems and for the real SLURM that it starts. Prints a table, and everything that went
wrong; ends with 1 if anything did.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from chaos.disk import fill_disk
from chaos.hangs import stop_ranks
from chaos.kills import kill_at_random
from chaos.on_ray import disturb_search
from chaos.on_slurm import disturb_job
from chaos.report import Report, render
from chaos.rivals import start_twice
from chaos.saves import damage_checkpoints, kill_in_saves
from voxscale.config.data import Synthetic
from voxscale.data.synthetic import ensure_synthetic

KINDS = ("saves", "disk", "kills", "hangs", "rivals", "slurm", "ray")


def run_all(options: argparse.Namespace, root: Path) -> Iterator[Report]:
    dataset = root / "pairs"
    ensure_synthetic(dataset, Synthetic(cases=12, size=(24, 24, 16), seed=3))
    wanted = options.only.split(",")
    environ = {**os.environ, "XDG_CACHE_HOME": str(root / "cache")}
    if "saves" in wanted:
        yield kill_in_saves(root / "saves")
        yield damage_checkpoints(root / "damage", mutations=options.mutations, seed=options.seed)
    if "disk" in wanted:
        yield fill_disk(root / "disk", dataset, environ)
    if "kills" in wanted:
        for devices in map(int, options.ranks.split(",")):
            kills = options.kills // len(options.ranks.split(","))
            yield kill_at_random(
                root / f"kills-{devices}",
                dataset,
                environ,
                kills=kills,
                devices=devices,
                seed=options.seed,
                is_warm=True,
            )
    if "hangs" in wanted:
        yield stop_ranks(root / "hangs", dataset, environ, stops=9, seed=options.seed, is_warm=True)
    if "rivals" in wanted:
        yield start_twice(root / "rivals", dataset, environ, pairs=9, seed=options.seed, is_warm=True)
    if "slurm" in wanted:
        yield disturb_job(root / "slurm", dataset, environ, requeues=10, losses=3)
    if "ray" in wanted:
        yield disturb_search(root / "ray", dataset, environ, trials=10, raylets=3, drivers=3, seed=options.seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Faults by the hundred.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", default="1,2", help="over which the kills are shared out")
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reports = []
    root = Path(tempfile.mkdtemp(prefix="vxchaos-"))
    try:
        for report in run_all(options, root):
            reports.append(report)
            print(f"{report.name}: {report.tried} tried, {len(report.wrong)} wrong", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps([asdict(report) for report in reports], indent=2) if options.json else render(reports))
    wrong = [f"{report.name}: {text}" for report in reports for text in report.wrong]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
