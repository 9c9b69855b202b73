"""What a task is: how to turn outputs into loss rows, loss rows into a loss, and volumes into metrics.

A task knows nothing of ranks. Its loss is a function of *rows*, one per sample; the training step gathers the
rows of the whole global batch, so a loss that couples samples (batch Dice, Cox) is the same at any world size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from voxscale.config.schema import Config
from voxscale.data.store import Store
from voxscale.data.volumes import Labels
from voxscale.tasks.segmentation import Segmentation

Row = dict[str, float]


class Task(Protocol):
    """The contract; `tests/contracts/test_tasks.py` holds every task to it."""

    out_channels: int
    couples_samples: bool
    """Whether the loss of a batch is more than the mean of its samples' losses."""

    def loss_rows(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """(n, k) numbers, one row per sample, with gradient. A sample's row depends on that sample alone."""

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """The loss of the batch that these rows are; the order of rows does not matter."""

    def decide(self, output_cxyz: torch.Tensor) -> np.ndarray:
        """The prediction for a whole volume of raw outputs."""

    def measure(self, prediction: np.ndarray, label_xyz: Labels) -> Row:
        """The metrics of one case. What is undefined is absent."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics that `measure` can give."""


TASKS: dict[str, Callable[[Config, Store], Task]] = {"segmentation": Segmentation.build}
SMALLER_IS_BETTER = ("loss/", "hd95/")


def build_task(config: Config, store: Store) -> Task:
    return TASKS[config.task](config, store)
