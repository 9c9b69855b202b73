"""The Cox loss against its definition, scikit-survival and lifelines; its gradient, its limits, its invariances."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pandas as pd
import pytest
import torch
from cohorts import KINDS, Cohort, cohorts, simulate, with_events
from hypothesis import given, settings
from hypothesis import strategies as st
from lifelines import CoxPHFitter
from sksurv.linear_model.coxph import CoxPHOptimizer

from voxscale.tasks.cox import Ties, cox_loss

TIES: list[Ties] = ["efron", "breslow"]


def tensors(cohort: Cohort) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(cohort.risk).requires_grad_(), torch.tensor(cohort.time), torch.tensor(cohort.event)


def value_and_gradient(cohort: Cohort, ties: Ties) -> tuple[float, torch.Tensor]:
    risk, time, event = tensors(cohort)
    loss = cox_loss(risk, time, event, ties=ties)
    (gradient,) = torch.autograd.grad(loss, risk)
    return loss.item(), gradient


def by_definition(risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor, ties: Ties) -> torch.Tensor:
    """Event by event, as the textbook has it; for risks near zero only."""
    total = 0 * risk.sum()
    for moment in time[event].unique():
        tied = risk[event & (time == moment)]
        at_risk = risk[time >= moment].exp().sum()
        for number in range(len(tied)):
            share = number / len(tied) if ties == "efron" else 0.0
            total = total + torch.log(at_risk - share * tied.exp().sum()) - tied[number]
    return total / event.sum().clamp(min=1)


@settings(max_examples=150, deadline=None)
@given(cohorts(least=0), st.sampled_from(TIES))
def test_value_and_gradient_are_those_of_the_definition(cohort: Cohort, ties: Ties) -> None:
    risk, time, event = tensors(cohort)
    expected = by_definition(risk, time, event, ties)
    (gradient,) = torch.autograd.grad(expected, risk)
    found = value_and_gradient(cohort, ties)
    assert found[0] == pytest.approx(float(expected), rel=1e-10, abs=1e-10)
    torch.testing.assert_close(found[1], gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_scikit_survival(kind: str, ties: Ties) -> None:
    for cohort in (simulate(1, 300, **KINDS[kind]), with_events(simulate(2, 50, **KINDS[kind]), 1)):
        oracle = CoxPHOptimizer(cohort.risk[:, None], cohort.event, cohort.time, np.zeros(1), ties)
        expected = oracle.nlog_likelihood(np.ones(1)) * len(cohort) / cohort.event.sum()
        found, gradient = value_and_gradient(cohort, ties)
        assert found == pytest.approx(expected, rel=1e-9)
        oracle.update(np.ones(1))
        slope = float(oracle.gradient[0]) * len(cohort) / cohort.event.sum()
        assert float(gradient @ torch.tensor(cohort.risk)) == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_lifelines_and_is_least_where_it_fits(kind: str) -> None:
    cohort = simulate(3, 300, **KINDS[kind])
    frame = pd.DataFrame({"x": cohort.risk, "time": cohort.time, "event": cohort.event})
    fitted = CoxPHFitter().fit(frame, "time", "event", fit_options={"precision": 1e-12})
    factor = torch.tensor(float(fitted.params_["x"]), dtype=torch.float64, requires_grad=True)
    risk, time, event = tensors(cohort)
    loss = cox_loss(factor * risk, time, event)
    assert float(loss) * cohort.event.sum() == pytest.approx(-fitted.log_likelihood_, rel=1e-9)
    (slope,) = torch.autograd.grad(loss, factor)
    assert abs(float(slope)) < 1e-5


@pytest.mark.parametrize("ties", TIES)
def test_the_gradient_is_that_of_the_value(ties: Ties) -> None:
    risk, time, event = tensors(simulate(4, 40, time_step=300.0, risk_step=0.5))
    assert torch.autograd.gradcheck(lambda each: cox_loss(each, time, event, ties=ties), (risk,))


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("scale", [100.0, 1e4])
def test_large_risks_stay_finite(ties: Ties, scale: float) -> None:
    cohort = simulate(5, 200, time_step=300.0)
    risk = np.where(np.arange(200) % 2, scale, -scale)
    for each in (risk, -risk, np.sort(risk), np.sort(risk)[::-1].copy()):
        loss, gradient = value_and_gradient(Cohort(cohort.time, cohort.event, each), ties)
        assert math.isfinite(loss)
        assert loss >= -1e-9 or ties == "efron"
        assert gradient.isfinite().all()


def test_tied_events_that_carry_all_risk_keep_their_digits() -> None:
    """d events at one time against a case of negligible risk: of their terms log d! remains."""
    risk = torch.tensor([100.0, 100.0, 100.0, -100.0], requires_grad=True)
    loss = cox_loss(risk, torch.tensor([1.0, 1.0, 1.0, 2.0]), torch.tensor([1, 1, 1, 0]))
    assert float(loss) == pytest.approx(math.log(6) / 3, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(cohorts(), st.sampled_from(TIES), st.randoms(use_true_random=False), st.floats(-1000, 1000))
def test_order_does_not_matter_and_neither_does_a_constant(
    cohort: Cohort, ties: Ties, random: Random, constant: float
) -> None:
    rows = list(range(len(cohort)))
    random.shuffle(rows)
    loss, gradient = value_and_gradient(cohort, ties)
    shuffled, shuffled_gradient = value_and_gradient(cohort.take(rows), ties)
    assert shuffled == loss
    torch.testing.assert_close(shuffled_gradient, gradient[rows], rtol=1e-12, atol=1e-14)
    moved, moved_gradient = value_and_gradient(Cohort(cohort.time, cohort.event, cohort.risk + constant), ties)
    assert moved == pytest.approx(loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(moved_gradient, gradient, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("cases", [0, 1, 7])
def test_without_events_the_loss_is_zero_and_its_gradient_flows(ties: Ties, cases: int) -> None:
    weight = torch.ones(1, requires_grad=True)
    loss = cox_loss(weight * 100 * torch.arange(cases), torch.arange(cases), torch.zeros(cases), ties=ties)
    assert float(loss) == 0
    loss.backward()
    assert weight.grad is not None and float(weight.grad) == 0


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_low_precision_is_taken_up(kind: torch.dtype) -> None:
    cohort = simulate(6, 100, risk_step=0.25)  # steps that all types hold exactly
    exact, _ = value_and_gradient(cohort, "efron")
    risk = torch.tensor(cohort.risk, dtype=kind).requires_grad_()
    loss = cox_loss(risk, torch.tensor(cohort.time), torch.tensor(cohort.event))
    loss.backward()
    assert loss.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    assert float(loss) == pytest.approx(exact, rel=1e-6)
    assert risk.grad is not None and risk.grad.dtype == kind


def test_only_the_risk_gets_a_gradient() -> None:
    rows = torch.tensor([[0.5, 3.0, 1.0], [0.1, 5.0, 0.0], [0.2, 2.0, 1.0]], requires_grad=True)
    cox_loss(rows[:, :1], rows[:, 1], rows[:, 2]).backward()
    assert rows.grad is not None
    assert (rows.grad[:, 0] != 0).all()
    assert (rows.grad[:, 1:] == 0).all()


def test_what_does_not_fit_is_refused() -> None:
    three = torch.zeros(3)
    with pytest.raises(ValueError, match=r"one number per sample.*\(3, 2\)"):
        cox_loss(torch.zeros(3, 2), three, three)
    with pytest.raises(ValueError, match="'exact' is neither"):
        cox_loss(three, three, three, ties="exact")  # type: ignore[arg-type]
