"""Saves in the background: what is saved is the state at that moment, and a save that fails is not passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Cli
from voxscale.checkpoint import Checkpoint, load_checkpoint
from voxscale.errors import InfrastructureError
from voxscale.runs import RunFolder
from voxscale.train.events import read_events
from voxscale.train.saver import Saver


def make_checkpoint(step: int, weight: torch.Tensor) -> Checkpoint:
    return Checkpoint({"weight": weight}, {"0.step": torch.tensor(1.0)}, {"step": step})


def test_the_state_may_change_as_soon_as_it_is_handed_over(tmp_path: Path) -> None:
    told: list[Any] = []
    weight = torch.zeros(1_000_000)
    with Saver(RunFolder(tmp_path), keep=3, tell=told.append) as saver:
        for step in (1, 2, 3):
            saver.save(make_checkpoint(step, weight), is_best=step == 2, event={"step": step})
            weight += 1
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        assert load_checkpoint(run.checkpoint(step)).model["weight"].unique().tolist() == [step - 1]
    assert load_checkpoint(run.best).step == 2
    assert told == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_save_that_fails_is_raised_and_not_told_of() -> None:
    told: list[Any] = []
    saver = Saver(RunFolder(Path("/proc/voxscale")), keep=1, tell=told.append)
    saver.save(make_checkpoint(1, torch.zeros(1)), is_best=False, event={})
    with pytest.raises(InfrastructureError, match="could not be written"):
        saver.wait()
    assert not told


def test_what_ended_training_counts_for_more_than_a_failed_save() -> None:
    saver = Saver(RunFolder(Path("/proc/voxscale")), keep=1, tell=lambda event: None)
    with pytest.raises(ZeroDivisionError), saver:
        saver.save(make_checkpoint(1, torch.zeros(1)), is_best=False, event={})
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ({"every_steps": 2}, [2, 4, 6, 8, 10]),
        ({"every_epochs": 1}, [5, 10]),
        ({"every_minutes": 1e-6}, [*range(1, 11)]),
        ({}, [10]),
    ],
    ids=["steps", "epochs", "minutes", "ten minutes"],
)
def test_the_interval_is_in_steps_epochs_or_minutes(
    interval: dict[str, float], expected: list[int], cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Five steps an epoch, and a validation at the end."""
    config = write_config(checkpoint=interval, validate__every=2)
    done = cli_here("train", config, "--devices", 1, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    saved = [
        event["step"] for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "checkpoint"
    ]
    assert saved == expected
