"""What a step costs is measured as a run takes it, at its dearest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import Cli
from voxscale.parallel import World
from voxscale.plan.costs import Costs
from voxscale.runs import RunFolder
from voxscale.train.job import open_job
from voxscale.train.measure import measure_run
from voxscale.train.trainer import Trainer

NETWORK = """
import torch

class Halves(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.encoder = torch.nn.Conv3d(in_channels, 16, 3, padding=1)
        self.head = torch.nn.Conv3d(16, out_channels, 1)

    def forward(self, image):
        return self.head(self.encoder(image))

def build(in_channels, out_channels):
    return Halves(in_channels, out_channels)
"""
PLAIN = {"train__precision": "fp32", "train__compile": False, "train__channels_last": False}
Write = Callable[..., Path]


@pytest.fixture
def make_run(
    cli_here: Cli, write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    (tmp_path / "halves.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)

    def make(**fields: object) -> Path:
        config, run = write_config(model={"name": "halves:build"}, **PLAIN, **fields), tmp_path / "run"
        done = cli_here("train", config, "--no-start", "--devices", 1, "--run", run)
        assert done.code == 0, done.err
        return run

    return make


def test_an_encoder_that_is_held_at_first_is_measured_as_it_trains(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run, out = make_run(train__freeze={"encoder": 999}, train__epochs=1000), tmp_path / "costs.json"
    before = (run / "config.yaml").read_text()
    measure_run(RunFolder(run), World(), os.environ, out=out, seconds=0.1)
    costs = Costs.from_record(json.loads(out.read_text()))
    assert costs.gradient_bytes == costs.weights_bytes, "the whole network's"
    assert costs.optimizer_bytes > 2 * costs.weights_bytes
    assert costs.communication_s == 0.0
    assert costs.validate_case_s and costs.full_case_s, "the best is measured in full"
    assert (run / "config.yaml").read_text() == before


def test_ranks_that_hand_their_gradient_on_cannot_tell_what_sharing_costs(make_run: Callable[..., Path]) -> None:
    job = open_job(RunFolder(make_run(train__deterministic="exact")), World(), os.environ)
    for size, told in ((1, True), (2, False)):
        trainer = Trainer(replace(job, world=World(0, size)))
        trainer._stepper = trainer._make_stepper()
        assert trainer.tells_sharing == told
