"""Row 0's synthetic U-Net job on two CPU ranks: `voxscale train` beside the job as MONAI's DDP tutorial has it.

    python bench/train_job.py --rounds 3 --json

Both train the same files, the same network and as many patches, without validation, and take turns. A wall time
goes from the start of the process to the end of the last step; preparing the store, which is done once for a dataset,
is timed by itself, as a process of its own. `compute` is the bare network: forward, backward and optimizer on ready
tensors, on the same ranks; what it takes cannot be gained. It is counted in CPU seconds of all ranks, as `cpu_s` is of
whole jobs: others on the machine disturb them less than wall times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "synthetic_unet.yaml"
SCALES = {"full": (128, 96), "small": (64, 32)}  # edges of a volume and of a crop
CASES, RANKS, CASES_A_STEP, CROPS = 16, 2, 2, 4
BATCH = CASES_A_STEP * CROPS  # patches of a rank in a step
STEPS_AN_EPOCH = CASES // (CASES_A_STEP * RANKS)
GOAL = 1.3


@dataclass(frozen=True)
class Timed:
    """One run of a job. `data_s` is waited for batches, by rank 0, and part of `steps_s`."""

    wall_s: float
    startup_s: float
    steps_s: float
    data_s: float
    cpu_s: float
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="full", help="small: to try the script")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--no-limit", action="store_true", help="do not time the bare network")
    parser.add_argument("--channels-last", action="store_true", help="let ours lay out its tensors so")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)  # for the parts that run as ranks
    parser.add_argument("--only", choices=("monai", "plain", "as_ours"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only == "monai":
        train_monai(options)
    elif options.only:
        print(time_network(options), flush=True)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(measure(options, Path(scratch)), indent=None if options.json else 2))


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    make_data(options, scratch / "data")
    prepare_s: list[float] = []
    step_cpu_s: dict[str, list[float]] = {"plain": [], "as_ours": []}
    rounds: dict[str, list[Timed]] = {"ours": [], "monai": []}
    for turn in range(options.rounds):
        prepare_s.append(prepare(options, scratch, turn))
        for side in sorted(rounds, reverse=turn % 2 == 0):
            rounds[side].append({"ours": run_ours, "monai": run_monai}[side](options, scratch, turn))
        for way, times in () if options.no_limit else step_cpu_s.items():
            times.append(run_network(options, scratch, way))
    sides = {side: median_of(runs) for side, runs in rounds.items()}
    num_steps = STEPS_AN_EPOCH * options.epochs
    compute_s = {way: num_steps * statistics.median(times) for way, times in step_cpu_s.items() if times}
    return summarise(options, sides, statistics.median(prepare_s), compute_s)


def summarise(
    options: argparse.Namespace, sides: dict[str, Timed], prepare_s: float, compute_s: dict[str, float]
) -> dict[str, Any]:
    ours, monai = sides["ours"], sides["monai"]
    steps = STEPS_AN_EPOCH * options.epochs
    result: dict[str, Any] = {}
    for side, timed in sides.items():
        result |= {f"{side}.{name}": round(value, 3) for name, value in vars(timed).items()}
        result[f"{side}.patches_per_s"] = round(steps * RANKS * BATCH / timed.steps_s, 3)
    gain = {
        "startup": monai.startup_s - ours.startup_s,
        "data": monai.data_s - ours.data_s,
        "compute_and_loss": (monai.steps_s - monai.data_s) - (ours.steps_s - ours.data_s),
    }
    return result | {
        "ratio": round(monai.wall_s / ours.wall_s, 3),
        "ratio.steps": round(monai.steps_s / ours.steps_s, 3),
        "ratio.cpu": round(monai.cpu_s / ours.cpu_s, 3),
        "ratio.with_prepare": round(monai.wall_s / (ours.wall_s + prepare_s), 3),
        "goal": GOAL,
        "ours.prepare_s": round(prepare_s, 3),
        "loss.no_worse": ours.loss <= monai.loss,
        **(limits_of(ours, monai, compute_s) if compute_s else {}),
        **{f"gain.{name}_s": round(value, 3) for name, value in gain.items()},
        "scale": options.scale,
        "channels_last": options.channels_last,
        "epochs": options.epochs,
        "rounds": options.rounds,
        "patches": steps * RANKS * BATCH,
    }


def limits_of(ours: Timed, monai: Timed, compute_s: dict[str, float]) -> dict[str, float]:
    """What the bare network takes of both, and the ratio that there would be if nothing else did."""
    return {
        "compute.plain_cpu_s": round(compute_s["plain"], 3),
        "compute.as_ours_cpu_s": round(compute_s["as_ours"], 3),
        "compute.share_of_ours": round(compute_s["as_ours"] / ours.cpu_s, 3),
        "compute.share_of_monai": round(compute_s["plain"] / monai.cpu_s, 3),
        "ratio.limit": round(monai.cpu_s / compute_s["as_ours"], 3),
    }


def median_of(runs: list[Timed]) -> Timed:
    return Timed(*(statistics.median(values) for values in zip(*(vars(run).values() for run in runs), strict=True)))


def make_data(options: argparse.Namespace, folder: Path) -> None:
    from voxscale.config.data import Synthetic
    from voxscale.data.synthetic import ensure_synthetic

    edge, _ = SCALES[options.scale]
    ensure_synthetic(folder, Synthetic(cases=CASES, size=(edge, edge, edge)), threads=2)


def overrides(options: argparse.Namespace, scratch: Path, turn: int) -> list[str]:
    """The recipe at this size. Float32 in the plain way is stated: finding out what is best takes a step of its own."""
    edge, crop = SCALES[options.scale]
    return [
        f"data.source={scratch / 'data'}",
        f"data.synthetic={{cases: {CASES}, size: [{edge}, {edge}, {edge}]}}",
        "data.split.val=0",
        f"data.store={scratch / f'store-{turn}'}",
        f"patches.size=[{crop}, {crop}, {crop}]",
        f"train={{epochs: {options.epochs}, batch: {{per_device: {BATCH}}},"
        f" precision: fp32, compile: false, channels_last: {str(options.channels_last).lower()}}}",
        "track=none",
        "log=quiet",
    ]


def prepare(options: argparse.Namespace, scratch: Path, turn: int) -> float:
    """Seconds to prepare the store, from a process's start to its end."""
    began = time.monotonic()
    run([sys.executable, "-m", "voxscale", "prepare", str(RECIPE), *overrides(options, scratch, turn)])
    return time.monotonic() - began


def run_ours(options: argparse.Namespace, scratch: Path, turn: int) -> Timed:
    folder = scratch / f"run-{turn}"
    command = [sys.executable, "-m", "voxscale", "train", str(RECIPE), *overrides(options, scratch, turn)]
    return watch([*command, "--run", str(folder), "--devices", str(RANKS)], [folder / "events.jsonl"])


def run_monai(options: argparse.Namespace, scratch: Path, turn: int) -> Timed:
    out = scratch / f"monai-{turn}"
    return watch(torchrun(options, scratch / "data", "monai", out), [rank_file(out, rank) for rank in range(RANKS)])


def run_network(options: argparse.Namespace, scratch: Path, way: str) -> float:
    """CPU seconds of a bare step, of all ranks together."""
    return sum(map(float, run(torchrun(options, scratch / "data", way, scratch)).split()))


def torchrun(options: argparse.Namespace, data: Path, part: str, out: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__]
    command += ["--scale", options.scale, "--epochs", str(options.epochs)]
    command += ["--channels-last"] if options.channels_last else []
    return [*command, "--data", str(data), "--only", part, "--out", str(out)]


def run(command: list[str]) -> str:
    done = subprocess.run(command, env=environ(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def watch(command: list[str], files: list[Path]) -> Timed:
    """Run a job whose ranks write a line for each step, and time it by when the lines of the first file appear."""
    cpu_before, began = cpu_of_children(), time.monotonic()
    first = last = 0.0
    seen = 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environ(), stdout=output, stderr=output)
        while process.poll() is None:
            time.sleep(0.02)
            if (count := len(read_steps(files[0]))) > seen:
                seen, last = count, time.monotonic()
                first = first or last
        if process.returncode or not seen:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}\n{output.read()}")
    rows = read_steps(files[0])
    startup_s = first - began - rows[0]["step_s"]
    losses = [row["loss"] for file in files for row in read_steps(file)[-STEPS_AN_EPOCH:]]
    return Timed(
        wall_s=last - began,
        startup_s=startup_s,
        steps_s=last - began - startup_s,
        data_s=sum(row["data_s"] for row in rows),
        cpu_s=cpu_of_children() - cpu_before,
        loss=statistics.fmean(losses),
    )


def read_steps(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in map(json.loads, whole) if row["event"] == "train"]


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rank_file(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.name}-rank-{rank}.jsonl")


def build_network() -> Any:
    from monai.networks.nets import UNet

    return UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=(16, 32, 64, 128, 256),
        strides=(2, 2, 2, 2),
        num_res_units=2,
    )


def train_monai(options: argparse.Namespace) -> None:
    """A rank of the tutorial's job: files read and cropped by worker processes, anew in every epoch."""
    import torch
    import torch.distributed as dist
    from monai.data import DataLoader, Dataset, DistributedSampler
    from monai.losses import DiceLoss
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Dataset(list_pairs(options.data), monai_transforms(SCALES[options.scale][1]))
    sampler = DistributedSampler(dataset, even_divisible=True, shuffle=True)
    loader = DataLoader(dataset, batch_size=CASES_A_STEP, shuffle=False, num_workers=2, sampler=sampler)
    model = DistributedDataParallel(build_network())
    loss_of = DiceLoss(sigmoid=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with rank_file(options.out, dist.get_rank()).open("w", buffering=1) as lines:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            began = time.monotonic()
            for batch in loader:
                waited = time.monotonic() - began
                optimizer.zero_grad()
                loss = loss_of(model(batch["img"]), batch["seg"])
                loss.backward()
                optimizer.step()
                row = {"event": "train", "loss": loss.item(), "data_s": waited, "step_s": time.monotonic() - began}
                lines.write(json.dumps(row) + "\n")
                began = time.monotonic()
    dist.destroy_process_group()


def list_pairs(folder: Path) -> list[dict[str, str]]:
    return [
        {"img": str(path), "seg": str(path.with_name(f"seg{path.name[3:]}"))} for path in sorted(folder.glob("img*"))
    ]


def monai_transforms(crop: int) -> Any:
    from monai import transforms as monai

    both = ("img", "seg")
    return monai.Compose(
        [
            monai.LoadImaged(both),
            monai.EnsureChannelFirstd(both),
            monai.ScaleIntensityd(both),
            monai.RandCropByPosNegLabeld(
                both, label_key="seg", spatial_size=(crop, crop, crop), pos=1, neg=1, num_samples=CROPS
            ),
            monai.RandRotate90d(both, prob=0.5, spatial_axes=(0, 2)),
        ]
    )


def time_network(options: argparse.Namespace) -> float:
    """Median CPU seconds of a step of the bare network, on this rank; `as_ours`: as `voxscale train` computes."""
    import torch

    from voxscale.train.compute import keep_freed_memory

    as_ours = options.only == "as_ours"
    if as_ours:
        keep_freed_memory()
    layout = torch.channels_last_3d if as_ours and options.channels_last else torch.contiguous_format
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, crop = build_network().to(memory_format=layout), SCALES[options.scale][1]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    image = torch.randn(BATCH, 1, crop, crop, crop).contiguous(memory_format=layout)
    gradient = torch.randn_like(image) / image.numel()
    times = []
    for _ in range(4):
        began = time.process_time()
        optimizer.zero_grad()
        model(image).backward(gradient)
        optimizer.step()
        times.append(time.process_time() - began)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
