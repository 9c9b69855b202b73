"""The demo: a config that trains in a minute on two CPU cores, and its score beside a threshold's."""

from __future__ import annotations

from typing import Any

from voxscale.data.cases import TEST, TRAIN
from voxscale.files import read_json
from voxscale.infer.baseline import threshold_dice
from voxscale.launch.folder import OpenedRun

DEMO: dict[str, Any] = {
    "data": {
        "source": "demo-data",
        "synthetic": {"cases": 48, "size": [48, 48, 48], "seed": 0},
        "split": {"val": 0.1, "test": 0.2},
        "regions": {"ball": [1]},
    },
    "patches": {"size": [48, 48, 48]},
    "augment": [{"name": "flip"}],
    "model": {"name": "unet", "channels": [8, 16, 32, 64], "residual_units": 0},
    "optimizer": {"name": "adam", "lr": 1e-3},
    "schedule": {"name": "none"},
    "train": {"epochs": 50, "batch": 4},
    "validate": {"every": 10},
}


def score_demo(opened: OpenedRun) -> dict[str, Any]:
    """Dice on the held-out cases, and what the best threshold of the training cases reaches on them."""
    training, held_out = ([case for case in opened.cases if case.split == split] for split in (TRAIN, TEST))
    metrics = read_json(opened.run.metrics)
    return {
        "dice": metrics["test"]["dice/mean"]["mean"],
        "threshold_dice": threshold_dice(opened.store, training, held_out),
        "num_test": len(held_out),
    }
