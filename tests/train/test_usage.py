"""What ranks record of the memory and the processor that they use."""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from voxscale.parallel import World
from voxscale.runs import RunFolder
from voxscale.train import usage
from voxscale.train.usage import recorded_usage

CPU = torch.device("cpu")
FIELDS = {
    *("rank", "host", "pid", "device", "since", "time", "ended", "memory_bytes", "memory_peak_bytes"),
    *("resident_bytes", "cpu_percent", "gpu"),
}


def read(run: RunFolder, rank: int = 0) -> dict[str, object]:
    content: dict[str, object] = json.loads(run.usage(rank).read_text())
    return content


@pytest.mark.ranks
def test_each_rank_of_a_training_leaves_its_last_word(undisturbed: Callable[[int], Path]) -> None:
    run = RunFolder(undisturbed(2))
    assert list(run.usages()) == [0, 1]
    records = [read(run, rank) for rank in (0, 1)]
    assert [record["rank"] for record in records] == [0, 1]
    assert len({record["pid"] for record in records}) == 2
    for record in records:
        assert record.keys() == FIELDS
        assert (record["ended"], record["device"], record["gpu"]) == (True, "cpu", None)
        assert 1 << 20 < int(str(record["memory_bytes"])) <= int(str(record["memory_peak_bytes"]))
        assert int(str(record["memory_bytes"])) < int(str(record["resident_bytes"]))
    assert sorted(path.name for path in run.usage(0).parent.iterdir()) == ["rank-0000.json", "rank-0001.json"]


def test_it_is_kept_up_to_date_and_ends_with_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "EVERY_S", 0.6)
    run = RunFolder(tmp_path)
    with recorded_usage(run, World(), CPU):
        deadline = time.monotonic() + 60
        while not run.usage(0).exists():
            assert time.monotonic() < deadline
        before = int(str(read(run)["memory_bytes"]))
        held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # goes back to the system at once
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        while (record := read(run))["cpu_percent"] is None or int(str(record["memory_bytes"])) < before + (48 << 20):
            assert time.monotonic() < deadline
            sum(range(100_000))
        assert (record["pid"], record["ended"]) == (os.getpid(), False)
        assert float(str(record["cpu_percent"])) > 0, "a thread was busy all the time"
        held.close()
    record = read(run)
    assert record["ended"] is True
    assert int(str(record["memory_peak_bytes"])) > int(str(record["memory_bytes"])) + (48 << 20)
    assert "usage" not in {thread.name for thread in threading.enumerate()}


def test_what_earlier_starts_left_is_taken_away(tmp_path: Path) -> None:
    """Ranks that are no more, and what a kill left half; but nothing of another rank that lives."""
    run = RunFolder(tmp_path)
    folder = run.usage(0).parent
    folder.mkdir(parents=True)
    for name in ("rank-0001.json", "rank-0002.json", ".rank-0000.json.0123abcd.tmp", ".rank-0001.json.0123abcd.tmp"):
        (folder / name).write_text("{}")
    with recorded_usage(run, World(0, 2), CPU):
        pass
    assert {path.name for path in folder.iterdir()} == {
        *("rank-0000.json", "rank-0001.json", ".rank-0001.json.0123abcd.tmp")
    }


def test_a_place_that_cannot_be_written_does_not_stop_the_work(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    worked = False
    with recorded_usage(RunFolder(tmp_path), World(), CPU):
        worked = True
    assert worked


def test_an_error_of_the_work_comes_out(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), recorded_usage(RunFolder(tmp_path), World(), CPU):
        raise ZeroDivisionError
    assert read(RunFolder(tmp_path))["ended"] is True
