"""The verb that searches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from voxscale.cli.options import (
    ConfigPath,
    Debug,
    Json,
    Overrides,
    RayAddress,
)
from voxscale.command import answer


def search(
    config: ConfigPath,
    overrides: Overrides = None,
    address: RayAddress = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The search's folder; default: runs/ and the config's name.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; a search that is there is moved aside.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Search for the best config: many trials at once, on Ray.

    The config's `search` section says which fields vary and how. Every trial is a run folder of its own; a search that
    is there is continued. Writes trials.csv and best.yaml.
    """
    from voxscale.launch.given import config_or_data, default_run
    from voxscale.search.drive import search_here

    settled = config_or_data(config, overrides, os.environ)
    root = (run or default_run(config)).resolve()
    metrics, text = search_here(settled, root, os.environ, address=address, fresh=fresh)
    answer(as_json, {"search": str(root), **metrics}, text)
