"""Segmentation: exclusive classes (softmax) or overlapping regions (sigmoid), scored by Dice per case and class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from voxscale.config.schema import Config
from voxscale.data.store import Store
from voxscale.data.volumes import Labels
from voxscale.errors import ConfigError, DataError
from voxscale.tasks.losses import DiceLoss


class Segmentation:
    """`classes` maps each reported class to the label values it consists of; background has none."""

    def __init__(self, classes: Mapping[str, tuple[int, ...]], *, exclusive: bool, loss: DiceLoss) -> None:
        self.classes = dict(classes)
        self.exclusive = exclusive
        self.out_channels = len(classes) + int(exclusive)
        self.couples_samples = loss.options.batch
        self._loss = loss

    @classmethod
    def build(cls, config: Config, store: Store) -> Segmentation:
        """Classes come from the config's regions or, without them, from the labels found in the data."""
        found = tuple(label for label in store.labels if label > 0)
        regions = config.data.regions
        if not found:
            raise DataError("no case has any labelled voxel", fix="check that labels and images were not swapped")
        if regions is not None:
            unknown = sorted({label for labels in regions.values() for label in labels} - set(found))
            if unknown:
                raise ConfigError(
                    f"data.regions: label {unknown[0]} stands in no case; found labels {list(found)}",
                    fix="name labels that the data has",
                )
        classes = regions or {str(label): (label,) for label in found}
        exclusive = regions is None
        task = cls(classes, exclusive=exclusive, loss=DiceLoss(config.loss, exclusive))
        if config.validation.metric not in task.metrics:
            raise ConfigError(
                f"validate.metric: found {config.validation.metric!r}, expected one of {', '.join(task.metrics)}",
                fix="choose a metric that this task reports",
            )
        return task

    def loss_rows(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self._loss.rows(output, self._target(label).to(output.dtype))

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return self._loss.loss(rows)

    def decide(self, output_cxyz: torch.Tensor) -> np.ndarray:
        """A mask (class, x, y, z) per reported class."""
        if self.exclusive:
            winner = output_cxyz.argmax(0)
            masks = torch.stack([winner == index for index in range(1, self.out_channels)])
        else:
            masks = output_cxyz > 0
        return masks.cpu().numpy()

    def measure(self, prediction: np.ndarray, label_xyz: Labels) -> dict[str, float]:
        row: dict[str, float] = {}
        for mask, (name, labels) in zip(prediction, self.classes.items(), strict=True):
            truth = np.isin(label_xyz, labels)
            total = int(mask.sum()) + int(truth.sum())
            if total:
                row[f"dice/{name}"] = 2 * int((mask & truth).sum()) / total
        if row:
            row["dice/mean"] = sum(row.values()) / len(row)
        return row

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*(f"dice/{name}" for name in self.classes), "dice/mean")

    def _target(self, label: torch.Tensor) -> torch.Tensor:
        """(n, c, x, y, z) of zeros and ones, background first for exclusive classes."""
        masks = [
            sum((label == value for value in values), torch.zeros_like(label)) > 0 for values in self.classes.values()
        ]
        if self.exclusive:
            masks = [~torch.stack(masks).any(0), *masks]
        return torch.stack(masks, dim=1)
