"""A training step: `voxscale train` beside a bare PyTorch loop of the same step on batches that are in memory already.

    python bench/step.py [--rounds 3] [--steps 20] [--patch 64] [--json]

The same network, loss, optimizer and batch on one rank and on two (DDP, gloo), one thread each; the four take turns.
Ours reads, augments and counts its samples, writes its events and asks after every step whether to stop; the bare loop
does nothing but compute. A step is the time from the end of one to the end of the next, the first few left out; of
each run the median counts, and of runs the median again. `ratio` is ours ÷ bare, `speedup` that of two ranks over one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

CASES, BATCH, WARM = 8, 2, 3
RANKS = (1, 2)
GOALS = {"ratio.1": 1.03, "ratio.2": 1.03, "speedup.kept": 0.97}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--patch", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)  # the part that runs as ranks
    options = parser.parse_args()
    if options.bare:
        run_bare_loop(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(options, Path(scratch)), indent=None if options.json else 2))


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    config = write_config(options, scratch)
    run([sys.executable, "-m", "voxscale", "prepare", str(config)])
    times: dict[str, list[float]] = {f"{side}.{ranks}": [] for ranks in RANKS for side in ("ours", "bare")}
    for turn in range(options.rounds):
        for name in sorted(times, reverse=turn % 2 == 1):
            side, ranks = name.split(".")
            way = {"ours": time_ours, "bare": time_bare}[side]
            times[name].append(way(options, int(ranks), config, scratch / f"{name}-{turn}"))
    step_s = {name: median(each) for name, each in times.items()}
    speedup = {side: step_s[f"{side}.1"] / step_s[f"{side}.2"] for side in ("ours", "bare")}
    return {
        **{f"{name}_s": round(seconds, 4) for name, seconds in step_s.items()},
        **{f"ratio.{ranks}": round(step_s[f"ours.{ranks}"] / step_s[f"bare.{ranks}"], 3) for ranks in RANKS},
        **{f"speedup.{side}": round(gain, 3) for side, gain in speedup.items()},
        "speedup.kept": round(speedup["ours"] / speedup["bare"], 3),
        "goals": GOALS,
        "patch": options.patch,
        "batch": BATCH,
        "rounds": options.rounds,
        "steps": options.steps,
    }


def write_config(options: argparse.Namespace, scratch: Path) -> Path:
    edge = options.patch * 3 // 2
    epochs = -(-(options.steps + WARM) * BATCH // CASES)
    path = scratch / "step.yaml"
    path.write_text(
        f"data: {{source: data, synthetic: {{cases: {CASES}, size: [{edge}, {edge}, {edge}]}}, split: {{val: 0}},"
        f" regions: {{ball: [1]}}, store: store}}\n"
        f"patches: {{size: [{options.patch}, {options.patch}, {options.patch}]}}\n"
        "model: {name: unet}\nloss: {name: dice_ce}\noptimizer: {name: adamw, lr: 1e-4}\n"
        f"train: {{epochs: {epochs}, batch: {BATCH}, threads: 1, precision: fp32, compile: false,"
        " channels_last: false}\n"
        "log: quiet\ntrack: none\n"
    )
    return path


def time_ours(options: argparse.Namespace, ranks: int, config: Path, folder: Path) -> float:
    words = ["train", str(config), "--run", str(folder), "--devices", str(ranks)]
    run([sys.executable, "-m", "voxscale", *words])
    rows = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return step_of([row["time_s"] for row in rows if row["event"] == "train"])


def time_bare(options: argparse.Namespace, ranks: int, config: Path, folder: Path) -> float:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = ["--bare", "--steps", str(options.steps), "--patch", str(options.patch)]
    return step_of(json.loads(run([sys.executable, *launcher, __file__, *words])))


def step_of(ends: list[float]) -> float:
    """The median step of the moments at which steps ended."""
    return median(after - before for before, after in list(pairwise(ends))[WARM:])


def run_bare_loop(options: argparse.Namespace) -> None:
    """As one would write it by hand."""
    import torch
    from monai.losses import DiceCELoss
    from torch.nn.parallel import DistributedDataParallel

    from voxscale.config.models import UNetOptions
    from voxscale.models import build_model

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    edge = (options.patch,) * 3
    network = build_model(UNetOptions(), 1, 1, patch=edge, seed=0)
    model: torch.nn.Module = network
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(network)
    loss_of = DiceCELoss(sigmoid=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    share = BATCH // ranks
    batches = [(torch.randn(share, 1, *edge), torch.rand(share, 1, *edge).round()) for _ in range(4)]
    ends = []
    for step in range(options.steps + WARM + 1):
        image, label = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = loss_of(model(image), label)
        loss.backward()
        optimizer.step()
        loss.item()
        ends.append(time.perf_counter())
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(ends), flush=True)


def run(command: list[str]) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
