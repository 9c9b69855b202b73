"""Verbs about what runs, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxscale.cli.options import Debug, Json
from voxscale.command import answer


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look.")] = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List runs: state, progress, best metric, age."""
    from voxscale.report.listing import list_runs, render_runs

    rows = list_runs(folder)
    answer(
        as_json,
        {"runs": [row.as_json() for row in rows]},
        render_runs(rows) if rows else f"no runs in {folder}",
    )
