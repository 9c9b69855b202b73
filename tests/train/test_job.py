"""What a rank finds or makes when it starts."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli
from voxscale.config.load import read_config
from voxscale.data import build
from voxscale.parallel import World
from voxscale.runs import RunFolder
from voxscale.train.job import open_run_store


def test_a_node_without_the_store_builds_it_with_the_threads_of_all_its_ranks(
    write_config: Callable[..., Path], cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = write_config(data__store=str(tmp_path / "store"), train__threads=2), RunFolder(tmp_path / "run")
    assert cli_here("train", config, "train.stop_after={steps: 1}", "--devices", 1, "--run", run.root).code == 75
    digest = open_run_store(run, read_config(run.config), World(), os.environ).digest
    shutil.rmtree(tmp_path / "store")
    read, together = build.read_case, threading.Barrier(4)

    def read_together(*case: Any, **declared: Any) -> Any:
        together.wait(30)  # twelve cases: three times four
        return read(*case, **declared)

    monkeypatch.setattr(build, "read_case", read_together)
    store = open_run_store(run, read_config(run.config), World(size=4, local_size=2), os.environ)
    assert (len(store), store.digest) == (12, digest)
