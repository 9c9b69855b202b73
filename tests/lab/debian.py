"""Programs the lab needs, installed from the machine's own Debian mirror where they are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

import pytest

INSTALL_TIMEOUT_S = 600


def require(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Make sure that `programs` can be run, by installing `packages`; skip the test where that cannot be done."""
    if not missing(programs):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(
            f"{', '.join(missing(programs))} not found, and only root on Debian can install {' '.join(packages)}"
        )
    if not _install(packages):
        _apt_get("update")
        if not _install(packages):
            pytest.skip(f"apt-get could not install {' '.join(packages)}")
    if still := missing(programs):
        pytest.skip(f"{' '.join(packages)} installed, and still no {', '.join(still)}")


def missing(programs: Sequence[str]) -> list[str]:
    return [name for name in programs if shutil.which(name, path=search_path()) is None]


def search_path() -> str:
    """The PATH with the folders of the daemons, which ordinary users lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _install(packages: Sequence[str]) -> bool:
    return _apt_get("install", "-y", "--no-install-recommends", *packages)


def _apt_get(*arguments: str) -> bool:
    # RUNLEVEL=1 keeps the packages from starting services of their own; the lock may be held by another session.
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1", "PATH": search_path()}
    command = ["apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={INSTALL_TIMEOUT_S}", *arguments]
    done = subprocess.run(command, env=environ, timeout=2 * INSTALL_TIMEOUT_S, capture_output=True, check=False)
    return done.returncode == 0
