"""Ranks that work at their own pace: who is slow is waited for, who hangs is not. Ranks that share their gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Finished

RANK = """
import os, time
import torch
from voxscale.errors import TimedOutError
from voxscale.parallel import Pace, World, gather_records, joined, leave

world, device = World.from_env(os.environ), torch.device("cpu")
with joined(world, backend="gloo", device=device, timeout_s=3):
    pace = Pace(world, device)
    for seconds in ([0.1], [1.0] * 5)[world.rank]:
        time.sleep(seconds)
        pace.advance()
    pace.finish()
    records = gather_records([{"rank": world.rank}], world, device, together=True)
    assert [record["rank"] for record in records] == [0, 1]
    began, pace = time.monotonic(), Pace(world, device)
    if world.rank == 1:
        time.sleep(9)
    try:
        pace.advance()
        pace.finish()
    except TimedOutError as error:
        assert 2.5 < time.monotonic() - began < 8, time.monotonic() - began
        print(error.message, flush=True)
leave(0)
"""

LAID_OUT = """
import os
import torch
from voxscale.parallel import World, distribute, joined, leave

world, device = World.from_env(os.environ), torch.device("cpu")
with joined(world, backend="gloo", device=device, timeout_s=30):
    model = torch.nn.Sequential(torch.nn.Conv3d(2, 4, 3), torch.nn.Conv3d(4, 4, 1))
    model.to(memory_format=torch.channels_last_3d)
    model = distribute(model, world, device)
    volume = torch.ones(1, 2, 6, 6, 6).contiguous(memory_format=torch.channels_last_3d)
    for _ in range(2):
        model(volume).sum().backward()
leave(0)
"""


@pytest.mark.ranks
def test_a_layout_that_the_ranks_chose_is_no_news(run_python: Callable[..., Finished], tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(LAID_OUT)
    done = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, tmp_path / "rank.py")
    assert done.code == 0, done.err
    assert "strides" not in done.err


@pytest.mark.ranks
def test_who_works_is_waited_for_and_who_hangs_is_not(run_python: Callable[..., Finished], tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    done = run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, tmp_path / "rank.py")
    assert "another rank did not answer within 3 s" in done.out, done.err
