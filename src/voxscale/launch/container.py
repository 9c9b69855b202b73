"""Containers: the words that run a command inside an image, with everything it needs at the same paths.

Text and checks. What has to be there before (the image, folders to bind on) is seen to by `launch.image`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import voxscale
from voxscale.config.site import Container
from voxscale.errors import ConfigError

PROJECT = "/opt/voxscale"  # where the package is bound inside the image
PACKAGE = Path(voxscale.__file__).parent
_PASSED_ON = (
    "SLURM", "CUDA", "NCCL", "GLOO", "TORCH", "PYTORCH", "OMP", "NVIDIA", "ROCR", "HIP", "UCX", "FI_", "VOXSCALE",
)  # fmt: skip
_IMAGES_OWN_VARIABLES = {"PATH", "LD_LIBRARY_PATH", "HOME"}  # the host's would be of no use inside
_EXECUTABLE = {"apptainer": "apptainer", "singularity": "singularity", "charliecloud": "ch-run"}
_SIF, _SIF_AT, _SQUASHFS = b"SIF_MAGIC", 32, b"hsqs"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What an image runs by: nothing of the host is put on it or on what holds it; of programs, nor on a part of it.
_PROGRAMS = (
    "/bin", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys",
    "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/sbin",
)  # fmt: skip
_OF_THE_IMAGE = (*_PROGRAMS, "/dev", "/opt", "/usr/local/bin", "/usr/local/lib", "/usr/share", "/var/lib")


def executable(container: Container) -> str:
    return _EXECUTABLE[container.runtime]


def is_charliecloud(container: Container) -> bool:
    return container.runtime == "charliecloud"


def render_container(
    container: Container, folders: Iterable[Path], *, gpus: bool, python: str, is_own: bool = True, search: str = ""
) -> list[str]:
    """The words before a Python program's own: runtime, binds, image, interpreter.

    `folders` are bound where they are; with `is_own` the package is bound too, so that the image need not hold it.
    `search` is the site's own PYTHONPATH, which comes behind ours. Packages in the home folder, which may be seen
    inside, are left out of account: they are for another Python.
    """
    binds = [word for bind in all_binds(container, folders, is_own=is_own) for word in ("--bind", bind)]
    image = _image_word(container)
    if is_charliecloud(container):
        # It hands on the host's PATH, whose python3 is not the image's; what the image says of its own wins.
        words = [executable(container), f"--set-env=PATH={_PATH}", "--set-env", *container.options, *binds, image, "--"]
    else:
        nv = ["--nv"] if container.nv is True or (container.nv == "auto" and gpus) else []
        words = [executable(container), "exec", *nv, *container.options, *binds, image]
    first = [*([PROJECT] if is_own else []), *_packages(container)]
    path = [f"PYTHONPATH={':'.join(filter(None, [*first, search]))}"] if first else []
    return [*words, "env", "-u", "PYTHONHOME", "PYTHONNOUSERSITE=1", *path, python]


def _packages(container: Container) -> list[str]:
    return [container.packages] if container.packages is not None else []


def all_binds(container: Container, folders: Iterable[Path], *, is_own: bool = True) -> list[str]:
    """What is bound, as the runtimes take it: HOST or HOST:INSIDE. `is_own` includes the package."""
    own = {PROJECT + "/voxscale": f"{PACKAGE}:{PROJECT}/voxscale"} if is_own else {}
    automatic = {**{str(folder): str(folder) for folder in outermost(folders)}, **own}
    automatic |= {packages: packages for packages in _packages(container)}
    return [*(bind for inside, bind in automatic.items() if not _is_bound(container, Path(inside))), *container.binds]


def _is_bound(container: Container, path: Path) -> bool:
    """Whether the site's own binds say what is at a path inside; one of ours would undo them, and their :ro."""
    return any(path.is_relative_to((*bind.split(":"), "")[1] or bind) for bind in container.binds)


def is_of_image(folder: Path) -> bool:
    """Whether a folder of the host, bound where it is, would hide programs, libraries or settings of an image."""
    return any(folder.is_relative_to(own) for own in _PROGRAMS) or any(
        Path(own).is_relative_to(folder) for own in _OF_THE_IMAGE
    )


def image_path(container: Container) -> Path:
    """The file or folder that is run: the image itself, or what is fetched from a reference."""
    if not container.is_reference:
        return Path(container.image)
    name = re.sub(r"[^A-Za-z0-9.]+", "-", container.image).strip("-.")
    digits = sha256(container.image.encode(errors="surrogateescape")).hexdigest()[:8]  # a-b and a_b are two images
    ending = "" if is_charliecloud(container) else ".sif"
    return Path(container.cache or ".") / f"{name}-{digits}{ending}"


def _image_word(container: Container) -> str:
    """The image as it is written, where that is a path: not even a slash at its end is lost."""
    return str(image_path(container)) if container.is_reference else container.image


def render_variables(container: Container) -> list[str]:
    """Lines of a job that settle what an image would see otherwise than its host does."""
    lines = ['export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$HOME/.cache}"']  # the home folder may be another one inside
    if is_charliecloud(container):
        lines.append('export USER="${USER:-${SLURM_JOB_USER:-$UID}}"')  # it does not start without
    return lines


def render_passed_on(container: Container, variables: Iterable[str] = ()) -> str:
    """A shell loop that keeps the variables a rank needs, whatever would drop them; nothing where they are kept anyway.

    Options do, and so do a node's own variables, such as APPTAINER_CLEANENV, and its runtime's settings. The values
    have to be taken from each node's environment, so the loop runs there.
    """
    if is_charliecloud(container):
        return ""
    prefix = container.runtime.upper()
    others = [name for name in variables if name not in _IMAGES_OWN_VARIABLES]
    names = " ".join([*(f"${{!{name}@}}" for name in _PASSED_ON), "XDG_CACHE_HOME", *others])
    keep = f'for name in {names}; do export "{prefix}ENV_$name=${{!name}}"; done'
    return f'{keep}; export {prefix}_NO_EVAL=1; exec "$@"'  # values are texts, not shell code


def needs_words(container: Container) -> list[str]:
    """The words behind the image's Python that look for what voxscale needs."""
    return [f"{PROJECT}/voxscale/launch/needs.py", f"--enter={shlex.join(_enter(container))}", *requirements()]


def _enter(container: Container) -> list[str]:
    """The words that a user types to run a program in the image, with the folder DIR bound."""
    image = _image_word(container)
    if is_charliecloud(container):
        return [executable(container), "--bind", "DIR", image, "--"]
    return [executable(container), "exec", "--bind", "DIR", image]


def requirements() -> list[str]:
    """voxscale's own requirements, without its extras; none where it is not installed but only on the path."""
    try:
        return [need.replace(" ", "") for need in requires("voxscale") or () if "extra ==" not in need]
    except PackageNotFoundError:
        return []


def check_container(container: Container, folders: Iterable[Path]) -> list[str]:
    """What is wrong with image and binds, as far as it can be seen from here; a line each."""
    return [*_check_image(container), *check_binds(container, folders)]


def _check_image(container: Container) -> list[str]:
    found = f"container.image {container.image}"
    if container.is_reference:
        return _check_reference(container)
    image = Path(container.image)
    if not image.is_absolute():
        return [f"{found}: expected an absolute path, or a reference such as docker://NAME"]
    if not image.exists():
        return [f"{found}: no such file or folder"]
    if image.is_dir():
        is_system = any((image / name).exists() for name in ("bin/sh", "usr/bin", "bin"))
        return [] if is_system else [f"{found}: found a folder without programs, expected an unpacked image"]
    if is_charliecloud(container):
        return [f"{found}: found a file; charliecloud expects an unpacked image, which is a folder"]
    start = _first_bytes(image)
    if not start[_SIF_AT:].startswith(_SIF) and not start.startswith(_SQUASHFS):
        return [f"{found}: not an image; {container.runtime} expects a .sif file or a folder"]
    return []


def _check_reference(container: Container) -> list[str]:
    found = f"container.image {container.image}"
    kind, _, rest = container.image.partition(":")
    if is_charliecloud(container) and kind != "docker":
        return [f"{found}: charliecloud fetches docker://NAME only; expected that, or an unpacked image"]
    if kind in ("docker-archive", "oci-archive") and not image_path(container).exists():
        archive = Path(rest.partition(":")[0])
        return [] if archive.is_file() else [f"{found}: {archive} is no file"]
    return []


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(64)
    except OSError:
        return b""


def check_binds(container: Container, folders: Iterable[Path]) -> list[str]:
    """What cannot be bound; a line each."""
    automatic = [folder for folder in outermost(folders) if not _is_bound(container, folder)]
    findings = [
        f"{folder}: would hide the image's own {folder}; use others for data, store, run, script and to start in"
        for folder in automatic
        if is_of_image(folder)
    ]
    findings += [
        f"{path}: a path with : or , cannot be bound into a container"
        for path in (*automatic, PACKAGE)
        if re.search("[:,]", str(path))
    ]
    for bind in container.binds:
        findings += _check_bind(container, bind)
    if container.packages is not None:
        found = f"container.packages {container.packages}"
        if not Path(container.packages).is_absolute() or re.search("[:,]", container.packages):
            findings.append(f"{found}: expected an absolute path without : and ,")
        elif not Path(container.packages).is_dir():
            findings.append(f"{found}: no such folder")
    return findings


def _check_bind(container: Container, bind: str) -> list[str]:
    found = f"container.binds {bind}"
    host, *rest = bind.split(":")
    absolute = host.startswith("/") and all(inside.startswith("/") for inside in rest[:1])
    if not absolute or "," in bind or len(rest) > 2 or (len(rest) == 2 and rest[1] not in ("ro", "rw")):
        return [f"{found}: expected HOST, HOST:INSIDE or HOST:INSIDE:ro, absolute paths without : and ,"]
    findings = [] if Path(host).exists() else [f"{found}: {host} does not exist"]
    if len(rest) == 2 and is_charliecloud(container):
        findings.append(f"{found}: charliecloud cannot bind with :{rest[1]}; leave it out")
    return findings


def outermost(folders: Iterable[Path]) -> list[Path]:
    """The folders without those that lie in others of them, sorted; where one is a link, what it leads to as well."""
    kept: list[Path] = []
    paths = {path for each in folders for path in (each.absolute(), each.resolve())}
    for folder in sorted(paths):
        if not any(folder.is_relative_to(other) for other in kept):
            kept.append(folder)
    return kept


def folders_of(files: Sequence[Path], *, most: int = 16) -> list[Path]:
    """Folders that hold all these files and what links among them lead to: their own, or ever wider ones."""
    folders = outermost({parent for file in files for parent in (file.parent, file.resolve().parent)})
    while len(folders) > most:
        folders = outermost(folder.parent for folder in folders)
    if Path("/") in folders:
        raise ConfigError(
            "data: its files lie in too many places to bind into a container",
            fix="bind what holds them with container.binds in the site, or move them together",
        )
    return folders
