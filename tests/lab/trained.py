"""One training that many tests disturb or run elsewhere, and what it gives undisturbed on this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Cli, tiny_config

LONG: dict[str, Any] = {"train__epochs": 4, "validate__every": 2, "model": {"name": "networks:build_slow"}}
NUM_STEPS = 20
# So slow that there is time to disturb the run. A job that was requeued is not slowed down again.
SLOW = {"SLOW_FIRST": "0.5"}
NETWORKS = """
import os
import time

import torch


class Slow(torch.nn.Conv3d):
    def forward(self, image):
        if self.training:
            first = "0" if os.environ.get("SLURM_RESTART_COUNT") else os.environ.get("SLOW_FIRST", "0")
            time.sleep(float(os.environ.get("SLOW_STEPS", first)))
        return super().forward(image)


class Broken(torch.nn.Conv3d):
    def forward(self, image):
        if os.environ.get("RANK") == "1":
            raise ValueError("rank one has had enough")
        return super().forward(image)


def build_slow(in_channels, out_channels):
    return Slow(in_channels, out_channels, 3, padding=1)


def build_broken(in_channels, out_channels):
    return Broken(in_channels, out_channels, 1)
"""


@pytest.fixture(scope="session")
def networks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the networks of these trainings, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("networks")
    (folder / "networks.py").write_text(NETWORKS)
    return folder


@pytest.fixture(scope="session")
def undisturbed(
    cli_here: Cli, dataset: Path, networks_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """The long run on this machine with so many ranks, trained once in a session."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "long.yaml").write_text(yaml.safe_dump(tiny_config(dataset, **LONG)))

    @cache
    def run(ranks: int) -> Path:
        root = folder / f"on-{ranks}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(networks_folder))
            patch.syspath_prepend(networks_folder)
            done = cli_here("train", folder / "long.yaml", "--devices", ranks, "--run", root)
        assert done.code == 0, done.err
        return root

    return run
