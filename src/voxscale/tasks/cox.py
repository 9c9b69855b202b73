"""The Cox partial likelihood as a loss over all samples of a batch."""

from __future__ import annotations

from typing import Literal

import torch

Ties = Literal["efron", "breslow"]


def cox_loss(risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor, *, ties: Ties = "efron") -> torch.Tensor:
    """The negative log partial likelihood per event; `risk` is the log hazard ratio of each sample, (n,) or (n, 1).

    `event` is 1 or true where `time` ends in an event, 0 or false where it is censored. The gradient goes to `risk`
    alone. Without any event the loss and its gradient are zero. The rows may come in any order: the result is the
    same to the last bit. Computed in float64; the loss has the type of `risk`, at least float32.
    """
    if ties not in ("efron", "breslow"):
        raise ValueError(f"ties {ties!r} is neither 'efron' nor 'breslow'")
    if not risk.numel() == time.numel() == event.numel():
        shapes = ", ".join(str(tuple(each.shape)) for each in (risk, time, event))
        raise ValueError(f"risk, time and event must have one number per sample; their shapes are {shapes}")
    rows = risk.reshape(-1).double(), time.detach().reshape(-1).double(), event.detach().reshape(-1) > 0.5
    loss = _loss(*_ordered(*rows), efron=ties == "efron")
    return loss.to(torch.promote_types(risk.dtype, torch.float32))


def _ordered(
    risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latest first, so that those at risk come before; at one time the censored before the events.

    Also by risk, so that sums do not depend on the order in which rows came.
    """
    order = torch.argsort(risk.detach(), stable=True)
    order = order[torch.argsort(event[order].byte(), stable=True)]
    order = order[torch.argsort(time[order], descending=True, stable=True)]
    return risk[order], time[order], event[order]


def _loss(risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor, *, efron: bool) -> torch.Tensor:
    last = torch.searchsorted(-time, -time, right=True) - 1  # the last row of the same time
    at_risk = _running_logsumexp(risk)[last]
    terms = at_risk - risk
    if efron:
        share = _efron_shares(time, event, last)
        tied = _running_logsumexp(risk, segment=torch.stack((time, event.double())))[last]
        # Not log(sum - share · tied): that would lose all digits where those who have the event carry all risk.
        terms = terms + torch.log1p(-share * torch.exp((tied - at_risk).clamp(max=0.0)))
    return torch.where(event, terms, 0.0).sum() / event.sum().clamp(min=1)


def _efron_shares(time: torch.Tensor, event: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """0, 1/d, … (d - 1)/d for the d events of one time; 0 for the censored."""
    first = torch.searchsorted(-time, -time, right=False)
    events = torch.nn.functional.pad(event.long().cumsum(0), (1, 0))
    earlier = events[:-1] - events[first]
    tied = events[last + 1] - events[first]
    return torch.where(event, earlier.double() / tied.clamp(min=1), 0.0)


def _running_logsumexp(values: torch.Tensor, *, segment: torch.Tensor | None = None) -> torch.Tensor:
    """log(exp(values[0]) + … + exp(values[i])) for each i; with `segment`, (k, n), from where the segment of i starts.

    By doubling: log n steps of element-wise sums, which are the same on every device and in every run.
    """
    shift = 1
    while shift < len(values):
        summed = torch.logaddexp(values[shift:], values[:-shift])
        if segment is not None:
            same = (segment[:, shift:] == segment[:, :-shift]).all(0)
            summed = torch.where(same, summed, values[shift:])
        values = torch.cat((values[:shift], summed))
        shift *= 2
    return values
