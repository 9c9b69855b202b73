"""Losses such as a user writes, for tests of `loss.name: package.module:function`."""

from __future__ import annotations

import torch


def squares(output: torch.Tensor, target: torch.Tensor, power: float = 2.0) -> torch.Tensor:
    """A number for each sample, of whatever task: what the outputs are away from the mean of the targets."""
    wanted = target.float().flatten(1).mean(1, keepdim=True)
    return ((output.flatten(1) - wanted).abs() ** power).mean(1)


def sums(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A row for each sample."""
    return torch.stack([output.flatten(1).square().sum(1), target.float().flatten(1).sum(1) + 1], dim=1)


def ratio(rows: torch.Tensor) -> torch.Tensor:
    """Couples samples: no mean of theirs."""
    return rows[:, 0].sum() / rows[:, 1].sum()


def mean_of_batch(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.flatten() - 1).square().mean()


def without_gradient(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.detach().flatten(1).mean(1)


def no_tensor(output: torch.Tensor, target: torch.Tensor) -> float:
    return 1.0


def keeps_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows


NUMBER = 3
