"""What a task is: how to turn outputs into loss rows, loss rows into a loss, and volumes into metrics.

A task knows nothing of ranks. Its loss is a function of *rows*, one per sample; the training step gathers the
rows of the whole global batch, so a loss that couples samples (batch Dice, Cox) is the same at any world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.config.schema import Config
from voxscale.data.findings import Finding
from voxscale.data.store import Store
from voxscale.data.volumes import Labels
from voxscale.tasks.segmentation import Labelled, Row, Segmentation

__all__ = ["TASKS", "Labelled", "Row", "Task", "build_task"]


class Task(Protocol):
    """The contract; `tests/contracts/test_tasks.py` holds every task to it."""

    out_channels: int
    couples_samples: bool
    """Whether the loss of a batch is more than the mean of its samples' losses."""

    def loss_rows(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """(n, k) numbers, one row per sample, with gradient. A sample's row depends on that sample alone."""

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """The loss of the batch that these rows are; the order of rows does not matter."""

    def decide(self, output_cxyz: torch.Tensor) -> NDArray[np.integer[Any]]:
        """The prediction for raw outputs, whole or any part of a volume: one small number per voxel, (x, y, z)."""

    def probabilities(self, output_cxyz: torch.Tensor) -> torch.Tensor:
        """Between 0 and 1, a channel per output, float32."""

    def measure(
        self, codes_xyz: NDArray[Any], label_xyz: Labels, spacing: tuple[float, float, float], *, surfaces: bool
    ) -> Row:
        """The metrics of one case; `spacing` in mm. What is undefined is absent.

        `surfaces` asks for what takes longer: distances between surfaces.
        """

    def metrics(self, *, surfaces: bool) -> tuple[str, ...]:
        """Names of all metrics that `measure` can give, in the order of columns."""

    def check_classes(self, store: Store, training: Iterable[int], validation: Iterable[int]) -> list[Finding]:
        """What these rows of the store, to train on and to validate on, lack for it: errors and warnings."""

    @property
    def can_map(self) -> str | None:
        """Why `label_map` is impossible; None where it is not."""

    def label_map(self, codes_xyz: NDArray[Any]) -> NDArray[np.uint8]:
        """The data's own label values for what `decide` gave."""

    def masks(self, codes_xyz: NDArray[Any]) -> NDArray[np.uint8]:
        """(class, x, y, z) of zeros and ones for what `decide` gave."""


TASKS: dict[str, Callable[[Config, Labelled], Task]] = {"segmentation": Segmentation.build}


def build_task(config: Config, store: Labelled) -> Task:
    return TASKS[config.task](config, store)
