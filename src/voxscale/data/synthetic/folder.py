"""Fill a folder with a synthetic dataset, once, and refuse a folder that holds another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from voxscale.config.data import Synthetic
from voxscale.config.load import plain
from voxscale.data.synthetic.btcv import list_btcv
from voxscale.data.synthetic.cohort import list_cohort
from voxscale.data.synthetic.decathlon import list_brats
from voxscale.data.synthetic.distmis import list_distmis
from voxscale.data.synthetic.pairs import list_pairs
from voxscale.errors import DataError, InfrastructureError
from voxscale.files import locked, publish, read_json, write_json
from voxscale.terminal import progress

# What writes the files of a dataset below a folder that exists: one piece of work for each, done in any order.
Files = list[Callable[[], None]]
LIKE: dict[str, Callable[[Path, Synthetic], Files]] = {
    "brats": list_brats,
    "btcv": list_btcv,
    "distmis": list_distmis,
    "mace": list_cohort,
}

_RECORD = "synthetic.json"


def ensure_synthetic(folder: Path, options: Synthetic, *, threads: int = 1) -> None:
    """Fill `folder` with generated pairs unless it is there. It appears whole or not at all."""
    _ensure(folder, list_pairs, options, plain(options), threads)


def ensure_like(folder: Path, like: str, options: Synthetic, *, threads: int = 1) -> None:
    """Fill `folder` with a small dataset laid out as the one that `like` names, on the same terms.

    `options.cases` counts the labelled cases; `options.size` is the voxels of each.
    """
    _ensure(folder, LIKE[like], options, {"like": like, **plain(options)}, threads)


def _ensure(
    folder: Path,
    list_files: Callable[[Path, Synthetic], Files],
    options: Synthetic,
    record: Mapping[str, Any],
    threads: int,
) -> None:
    try:
        if not folder.exists():
            with locked(folder.parent / f".{folder.name}.lock"):
                if not folder.exists():
                    with publish(folder) as temporary:
                        temporary.mkdir()
                        _write(list_files(temporary, options), threads)
                        write_json(temporary / _RECORD, record)
    except OSError as error:
        raise InfrastructureError(
            f"data.source {folder}: cannot be written: {error.strerror}", fix="choose a place that can be written"
        ) from error
    try:
        made_from = read_json(folder / _RECORD)
    except (OSError, ValueError):
        made_from = None
    if made_from != record:
        raise DataError(
            f"data.source {folder}: made from {made_from or 'something else'}, expected {record}",
            fix="name a folder that does not exist, or drop data.synthetic to use what is there",
        )


def _write(files: Files, threads: int) -> None:
    with progress("making volumes", len(files)) as advance, ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(file) for file in files]:
            done.result()
            advance()
