"""Segmentation: exclusive classes (softmax) or overlapping regions (sigmoid), scored per case and class."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.config.losses import OutcomeLoss, OwnLossOptions
from voxscale.config.schema import Config
from voxscale.data.classes import check_classes, classes_of
from voxscale.data.findings import Finding
from voxscale.data.store import Store
from voxscale.data.volumes import Labels
from voxscale.errors import ConfigError, DataError
from voxscale.tasks.codes import MAX_REGIONS, Codes, Counts
from voxscale.tasks.losses import DiceLoss
from voxscale.tasks.own import OwnLoss
from voxscale.tasks.summary import Row, Summary, summarise
from voxscale.tasks.surface import Spacing, hd95, surface_dice, surface_distances

_OVERLAPS = ("dice", "iou", "sensitivity", "precision")
_SURFACES = ("hd95", "surface_dice")
_VOLUMES = ("volume", "volume_label")
_PLANES = 8  # decided at once: the winners' numbers take eight bytes each before they are one


class Labelled(Protocol):
    """What a task has to know of the data it is built for: a store does."""

    @property
    def labels(self) -> tuple[int, ...]:
        """The label values found, background included."""


class Segmentation:
    """`classes` maps each reported class to the label values it consists of; background has none.

    `model` is what messages call the network.
    """

    def __init__(
        self,
        classes: Mapping[str, tuple[int, ...]],
        *,
        exclusive: bool,
        loss: DiceLoss | OwnLoss,
        tolerance_mm: float = 1.0,
        model: str = "model",
    ) -> None:
        self.classes = dict(classes)
        self.exclusive = exclusive
        self.out_channels = len(classes) + int(exclusive)
        self.couples_samples = loss.options.batch
        self._codes = Codes(classes, exclusive=exclusive)
        self._loss = loss
        self._tolerance_mm = tolerance_mm
        self._model = model

    @classmethod
    def build(cls, config: Config, store: Labelled) -> Segmentation:
        """Classes come from the config's regions or, without them, from the labels found in the data."""
        found = tuple(label for label in store.labels if label > 0)
        if not found:
            raise DataError("no case has any labelled voxel", fix="check that labels and images were not swapped")
        if isinstance(config.loss, OutcomeLoss):
            raise ConfigError(f"loss {config.loss.name}: is of another task", fix="choose one with a Dice part")
        regions = config.data.regions
        exclusive = regions is None
        classes = classes_of(regions, found)
        loss = (
            OwnLoss(config.loss)
            if isinstance(config.loss, OwnLossOptions)
            else DiceLoss(config.loss, exclusive, channels=len(classes) + int(exclusive))
        )
        task = cls(
            classes,
            exclusive=exclusive,
            loss=loss,
            tolerance_mm=config.validation.tolerance_mm,
            model=config.model.name,
        )
        problems = [*_region_problems(regions or {}, found), *task._metric_problems(config.validation.metric)]
        if problems:
            fixes = dict.fromkeys(fix for _, fix in problems)
            raise ConfigError.from_findings([problem for problem, _ in problems], fix="; ".join(fixes))
        return task

    def loss_rows(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self._refuse_misshapen(output, label)
        return self._loss.rows(output, self._target(label))

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return self._loss.loss(rows)

    def decide(self, output_cxyz: torch.Tensor) -> NDArray[np.integer[Any]]:
        parts = [self._decide(part) for part in torch.split(output_cxyz, _PLANES, dim=1)]
        return torch.cat(parts).cpu().numpy().astype(self._codes.dtype, copy=False)

    def probabilities(self, output_cxyz: torch.Tensor) -> torch.Tensor:
        return output_cxyz.float().softmax(0) if self.exclusive else output_cxyz.float().sigmoid()

    def measure(self, codes_xyz: NDArray[Any], label_xyz: Labels, spacing: Spacing, *, full: bool) -> Row:
        """Overlaps, volumes in millilitres and, if `full`, distances of surfaces.

        A class that only the label or only the prediction has scores Dice, IoU and surface Dice 0, as nothing of it
        fits; a distance to nothing is absent, as is the share (sensitivity, precision) of nothing. In neither: all is
        absent but the volumes, which are 0.
        """
        counts = self._codes.count(codes_xyz, label_xyz)
        values = _overlaps(counts)
        if full:
            values |= self._surface_scores(codes_xyz, label_xyz, spacing, counts)
        millilitres = float(np.prod(spacing)) / 1000
        values["volume"] = [_six_digits(voxels * millilitres) for voxels in counts.predicted]
        values["volume_label"] = [_six_digits(voxels * millilitres) for voxels in counts.labelled]
        return self._as_row(values)

    def metrics(self, *, full: bool) -> tuple[str, ...]:
        averaged = (*_OVERLAPS, *(_SURFACES if full else ()))
        scores = [f"{metric}/{name}" for metric in averaged for name in (*self.classes, "mean")]
        return (*scores, *(f"{metric}/{name}" for metric in _VOLUMES for name in self.classes))

    def choosable(self) -> tuple[str, ...]:
        return tuple(name for name in self.metrics(full=False) if not name.startswith(_VOLUMES))

    def columns(self, *, full: bool) -> tuple[str, ...]:
        return self.metrics(full=full)

    def summarise(self, rows: Sequence[Row], *, full: bool) -> Summary:
        return summarise(rows, self.metrics(full=full))

    def details(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {}

    def prefers_low(self, metric: str) -> bool:
        return metric.startswith("hd95")

    def worth_a_look(self, row: Row) -> float:
        """The less Dice; what has none, as there is nothing to find, the least."""
        return 1.0 - float(row.get("dice/mean", 1.0))

    def check_classes(self, store: Store, training: Iterable[int], validation: Iterable[int]) -> list[Finding]:
        return check_classes(self.classes, map(store.labels_of, training), map(store.labels_of, validation))

    @property
    def can_map(self) -> str | None:
        return self._codes.can_map

    @property
    def painting(self) -> list[tuple[int, int]]:
        return self._codes.painting

    def label_map(self, codes_xyz: NDArray[Any]) -> NDArray[np.uint8]:
        return self._codes.label_map(codes_xyz)

    def encode(self, label_xyz: Labels) -> NDArray[np.integer[Any]]:
        return self._codes.encode(label_xyz)

    def masks(self, codes_xyz: NDArray[Any]) -> NDArray[np.uint8]:
        return self._codes.masks(codes_xyz)

    def _decide(self, output_cxyz: torch.Tensor) -> torch.Tensor:
        if self.exclusive:
            return output_cxyz.max(0).indices.to(torch.uint8)  # a third of argmax's time on a CPU
        codes = torch.zeros(output_cxyz.shape[1:], dtype=torch.uint8 if len(output_cxyz) <= 8 else torch.int64)
        codes = codes.to(output_cxyz.device)
        for index, channel in enumerate(output_cxyz):
            codes |= (channel > 0).to(codes.dtype) << index
        return codes

    def _surface_scores(
        self, codes_xyz: NDArray[Any], label_xyz: Labels, spacing: Spacing, counts: Counts
    ) -> dict[str, list[float | None]]:
        far: list[float | None] = []
        near: list[float | None] = []
        for index, box in enumerate(self._codes.boxes(codes_xyz, label_xyz)):
            if box is None:
                far.append(None)
                near.append(None)
            elif not counts.predicted[index] or not counts.labelled[index]:
                far.append(None)
                near.append(0.0)
            else:
                predicted = self._codes.has(codes_xyz[box], index)
                distances = surface_distances(predicted, self._codes.labelled(label_xyz[box], index), spacing)
                far.append(hd95(distances))
                near.append(surface_dice(distances, self._tolerance_mm))
        return {"hd95": far, "surface_dice": near}

    def _as_row(self, values: Mapping[str, Sequence[float | None]]) -> Row:
        row: Row = {}
        for metric, scores in values.items():
            defined = {
                f"{metric}/{name}": score for name, score in zip(self.classes, scores, strict=True) if score is not None
            }
            row |= defined
            if defined and metric not in _VOLUMES:
                row[f"{metric}/mean"] = sum(defined.values()) / len(defined)
        return row

    def _target(self, label: torch.Tensor) -> torch.Tensor:
        """(n, c, x, y, z) of zeros and ones, background first for exclusive classes."""
        target = torch.empty((len(label), self.out_channels, *label.shape[1:]), device=label.device)
        background = torch.ones_like(label, dtype=torch.bool)
        for channel, labels in enumerate(self.classes.values(), start=int(self.exclusive)):
            inside = label == labels[0]
            for value in labels[1:]:
                inside |= label == value
            target[:, channel] = inside
            background &= ~inside
        if self.exclusive:
            target[:, 0] = background
        return target

    def _refuse_misshapen(self, output: torch.Tensor, label: torch.Tensor) -> None:
        """A user's own model may return anything; six dimensions are those of deep supervision."""
        size = tuple(label.shape[1:])
        if isinstance(output, torch.Tensor) and output.ndim in (5, 6):
            expected = (len(label), *output.shape[1:-4], self.out_channels, *size)
            if tuple(output.shape) == expected:
                return
        found = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ConfigError(
            f"model {self._model}: found an output of {found}, expected"
            f" {[len(label), self.out_channels, *size]}: samples, channels, then the size of the patch",
            fix=f"return one tensor with {self.out_channels} channels, in the size of the input",
        )

    def _metric_problems(self, metric: str) -> list[tuple[str, str]]:
        usable = self.choosable()
        if metric in usable:
            return []
        expected = f"{'|'.join(_OVERLAPS)} / {'|'.join((*self.classes, 'mean'))}"
        why = ", as surfaces are measured in the final evaluation only" * metric.startswith(_SURFACES)
        nearest = difflib.get_close_matches(metric, usable, n=1, cutoff=0)[0]
        return [(f"validate.metric: found {metric!r}, expected one of {expected}{why}", f"e.g. {nearest}")]


def _overlaps(counts: Counts) -> dict[str, list[float | None]]:
    values: dict[str, list[float | None]] = {metric: [] for metric in _OVERLAPS}
    for predicted, labelled, both in zip(counts.predicted, counts.labelled, counts.both, strict=True):
        values["dice"].append(_share(2 * both, predicted + labelled))
        values["iou"].append(_share(both, predicted + labelled - both))
        values["sensitivity"].append(_share(both, labelled))
        values["precision"].append(_share(both, predicted))
    return values


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def _region_problems(regions: Mapping[str, tuple[int, ...]], found: Sequence[int]) -> list[tuple[str, str]]:
    problems = []
    unknown = sorted({label for labels in regions.values() for label in labels} - set(found))
    for label in unknown:
        problem = f"data.regions: label {label} stands in no case; found labels {list(found)}"
        problems.append((problem, "name labels that the data has"))
    if len(regions) > MAX_REGIONS:
        problem = f"data.regions: found {len(regions)} regions, expected at most {MAX_REGIONS}"
        problems.append((problem, "leave some out, or train exclusive classes"))
    return problems
