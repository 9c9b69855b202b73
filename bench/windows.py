"""Sliding windows beside MONAI's: time, peak memory, equal outputs; and the largest volume in bounded memory.

    python bench/windows.py --threads 1 --json

Two set-ups: a large volume with a one-layer model, where accumulation is most of the work, and a small one with MONAI's
UNet. Both sides take turns within one process, so that only their ratios count; on a busy machine the ratio of
processor time is the steadier one. Memory is measured in processes of their own: the peak of the whole volume less the
peak of one window through the model, which is what the accumulation adds. The last part takes a volume of 512×512×600
with 14 classes to labels, slab by slab, and reports the peak of the whole process, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from voxscale.infer.windows import Size, Windows, predict_slabs, predict_volume

CPU = torch.device("cpu")
GOALS = {"time": 1.05, "memory": 0.5, "difference": 1e-4, "huge_gb": 4.0}
HUGE_SHAPE, HUGE_CLASSES = (512, 512, 600), 14


@dataclass(frozen=True)
class SetUp:
    shape: Size
    windows: Windows
    classes: int
    build: Callable[[int], torch.nn.Module]

    def make(self) -> tuple[torch.nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return self.build(self.classes).eval(), torch.randn(1, *self.shape)


def one_layer(classes: int) -> torch.nn.Module:
    return torch.nn.Conv3d(1, classes, 1)


def unet(classes: int) -> torch.nn.Module:
    from monai.networks.nets.unet import UNet

    return UNet(3, 1, classes, channels=(16, 32, 64, 128, 256), strides=(2, 2, 2, 2), num_res_units=2)


SET_UPS = {
    "layer": SetUp((256, 256, 256), Windows((96, 96, 96), 0.5), 3, one_layer),
    "unet": SetUp((96, 96, 160), Windows((64, 64, 64), 0.5), 3, unet),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--skip-huge", action="store_true", help="leave the volume of 512×512×600 out")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)  # the parts that run as processes
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.only:
        print(json.dumps(label_huge() if options.only == ["huge"] else peaks(*options.only)))
        return
    result: dict[str, Any] = {}
    for name in SET_UPS:
        result |= {f"{name}.{key}": value for key, value in compare(name, options).items()}
    if not options.skip_huge:
        result |= {f"huge.{key}": value for key, value in in_process(options, "huge").items()}
    result |= {"threads": options.threads, "rounds": options.rounds, "goals": GOALS}
    print(json.dumps(result, indent=None if options.json else 2))


def compare(name: str, options: argparse.Namespace) -> dict[str, float]:
    model, image = SET_UPS[name].make()
    sides = {"ours": ours, "monai": monai}
    seconds = take_turns({side: lambda run=run: run(name, model, image) for side, run in sides.items()}, options.rounds)
    medians = {side: statistics.median(wall for wall, _ in times) for side, times in seconds.items()}
    pairs = list(zip(seconds["ours"], seconds["monai"], strict=True))
    wall, processor = (statistics.median(mine[kind] / theirs[kind] for mine, theirs in pairs) for kind in (0, 1))
    beyond = {side: in_process(options, name, side)["beyond_model_mb"] for side in sides}
    whole = predict_volume(model, image, SET_UPS[name].windows)
    return {
        **{f"{side}_s": round(value, 3) for side, value in medians.items()},
        "time_ratio": round(wall, 3),
        "processor_time_ratio": round(processor, 3),
        **{f"{side}_mb": value for side, value in beyond.items()},
        "memory_ratio": round(beyond["ours"] / beyond["monai"], 3),
        "difference": float((whole - monai(name, model, image)).abs().max()),
    }


def take_turns(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds by the clock and of the processor, per side; who goes first changes from round to round."""
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for run in sides.values():
        run()  # warm up
    for turn in range(rounds):
        for side in sorted(sides, reverse=bool(turn % 2)):
            began = time.perf_counter(), time.process_time()
            sides[side]()
            seconds[side].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return seconds


def ours(name: str, model: torch.nn.Module, image_cxyz: torch.Tensor) -> None:
    for _box, _output in predict_slabs(model, image_cxyz, SET_UPS[name].windows, device=CPU):
        pass


@torch.no_grad()
def monai(name: str, model: torch.nn.Module, image_cxyz: torch.Tensor) -> torch.Tensor:
    from monai.inferers import sliding_window_inference

    windows = SET_UPS[name].windows
    return sliding_window_inference(  # type: ignore[index,return-value]
        image_cxyz[None], windows.size, 1, model, windows.overlap, mode=windows.weights
    )[0]


def in_process(options: argparse.Namespace, *part: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--threads", str(options.threads), "--only", *part]
    # blocks go back to the system when freed, so that the peak is of what is in use, not of what the heap keeps
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@torch.no_grad()
def peaks(name: str, side: str) -> dict[str, float]:
    """How far the peak of a whole volume lies above that of one window through the model."""
    model, image = SET_UPS[name].make()
    x, y, z = SET_UPS[name].windows.size
    run = {"ours": ours, "monai": monai}[side]
    run(name, model, image)  # what is made once, stays
    alone = peak_mb(lambda: model(image[None, :, :x, :y, :z].contiguous()))
    return {"beyond_model_mb": round(peak_mb(lambda: run(name, model, image)) - alone, 1)}


def peak_mb(work: Callable[[], Any]) -> float:
    """The most memory the process held at any moment of some work."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def label_huge() -> dict[str, float]:
    """Label a volume kept on the host in half precision; peak of the process from its start."""
    torch.manual_seed(0)
    model = one_layer(HUGE_CLASSES).eval()
    image = torch.empty((1, *HUGE_SHAPE), dtype=torch.float16)
    for plane in image[0]:
        plane.copy_(torch.randn(HUGE_SHAPE[1:]))
    labels = torch.zeros(HUGE_SHAPE, dtype=torch.uint8)
    began = time.perf_counter()
    for box, output in predict_slabs(model, image, Windows((96, 96, 96), 0.25), device=CPU):
        labels[box] = output.argmax(0)
    seconds = time.perf_counter() - began
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    if int(labels.max()) == 0:
        raise SystemExit("every voxel has class 0: the labels were not written")
    return {"peak_gb": round(peak_gb, 2), "seconds": round(seconds, 1)}


if __name__ == "__main__":
    main()
