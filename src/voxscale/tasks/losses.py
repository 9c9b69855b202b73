"""Segmentation losses, split in two: rows of sums per sample, and the loss as a function of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from voxscale.config.training import DiceCEOptions, DiceOptions

_SMOOTH = 1e-5  # keeps an empty class defined, as MONAI's Dice does


@dataclass(frozen=True)
class DiceLoss:
    """Soft Dice, with or without cross-entropy.

    A row holds, per class, the overlap and the denominator of Dice, then the sample's mean cross-entropy.
    """

    options: DiceOptions | DiceCEOptions
    exclusive: bool

    def rows(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """`logits` (n, c, x, y, z) and `target`, the same shape with zeros and ones."""
        logits = logits.float()
        probability = logits.softmax(1) if self.exclusive else logits.sigmoid()
        space = (2, 3, 4)
        overlap = (probability * target).sum(space)
        power = 2 if self.options.squared else 1
        total = probability.pow(power).sum(space) + target.sum(space)
        if self.exclusive:
            entropy = functional.cross_entropy(logits, target.argmax(1), reduction="none").mean((1, 2, 3))
        else:
            entropy = functional.binary_cross_entropy_with_logits(logits, target, reduction="none").mean((1, *space))
        return torch.cat([overlap, total, entropy[:, None]], dim=1)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        num_classes = (rows.shape[1] - 1) // 2
        overlap, total, entropy = torch.split(rows, [num_classes, num_classes, 1], dim=1)
        if self.options.batch:
            overlap, total = overlap.sum(0, keepdim=True), total.sum(0, keepdim=True)
        if self.exclusive and not self.options.background:
            overlap, total = overlap[:, 1:], total[:, 1:]
        dice = 1 - (2 * overlap + _SMOOTH) / (total + _SMOOTH)
        return dice.mean() + entropy.mean() if isinstance(self.options, DiceCEOptions) else dice.mean()
