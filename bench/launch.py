"""From submit to the first step: `voxscale train --on slurm` beside a hand-written sbatch + torchrun of the same job.

    python bench/launch.py [--nodes 2] [--devices 2] [--rounds 5] [--json]

Starts the real SLURM of tests/lab (needs root), then submits both in turn, on idle nodes. Measured is the time from
`sbatch` having taken the job to the first step in events.jsonl; beside it, from the user's command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from lab.slurm import SlurmLab  # noqa: E402 found by the line above

CONFIG = {
    "data": {"source": "pairs", "synthetic": {"cases": 12, "size": [24, 24, 16]}, "regions": {"ball": [1]}},
    "patches": {"size": [16, 16, 16]},
    "model": {"name": "unet", "channels": [4, 8]},
    "train": {"epochs": 1, "batch": 4, "threads": 1, "precision": "fp32", "compile": False, "channels_last": False},
    "validate": {"every": 1},
    "track": "none",
}
BY_HAND = """#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={devices}
#SBATCH --output={run}/launch/hand.%j.out
port=$({python} -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
srun --nodes={nodes} --ntasks-per-node=1 --cpus-per-task={devices} {python} -m torch.distributed.run \\
  --nnodes {nodes} --nproc-per-node {devices} --rdzv-backend c10d --rdzv-id "$RANDOM$RANDOM" \\
  --rdzv-endpoint "$SLURMD_NODENAME:$port" -m voxscale.train.worker {run}
"""


def first_step(run: Path, since: float) -> float:
    """Seconds from `since` until a step is recorded."""
    events = run / "events.jsonl"
    while not (events.exists() and '"event": "train"' in events.read_text()):
        if time.time() - since > 120:
            raise SystemExit(f"no step within two minutes: see {run}")
        time.sleep(0.01)
    return time.time() - since


def voxscale(*words: object, environ: dict[str, str], cwd: Path) -> None:
    command = [sys.executable, "-m", "voxscale", *map(str, words)]
    subprocess.run(command, env=environ, cwd=cwd, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, SlurmLab() as lab:
        work = Path(folder)
        environ = {**os.environ, **lab.environ, "XDG_CACHE_HOME": str(work / "cache")}
        (work / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        voxscale("prepare", "config.yaml", environ=environ, cwd=work)
        place = ["--nodes", options.nodes, "--devices", options.devices]

        def by_us(run: Path) -> tuple[float, float]:
            began = time.time()
            site = ["site.cpus_per_device=1", "--on", "slurm", "--detach"]
            voxscale("train", "config.yaml", *site, *place, "--run", run, environ=environ, cwd=work)
            submitted = (run / "launch" / "jobs.json").stat().st_mtime
            return first_step(run, submitted), first_step(run, began)

        def by_hand(run: Path) -> tuple[float, float]:
            world = options.nodes * options.devices
            voxscale("train", "config.yaml", "--devices", world, "--run", run, "--no-start", environ=environ, cwd=work)
            file = run / "launch" / "hand.sbatch"
            file.write_text(BY_HAND.format(run=run, python=sys.executable, **vars(options)))
            began = time.time()
            subprocess.run(["sbatch", str(file)], env=environ, check=True, capture_output=True)  # noqa: S607
            return first_step(run, time.time()), first_step(run, began)

        ways: dict[str, Callable[[Path], tuple[float, float]]] = {"voxscale": by_us, "by hand": by_hand}
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(options.rounds + 1):
            for way, start in ways.items():
                lab.reset()
                measured = start(work / f"{way.replace(' ', '-')}-{turn}")
                if turn:  # the first fills the page cache
                    times[way].append(measured)
    ours, hand = times["voxscale"], times["by hand"]
    result = {
        "from_submit_s": {way: median(pair[0] for pair in pairs) for way, pairs in times.items()},
        "from_command_s": {way: median(pair[1] for pair in pairs) for way, pairs in times.items()},
        "ratio": median(a[0] for a in ours) / median(b[0] for b in hand),
        "ratio_from_command": median(a[1] for a in ours) / median(b[1] for b in hand),
        "rounds": options.rounds,
    }
    if options.json:
        print(json.dumps(result))
        return
    for way in ways:
        submit, command = result["from_submit_s"][way], result["from_command_s"][way]
        print(f"{way:>9}: {submit:.2f} s from submit, {command:.2f} s from the command")
    print(f"ratio {result['ratio']:.2f} from submit (≤ 1.1), {result['ratio_from_command']:.2f} from the command")


if __name__ == "__main__":
    main()
