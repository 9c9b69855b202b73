"""Containers: the words that run a command inside an image, with everything it needs at the same paths."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import voxscale
from voxscale.config.site import Container
from voxscale.errors import ConfigError

PROJECT = "/opt/voxscale"  # where the package is bound inside the image
_DROPS_VARIABLES = {"-e", "--cleanenv", "-C", "--containall"}
_PASSED_ON = ("SLURM", "CUDA", "NCCL", "GLOO", "TORCH", "OMP", "NVIDIA", "ROCR", "HIP", "VOXSCALE")
_EXECUTABLE = {"apptainer": "apptainer", "singularity": "singularity", "charliecloud": "ch-run"}


def executable(container: Container) -> str:
    return _EXECUTABLE[container.runtime]


def render_container(container: Container, folders: Iterable[Path], *, gpus: bool, python: str) -> list[str]:
    """The words before a Python program's own: runtime, binds, image, interpreter.

    `folders` are bound where they are; the package is bound so that the image need not hold it.
    """
    binds = [str(folder) for folder in outermost(folders)]
    binds += [f"{Path(voxscale.__file__).parent}:{PROJECT}/voxscale", *container.binds]
    binds += [container.packages] if container.packages is not None else []
    search = [PROJECT, *([container.packages] if container.packages is not None else [])]
    words = [executable(container)]
    if container.runtime == "charliecloud":
        words += ["--unset-env=PYTHONHOME", *container.options]
        words += [word for bind in binds for word in ("--bind", bind)]
        words += [container.image, "--"]
    else:
        words += ["exec", *(["--nv"] if container.nv is True or (container.nv == "auto" and gpus) else [])]
        words += container.options
        words += [word for bind in binds for word in ("--bind", bind)]
        words += [container.image]
    return [*words, "env", f"PYTHONPATH={':'.join(search)}", python]


def render_passed_on(container: Container) -> str:
    """A shell loop that keeps the variables a rank needs, where the container's options would drop them; or nothing.

    They have to be taken from each node's own environment, so the loop runs there.
    """
    if container.runtime == "charliecloud" or not _DROPS_VARIABLES & set(container.options):
        return ""
    prefix = container.runtime.upper()
    names = " ".join(f"${{!{name}@}}" for name in _PASSED_ON)
    return f'for name in {names}; do export "{prefix}ENV_$name=${{!name}}"; done; exec "$@"'


def check_container(container: Container, folders: Iterable[Path]) -> list[str]:
    """What is wrong with image and binds, as far as it can be seen from here; a line each."""
    findings = []
    image = Path(container.image)
    if not container.is_reference and not image.exists():
        findings.append(f"container.image {image}: no such file or folder")
    elif container.runtime == "charliecloud" and not image.is_dir():
        findings.append(f"container.image {image}: charliecloud expects an unpacked image, which is a folder")
    for bind in (*container.binds, *([container.packages] if container.packages else [])):
        host = bind.partition(":")[0]
        if not Path(host).exists():
            findings.append(f"container.binds {bind}: {host} does not exist")
    findings += [
        f"{folder}: a path with : or , cannot be bound into a container"
        for folder in outermost(folders)
        if re.search("[:,]", str(folder))
    ]
    return findings


def outermost(folders: Iterable[Path]) -> list[Path]:
    """The folders without those that lie in others of them, sorted."""
    kept: list[Path] = []
    for folder in sorted({folder.resolve() for folder in folders}):
        if not any(folder.is_relative_to(other) for other in kept):
            kept.append(folder)
    return kept


def folders_of(files: Sequence[Path], *, most: int = 16) -> list[Path]:
    """Folders that hold all these files: their own, or ever wider ones until there are few."""
    folders = outermost(file.parent for file in files)
    while len(folders) > most:
        folders = outermost(folder.parent for folder in folders)
    if Path("/") in folders:
        raise ConfigError(
            "data: its files lie in too many places to bind into a container",
            fix="bind what holds them with container.binds in the site, or move them together",
        )
    return folders
