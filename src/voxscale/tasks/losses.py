"""Segmentation losses, split in two: rows of sums per sample, and the loss as a function of rows.

The sums are taken with gradients of our own: fewer passes over the voxels than if every operation kept its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from voxscale.config.losses import DiceCEOptions, DiceFocalOptions, DiceOptions, SoftDiceOptions

Options = DiceOptions | DiceCEOptions | DiceFocalOptions | SoftDiceOptions

_SMOOTH = 1e-5  # keeps an empty class defined, as MONAI's Dice does
_SPACE = (2, 3, 4)


@dataclass(frozen=True)
class DiceLoss:
    """Soft Dice, alone or with cross-entropy or the focal loss.

    A row holds, per class, the overlap and the denominator of Dice, then, where the loss has such a part, the
    sample's mean over voxels. `channels`, the network's outputs, tells where the row of one level ends: a network
    supervised on several levels has a row for each, side by side, and level i weighs half as much as level i - 1.
    """

    options: Options
    exclusive: bool
    channels: int | None = None

    def rows(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """`logits` (n, c, x, y, z) or (n, levels, c, x, y, z) and `target` (n, c, x, y, z) of zeros and ones."""
        sums = _ClassSums if self.exclusive else _RegionSums
        target = target.float()
        levels = logits.unbind(1) if logits.ndim == 6 else (logits,)
        if len(levels) > 1 and self.channels is None:
            raise ValueError("a loss on several levels must know the number of channels")
        rows: list[torch.Tensor] = [
            sums.apply(level.float(), target, self.options.squared, self._gamma)  # type: ignore[no-untyped-call]
            for level in levels
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        width = rows.shape[1] if self.channels is None else 2 * self.channels + int(self._gamma is not None)
        levels = torch.split(rows, width, dim=1)
        if len(levels) == 1:
            return self._level_loss(rows)
        weights = [0.5**level for level in range(len(levels))]
        losses = [weight * self._level_loss(level) for weight, level in zip(weights, levels, strict=True)]
        return torch.stack(losses).sum() / sum(weights)

    @property
    def _gamma(self) -> float | None:
        """How a voxel's cross-entropy is focused; none: the loss has no such part."""
        if isinstance(self.options, DiceFocalOptions):
            return self.options.gamma
        return 0.0 if isinstance(self.options, DiceCEOptions) else None

    def _level_loss(self, rows: torch.Tensor) -> torch.Tensor:
        num_classes = rows.shape[1] // 2
        overlap, total, per_voxel = rows.tensor_split((num_classes, 2 * num_classes), dim=1)
        if self.options.batch:
            overlap, total = overlap.sum(0, keepdim=True), total.sum(0, keepdim=True)
        if self.exclusive and not self.options.background:
            overlap, total = overlap[:, 1:], total[:, 1:]
        smooth = self.options.smooth if isinstance(self.options, SoftDiceOptions) else _SMOOTH
        dice = (1 - (2 * overlap + smooth) / (total + smooth)).mean()
        match self.options:
            case DiceCEOptions():
                return dice + per_voxel.mean()
            case DiceFocalOptions(weight=weight):
                # MONAI averages the focal loss over classes too, also where only the true class has any.
                return dice + weight / (num_classes if self.exclusive else 1) * per_voxel.mean()
        return dice


class _RegionSums(torch.autograd.Function):
    """Rows for overlapping regions, each channel by itself.

    With the error q = |p - t| a voxel's focal loss is q^gamma · softplus(z), where z is the logit counted against
    the truth; gamma 0 is cross-entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, squared: bool, gamma: float | None
    ) -> torch.Tensor:
        probability = logits.sigmoid()
        ctx.squared, ctx.gamma = squared, gamma
        columns = _dice_sums(probability, target, squared)
        entropy = None
        if gamma is not None:
            entropy = functional.softplus(logits * (1 - 2 * target))
            focused = entropy * (probability - target).abs_().pow_(gamma) if gamma else entropy
            columns.append(focused.mean((1, *_SPACE))[:, None])
        ctx.save_for_backward(probability, target, entropy if gamma else None)
        return torch.cat(columns, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probability, target, entropy = ctx.saved_tensors
        num_classes = probability.shape[1]
        gradient = torch.ops.aten.sigmoid_backward(
            _dice_gradient(gradients[0], probability, target, squared=ctx.squared), probability
        )
        if ctx.gamma is None:
            return gradient, None, None, None
        share = gradients[0][:, 2 * num_classes, None, None, None, None] / probability[0].numel()
        slope = probability - target
        if ctx.gamma:
            error = slope.abs()
            slope.addcmul_((1 - error).mul_(entropy), 1 - 2 * target, value=ctx.gamma).mul_(error.pow_(ctx.gamma))
        return gradient.addcmul_(slope, share), None, None, None


class _ClassSums(torch.autograd.Function):
    """Rows for exclusive classes. A voxel's focal loss is -(1 - p)^gamma · log p of its true class."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, squared: bool, gamma: float | None
    ) -> torch.Tensor:
        logarithm = logits.log_softmax(1)
        probability = logarithm.exp()
        ctx.squared, ctx.gamma = squared, gamma
        columns = _dice_sums(probability, target, squared)
        true = None
        if gamma is not None:
            true = logarithm.mul_(target).sum(1, keepdim=True)
            focused = true * _error(true).pow_(gamma) if gamma else true
            columns.append(-focused.mean((1, *_SPACE))[:, None])
        ctx.save_for_backward(probability, target, true if gamma else None)
        return torch.cat(columns, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probability, target, true = ctx.saved_tensors
        num_classes = probability.shape[1]
        gradient = _dice_gradient(gradients[0], probability, target, squared=ctx.squared).mul_(probability)
        gradient.addcmul_(probability, gradient.sum(1, keepdim=True), value=-1)
        if ctx.gamma is None:
            return gradient, None, None, None
        slope = gradients[0][:, 2 * num_classes, None, None, None, None] / probability[0, 0].numel()
        if ctx.gamma:
            error = _error(true)
            slope = slope * (error.pow(ctx.gamma) - ctx.gamma * error.pow(ctx.gamma - 1) * true.exp() * true)
        return gradient.addcmul_(probability - target, slope), None, None, None


def _dice_sums(probability: torch.Tensor, target: torch.Tensor, squared: bool) -> list[torch.Tensor]:
    product = probability * target
    overlap = product.sum(_SPACE)
    size = torch.mul(probability, probability, out=product) if squared else probability
    return [overlap, size.sum(_SPACE) + target.sum(_SPACE)]


def _dice_gradient(
    gradient: torch.Tensor, probability: torch.Tensor, target: torch.Tensor, *, squared: bool
) -> torch.Tensor:
    """The gradient of overlap and denominator with respect to the probabilities."""
    num_classes = probability.shape[1]
    sums = gradient[:, : 2 * num_classes, None, None, None]
    overlap, total = sums[:, :num_classes], sums[:, num_classes:]
    by_overlap = target * overlap
    return by_overlap.addcmul_(probability, 2 * total) if squared else by_overlap.add_(total)


def _error(logarithm: torch.Tensor) -> torch.Tensor:
    """1 - p from log p, kept above zero, where its powers below one have no slope."""
    return torch.expm1(logarithm).neg_().clamp_min_(1e-12)
