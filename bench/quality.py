"""Does it learn? Row 0's BraTS recipe, shrunk, on sixteen synthetic brains: Dice of TC, WT and ET on unseen ones.

    python bench/quality.py --json

Twelve cases train, four validate; nothing of the four is seen before. Beside the Dice stands what the best threshold
on any one sequence reaches, chosen on the training cases for each region. Ends with 1 if a region stays below 0.85.
Takes about four minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from voxscale.data.cases import TRAIN, VAL
from voxscale.launch.demo import score_demo, write_demo
from voxscale.launch.folder import OpenedRun
from voxscale.launch.start import train_here

LEAST_DICE = 0.85
OVERRIDES = (
    "data.synthetic={cases: 16, size: [48, 48, 40]}",
    "data.split.val=0.25",
    "patches.size=[48, 48, 40]",
    "validate.window=[48, 48, 40]",
    "train.epochs=60",
    "validate.every=20",
    "track=none",
)


def main() -> int:
    options = parse_arguments()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="voxscale-quality-") as scratch:
        folder = options.out or Path(scratch) / "quality"
        store = f"data.store={folder / 'store'}"
        config, run = write_demo("brats", folder, [*OVERRIDES, store, *options.overrides])
        opened = train_here(config, run, os.environ, devices=options.devices, fresh=False)
        scores = score_demo(opened)
        baseline = threshold_dice(opened)
    report = {
        "dice": rounded(scores["dice_per_class"]),
        "mean_dice": round(scores["dice"], 4),
        "threshold_dice": rounded(baseline),
        "least_dice": LEAST_DICE,
        "train_cases": sum(case.split == TRAIN for case in opened.cases),
        "validation_cases": scores["num_val"],
        "steps": opened.plan.num_steps,
        "seconds": round(time.monotonic() - began, 1),
        "passed": min(scores["dice_per_class"].values()) >= LEAST_DICE,
    }
    print(json.dumps(report) if options.json else render(report))
    return 0 if report["passed"] else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on synthetic brains and score the regions.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--devices", default="auto", help="as of voxscale train")
    parser.add_argument("--out", type=Path, help="keep data and run here")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="fields to change")
    return parser.parse_args()


def threshold_dice(opened: OpenedRun) -> dict[str, float]:
    """For each region the Dice on validation cases of the threshold and sequence that are best on training cases."""
    training, validation = (read_split(opened, split) for split in (TRAIN, VAL))
    regions = opened.config.data.regions or {}
    return {name: threshold_of_region(training, validation, labels) for name, labels in regions.items()}


def read_split(opened: OpenedRun, split: str) -> list[tuple[Any, Any]]:
    rows = [opened.store.row(case.id) for case in opened.cases if case.split == split]
    return [(opened.store.read_image(row), opened.store.read_label(row)) for row in rows]


def threshold_of_region(training: list[tuple[Any, Any]], validation: list[tuple[Any, Any]], labels: Any) -> float:
    thresholds = np.linspace(-3, 4, 71)
    chosen = max(
        ((channel, sign, float(threshold)) for channel in range(4) for sign in (1, -1) for threshold in thresholds),
        key=lambda rule: mean_dice(training, labels, *rule),
    )
    return mean_dice(validation, labels, *chosen)


def mean_dice(cases: Sequence[tuple[Any, Any]], labels: Any, channel: int, sign: int, threshold: float) -> float:
    """Voxels of the brain above the threshold (below it, with sign -1) against the region."""
    scores = []
    for image_cxyz, label_xyz in cases:
        image = image_cxyz[channel]
        mask = (image != 0) & (sign * image > sign * threshold)
        truth = np.isin(label_xyz, labels)
        scores.append(2 * (mask & truth).sum() / max(1, mask.sum() + truth.sum()))
    return float(np.mean(scores))


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def render(report: dict[str, Any]) -> str:
    lines = [
        f"{name}  Dice {dice:.3f}  (best threshold {report['threshold_dice'][name]:.3f})"
        for name, dice in report["dice"].items()
    ]
    verdict = "passed" if report["passed"] else "failed"
    return "\n".join([*lines, f"{report['steps']} steps, {report['seconds']:.0f} s; at least {LEAST_DICE}: {verdict}"])


if __name__ == "__main__":
    sys.exit(main())
