"""A folder in shared memory: there as long as someone uses it, and gone with the last one."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from voxscale.data.shared_memory import SharedFolder, sweep_shared_memory
from voxscale.errors import InfrastructureError


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


def test_what_others_have_put_there_is_not_used(tmp_path: Path) -> None:
    """Names can be guessed: another user's folder could hold other voxels, and would be handed a patient's."""
    folder, elsewhere = tmp_path / f"voxscale-{os.getuid()}-a", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    sweep_shared_memory(tmp_path)
    with pytest.raises(InfrastructureError, match="found another user's, or a link"):
        SharedFolder("a", tmp_path)
    assert not list(elsewhere.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
@pytest.mark.parametrize("name", [f"voxscale-{os.getuid()}-a", f".voxscale-{os.getuid()}.lock"])
def test_another_users_folder_or_lock_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir() if name.endswith("a") else (tmp_path / name).touch()
    os.chown(tmp_path / name, 4711, 4711)
    with pytest.raises(InfrastructureError, match="found another user's, or a link"):
        SharedFolder("a", tmp_path)
    sweep_shared_memory(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.lstat().st_uid == 4711] == [name]
