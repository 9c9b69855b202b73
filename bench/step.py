"""A training step: `voxscale train` beside bare PyTorch loops on batches that are in memory already.

    python bench/step.py [--rounds 3] [--steps 10] [--patch 64] [--json]
    python bench/step.py --variants all [--rounds 5]

Three sides take turns, on one rank and on two (DDP, gloo), with a core and a thread for each, and the same network and
batch:

- ours reads, augments and counts its samples, writes its events and asks after every step whether to stop;
- bare does nothing but compute, as one would write it by hand: MONAI's DiceCELoss, AdamW and memory as they come;
- even does nothing but compute either, with all that makes our computing fast: our loss, the fused AdamW, freed memory
  kept, gradients that live in DDP's buckets.

A step is the time from the end of one to the end of the next, the first few left out; of each run the median counts,
and of runs the median again. `ratio` is ours ÷ bare; `overhead` is ours ÷ even, what our loop alone adds; `speedup` is
that of two ranks over one.

With `--variants` two of our ranks are compared with themselves under other settings, which take turns too: `ratio` is
then a setting's step ÷ the plain one's, and `rounds` are the ratios of each turn, whose spread says what is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

CASES, BATCH, WARM = 8, 4, 3  # two patches for each of two ranks: torch computes one alone in a slower way
RANKS = (1, 2)
SIDES = ("ours", "bare", "even")
GOALS = {"ratio.1": 1.03, "ratio.2": 1.03, "overhead.1": 1.03, "overhead.2": 1.03, "speedup.kept": 0.97}


@dataclass(frozen=True)
class Variant:
    """What differs from our ranks as they are: arguments of DDP, fields of the config, a core for each rank."""

    ddp: dict[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    pinned: bool = False


VARIANTS = {
    "plain": Variant(),
    "static_graph": Variant(ddp={"static_graph": True}),
    "bucket_1mb": Variant(ddp={"bucket_cap_mb": 1}),
    "bucket_5mb": Variant(ddp={"bucket_cap_mb": 5}),
    "no_bucket_view": Variant(ddp={"gradient_as_bucket_view": False}),
    "pinned": Variant(pinned=True),
    "threads_2": Variant(fields=("train.threads=2",)),
    "workers_2": Variant(fields=("loader.workers=2",)),
    "prefetch_1": Variant(fields=("loader.prefetch=1",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--patch", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variants", metavar="NAME,…", help=f"all, or some of {', '.join(VARIANTS)}")
    parser.add_argument("--loop", choices=("bare", "even"), help=argparse.SUPPRESS)  # the parts that run as ranks
    parser.add_argument("--as-rank", nargs=2, metavar=("RUN", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        run_loop(options)
        return
    if options.as_rank:
        run_variant(*options.as_rank)
    with tempfile.TemporaryDirectory() as scratch:
        found = (compare_variants if options.variants else measure)(options, Path(scratch))
    print(json.dumps(found, indent=None if options.json else 2))


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    config = write_config(options, scratch)
    run([sys.executable, "-m", "voxscale", "prepare", str(config)])
    times: dict[str, list[float]] = {f"{side}.{ranks}": [] for ranks in RANKS for side in SIDES}
    for turn in range(options.rounds):
        for name in sorted(times, reverse=turn % 2 == 1):
            side, ranks = name.split(".")
            times[name].append(
                time_ours(int(ranks), config, scratch / f"{name}-{turn}")
                if side == "ours"
                else time_loop(options, int(ranks), side)
            )
    step_s = {name: median(each) for name, each in times.items()}
    speedup = {side: step_s[f"{side}.1"] / step_s[f"{side}.2"] for side in SIDES}
    return {
        **{f"{name}_s": round(seconds, 4) for name, seconds in step_s.items()},
        **{f"ratio.{ranks}": round(step_s[f"ours.{ranks}"] / step_s[f"bare.{ranks}"], 3) for ranks in RANKS},
        **{f"overhead.{ranks}": round(step_s[f"ours.{ranks}"] / step_s[f"even.{ranks}"], 3) for ranks in RANKS},
        **{f"speedup.{side}": round(gain, 3) for side, gain in speedup.items()},
        "speedup.kept": round(speedup["ours"] / speedup["bare"], 3),
        "goals": GOALS,
        "patch": options.patch,
        "batch": BATCH,
        "rounds": options.rounds,
        "steps": options.steps,
    }


def compare_variants(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    names = (
        list(VARIANTS) if options.variants == "all" else list(dict.fromkeys(["plain", *options.variants.split(",")]))
    )
    if unknown := set(names) - set(VARIANTS):
        raise SystemExit(f"--variants: found {', '.join(sorted(unknown))}, expected some of {', '.join(VARIANTS)}")
    config = write_config(options, scratch)
    run([sys.executable, "-m", "voxscale", "prepare", str(config)])
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in sorted(names, reverse=turn % 2 == 1):
            times[name].append(time_variant(name, config, scratch / f"{name}-{turn}"))
    ratios = {name: [a / b for a, b in zip(times[name], times["plain"], strict=True)] for name in names[1:]}
    return {
        "plain_s": round(median(times["plain"]), 4),
        **{f"ratio.{name}": round(median(times[name]) / median(times["plain"]), 3) for name in names[1:]},
        **{f"rounds.{name}": [round(each, 3) for each in found] for name, found in ratios.items()},
        "patch": options.patch,
        "batch": BATCH,
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


def time_ours(ranks: int, config: Path, folder: Path) -> float:
    words = ["train", str(config), "--run", str(folder), "--devices", str(ranks)]
    run([sys.executable, "-m", "voxscale", *words], cores=ranks)
    return step_in(folder)


def time_variant(name: str, config: Path, folder: Path) -> float:
    words = ["train", str(config), *VARIANTS[name].fields, "--run", str(folder), "--devices", "2", "--no-start"]
    run([sys.executable, "-m", "voxscale", *words])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([sys.executable, *launcher, __file__, "--as-rank", str(folder), name])
    return step_in(folder)


def step_in(folder: Path) -> float:
    """The median step of a run of ours."""
    rows = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return step_of([row["time_s"] for row in rows if row["event"] == "train"])


def time_loop(options: argparse.Namespace, ranks: int, side: str) -> float:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = ["--loop", side, "--steps", str(options.steps), "--patch", str(options.patch)]
    return step_of(json.loads(run([sys.executable, *launcher, __file__, *words], cores=ranks)))


def step_of(ends: list[float]) -> float:
    """The median step of the moments at which steps ended."""
    return median(after - before for before, after in list(pairwise(ends))[WARM:])


def run_loop(options: argparse.Namespace) -> None:
    """As one would write it by hand; even: with our loss, the fused optimizer and our ways with memory."""
    import torch
    from monai.losses import DiceCELoss
    from torch.nn.parallel import DistributedDataParallel

    from voxscale.config.losses import DiceCEOptions
    from voxscale.config.models import UNetOptions
    from voxscale.models import build_model
    from voxscale.tasks.losses import DiceLoss
    from voxscale.train.compute import keep_freed_memory

    even = options.loop == "even"
    if even:
        keep_freed_memory()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    edge = (options.patch,) * 3
    network = build_model(UNetOptions(), 1, 1, patch=edge, seed=0)
    model: torch.nn.Module = network
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(network, gradient_as_bucket_view=even)
    ours, monais = DiceLoss(DiceCEOptions(), exclusive=False), DiceCELoss(sigmoid=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=even)
    share = BATCH // ranks
    batches = [(torch.randn(share, 1, *edge), torch.rand(share, 1, *edge).round()) for _ in range(4)]
    ends = []
    for step in range(options.steps + WARM + 1):
        image, label = batches[step % len(batches)]
        optimizer.zero_grad()
        output = model(image)
        loss = ours.loss(ours.rows(output, label)) if even else monais(output, label)
        loss.backward()
        optimizer.step()
        loss.item()
        ends.append(time.perf_counter())
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(ends), flush=True)


def run_variant(folder: str, name: str) -> NoReturn:
    """Train the run as one rank of ours, with the variant's settings."""
    from torch.nn.parallel import DistributedDataParallel

    from voxscale import parallel
    from voxscale.train.worker import main as worker

    variant = VARIANTS[name]

    class Tried(DistributedDataParallel):
        def __init__(self, module: Any, **options: Any) -> None:
            super().__init__(module, **{**options, **variant.ddp})

    parallel.DistributedDataParallel = Tried  # type: ignore[misc]
    if variant.pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    parallel.leave(worker([folder]))


def run(command: list[str], *, cores: int | None = None) -> str:
    """What a command prints; on so many cores, as a rank alone on two would have its patches read by the other."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    taken = sorted(os.sched_getaffinity(0))[:cores]
    confine = partial(os.sched_setaffinity, 0, taken)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, preexec_fn=confine)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
