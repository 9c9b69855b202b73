"""The lab as fixtures; nothing is started before a test asks for it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import containers
from lab.containers import Apptainer
from lab.slurm import SlurmLab


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab]:
    """A running cluster of four nodes and one without GPUs, shared by all tests of the session."""
    with SlurmLab() as lab:
        yield lab


@pytest.fixture
def idle_slurm(slurm: SlurmLab) -> Iterator[SlurmLab]:
    """The same cluster without jobs and with every node up, before the test and after it."""
    slurm.reset()
    yield slurm
    slurm.reset()


@pytest.fixture(scope="session")
def image_folder() -> Iterator[Path]:
    """Debian 12 with Python, for this session alone: runtimes may make folders in it. Readable by every user."""
    folder = Path(tempfile.mkdtemp(prefix="voxscale-image-"))
    folder.chmod(0o755)
    try:
        subprocess.run(["cp", "-a", containers.image_folder(), folder / "python"], check=True, timeout=120)
        yield folder / "python"
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def charliecloud() -> Path:
    """The path of `ch-run`."""
    return containers.charliecloud_program()


@pytest.fixture(scope="session")
def apptainer(image_folder: Path) -> Apptainer:
    return Apptainer(containers.apptainer_program(), containers.apptainer_image(), image_folder)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on the cluster is marked so."""
    for item in items:
        if {"slurm", "idle_slurm"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slurm")
