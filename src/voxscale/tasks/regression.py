"""Regression: numbers of a table's columns, trained in deviations from their mean, measured in their own units."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.config.losses import HuberOptions
from voxscale.config.schema import Config
from voxscale.data.outcome_encoding import Numeric
from voxscale.data.outcomes import Outcomes
from voxscale.tasks.choosing import refuse_metric
from voxscale.tasks.own import OwnLoss
from voxscale.tasks.resampling import summarise_scores
from voxscale.tasks.scores import score_numbers
from voxscale.tasks.summary import Row, Summary, mean_row

Array = NDArray[np.float64]


class Regression:
    """`targets` are the columns to predict, with the scale that they have in training; `delta` is Huber's, if any."""

    learns_from = False

    def __init__(self, targets: Sequence[Numeric], *, delta: float | None = None, own: OwnLoss | None = None) -> None:
        self.names = tuple(target.column for target in targets)
        self.out_channels = len(self.names)
        self._mean = np.array([target.mean for target in targets])
        self._scale = np.array([target.scale for target in targets])
        self._delta = delta
        self._own = own
        self.couples_samples = own is not None and own.options.batch

    @classmethod
    def build(cls, config: Config, outcomes: Outcomes) -> Regression:
        delta = config.loss.delta if isinstance(config.loss, HuberOptions) else None
        task = cls(outcomes.encoding.targets, delta=delta, own=OwnLoss.of(config.loss))
        refuse_metric(task, config.validation.metric)
        return task

    def loss_rows(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean, scale = (torch.from_numpy(each).to(output.device) for each in (self._mean, self._scale))
        scaled = ((target.double() - mean) / scale).float()
        if self._own is not None:
            return self._own.rows(output, scaled)
        if self._delta is None:
            return (output.float() - scaled) ** 2
        return torch.nn.functional.huber_loss(output.float(), scaled, reduction="none", delta=self._delta)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.mean() if self._own is None else self._own.loss(rows)

    def columns(self, *, full: bool) -> tuple[str, ...]:
        return tuple(f"{kind}/{name}" for name in self.names for kind in ("target", "predicted"))

    def metrics(self, *, full: bool) -> tuple[str, ...]:
        averaged = [f"{metric}/{name}" for metric in ("r2", "pearson", "spearman") for name in (*self.names, "mean")]
        return (*averaged, *(f"{metric}/{name}" for metric in ("mae", "rmse") for name in self.names))

    def choosable(self) -> tuple[str, ...]:
        return self.metrics(full=False)

    def details(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {}

    def prefers_low(self, metric: str) -> bool:
        return metric.startswith(("mae", "rmse"))

    def worth_a_look(self, row: Row) -> float:
        """The mean error, in deviations of the training cases."""
        errors = [abs(float(row[f"predicted/{name}"]) - float(row[f"target/{name}"])) for name in self.names]
        return float(np.mean(np.array(errors) / self._scale))

    def predict(self, output: Array) -> Row:
        values = output * self._scale + self._mean
        return {f"predicted/{name}": float(value) for name, value in zip(self.names, values, strict=True)}

    def average(self, rows: Sequence[Row]) -> Row:
        return mean_row(rows)

    def shown(self, row: Row) -> Row:
        return {name.removeprefix("predicted/"): value for name, value in row.items()}

    def known(self, target: Array) -> Row:
        return {f"target/{name}": float(value) for name, value in zip(self.names, target, strict=True)}

    def learn(self, rows: Sequence[Row]) -> None:
        return

    def learnt(self) -> dict[str, Any]:
        return {}

    def relearn(self, *contents: dict[str, Any]) -> None:
        return

    def summarise(self, rows: Sequence[Row], *, full: bool) -> Summary:
        if not rows:
            return {}
        truth, predicted = (
            np.array([[row[f"{kind}/{name}"] for name in self.names] for row in rows])
            for kind in ("target", "predicted")
        )
        return summarise_scores(
            partial(score_numbers, truth, predicted, self.names), len(rows), self.metrics(full=full)
        )
