"""Images of a real registry, on this machine: pulled by reference, run by a job, and refused in words."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.containers import Apptainer, with_program, write_archive
from lab.debian import require
from voxscale.config.site import Container, Site
from voxscale.errors import InfrastructureError
from voxscale.launch.container import image_path
from voxscale.launch.image import fetch_image, make_ready

pytestmark = [pytest.mark.slurm, pytest.mark.cluster]


@dataclass(frozen=True)
class Registry:
    """Debian's registry of images; it listens on loopback alone, without TLS."""

    address: str

    def push(self, archive: Path, name: str) -> str:
        """Upload a Docker archive; returns the reference that pulls it."""
        reference = f"docker://{self.address}/{name}"
        words = ["skopeo", "copy", "--dest-tls-verify=false", f"docker-archive:{archive}", reference]
        subprocess.run(words, check=True, capture_output=True, timeout=120)
        return reference


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    require(["docker-registry", "skopeo"], ["docker-registry", "skopeo"])
    folder = tmp_path_factory.mktemp("registry")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(folder / "images")}},
        "http": {"addr": address},
    }
    (folder / "config.yml").write_text(json.dumps(settings))
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(["docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log)
    try:
        _await_answer(f"http://{address}/v2/", folder / "log")
        yield Registry(address)
    finally:
        server.terminate()
        server.wait(20)


def _await_answer(address: str, log: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):  # noqa: S310 our own server
                return
        except urllib.error.URLError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


@pytest.fixture
def environ(apptainer: Apptainer, tmp_path: Path) -> dict[str, str]:
    """A user's environment with Apptainer, told that the registry has no TLS."""
    return with_program(apptainer.program, APPTAINER_CACHEDIR=str(tmp_path / "own"), APPTAINER_NOHTTPS="true")


def test_a_reference_is_pulled_once(registry: Registry, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    write_archive(tmp_path / "small.tar", tmp_path / "small")
    wanted = Container(image=registry.push(tmp_path / "small.tar", "small:1"), cache=str(tmp_path / "cache"))
    image = fetch_image(wanted, environ)
    assert image == image_path(wanted)
    said = subprocess.run(["apptainer", "inspect", image], env=environ, capture_output=True, text=True, timeout=60)
    assert registry.address in said.stdout, "the image tells where it came from"
    assert fetch_image(wanted, {"PATH": ""}) == image, "nothing is asked for a second time"
    missing = wanted.model_copy(update={"image": wanted.image.replace(":1", ":2")})
    with pytest.raises(InfrastructureError, match=r"small:2: could not be fetched: .*(unknown|not found)") as refused:
        fetch_image(missing, environ)
    assert refused.value.fix
    assert [path for path in (tmp_path / "cache").iterdir() if path.name != ".lock"] == [image]


def test_what_a_pulled_image_lacks_is_named(
    registry: Registry, environ: dict[str, str], image_folder: Path, tmp_path: Path
) -> None:
    """An image with a Python and none of the packages: said before a job is submitted."""
    write_archive(tmp_path / "python.tar", image_folder)
    pulled = Container(image=registry.push(tmp_path / "python.tar", "team/python:3.11"), cache=str(tmp_path / "cache"))
    with pytest.raises(InfrastructureError, match=r"torch>=2.11: not there") as refused:
        make_ready(Site(container=pulled), [], environ)
    assert refused.value.fix
    assert image_path(pulled).is_file()
