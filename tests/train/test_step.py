"""The gradient of a step over ranks is that of the loss over the whole batch, to the last digits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import Finished
from train.gradient_of_step import IMAGES, TARGETS, Risk
from voxscale.tasks.cox import cox_loss

PROGRAM = Path(__file__).with_name("gradient_of_step.py")


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 2), (2, 4), (2, 1), (4, 1)])
def test_ranks_without_events_and_uneven_shares_leave_the_gradient_as_it_is(
    ranks: int, micro_batch: int, run_python: Callable[..., Finished], tmp_path: Path
) -> None:
    model = Risk()
    loss = cox_loss(model(IMAGES, torch.zeros(7, 1, dtype=torch.float64)), TARGETS[:, 0], TARGETS[:, 1])
    (gradient,) = torch.autograd.grad(loss, model.layer.weight)
    assert gradient.abs().max() > 0.01
    out = tmp_path / "found.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = run_python(*torchrun, PROGRAM, out, micro_batch)
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
    assert found["gradient"] == pytest.approx(gradient.flatten().tolist(), rel=1e-12, abs=1e-15)
