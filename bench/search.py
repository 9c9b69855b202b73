"""Eight equal trials, two at once: `voxscale search` beside the trials alone, and beside plain Ray Tune with MONAI.

    python bench/search.py [--trials 8] [--rounds 1] [--skip-peer] [--json]
    python bench/search.py --asha [--seeds 3] [--points 32] [--json]

Measured in turns, all with one thread to a trial, on data that was prepared before (`prepare_s`, once a dataset):
  solo    one trial as `voxscale train`, from the start of the process to its end, by itself;
  pair    two of them at once: what the machine itself loses when both cores work;
  search  the whole command. Ray's start-up, from its folder being made to its driver being connected, is taken off
          `makespan_s`; everything else stays in it: interpreter, opening of the search, every trial's own start, Ray's
          end. The target is makespan ≤ 1.15 × (trials × solo ÷ 2);
  tune    the same trials as a practised user of MONAI writes them: a function for Ray Tune, one CPU each, two at once.
          Each trial fills a `CacheDataset` of its own from the same .nii.gz files, labels as bytes, and trains from it
          without worker processes: the same network, loss, optimizer, batch, steps, crops and augmentation; validates
          by `sliding_window_inference` on the same windows, as often, keeps the best weights, and measures them once
          more at the end, as ours does (ours adds surface distances). `ratio.speed` compares whole commands.
`peak_mb` is the largest sum of PSS over a command and all its descendants, Ray's own processes included, from
/proc/PID/smaps_rollup, every three seconds: memory that several share, mapped files as well, counts once. To look
costs 10 to 20 ms for each large process, which a command that keeps both cores busy has to wait for.

--asha: ASHA against the full grid of recipes/distmis_search.yaml, shrunk as bench/distmis.py does, each with several
values of train.seed: steps spent, and the metric of the best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmis import Watched, measure_asha, read_lines, render_asha, watch, watched_environ

AT_ONCE = 2
GOALS = {"makespan": 1.15, "speed": 1.3, "memory": 0.5}
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Scale:
    """The trials' data and length: a few epochs, so that every cached case is used."""

    cases: int
    size: tuple[int, int, int]
    patch: int
    channels: tuple[int, ...]
    epochs: int
    val_cases: int
    validate_every: int
    batch: int = 2
    overlap: float = 0.0


SCALES = {
    "full": Scale(48, (192, 192, 160), 64, (16, 32, 64, 128), epochs=2, val_cases=1, validate_every=2),
    "small": Scale(10, (32, 32, 32), 16, (4, 8), epochs=2, val_cases=2, validate_every=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scale", choices=SCALES, default="full", help="small: to try the script")
    parser.add_argument("--skip-peer", action="store_true", help="leave Ray Tune with MONAI out")
    parser.add_argument("--asha", action="store_true", help="measure ASHA instead")
    parser.add_argument("--seeds", type=int, default=3, help="with --asha")
    parser.add_argument("--points", type=int, default=32, choices=(4, 8, 16, 32), help="with --asha: of the grid")
    parser.add_argument("--epochs", type=int, default=20, help="with --asha: of a trial; 20 is the recipe's")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tune", type=Path, help=argparse.SUPPRESS)  # be the peer, in this folder
    options = parser.parse_args()
    if options.tune:
        run_tune(options)
        return
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:  # Ray's sockets want short paths
        measure, render = (measure_asha, render_asha) if options.asha else (measure_trials, render_trials)
        result = measure(options, Path(folder))
    print(json.dumps(result) if options.json else render(result))


def measure_trials(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from voxscale.config.data import Synthetic
    from voxscale.data.synthetic import ensure_synthetic

    scale = SCALES[options.scale]
    ensure_synthetic(scratch / "data", Synthetic(cases=scale.cases, size=scale.size), threads=AT_ONCE)
    config = write_config(options, scratch)
    prepare_s = watch(voxscale("prepare", config), scratch).wall_s
    runs: dict[str, list[Any]] = {"solo": [], "pair": [], "search": [], "tune": []}
    turns: dict[str, Callable[[str], Any]] = {
        "solo": lambda name: watch(voxscale("train", config, run=scratch / name), scratch),
        "pair": lambda name: run_pair(config, scratch, name),
        "search": lambda name: run_search(options, config, scratch, name),
        "tune": lambda name: run_peer(options, scratch, name),
    }
    order = ["solo", "search", "pair", "solo", *([] if options.skip_peer else ["tune"]), "solo"]
    for turn in range(options.rounds):
        for place, way in enumerate(order if turn % 2 == 0 else reversed(order)):
            runs[way].append(turns[way](f"{way}-{turn}-{place}"))
    return summarise(options, runs, prepare_s)


def write_config(options: argparse.Namespace, scratch: Path) -> Path:
    """How to compute is stated: finding out what is best takes steps of its own."""
    scale = SCALES[options.scale]
    config = {
        "data": {
            "source": str(scratch / "data"),
            "split": {"val": scale.val_cases / scale.cases},
            "regions": {"ball": [1]},
            "store": str(scratch / "store"),
        },
        "patches": {"size": [scale.patch] * 3, "foreground": 0.5},
        "augment": "light",
        "model": {"name": "unet", "channels": list(scale.channels), "residual_units": 2},
        "loss": {"name": "dice_ce"},
        "optimizer": {"name": "adam", "lr": 1e-3},
        "schedule": {"name": "none"},
        "train": {"epochs": scale.epochs, "batch": scale.batch, "devices": 1, "threads": 1}
        | {"precision": "fp32", "compile": False, "channels_last": False},
        "validate": {"every": scale.validate_every, "overlap": scale.overlap},
        "search": {
            "max_concurrent": AT_ONCE,
            "per_trial": {"devices": 1, "cpus": 1},
            "space": {"optimizer.weight_decay": {"grid": weight_decays(options)}},
        },
        "track": "none",
        "log": "quiet",
    }
    path = scratch / "config.yaml"
    path.write_text(json.dumps(config))  # which is YAML
    return path


def weight_decays(options: argparse.Namespace) -> list[float]:
    """A field that makes trials differ, and none of them longer."""
    return [round(1e-6 * (index + 1), 9) for index in range(options.trials)]


def voxscale(verb: str, config: Path, run: Path | None = None) -> list[str]:
    return [sys.executable, "-m", "voxscale", verb, str(config), *(["--run", str(run)] if run else [])]


def run_pair(config: Path, scratch: Path, name: str) -> float:
    """Seconds until two trials that start together have both ended."""
    began = time.monotonic()
    commands = [voxscale("train", config, run=scratch / f"{name}-{index}") for index in range(AT_ONCE)]
    started = [
        subprocess.Popen(command, env=watched_environ(scratch), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        if any(process.wait(TIMEOUT_S) for process in started):
            raise SystemExit(f"{name}: a trial failed")
    finally:
        for process in started:
            process.kill()
    return time.monotonic() - began


def run_search(options: argparse.Namespace, config: Path, scratch: Path, name: str) -> dict[str, float]:
    folder = scratch / name
    watched = watch(voxscale("search", config, run=folder), scratch, lambda: search_marks(scratch, folder))
    check_work(options, [trial_work(trial) for trial in sorted((folder / "trials").iterdir())])
    return {"wall_s": watched.wall_s, "peak_mb": watched.peak_mb, **stages(options, watched, folder)}


def search_marks(scratch: Path, folder: Path) -> Iterable[str]:
    """What of a search can be seen so far."""
    for ray in scratch.glob("vx-*"):
        yield "ray begins"
        if any(ray.glob("ray/session_*/logs/python-core-driver-*")):
            yield "ray is up"
    for line in read_lines(folder / "trials.jsonl"):
        if line["event"] in ("start", "end"):
            yield f"{line['event']} {line['trial']}"
    for events in folder.glob("trials/*/events.jsonl"):
        yield f"opened {int(events.parent.name)}"


def stages(options: argparse.Namespace, watched: Watched, folder: Path) -> dict[str, float]:
    """Where a search's time went. `idle_s` is what the places for trials were empty for, between its first start and
    its last end, divided by their number."""
    at = watched.marks
    trials = range(options.trials)
    begins, ends = ([at[f"{mark} {trial}"] for trial in trials] for mark in ("start", "end"))
    opened = [at[f"opened {trial}"] for trial in trials]
    lasted = [read_lines(folder / "trials" / f"{trial:04d}" / "events.jsonl")[-1]["time_s"] for trial in trials]
    span = max(ends) - min(begins)
    return {
        "ray_start_s": at["ray is up"] - at["ray begins"],
        "makespan_s": watched.wall_s - (at["ray is up"] - at["ray begins"]),
        "stage.to_ray_s": at["ray begins"],
        "stage.opening_s": min(begins) - at["ray is up"],
        "stage.trials_s": span,
        "stage.ending_s": watched.wall_s - max(ends),
        "trial.start_s": statistics.median(b - a for a, b in zip(begins, opened, strict=True)),
        "trial.work_s": statistics.median(lasted),
        "trial.end_s": statistics.median(c - b - w for b, w, c in zip(opened, lasted, ends, strict=True)),
        "idle_s": span - sum(b - a for a, b in zip(begins, ends, strict=True)) / AT_ONCE,
    }


def trial_work(run: Path) -> tuple[int, int]:
    """(Steps, validations) of a run."""
    events = [row["event"] for row in read_lines(run / "events.jsonl")]
    return events.count("train"), events.count("validate")


def check_work(options: argparse.Namespace, found: list[tuple[int, int]]) -> None:
    """Both sides do the same, or there is nothing to compare."""
    scale = SCALES[options.scale]
    steps = scale.epochs * -(-(scale.cases - scale.val_cases) // scale.batch)
    expected = (steps, scale.epochs // scale.validate_every)
    if found != [expected] * options.trials:
        raise SystemExit(f"(steps, validations) of the trials: found {found}, expected {expected} of each")


def summarise(options: argparse.Namespace, runs: dict[str, list[Any]], prepare_s: float) -> dict[str, Any]:
    result: dict[str, Any] = {
        "solo.wall_s": statistics.median(solo.wall_s for solo in runs["solo"]),
        "solo.peak_mb": statistics.median(solo.peak_mb for solo in runs["solo"]),
        "pair.wall_s": statistics.median(runs["pair"]),
        **medians("search", runs["search"]),
        **medians("tune", runs["tune"]),
    }
    half = result["solo.wall_s"] * options.trials / AT_ONCE
    result |= {
        "ratio.makespan": result["search.makespan_s"] / half,
        "ratio.pair": result["pair.wall_s"] / result["solo.wall_s"],
        "prepare_s": prepare_s,
    }
    if runs["tune"]:
        ours_s, tune_s = result["search.wall_s"], result["tune.wall_s"]
        result |= {
            "ratio.speed": tune_s / ours_s,
            "ratio.speed_with_prepare": tune_s / (ours_s + prepare_s),
            "ratio.speed_without_ray": (tune_s - result["tune.ray_start_s"]) / result["search.makespan_s"],
            "ratio.memory": result["search.peak_mb"] / result["tune.peak_mb"],
        }
    rounded = {name: round(value, 3) for name, value in result.items()}
    return {**rounded, "goals": GOALS, "scale": options.scale, "trials": options.trials, "rounds": options.rounds}


def medians(side: str, runs: list[dict[str, float]]) -> dict[str, float]:
    return {f"{side}.{name}": statistics.median(run[name] for run in runs) for name in (runs[0] if runs else ())}


def render_trials(result: dict[str, Any]) -> str:
    ours = {name.removeprefix("search."): value for name, value in result.items() if name.startswith("search.")}
    lines = [
        f"one trial alone {result['solo.wall_s']:.1f} s; two at once {result['pair.wall_s']:.1f} s "
        f"({result['ratio.pair']:.2f} ×)",
        f"voxscale search: {result['trials']} trials in {ours['makespan_s']:.1f} s, and {ours['ray_start_s']:.1f} s of "
        f"Ray's start-up: {result['ratio.makespan']:.3f} × half of the trials alone (≤ {GOALS['makespan']})",
        "  " + ", ".join(f"{name} {value:.2f}" for name, value in ours.items()),
    ]
    if "ratio.speed" in result:
        lines += [
            f"Ray Tune with MONAI: {result['tune.wall_s']:.1f} s, peak {result['tune.peak_mb']:.0f} MB; ours "
            f"{ours['wall_s']:.1f} s, peak {ours['peak_mb']:.0f} MB",
            f"ours is {result['ratio.speed']:.2f} × as fast (≥ {GOALS['speed']}; with preparing "
            f"{result['ratio.speed_with_prepare']:.2f}), in {result['ratio.memory']:.2f} × the memory "
            f"(≤ {GOALS['memory']})",
        ]
    return "\n".join(lines)


# the peer


def run_peer(options: argparse.Namespace, scratch: Path, name: str) -> dict[str, float]:
    folder = scratch / name
    folder.mkdir()
    command = [sys.executable, __file__, "--tune", str(folder), "--scale", options.scale]
    watched = watch([*command, "--trials", str(options.trials)], scratch)
    told = json.loads((folder / "told.json").read_text())
    check_work(options, [(steps, validations) for steps, validations in told["work"]])
    return {"wall_s": watched.wall_s, "peak_mb": watched.peak_mb, "ray_start_s": told["ray_start_s"]}


def run_tune(options: argparse.Namespace) -> None:
    """A user's script: the trials by Ray Tune."""
    began = time.monotonic()
    import ray

    temporary = str(options.tune.parent / "t")
    ray.init(num_cpus=AT_ONCE, include_dashboard=False, _temp_dir=temporary, log_to_driver=False)
    ray_start_s = time.monotonic() - began
    from ray import tune

    training, validation = list_pairs(options)
    fixed = {"training": training, "validation": validation, "scale": SCALES[options.scale]}
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(tune_trial, **fixed), {"cpu": 1}),
        param_space={"weight_decay": tune.grid_search(weight_decays(options))},
        tune_config=tune.TuneConfig(metric="dice", mode="max", max_concurrent_trials=AT_ONCE),
        run_config=tune.RunConfig(storage_path=str(options.tune), name="trials", verbose=0),
    )
    results = tuner.fit()
    work = [((result.metrics or {}).get("steps"), (result.metrics or {}).get("validations")) for result in results]
    (options.tune / "told.json").write_text(json.dumps({"ray_start_s": ray_start_s, "work": work}))
    ray.shutdown()


def list_pairs(options: argparse.Namespace) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(Training, validation) files, as many of each as ours."""
    images = sorted((options.tune.parent / "data").glob("img*"))
    pairs = [{"image": str(path), "label": str(path.with_name(f"seg{path.name[3:]}"))} for path in images]
    held_out = SCALES[options.scale].val_cases
    return pairs[held_out:], pairs[:held_out]


def tune_trial(params: dict[str, float], training: Any, validation: Any, scale: Scale) -> None:
    import torch
    from monai.data import CacheDataset, DataLoader
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet
    from monai.transforms import Compose
    from ray import tune

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fixed, random = tune_transforms(scale)
    cached = CacheDataset(training, Compose([*fixed, *random]), num_workers=1, progress=False)
    loader = DataLoader(cached, batch_size=scale.batch, shuffle=True)
    held_out = DataLoader(CacheDataset(validation, Compose(fixed), num_workers=1, progress=False))
    strides = (2,) * (len(scale.channels) - 1)
    model = UNet(3, 1, 1, channels=scale.channels, strides=strides, num_res_units=2)
    loss_of = DiceCELoss(sigmoid=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=params["weight_decay"])
    steps, validations, best = 0, 0, -1.0
    for epoch in range(1, scale.epochs + 1):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(batch["image"]), batch["label"].float()).backward()
            optimizer.step()
            steps += 1
        if epoch % scale.validate_every:
            continue
        dice, validations = validate_dice(model, held_out, scale), validations + 1
        if dice > best:
            best = dice
            torch.save(model.state_dict(), "best.pt")
        tune.report({"dice": dice, "steps": steps, "validations": validations})
    model.load_state_dict(torch.load("best.pt", weights_only=True))
    validate_dice(model, held_out, scale)


def tune_transforms(scale: Scale) -> tuple[list[Any], list[Any]]:
    """(What is cached, what is drawn for every batch)."""
    import numpy as np
    from monai import transforms as monai

    both, size = ("image", "label"), (scale.patch,) * 3
    fixed = [
        monai.LoadImaged(both),
        monai.EnsureChannelFirstd(both),
        monai.Orientationd(both, axcodes="RAS"),
        monai.NormalizeIntensityd("image", nonzero=True, channel_wise=True),
        monai.CastToTyped("label", dtype=np.uint8),
    ]
    random = [
        monai.RandCropByPosNegLabeld(both, label_key="label", spatial_size=size, pos=1, neg=1, num_samples=1),
        *(monai.RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in range(3)),
        monai.RandScaleIntensityd("image", factors=0.1, prob=0.5),
        monai.RandShiftIntensityd("image", offsets=0.1, prob=0.5),
    ]
    return fixed, random


def validate_dice(model: Any, loader: Any, scale: Scale) -> float:
    import torch
    from monai.inferers import sliding_window_inference
    from monai.metrics import DiceMetric

    model.eval()
    metric = DiceMetric()
    with torch.no_grad():
        for batch in loader:
            logits = sliding_window_inference(
                batch["image"], (scale.patch,) * 3, scale.batch, model, scale.overlap, mode="gaussian"
            )
            metric(logits > 0, batch["label"])
    return float(metric.aggregate())


if __name__ == "__main__":
    main()
