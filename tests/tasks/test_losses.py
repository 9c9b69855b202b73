"""Our losses, split into rows, against MONAI's: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.losses.dice import DiceCELoss, DiceFocalLoss
from monai.losses.dice import DiceLoss as MonaiDice
from monai.losses.focal_loss import FocalLoss
from torch.nn.functional import binary_cross_entropy_with_logits

from voxscale.config.losses import DiceCEOptions, DiceFocalOptions, DiceOptions, SoftDiceOptions
from voxscale.tasks.losses import DiceLoss, Options

ALL = [DiceOptions(), DiceCEOptions(), DiceFocalOptions(), SoftDiceOptions()]


def make_batch(seed: int, shape: tuple[int, ...], *, exclusive: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, some of them large, and a target in which a class may be empty."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator) * 4
    if not exclusive:
        return logits, (torch.rand(shape, generator=generator) > 0.7).float()
    classes = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    return logits, torch.nn.functional.one_hot(classes, shape[1]).movedim(-1, 1).float()


def value_and_gradient(loss: Any, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def in_two_parts(loss: DiceLoss) -> Any:
    return lambda logits, target: loss.loss(loss.rows(logits, target))


def assert_same(ours: DiceLoss, theirs: Any, logits: torch.Tensor, target: torch.Tensor) -> None:
    found = value_and_gradient(in_two_parts(ours), logits, target)
    expected = value_and_gradient(theirs, logits, target)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert found[1].isfinite().all()
    defined = expected[1].isfinite()  # MONAI's focal loss has no gradient where a probability is exactly 1, ours is 0
    largest = float(expected[1][defined].abs().max()) if defined.any() else 0.0
    torch.testing.assert_close(found[1][defined], expected[1][defined], rtol=1e-4, atol=1e-8 + 1e-5 * largest)


@st.composite
def batches(draw: st.DrawFn) -> tuple[bool, dict[str, bool], torch.Tensor, torch.Tensor]:
    exclusive = draw(st.booleans())
    options = {key: draw(st.booleans()) for key in ("batch", "squared")}
    options["background"] = draw(st.booleans()) if exclusive else True
    edges = st.integers(1, 6)
    shape = (
        draw(st.integers(1, 3)),
        draw(st.integers(2 if exclusive else 1, 5)),
        *draw(st.tuples(edges, edges, edges)),
    )
    return exclusive, options, *make_batch(draw(st.integers(0, 999)), shape, exclusive=exclusive)


def monai_options(exclusive: bool, options: dict[str, bool]) -> dict[str, bool]:
    return {
        "sigmoid": not exclusive,
        "softmax": exclusive,
        "batch": options["batch"],
        "squared_pred": options["squared"],
        "include_background": options["background"],
    }


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([0.0, 0.7, 2.0, 3.5]), st.floats(0, 3))
def test_losses_agree_with_monai(
    batch: tuple[bool, dict[str, bool], torch.Tensor, torch.Tensor], gamma: float, weight: float
) -> None:
    exclusive, options, logits, target = batch
    dice = MonaiDice(**monai_options(exclusive, options))
    focal = FocalLoss(gamma=gamma, use_softmax=exclusive)
    assert_same(DiceLoss(DiceOptions(**options), exclusive), dice, logits, target)
    dice_ce = DiceCELoss(**monai_options(exclusive, options))
    if not exclusive and logits.shape[1] > 1:  # MONAI takes a softmax here, which regions that overlap have not
        dice_ce = lambda x, t: dice(x, t) + binary_cross_entropy_with_logits(x, t)  # noqa: E731
    assert_same(DiceLoss(DiceCEOptions(**options), exclusive), dice_ce, logits, target)
    assert_same(
        DiceLoss(DiceFocalOptions(**options, gamma=gamma, weight=weight), exclusive),
        lambda x, t: dice(x, t) + weight * focal(x, t),
        logits,
        target,
    )
    soft = MonaiDice(**monai_options(exclusive, options), smooth_nr=1, smooth_dr=1)
    assert_same(DiceLoss(SoftDiceOptions(**options), exclusive), soft, logits, target)


@pytest.mark.parametrize("batch", [False, True])
def test_dice_focal_of_regions_is_monais_own(batch: bool) -> None:
    """For classes MONAI's has a focal part of sigmoids all the same; ours is over the classes, as its FocalLoss can."""
    logits, target = make_batch(0, (2, 3, 5, 6, 7), exclusive=False)
    theirs = DiceFocalLoss(sigmoid=True, squared_pred=True, batch=batch)
    assert_same(DiceLoss(DiceFocalOptions(squared=True, batch=batch), exclusive=False), theirs, logits, target)


def test_soft_dice_of_one_region_is_that_of_distmis() -> None:
    logits, target = make_batch(1, (2, 1, 4, 4, 4), exclusive=False)
    probability, loss = logits.sigmoid().flatten(), DiceLoss(SoftDiceOptions(batch=True), exclusive=False)
    dice = (2 * (probability * target.flatten()).sum() + 1) / (probability.sum() + target.sum() + 1)
    assert float(loss.loss(loss.rows(logits, target))) == pytest.approx(1 - float(dice), rel=1e-6)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("options", ALL, ids=lambda options: options.name)
def test_a_row_depends_on_its_sample_alone(options: Options, exclusive: bool) -> None:
    logits, target = make_batch(2, (3, 4, 5, 6, 7), exclusive=exclusive)
    loss = DiceLoss(options, exclusive)
    whole = loss.rows(logits, target)
    apart = torch.cat([loss.rows(logits[n : n + 1], target[n : n + 1]) for n in range(3)])
    assert torch.allclose(whole, apart, rtol=1e-6)
    assert torch.equal(whole[[2, 0, 1]], loss.rows(logits[[2, 0, 1]], target[[2, 0, 1]]))


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("options", ALL, ids=lambda options: options.name)
def test_levels_are_weighted_by_halves(options: Options, exclusive: bool) -> None:
    logits, target = make_batch(3, (2, 3, 4, 5, 6), exclusive=exclusive)
    levels = torch.stack([logits, logits / 2, -logits], dim=1)
    one, several = DiceLoss(options, exclusive), DiceLoss(options, exclusive, channels=3)

    def by_hand(levels: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = [one.loss(one.rows(level, target)) for level in levels.unbind(1)]
        return (losses[0] + losses[1] / 2 + losses[2] / 4) / 1.75

    assert several.rows(levels, target).ndim == 2
    assert_same(several, by_hand, levels, target)
    assert_same(several, in_two_parts(one), logits, target)
    with pytest.raises(ValueError, match="number of channels"):
        one.rows(levels, target)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("options", ALL, ids=lambda options: options.name)
def test_extreme_logits_and_half_precision_stay_finite(options: Options, exclusive: bool) -> None:
    logits, target = make_batch(4, (2, 3, 4, 4, 4), exclusive=exclusive)
    loss = in_two_parts(DiceLoss(options, exclusive))
    for extreme in (logits * 1e4, (logits * 100).bfloat16(), torch.zeros_like(logits).half()):
        value, gradient = value_and_gradient(loss, extreme, target)
        assert value.dtype == torch.float32
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert gradient.dtype == extreme.dtype
