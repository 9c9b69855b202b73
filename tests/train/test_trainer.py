"""Steps whose numbers are read later: what is not finite stays away from the weights until somebody has looked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import Cli
from voxscale.checkpoint import Checkpoint, digest_of
from voxscale.errors import DataError, NotFiniteError
from voxscale.parallel import World
from voxscale.runs import RunFolder
from voxscale.train.job import Job, open_job
from voxscale.train.trainer import Trainer


@pytest.fixture
def make_job(write_config: Callable[..., Path], cli_here: Cli, tmp_path: Path) -> Callable[[str], Job]:
    def make(optimizer: str) -> Job:
        config, run = write_config(train__stop_after={"steps": 1}), tmp_path / "run"
        stated = f"optimizer={{name: {optimizer}, lr: 0.01}}"
        assert cli_here("train", config, stated, "--devices", 1, "--run", run).code == 75
        return open_job(RunFolder(run), World(), os.environ)

    return make


def test_no_step_counts_after_one_that_is_not_finite(make_job: Callable[[str], Job]) -> None:
    job = make_job("adam")
    kept = json.loads(job.run.plan.read_text())
    assert kept["loader"] == {"workers": 1, "prefetch": 2, "pin_memory": False}, "what auto came to is written down"
    assert (kept["threads"], kept["affinity"]) == (1, "system")
    assert kept["ddp"] == {"bucket_mb": 25, "static_graph": False}
    trainer = Trainer(job)
    with closing(job.make_loader(trainer.sampler)) as loader, closing(loader.steps(1, 3)) as batches:
        first = trainer.take(1, next(batches))
        after_first = digest_of(job.model.state_dict())
        spoilt = [replace(batch, image=torch.full_like(batch.image, torch.nan)) for batch in next(batches)]
        second = trainer.take(2, spoilt)
        trainer.take(3, next(batches))
    assert trainer.loss_of(first) > 0
    with pytest.raises(NotFiniteError, match=r"the loss is nan at step 2, with cases .*; the weights are as before it"):
        trainer.loss_of(second)
    assert digest_of(job.model.state_dict()) == after_first


def test_an_optimizer_that_cannot_leave_out_a_step_is_asked_first(make_job: Callable[[str], Job]) -> None:
    job = make_job("novograd")
    trainer = Trainer(job)
    before = digest_of(job.model.state_dict())
    with closing(job.make_loader(trainer.sampler)) as loader, closing(loader.steps(1, 1)) as batches:
        spoilt = [replace(batch, image=torch.full_like(batch.image, torch.nan)) for batch in next(batches)]
        with pytest.raises(NotFiniteError, match="the loss is nan at step 1"):
            trainer.take(1, spoilt)
    assert digest_of(job.model.state_dict()) == before


def test_weights_of_another_model_are_refused(make_job: Callable[[str], Job]) -> None:
    trainer = Trainer(make_job("adam"))
    with pytest.raises(DataError, match=r"checkpoint of step 3 is of another model or optimizer: .* Missing key"):
        trainer.restore(Checkpoint({"weight": torch.ones(1)}, {}, {"step": 3}))
