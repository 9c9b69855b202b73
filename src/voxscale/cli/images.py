"""Verbs about container images."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from voxscale.cli.options import Debug, Json
from voxscale.command import answer

image = typer.Typer(no_args_is_help=True, help="Container images for clusters.")


@image.callback()
def _group() -> None:
    return


@image.command()
def build(
    runtime: Annotated[
        Literal["apptainer", "singularity", "charliecloud"], typer.Option(help="For which.")
    ] = "apptainer",
    base: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="BASE",
            help="What to build on: docker://NAME, a .sif or a folder; default: Python's own image.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The image; default: voxscale.sif, or the folder voxscale-image."),
    ] = None,
    definition: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep the definition here, and what it copies beside it.", show_default=False
        ),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Install from this folder, without a network.", show_default=False),
    ] = None,
    no_build: Annotated[bool, typer.Option("--no-build", help="Write the definition only.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make an image with this voxscale and everything it needs. Versions are those that are installed here."""
    from voxscale.launch.definition import Recipe, build_image, check_recipe, default_base, pinned, write_definition

    folder = wheels.resolve() if wheels is not None else None
    given = base or default_base()
    given = given if "://" in given else str(Path(given).resolve())
    recipe = Recipe(runtime, given, pinned(), folder)
    whole = (out or Path("voxscale-image" if runtime == "charliecloud" else "voxscale.sif")).resolve()
    usual = Path("Dockerfile" if runtime == "charliecloud" else "voxscale.def") if no_build else None
    kept = definition or usual
    file = kept.absolute() if kept is not None else None
    check_recipe(recipe, None if no_build else whole, file)
    written = write_definition(recipe, file) if file is not None else []
    if not no_build:
        build_image(recipe, whole, os.environ)
        written.append(whole)
    answer(as_json, {"written": [str(path) for path in written]}, "\n".join(f"wrote {path}" for path in written))
