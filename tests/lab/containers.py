"""Images and container runtimes for tests, built once and kept in a cache that a killed build cannot spoil."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.debian import require, search_path

BUILD_TIMEOUT_S = 600
_SUITE = "bookworm"
_SCRIPT = Path(__file__).with_name("get_apptainer.sh")


@dataclass(frozen=True)
class Apptainer:
    """The program, and the image in both forms it takes."""

    program: Path
    sif: Path
    sandbox: Path


def cache_folder() -> Path:
    """Where images and runtimes are kept between sessions; root's are where jobs of other users can read them too."""
    own = Path("/var/cache") if os.geteuid() == 0 else Path("~/.cache").expanduser()
    folder = Path(os.environ.get("VOXSCALE_LAB_CACHE", own / "voxscale-lab"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def image_folder() -> Path:
    """A file system of Debian 12 with its own Python 3.11, as a folder: what Charliecloud runs."""
    require(["mmdebstrap"], ["mmdebstrap"])
    return _built(f"{_SUITE}-python-2", _build_image)


def apptainer_program() -> Path:
    """Apptainer, which Debian 12 does not have, in a folder of its own."""
    require(["mksquashfs", "squashfuse", "patchelf"], ["squashfs-tools", "squashfuse", "patchelf"])
    return _built("apptainer-1", _get_apptainer) / "usr/bin/apptainer"


def apptainer_image() -> Path:
    """The image as one `.sif` file."""
    folder, program = image_folder(), apptainer_program()

    def build(aside: Path) -> None:
        aside.mkdir()
        _run(program, "build", aside / "python.sif", folder)

    return _built(f"{_SUITE}-sif-2", build) / "python.sif"


def charliecloud_program() -> Path:
    """`ch-run`."""
    require(["ch-run"], ["charliecloud"])
    return Path(shutil.which("ch-run", path=search_path()) or "ch-run")


def with_program(program: Path, **variables: str) -> dict[str, str]:
    """The environment, and in it a program that is not on everybody's PATH."""
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", **variables}


def write_archive(file: Path, folder: Path) -> None:
    """A Docker archive, as `docker save` writes it, of an image with the content of a folder."""
    layer = file.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        tar.add(folder, arcname=".")
    with layer.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    parts = {
        "config.json": {
            "architecture": "amd64", "os": "linux", "config": {},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        },
        "manifest.json": [{"Config": "config.json", "RepoTags": ["image:latest"], "Layers": ["layer.tar"]}],
    }  # fmt: skip
    with tarfile.open(file, "w") as tar:
        for name, part in parts.items():
            content = json.dumps(part).encode()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        tar.add(layer, arcname="layer.tar")
    layer.unlink()


def _build_image(aside: Path) -> None:
    # The smallest variant that starts Python: 13 s, 191 MB. The wheels of numpy and torch want the C++ library.
    options = ["--variant=essential", "--include=python3,libstdc++6", '--aptopt=APT::Install-Recommends "false"']
    _run("mmdebstrap", *options, _SUITE, aside, _mirror())
    # Device files cannot be copied by ordinary users, and every runtime brings its own.
    shutil.rmtree(aside / "dev")
    (aside / "dev").mkdir()


def _get_apptainer(aside: Path) -> None:
    _run("bash", _SCRIPT, aside, _mirror())


def _mirror() -> str:
    """The machine's own Debian mirror."""
    targets = _run(
        "apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"
    ).splitlines()
    mirrors = [target.split()[0] for target in targets if target.endswith(f"/debian/ {_SUITE}")]
    if not mirrors:
        pytest.skip("this machine's apt has no Debian mirror")
    return mirrors[0]


def _built(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's `name`, made by `build(folder aside)` if it is not there: whole, or not at all."""
    whole = cache_folder() / name
    with _lock(name):
        if not whole.exists():
            aside = whole.with_suffix(".part")
            shutil.rmtree(aside, ignore_errors=True)
            try:
                build(aside)
            except subprocess.SubprocessError as error:
                shutil.rmtree(aside, ignore_errors=True)
                said = (getattr(error, "stderr", None) or "")[-400:]
                pytest.skip(f"{name} could not be built: {error} {said}")
            aside.rename(whole)
    return whole


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    with (cache_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*argv: object) -> str:
    """Run a build step as root, without the variables of the test session."""
    environ = {"PATH": search_path(), "HOME": os.environ.get("HOME", "/root"), "LANG": "C.UTF-8"}
    return subprocess.run(
        [*map(str, argv)], env=environ, timeout=BUILD_TIMEOUT_S, check=True, capture_output=True, text=True
    ).stdout
