"""Free disk: delete runs that came to nothing, and those that `--fresh` moved aside. What is done is never touched."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from voxscale.errors import VoxscaleError
from voxscale.files import locked, remove
from voxscale.launch.batch import read_jobs, unfinished_jobs
from voxscale.runs import RunFolder

_CAME_TO_NOTHING = ("failed", "stopped", "interrupted", "new")
_ENDED = (*_CAME_TO_NOTHING, "done")


@dataclass(frozen=True)
class Pruned:
    """A run that was deleted."""

    run: str
    state: str
    bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def may_go(run: Path, state: str, *, is_search: bool) -> bool:
    """Whether a run may be deleted once it is old: it came to nothing, or is of before a `--fresh`. Of a search that
    was stopped, the trials that are done are worth keeping."""
    if any(re.search(r"\.old-\d+$", name) for name in (run.name, run.parent.name)):
        return state in _ENDED
    return state in _CAME_TO_NOTHING and not is_search


def prune_runs(runs: Iterable[tuple[Path, str]], environ: Mapping[str, str]) -> list[Pruned]:
    """Delete the runs, given with their states, but for those that are claimed or have a job that may wait or run."""
    pruned = []
    for root, state in runs:
        run, gone = RunFolder(root), root.with_name(f".{root.name}.pruned")
        if _may_have_a_job(run, environ):
            continue
        size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        try:
            with locked(run.owner_lock, wait=False):
                remove(gone)  # of a command that was killed
                root.rename(gone)  # at once, so that no half of it is taken for a run
        except BlockingIOError:
            continue
        remove(gone)
        pruned.append(Pruned(str(root), state, size))
    return pruned


def render_pruned(pruned: Iterable[Pruned], kept: int) -> str:
    rows = list(pruned)
    lines = [f"deleted {row.run}  {row.state}  {row.bytes / 2**20:.1f} MB" for row in rows]
    total = sum(row.bytes for row in rows)
    return "\n".join([*lines, f"deleted: {len(rows)}, {total / 2**20:.1f} MB; kept: {kept}"])


def _may_have_a_job(run: RunFolder, environ: Mapping[str, str]) -> bool:
    """Also where nobody can be asked: the job may wait in the queue of another cluster. Folds' are above them."""
    for folder in (run, RunFolder(run.root.parent)):
        if not read_jobs(folder):
            continue
        try:
            if not shutil.which("squeue", path=environ.get("PATH")) or unfinished_jobs(folder, environ):
                return True
        except VoxscaleError:
            return True
    return False
