"""Definition files of images with voxscale's own pinned environment, and building them where the runtime is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from voxscale import __version__
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.files import publish, write_text
from voxscale.launch.container import PACKAGE, PROJECT
from voxscale.launch.image import last_words, run_tool

_BUILD_S = 4 * 3600.0
_WHEELS = "/opt/wheels"
_REQUIREMENTS = f"{PROJECT}/requirements.txt"
_COMMAND = "/usr/local/bin/voxscale"
_METADATA = ("METADATA", "entry_points.txt")


@dataclass(frozen=True)
class Recipe:
    """What an image is made of. `wheels` is a folder to install from instead of the network."""

    runtime: str
    base: str
    requirements: tuple[str, ...]
    wheels: Path | None = None


def default_base() -> str:
    """A small image with the Python that voxscale runs in now."""
    return "docker://python:{}.{}-slim".format(*sys.version_info[:2])


def pinned(name: str = "voxscale") -> tuple[str, ...]:
    """Everything that a package needs, directly or not, as it is installed now: `name==version`, sorted.

    What is not installed is not needed here: it is for an extra or for another system. A local build such as 2.13.0+cpu
    is pinned by its release, so that the index chooses the build.
    """
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        try:
            package = distribution(waiting.pop())
        except PackageNotFoundError:
            continue
        for requirement in package.requires or ():
            needed = re.match(r"[A-Za-z0-9._-]+", requirement)
            if needed is None or "extra ==" in requirement or _plain(needed[0]) in found:
                continue
            try:
                version = distribution(needed[0]).version
            except PackageNotFoundError:
                continue
            found[_plain(needed[0])] = version.partition("+")[0]
            waiting.append(needed[0])
    return tuple(f"{each}=={version}" for each, version in sorted(found.items()))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def render_definition(recipe: Recipe) -> str:
    """The text: a Dockerfile for Charliecloud, a definition file for the others. Pure.

    It is built in the folder that `write_context` fills.
    """
    return _dockerfile(recipe) if recipe.runtime == "charliecloud" else _definition(recipe)


def _definition(recipe: Recipe) -> str:
    kind, separator, rest = recipe.base.partition("://")
    kind, base = (kind, rest) if separator else ("localimage", recipe.base)
    post = [*_install(recipe), f"rm -rf {_WHEELS}"] if recipe.wheels is not None else _install(recipe)
    return "\n".join(
        [
            f"# voxscale {__version__} and all that it needs, pinned.",
            f"# Build it in the folder with its files: {recipe.runtime} build voxscale.sif THIS_FILE",
            f"Bootstrap: {kind}",
            f"From: {base}",
            "",
            "%files",
            *(f"    {name} {place}" for name, place in _files(recipe)),
            "",
            "%post",
            "    set -e",
            *(f"    {line}" for line in post),
            "",
            "%environment",
            f"    export PYTHONPATH={PROJECT}",
            "",
            "%runscript",
            f'    exec {_COMMAND} "$@"',
            "",
        ]
    )


def _dockerfile(recipe: Recipe) -> str:
    return "\n".join(
        [
            f"# voxscale {__version__} and all that it needs, pinned.",
            "# Build it in the folder with its files: ch-image build -t voxscale -f THIS_FILE .",
            f"FROM {recipe.base.removeprefix('docker://')}",
            *(f"COPY {name} {place}" for name, place in _files(recipe)),
            f"RUN {' && '.join(_install(recipe))}",
            f"ENV PYTHONPATH={PROJECT}",
            "",
        ]
    )


def _files(recipe: Recipe) -> list[tuple[str, str]]:
    """What of the context goes where in the image."""
    info = f"voxscale-{__version__}.dist-info"
    own = [("voxscale", f"{PROJECT}/voxscale"), (info, f"{PROJECT}/{info}"), ("requirements.txt", _REQUIREMENTS)]
    return [*own, *([("wheels", _WHEELS)] if recipe.wheels is not None else [])]


def _install(recipe: Recipe) -> list[str]:
    offline = f" --no-index --find-links {_WHEELS}" if recipe.wheels is not None else ""
    start = rf"""printf '#!/bin/sh\nexport PYTHONPATH={PROJECT}\nexec python3 -m voxscale "$@"\n'"""
    return [
        # Older pips know no such option, and take the variable for none of theirs.
        "export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore",
        f"python3 -m pip install --no-cache-dir --disable-pip-version-check{offline} -r {_REQUIREMENTS}",
        f"{start} >{_COMMAND}",
        f"chmod 755 {_COMMAND}",
    ]


def write_context(recipe: Recipe, folder: Path) -> Path:
    """Fill a folder with what the definition copies, and the definition itself. Returns its path."""
    shutil.copytree(PACKAGE, folder / "voxscale", ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / f"voxscale-{__version__}.dist-info"
    info.mkdir()
    for name in _METADATA:
        (info / name).write_text(_own_metadata(name))
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in recipe.requirements))
    if recipe.wheels is not None:
        shutil.copytree(recipe.wheels, folder / "wheels")
    definition = folder / ("Dockerfile" if recipe.runtime == "charliecloud" else "voxscale.def")
    definition.write_text(render_definition(recipe))
    return definition


def _own_metadata(name: str) -> str:
    try:
        return distribution("voxscale").read_text(name) or ""
    except PackageNotFoundError:
        return ""


def check_recipe(recipe: Recipe, out: Path | None, definition: Path | None = None) -> None:
    """Refuse what cannot be built, everything at once. Nothing is written.

    Without `out` nothing is to be built, and without `definition` none is to be kept.
    """
    findings = []
    if not recipe.base.isprintable() or re.search(r"\s", recipe.base) or recipe.base.startswith("-"):
        findings.append(f"--from {recipe.base!r}: expected an image without spaces in its name")
    elif "://" not in recipe.base and recipe.runtime == "charliecloud":
        findings.append(f"--from {recipe.base}: charliecloud builds from docker://NAME")
    elif "://" not in recipe.base and out is not None and not Path(recipe.base).exists():
        findings.append(f"--from {recipe.base}: no such file or folder; a registry's image is docker://NAME")
    if recipe.wheels is not None and not any(recipe.wheels.glob("*.whl")):
        findings.append(f"--wheels {recipe.wheels}: no wheels there")
    if not recipe.requirements:
        findings.append("voxscale is not installed here, so there are no versions to pin")
    kept = {"--definition": [definition, context_of(definition)]} if definition is not None else {}
    for option, files in {"--out": [out] if out is not None else [], **kept}.items():
        findings += [f"{option} {file}: is there already" for file in files if os.path.lexists(file)]
    if findings:
        raise ConfigError.from_findings(findings, fix="see `voxscale image build --help`")


def build_image(recipe: Recipe, out: Path, environ: Mapping[str, str]) -> None:
    """Build the image at `out`: whole, or not at all."""
    program = "ch-image" if recipe.runtime == "charliecloud" else recipe.runtime
    if shutil.which(program, path=environ.get("PATH")) is None:
        raise InfrastructureError(
            f"{program} is not on this machine: nothing was built",
            fix="run this command where it is, or with --no-build for the definition alone",
        )
    with TemporaryDirectory(prefix="voxscale-image-") as name:
        context = Path(name)
        definition = write_context(recipe, context)
        try:
            with publish(out) as temporary:
                for words in _commands(recipe, definition, temporary):
                    run_tool(words, environ, timeout_s=_BUILD_S, cwd=context)
        except subprocess.SubprocessError as error:
            raise InfrastructureError(
                f"{program} could not build the image: {last_words(error)}",
                fix="see what it says; without a network, give a base with --from and a folder of wheels with --wheels",
            ) from error


def _commands(recipe: Recipe, definition: Path, out: Path) -> list[Sequence[str]]:
    if recipe.runtime != "charliecloud":
        return [[recipe.runtime, "build", str(out), str(definition)]]
    return [
        ["ch-image", "build", "-t", "voxscale", "-f", str(definition), str(definition.parent)],
        ["ch-convert", "-i", "ch-image", "-o", "dir", "voxscale", str(out)],
    ]


def context_of(definition: Path) -> Path:
    """The folder beside a definition with the files that it copies."""
    return definition.with_name(f"{definition.name}.context")


def write_definition(recipe: Recipe, file: Path) -> list[Path]:
    """Write the definition, and the context that it is built in beside it. Returns what was written.

    Called where neither is there.
    """
    folder = context_of(file)
    with publish(folder) as temporary:
        temporary.mkdir()
        write_context(recipe, temporary)
    write_text(file, render_definition(recipe))
    return [file, folder]
