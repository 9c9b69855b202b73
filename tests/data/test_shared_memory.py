"""A folder in shared memory: there as long as someone uses it, and gone with the last one."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

from voxscale.data.shared_memory import SharedFolder, sweep_shared_memory


def _come_and_go(seed: int, root: str, lost: multiprocessing.Queue[tuple[int, int]]) -> None:
    rng, end = random.Random(seed), time.monotonic() + 1.5
    num_opened = num_lost = 0
    while time.monotonic() < end:
        folder = SharedFolder(rng.choice("ab"), Path(root))
        mine = folder.path / f"{seed}.raw"
        mine.touch()
        time.sleep(rng.random() * 0.002)
        num_opened, num_lost = num_opened + 1, num_lost + (not mine.exists())
        folder.close()
    lost.put((num_opened, num_lost))


def test_no_one_loses_a_folder_while_others_come_and_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    lost: multiprocessing.Queue[tuple[int, int]] = context.Queue()
    processes = [context.Process(target=_come_and_go, args=(seed, str(tmp_path), lost)) for seed in range(4)]
    for process in processes:
        process.start()
    results = [lost.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(30)
    assert all(num_opened > 10 and num_lost == 0 for num_opened, num_lost in results), results
    assert list(tmp_path.iterdir()) == [], "not even the lock is left"


def test_one_process_may_have_several(tmp_path: Path) -> None:
    first, second = SharedFolder("a", tmp_path), SharedFolder("b", tmp_path)
    sweep_shared_memory(tmp_path)
    assert first.path.exists()
    first.close()
    assert second.path.exists()
    second.close()
    assert list(tmp_path.iterdir()) == []
