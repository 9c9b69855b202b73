"""What a task is: how to turn outputs into loss rows, loss rows into a loss, and cases into metrics.

A task knows nothing of ranks. Its loss is a function of *rows*, one per sample; the training step gathers the
rows of the whole global batch, so a loss that couples samples (batch Dice, Cox) is the same at any world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.config.schema import Config
from voxscale.data.findings import Finding
from voxscale.data.outcomes import Outcomes
from voxscale.data.store import Store
from voxscale.data.volumes import Labels
from voxscale.tasks.classification import Classification
from voxscale.tasks.regression import Regression
from voxscale.tasks.segmentation import Labelled, Segmentation
from voxscale.tasks.summary import Row, Summary
from voxscale.tasks.survival import Survival

__all__ = ["OUTCOMES", "Labelled", "OutcomeTask", "Row", "Task", "VolumeTask", "build_outcome_task", "build_task"]


class Task(Protocol):
    """What training needs of every task; `tests/contracts/test_tasks.py` holds every task to it.

    `full` asks for what takes longer, and is measured of the best model alone.
    """

    out_channels: int
    couples_samples: bool
    """Whether the loss of a batch is more than the mean of its samples' losses."""

    def loss_rows(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """(n, k) numbers, one row per sample, with gradient. A sample's row depends on that sample alone."""

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """The loss of the batch that these rows are; the order of rows does not matter."""

    def columns(self, *, full: bool) -> tuple[str, ...]:
        """What is known of a case, in the order of columns."""

    def metrics(self, *, full: bool) -> tuple[str, ...]:
        """Names of all metrics that `summarise` can give."""

    def choosable(self) -> tuple[str, ...]:
        """Names of those that can choose the best model: every validation has them, and more or less is better."""

    def summarise(self, rows: Sequence[Row], *, full: bool) -> Summary:
        """The metrics of all these cases. What is undefined is absent."""

    def details(self, rows: Sequence[Row]) -> dict[str, Any]:
        """What else these cases show that is no single number, for `metrics.json`; often nothing."""

    def prefers_low(self, metric: str) -> bool:
        """Whether less of a metric is better."""

    def worth_a_look(self, row: Row) -> float:
        """How much a case asks to be looked at, by its row alone: the worse it is predicted, the more."""


class VolumeTask(Task, Protocol):
    """A task whose targets are volumes of labels, predicted window by window."""

    classes: dict[str, tuple[int, ...]]
    exclusive: bool
    """Whether a voxel has one class at most."""

    def decide(self, output_cxyz: torch.Tensor) -> NDArray[np.integer[Any]]:
        """The prediction for raw outputs, whole or any part of a volume: one small number per voxel, (x, y, z)."""

    def probabilities(self, output_cxyz: torch.Tensor) -> torch.Tensor:
        """Between 0 and 1, a channel per output, float32."""

    def measure(
        self, codes_xyz: NDArray[Any], label_xyz: Labels, spacing: tuple[float, float, float], *, full: bool
    ) -> Row:
        """The metrics of one case; `spacing` in mm. What is undefined is absent."""

    def check_classes(self, store: Store, training: Iterable[int], validation: Iterable[int]) -> list[Finding]:
        """What these rows of the store, to train on and to validate on, lack for it: errors and warnings."""

    @property
    def can_map(self) -> str | None:
        """Why `label_map` is impossible; None where it is not."""

    def label_map(self, codes_xyz: NDArray[Any]) -> NDArray[np.uint8]:
        """The data's own label values for what `decide` gave."""

    def encode(self, label_xyz: Labels) -> NDArray[np.integer[Any]]:
        """What `decide` would give for a perfect output."""

    def masks(self, codes_xyz: NDArray[Any]) -> NDArray[np.uint8]:
        """(class, x, y, z) of zeros and ones for what `decide` gave."""


class OutcomeTask(Task, Protocol):
    """A task whose targets are a few numbers for each case, predicted from its whole volume at once."""

    def predict(self, output: NDArray[np.float64]) -> Row:
        """What is predicted for a case, from its raw output (out_channels,)."""

    def average(self, rows: Sequence[Row]) -> Row:
        """What several runs predict of a case together, from what each predicts."""

    def shown(self, row: Row) -> Row:
        """What `voxscale predict` writes of a prediction: e.g. the class beside its probabilities."""

    def known(self, target: NDArray[np.float64]) -> Row:
        """What is known of a case, from its targets, under the names of columns."""

    @property
    def learns_from(self) -> bool:
        """Whether a full evaluation needs `learn` to be given the rows of the training cases first."""

    def learn(self, rows: Sequence[Row]) -> None:
        """Take from the training cases what predictions of the final model need, e.g. a baseline hazard."""

    def learnt(self) -> dict[str, Any]:
        """What was learnt, for a file; `relearn` takes it up again."""

    def relearn(self, *contents: dict[str, Any]) -> None:
        """What this run has learnt, then what others have with which it is averaged, in the order of `average`."""


OUTCOMES: dict[str, Callable[[Config, Outcomes], OutcomeTask]] = {
    "survival": Survival.build,
    "regression": Regression.build,
    "classification": Classification.build,
}


def build_task(config: Config, store: Labelled) -> VolumeTask:
    return Segmentation.build(config, store)


def build_outcome_task(config: Config, outcomes: Outcomes) -> OutcomeTask:
    return OUTCOMES[config.task](config, outcomes)
