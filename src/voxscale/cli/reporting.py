"""The verb that writes the page to look at."""

from pathlib import Path
from typing import Annotated

import typer

from voxscale.cli.options import Debug, Json
from voxscale.command import answer


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or one of folds, of a search or of `scale`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write it; default: report.html in RUN, of several here.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write one page to look at. Curves, cases slice by slice, timing, config; several runs are compared.

    The page is one file that loads nothing. Commands that train, search, evaluate, scale or launch write it at their
    end.
    """
    from voxscale.report.write import write_report

    page = write_report(folders, out)
    answer(as_json, {"report": str(page), "bytes": page.stat().st_size}, str(page))
