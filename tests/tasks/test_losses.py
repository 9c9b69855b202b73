"""Our losses, split into rows, against MONAI's."""

from __future__ import annotations

import pytest
import torch
from monai.losses import DiceCELoss as MonaiDiceCE
from monai.losses import DiceLoss as MonaiDice

from voxscale.config.training import DiceCEOptions, DiceOptions
from voxscale.tasks.losses import DiceLoss


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3, 4, 5, 6, 7, generator=torch.Generator().manual_seed(0))


def one_hot(channels: int) -> torch.Tensor:
    classes = torch.randint(0, channels, (3, 5, 6, 7), generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.one_hot(classes, channels).movedim(-1, 1).float()


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_dice_agrees_with_monai(logits: torch.Tensor, batch: bool, squared: bool, exclusive: bool) -> None:
    target = (
        one_hot(4)
        if exclusive
        else (torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) > 0.7).float()
    )
    ours = DiceLoss(DiceOptions(batch=batch, squared=squared), exclusive)
    theirs = MonaiDice(sigmoid=not exclusive, softmax=exclusive, batch=batch, squared_pred=squared)
    assert float(ours.loss(ours.rows(logits, target))) == pytest.approx(float(theirs(logits, target)), rel=1e-5)


@pytest.mark.parametrize("background", [False, True])
def test_dice_ce_agrees_with_monai(logits: torch.Tensor, background: bool) -> None:
    target = one_hot(4)
    ours = DiceLoss(DiceCEOptions(background=background), exclusive=True)
    dice = MonaiDice(softmax=True, include_background=background)(logits, target)
    entropy = MonaiDiceCE(softmax=True, lambda_dice=0)(logits, target)
    assert float(ours.loss(ours.rows(logits, target))) == pytest.approx(float(dice + entropy), rel=1e-5)


def test_a_row_depends_on_its_sample_alone(logits: torch.Tensor) -> None:
    loss = DiceLoss(DiceCEOptions(), exclusive=True)
    target = one_hot(4)
    whole = loss.rows(logits, target)
    apart = torch.cat([loss.rows(logits[n : n + 1], target[n : n + 1]) for n in range(3)])
    assert torch.allclose(whole, apart, rtol=1e-6)
    assert torch.equal(whole[[2, 0, 1]], loss.rows(logits[[2, 0, 1]], target[[2, 0, 1]]))
