"""What saving costs: training without saves, with ours in the background, and with `torch.save` in the loop.

    python bench/checkpoint.py [--steps 4] [--rounds 15] [--patch 64] [--json]

One rank, one thread for the network, the default U-Net with AdamW on patches that are in memory; the three ways take
turns, a few steps each, the first of which a save comes before. A save costs what these take longer than those
without, by the medians: ours waits for a copy of the state (`wait_s`), then serialises, hashes (SHA-256), writes and
syncs in a thread beside the steps, and is waited for at their end; `torch.save` neither hashes nor syncs. Steps vary by
more than a save costs, so there is a bound too: `alone_s`, a whole save that training waits for. `cost` is that,
divided by the default interval of ten minutes; `every_s_for_2_percent` the interval at which it is 2 % of training.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from voxscale.checkpoint import Checkpoint
from voxscale.config.models import UNetOptions
from voxscale.config.schema import Checkpoint as Interval
from voxscale.models import build_model
from voxscale.runs import RunFolder
from voxscale.train.optimize import optimizer_tensors
from voxscale.train.saver import Saver

Save = Callable[[], None]


class Training:
    """Steps of the default network."""

    def __init__(self, patch: int) -> None:
        self.model = build_model(UNetOptions(), 4, 3, patch=(patch, patch, patch), seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._image = torch.randn(2, 4, patch, patch, patch)
        self._label = torch.rand(2, 3, patch, patch, patch).round()
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(self._image), self._label)
        loss.backward()
        self.optimizer.step()

    def seconds(self, steps: int, save: Save | None = None) -> float:
        began = time.perf_counter()
        if save is not None:
            save()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - began


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    training = Training(options.patch)
    times: dict[str, list[float]] = {"none": [], "ours": [], "torch_save": []}
    waits: list[float] = []
    whole: list[float] = []
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for number in range(options.rounds):
            times["none"].append(training.seconds(options.steps))
            times["ours"].append(_with_ours(training, options.steps, RunFolder(folder), number, waits))
            times["torch_save"].append(training.seconds(options.steps, _plain(training, folder)))
            whole.append(_with_ours(training, 0, RunFolder(folder), options.rounds + number, []))
        size = sum(path.stat().st_size for path in RunFolder(folder).last.iterdir())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    alone = median(times["none"])
    each = {name: median(times[name]) - alone for name in ("ours", "torch_save")}
    interval = Interval().every_minutes * 60
    return {
        "state_mb": round(size / 1e6, 1),
        "step_s": round(alone / options.steps, 4),
        "ours": {
            "wait_s": round(median(waits), 4),
            "save_costs_s": round(each["ours"], 4),
            "alone_s": round(median(whole), 4),
            "every_s_for_2_percent": round(median(whole) / 0.02, 1),
        },
        "cost": round(median(whole) / interval, 6),
        "torch_save": {"save_costs_s": round(each["torch_save"], 4)},
        "goal": {"cost": 0.02},
        "seconds": {name: [round(value, 3) for value in values] for name, values in times.items()},
    }


def _with_ours(training: Training, steps: int, run: RunFolder, number: int, waits: list[float]) -> float:
    began = time.perf_counter()
    with Saver(run, keep=2, tell=lambda event: None) as saver:

        def save() -> None:
            state = {"step": number, "best": None, "validated": 0, "wall_s": 0.0}
            checkpoint = Checkpoint(training.model.state_dict(), optimizer_tensors(training.optimizer), state)
            saver.save(checkpoint, is_best=False, event={})
            waits.append(time.perf_counter() - began)

        training.seconds(steps, save)
    return time.perf_counter() - began


def _plain(training: Training, folder: Path) -> Save:
    def save() -> None:
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save(state, folder / "plain.pt")

    return save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="between saves")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--patch", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where to save; default: the system's temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    ours = result["ours"]
    print(f"a state of {result['state_mb']} MB, steps of {result['step_s']} s")
    print(f"ours: training waits {ours['wait_s']} s for a save, which costs {ours['save_costs_s']} s in all,")
    print(f"      and {ours['alone_s']} s if it were waited for: every ten minutes {100 * ours['cost']:.3f} %")
    print(f"      (goal: 2 %), and 2 % every {ours['every_s_for_2_percent']} s")
    print(f"torch.save: {result['torch_save']['save_costs_s']} s, neither hashed nor synced")


if __name__ == "__main__":
    main()
