"""Write the page of a run, of several, of a search, or of what was measured of scaling.

    python -m voxscale.report.write FOLDER

is the last line of a job: where the page cannot be written it says so, and nothing else is changed by that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from voxscale.errors import ConfigError, VoxscaleError, printable
from voxscale.files import read_json, write_text
from voxscale.report.comparison_page import comparison_page
from voxscale.report.page import render_page
from voxscale.report.run_page import run_page
from voxscale.report.scale_page import scale_page
from voxscale.report.search_page import search_page
from voxscale.runs import REPORT, RunFolder, ScaleFolder, SearchFolder, runs_of


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of a folder into it, that of several to `out` or ./report.html. Returns where it is."""
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {out}: found {out.suffix or 'no ending'}, expected .html", fix="rename it")
    if len(folders) == 1:
        content, page = _page_of(folders[0].resolve()), RunFolder(folders[0].resolve()).report
    else:
        runs = [run for folder in folders for run in _runs_in(folder)]
        content, page = comparison_page(runs, f"{len(runs)} runs"), Path(REPORT).resolve()
    page = out.resolve() if out is not None else page
    write_text(page, render_page(content))
    return page


def refresh_report(folder: Path) -> Path | None:
    """Write the page at the end of a command; what prevents that is a warning, as the work itself is done."""
    try:
        for run in runs_of(folder):
            if run.root != folder.resolve():
                write_report([run.root])  # of each fold, beside that of all
        return write_report([folder])
    except Exception as error:
        what = error.message if isinstance(error, VoxscaleError) else f"{type(error).__name__}: {error}"
        print(f"warning: the report was not written: {printable(what)}", file=sys.stderr, flush=True)
        return None


@contextmanager
def reporting(folder: Path) -> Iterator[None]:
    """Write the page when the body fails or stops early, too, if anything has happened in the folder by then."""
    try:
        yield
    except BaseException as error:
        runs = (RunFolder(path) for path in (folder, *folder.glob("fold-*")))
        if SearchFolder(folder).table.exists() or any(run.events.exists() or run.command.exists() for run in runs):
            if isinstance(error, VoxscaleError):
                error.afterwards = partial(refresh_report, folder)  # of a long run the page takes its time
            else:
                refresh_report(folder)
        raise


def seen_in(page: Path | None) -> str:
    """A line that says where the page is."""
    return "" if page is None else f"\nreport {page}"


def _page_of(folder: Path) -> dict[str, object]:
    if SearchFolder(folder).exists:
        return search_page(SearchFolder(folder))
    if (scale := ScaleFolder(folder)).exists:
        try:
            return scale_page(scale, read_json(scale.content))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{scale.content}: damaged: {type(error).__name__}: {error}", fix="measure it again with --fresh"
            ) from error
    runs = _runs_in(folder)
    if len(runs) == 1 and runs[0].root == folder:
        return run_page(runs[0])
    return comparison_page(runs, folder.name, folds=folder)


def _runs_in(folder: Path) -> list[RunFolder]:
    """The run that a folder is, or those of its folds."""
    if SearchFolder(folder).exists or ScaleFolder(folder).exists:
        what = f"a search, whose runs are in {folder}/trials" if SearchFolder(folder).exists else "measured scaling"
        raise ConfigError(
            f"{folder}: {what}: found among several folders, expected runs", fix=f"voxscale report {folder}, by itself"
        )
    if runs := runs_of(folder):
        return runs
    run = RunFolder(folder.resolve())
    if run.command.exists() or run.asked.exists():
        return [run]  # a script's, or one that a job is to open yet
    raise ConfigError(f"{folder}: not a run folder", fix="give a folder that `voxscale runs` lists")


def main(arguments: Sequence[str]) -> int:
    refresh_report(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
