"""Classification: one class for each case (softmax), or labels that may hold at once (sigmoid)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.config.losses import CrossEntropyOptions
from voxscale.config.schema import Config
from voxscale.data.cases import TRAIN
from voxscale.data.outcomes import Outcomes
from voxscale.errors import ConfigError
from voxscale.tasks.choosing import refuse_metric
from voxscale.tasks.own import OwnLoss
from voxscale.tasks.resampling import summarise_scores
from voxscale.tasks.scores import confusion_matrix, score_classes, score_labels
from voxscale.tasks.summary import Row, Summary, mean_row

Array = NDArray[np.float64]
_WHOLE = ("accuracy", "balanced_accuracy", "calibration_error")  # of exclusive classes one number, of labels one each
_CURVES = ("auroc", "auprc", "f1")


class Classification:
    """`classes` in the order of outputs; `weights` of their losses. A row of the loss is (loss, weight) of a sample."""

    couples_samples = True  # a mean weighed by the classes of the whole batch
    learns_from = False

    def __init__(
        self,
        classes: Sequence[str],
        *,
        exclusive: bool,
        weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        own: OwnLoss | None = None,
    ) -> None:
        self.classes, self.exclusive = tuple(classes), exclusive
        self.out_channels = len(self.classes)
        self._own = own
        self.couples_samples = own.options.batch if own is not None else exclusive and weights is not None
        self._weights = torch.tensor(weights if weights is not None else [1.0] * len(self.classes))
        self._smoothing = label_smoothing

    @classmethod
    def build(cls, config: Config, outcomes: Outcomes) -> Classification:
        classes = outcomes.encoding.classes
        exclusive = len(outcomes.encoding.columns.classes) == 1
        options = config.loss if isinstance(config.loss, CrossEntropyOptions) else CrossEntropyOptions()
        weights = _weights(options.class_weights, classes, outcomes.of(TRAIN), exclusive=exclusive)
        own = OwnLoss.of(config.loss)
        task = cls(classes, exclusive=exclusive, weights=weights, label_smoothing=options.label_smoothing, own=own)
        refuse_metric(task, config.validation.metric)
        return task

    def loss_rows(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """(Weighed loss, weight) of each sample."""
        if self._own is not None:
            return self._own.rows(output, target)
        output, weights = output.float(), self._weights.to(output.device)
        if self.exclusive:
            chosen = target[:, 0].long()
            losses = torch.nn.functional.cross_entropy(
                output, chosen, weight=weights, reduction="none", label_smoothing=self._smoothing
            )
            return torch.stack([losses, weights[chosen]], dim=1)
        wanted = target.float() * (1 - self._smoothing) + self._smoothing / 2
        losses = torch.nn.functional.binary_cross_entropy_with_logits(output, wanted, reduction="none")
        return torch.stack([(losses * weights).mean(1), torch.ones(len(output), device=output.device)], dim=1)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean weighed by class, over the whole batch."""
        if self._own is not None:
            return self._own.loss(rows)
        return rows[:, 0].sum() / rows[:, 1].sum().clamp(min=torch.finfo(rows.dtype).tiny)

    def columns(self, *, full: bool) -> tuple[str, ...]:
        known = ("class",) if self.exclusive else tuple(f"class/{name}" for name in self.classes)
        return (*known, *self._probabilities)

    def metrics(self, *, full: bool) -> tuple[str, ...]:
        by_class = [f"{metric}/{name}" for metric in _CURVES for name in (*self.classes, "mean")]
        if self.exclusive:
            return (*_WHOLE, *by_class)
        return (*(f"{metric}/{name}" for metric in _WHOLE for name in (*self.classes, "mean")), *by_class)

    def choosable(self) -> tuple[str, ...]:
        return self.metrics(full=False)

    def details(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The confusion matrix, true classes downwards; of labels that may hold at once one for each, of 0 and 1."""
        shares = self._shares(rows)
        if self.exclusive:
            matrix = confusion_matrix(self._truth(rows), shares.argmax(1), len(self.classes))
            return {"confusion": {"classes": list(self.classes), "cases": matrix.tolist()}}
        pairs = zip(self.classes, self._truth(rows).T, shares.T >= 0.5, strict=True)
        return {"confusion": {name: confusion_matrix(truth, chosen, 2).tolist() for name, truth, chosen in pairs}}

    def prefers_low(self, metric: str) -> bool:
        return metric.startswith("calibration_error")

    def worth_a_look(self, row: Row) -> float:
        """The probability that was given to what is not so."""
        if self.exclusive:
            return 1.0 - float(row[f"probability/{row['class']}"])
        return float(np.mean([abs(row[f"class/{name}"] - row[f"probability/{name}"]) for name in self.classes]))

    def predict(self, output: Array) -> Row:
        values = torch.from_numpy(output)
        shares = values.softmax(0) if self.exclusive else values.sigmoid()
        return dict(zip(self._probabilities, shares.tolist(), strict=True))

    def average(self, rows: Sequence[Row]) -> Row:
        return mean_row(rows)

    def shown(self, row: Row) -> Row:
        """Beside the probabilities the class that has the largest, or 0 and 1 for each label."""
        shares = [row[name] for name in self._probabilities]
        if self.exclusive:
            return {"class": self.classes[int(np.argmax(shares))], **row}
        return {**{f"class/{name}": int(share >= 0.5) for name, share in zip(self.classes, shares, strict=True)}, **row}

    def known(self, target: Array) -> Row:
        if self.exclusive:
            return {"class": self.classes[int(target[0])]}
        return {f"class/{name}": int(value) for name, value in zip(self.classes, target, strict=True)}

    def learn(self, rows: Sequence[Row]) -> None:
        return

    def learnt(self) -> dict[str, Any]:
        return {}

    def relearn(self, *contents: dict[str, Any]) -> None:
        return

    def summarise(self, rows: Sequence[Row], *, full: bool) -> Summary:
        if not rows:
            return {}
        score = score_classes if self.exclusive else score_labels
        bound = partial(score, self._truth(rows), self._shares(rows), self.classes)
        return summarise_scores(bound, len(rows), self.metrics(full=full))

    def _truth(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        """The class of each case by number, or 0 and 1 for each label."""
        if not self.exclusive:
            return np.array([[row[f"class/{name}"] for name in self.classes] for row in rows], np.int64)
        numbers = {name: number for number, name in enumerate(self.classes)}
        return np.array([numbers[row["class"]] for row in rows], np.int64)

    def _shares(self, rows: Sequence[Row]) -> Array:
        return np.array([[row[name] for name in self._probabilities] for row in rows])

    @property
    def _probabilities(self) -> tuple[str, ...]:
        return tuple(f"probability/{name}" for name in self.classes)


def _weights(
    asked: str | Mapping[str, float], classes: Sequence[str], training: Array, *, exclusive: bool
) -> list[float] | None:
    """A weight for each class, in their order; None where all count the same."""
    if asked == "none":
        return None
    if not isinstance(asked, str):
        if unknown := sorted(set(asked) ^ set(classes)):
            raise ConfigError(
                f"loss.class_weights: found {', '.join(asked)}, expected each of {', '.join(classes)}; "
                f"differing: {', '.join(unknown)}",
                fix="give a weight to every class",
            )
        return [asked[name] for name in classes]
    counts = np.bincount(training[:, 0].astype(int), minlength=len(classes)) if exclusive else training.sum(0)
    shares: list[float] = (counts.sum() / (len(classes) * np.maximum(counts, 1))).tolist()
    return shares
