"""Ranks go on from the same checkpoint, or not at all: each may see the shared folder otherwise."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from voxscale.checkpoint import Checkpoint, load_last, save_checkpoint
from voxscale.parallel import World
from voxscale.runs import RunFolder
from voxscale.train.resume import load_agreed

RANK = """
import os, sys
from pathlib import Path
import torch
from voxscale.errors import InfrastructureError
from voxscale.parallel import World, joined, leave
from voxscale.runs import RunFolder
from voxscale.train.resume import load_agreed

world, device = World.from_env(os.environ), torch.device("cpu")
with joined(world, backend="gloo", device=device, timeout_s=60):
    for place in ("same", f"seen-by-{world.rank}"):
        try:
            found = load_agreed(RunFolder(Path(sys.argv[1]) / place), world, device, lambda text: None)
            print(place, found.step)
        except InfrastructureError as error:
            print(place, error.message)
leave(0)
"""


def save(run: RunFolder, *steps: int) -> None:
    for step in steps:
        save_checkpoint(run, Checkpoint({"weight": torch.ones(step)}, {}, {"step": step}), keep=9, is_best=False)


def damage(run: RunFolder, step: int) -> None:
    (run.checkpoint(step) / "model.safetensors").write_bytes(b"")


@pytest.mark.ranks
def test_ranks_that_see_different_files_do_not_train_on(session_environ: dict[str, str], tmp_path: Path) -> None:
    save(RunFolder(tmp_path / "same"), 1, 2)
    damage(RunFolder(tmp_path / "same"), 2)
    save(RunFolder(tmp_path / "seen-by-1"), 1, 2)
    shutil.copytree(tmp_path / "seen-by-1", tmp_path / "seen-by-0", symlinks=True)
    damage(RunFolder(tmp_path / "seen-by-0"), 2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {**session_environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, tmp_path], env={**place, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    first, second = (rank.communicate(timeout=120)[0] for rank in ranks)
    assert "same 1\n" in first
    assert "seen-by-0/checkpoints/step-00000002: does not match its manifest" in first
    assert "but rank 1 has read it whole" in first
    assert second == "same 1\nseen-by-1 2\n"
    assert sorted(os.listdir(tmp_path / "same" / "checkpoints")) == ["damaged-00000002", "last", "step-00000001"]


def test_what_was_passed_over_does_not_push_a_whole_one_out(tmp_path: Path) -> None:
    """Of two that are kept one would be damaged, and the next damage would be the end of the run."""
    run = RunFolder(tmp_path)
    save(run, 4, 6)
    damage(run, 6)
    found = load_agreed(run, World(), torch.device("cpu"), lambda text: None)
    assert found is not None
    save_checkpoint(run, Checkpoint({}, {}, {"step": 8}), keep=2, is_best=False)
    damage(run, 8)
    found = load_last(run, lambda text: None)
    assert found is not None
    assert found.step == 4
