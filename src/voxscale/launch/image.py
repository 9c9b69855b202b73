"""Images: which kinds there are, fetching them once, and making them ready for a job before it is submitted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from voxscale.config.site import Container, Site
from voxscale.errors import ConfigError, InfrastructureError, printable
from voxscale.files import locked, publish, remove, remove_temporaries
from voxscale.launch.container import (
    all_binds,
    executable,
    image_path,
    is_charliecloud,
    needs_words,
    render_container,
)

_TRY_S = 120.0  # for an image to start here and look at its packages
_FETCH_S = 4 * 3600.0
# What Charliecloud wants to find in an image: a file of variables to set, and files that it binds if they are there.
_FILES = ("ch/environment", "etc/hosts", "etc/resolv.conf")
_NOT_FOUND = 127


def make_ready(
    site: Site, folders: Sequence[Path], environ: Mapping[str, str], *, is_own: bool = True, python: str | None = None
) -> None:
    """Everything that a job's container needs: folders to bind, the image fetched, places in it to bind on.

    Called before a job is submitted, nothing happens without a container. With `is_own`, refuses an image that lacks
    what voxscale needs, where the runtime is here to tell; else the job does.
    """
    container = site.container
    if container is None:
        return
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)  # a store may not be there yet, and runtimes refuse to bind nothing
    is_here = find_runtime(container, environ) is not None
    if not is_here:
        where = "; its modules may bring it on nodes" if site.modules else "; nodes have to have it"
        print(f"warning: {executable(container)} is not on this machine{where}", file=sys.stderr)
    if container.is_reference:
        fetch_image(container, environ)
    if is_charliecloud(container):
        _make_targets(container, all_binds(container, folders, is_own=is_own))
    if is_here and is_own:
        search = site.env.get("PYTHONPATH", "")
        words = render_container(
            container, folders, gpus=False, python=python or site.python or "python3", search=search
        )
        _refuse_lacking(container, words, environ)


def find_runtime(container: Container, environ: Mapping[str, str]) -> str | None:
    return shutil.which(executable(container), path=environ.get("PATH"))


def fetch_image(container: Container, environ: Mapping[str, str]) -> Path:
    """The image that a reference names, fetched if it is not in the cache: whole, or not at all, and by one process."""
    image = image_path(container)
    if image.exists():
        return image
    fix = f"fetch it where there is a network and set container.image to that file, or see `{executable(container)}`"
    if find_runtime(container, environ) is None:
        raise InfrastructureError(
            f"container.image {container.image}: not fetched yet, and {executable(container)} is not here", fix=fix
        )
    print(f"fetching {container.image} into {image}", file=sys.stderr, flush=True)
    try:
        with locked(image.with_name(".lock")):  # one for all, so that what is half there is nobody's
            if not image.exists():
                remove_temporaries(image.parent)
                with publish(image) as temporary:
                    _fetch(container, temporary, environ)
    except OSError as error:
        raise InfrastructureError(
            f"container.image {container.image}: cannot be kept in {image.parent}: {error.strerror}",
            fix="set container.cache to a folder with room that all nodes see",
        ) from error
    except subprocess.SubprocessError as error:
        raise InfrastructureError(
            f"container.image {container.image}: could not be fetched: {last_words(error)}", fix=fix
        ) from error
    return image


def _fetch(container: Container, out: Path, environ: Mapping[str, str]) -> None:
    if not is_charliecloud(container):
        verb = "pull" if "://" in container.image else "build"
        run_tool([executable(container), verb, str(out), container.image], environ, timeout_s=_FETCH_S)
        return
    name = container.image.removeprefix("docker://")
    run_tool(["ch-image", "pull", name], environ, timeout_s=_FETCH_S)
    try:
        run_tool(["ch-convert", "-i", "ch-image", "-o", "dir", name, str(out)], environ, timeout_s=_FETCH_S)
    except subprocess.SubprocessError:
        remove(out)
        raise


def run_tool(words: Sequence[str], environ: Mapping[str, str], *, timeout_s: float, cwd: Path | None = None) -> None:
    """Run a program of a container runtime to its end; raises SubprocessError with what it said."""
    subprocess.run(
        words, env=with_user(environ), cwd=cwd, timeout=timeout_s, check=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip


def with_user(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with USER, without which Charliecloud does not start."""
    return {"USER": str(os.getuid()), **environ}


def last_words(error: subprocess.SubprocessError) -> str:
    """What a failed program said last, on one line."""
    said = getattr(error, "output", None) or ""
    text = said if isinstance(said, str) else said.decode(errors="replace")  # of a time-out these are bytes
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return printable(" / ".join(lines[-3:])) or str(error)


def _make_targets(container: Container, binds: Sequence[str]) -> None:
    """Make the places in an unpacked image on which Charliecloud binds: it cannot while it runs one."""
    image = image_path(container)
    host_has = ("/tmp", "/dev", "/proc", "/sys")  # noqa: S108 bound from the host, so what is there is inside
    findings = []
    for host, *inside in (bind.split(":") for bind in binds):
        path = Path(inside[0] if inside else host)
        if not any(path.is_relative_to(each) for each in host_has):
            findings += _make_place(image, path, is_folder=Path(host).is_dir())
    for file in _FILES:
        is_dangling = (image / file).is_symlink() and not (image / file).exists()
        findings += [] if is_dangling else _make_place(image, Path("/", file), is_folder=False)
    if findings:
        raise ConfigError.from_findings(
            findings,
            fix=f"copy the image, cp -r {image} DIR, and make them there; or use other folders",
        )


def _make_place(image: Path, path: Path, *, is_folder: bool) -> list[str]:
    """Make an empty folder or file in an image if it is not there, and nothing outside; returns what is in the way.

    Charliecloud follows an image's links as the host does: one to an absolute path leads out of the image, where it
    refuses to bind.
    """
    found = f"container.image {image}"
    try:
        place = (image / path.relative_to("/")).resolve()
        if not place.is_relative_to(image.resolve()):
            return [f"{found}: a link in it leads from {path} to {place}, out of the image; expected {path} in it"]
        folder = place if is_folder else place.parent
        folder.mkdir(parents=True, exist_ok=True)
        if not is_folder and not place.exists():
            place.touch(exist_ok=False)
    except (OSError, RuntimeError):  # a ring of links is the latter
        return [f"{found}: has no {path} to bind on, and you may not make it"]
    return []


def _refuse_lacking(container: Container, python: Sequence[str], environ: Mapping[str, str]) -> None:
    """Look into the image from here; `python` are the words that start its interpreter."""
    words = [*python, *needs_words(container), "--json"]
    try:
        done = subprocess.run(
            words, env=with_user(environ), timeout=_TRY_S, capture_output=True, check=False, text=True, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"warning: the image could not be tried here: {error}", file=sys.stderr)
        return
    if done.returncode == InfrastructureError.exit_code and done.stdout.startswith("{"):
        said = json.loads(done.stdout)
        raise InfrastructureError(f"container.image {container.image}: {said['message']}", fix=said["fix"])
    if done.returncode == _NOT_FOUND:
        raise InfrastructureError(
            f"container.image {container.image}: has no {python[-1]}", fix="set `python` in the site to the image's own"
        )
    if done.returncode:
        last = printable(" / ".join(done.stderr.strip().splitlines()[-2:]))
        print(f"warning: the image does not start on this machine: {last}", file=sys.stderr)
