"""Evaluate whole volumes: each case exactly once, on one rank; rows are gathered, then summarised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.affines import voxel_sizes
from numpy.typing import NDArray

from voxscale.data.cases import Case
from voxscale.data.store import Store
from voxscale.errors import BY_CODE, StoppedEarly, TrainingError, VoxscaleError
from voxscale.files import write_csv
from voxscale.infer.ensemble import Ensemble
from voxscale.parallel import World, gather_records
from voxscale.tasks import Task
from voxscale.terminal import progress

Row = dict[str, Any]
Keep = Callable[[Case, NDArray[np.integer[Any]]], None]
_BOOTSTRAPS = 1000


def evaluate_cases(
    ensemble: Ensemble,
    task: Task,
    store: Store,
    cases: Sequence[Case],
    *,
    surfaces: bool,
    world: World,
    show_progress: bool = False,
    keep: Keep | None = None,
    stop: Callable[[], str] | None = None,
) -> list[Row]:
    """One row per case, in the order of `cases`, the same on every rank. Ranks meet once, at the end.

    A rank that fails comes there too, so that no other waits for it in vain; then all raise. `keep` is handed what is
    predicted for a case, on the rank that has the case. `stop` gives a reason to stop, or nothing.
    """
    mine = share_cases(cases, store, world.size)[world.rank]
    records: list[Row] = []
    failure: Exception | None = None
    with progress("evaluating", len(mine), shown=show_progress and world.is_main) as advance:
        for case in mine:
            if stop is not None and (reason := stop()):
                stopped = StoppedEarly(f"stopped while evaluating ({reason})", fix="start the same command again")
                records.append({"failed": stopped.as_json()})
                break
            try:
                records.append(_evaluate(ensemble, task, store, case, surfaces, keep))
            except Exception as error:
                failure = error
                records.append({"failed": _describe(error, case, world)})
                break
            advance()
    gathered = gather_records(records, world, ensemble.device)
    if failure is not None and not isinstance(failure, VoxscaleError):
        raise failure  # its traceback goes into this rank's log
    _refuse_failures(gathered)
    by_case = {row["case"]: row for row in gathered}
    return [by_case[case.id] for case in cases]


def _evaluate(ensemble: Ensemble, task: Task, store: Store, case: Case, surfaces: bool, keep: Keep | None) -> Row:
    row = store.row(case.id)
    codes = ensemble.decide(task, store.read_image(row))
    if keep is not None:
        keep(case, codes)
    x, y, z = voxel_sizes(store.geometry(row).prepared_affine).tolist()
    metrics = task.measure(codes, store.read_label(row), (x, y, z), surfaces=surfaces)
    return {"case": case.id, "patient": case.patient, "split": case.split, **metrics}


def _describe(error: Exception, case: Case, world: World) -> dict[str, str]:
    """An error as it travels to the other ranks."""
    if isinstance(error, VoxscaleError):
        return error.as_json()
    message = f"case {case.id} failed on rank {world.rank}: {type(error).__name__}: {_first_line(error)}"
    return TrainingError(message, fix=f"see the log of rank {world.rank}").as_json()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]


def _refuse_failures(records: Sequence[Row]) -> None:
    failures = [record["failed"] for record in records if "failed" in record]
    if failures:
        kind = BY_CODE[failures[0]["code"]]
        fixes = dict.fromkeys(failure["fix"] for failure in failures)
        raise kind.from_findings([failure["message"] for failure in failures], fix="; ".join(fixes))


def share_cases(cases: Sequence[Case], store: Store, num_ranks: int) -> list[list[Case]]:
    """Deal the cases out, largest first, each to the rank with the least work so far."""
    shares: list[list[Case]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    for case in sorted(cases, key=lambda case: (-_voxels(case, store), case.id)):
        rank = work.index(min(work))
        shares[rank].append(case)
        work[rank] += _voxels(case, store)
    return shares


def write_cases(path: Path, rows: Sequence[Row], metrics: Sequence[str]) -> None:
    write_csv(path, ("case", "patient", "split", *metrics), rows)


def as_numbers(row: Mapping[str, str], metrics: Sequence[str]) -> Row:
    """A row of a written table with its metrics as numbers again; an empty cell is an absent metric."""
    return {name: float(value) if name in metrics else value for name, value in row.items() if value != ""}


def summarise(rows: Sequence[Row], metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Mean, median, deviation and a bootstrap interval per metric, over the cases that have it."""
    summary = {}
    for metric in metrics:
        values = np.array([row[metric] for row in rows if metric in row], dtype=np.float64)
        if len(values):
            summary[metric] = _summary(values)
    return summary


def _summary(values: np.ndarray) -> dict[str, Any]:
    low, high = np.percentile(values[_drawn(len(values))].mean(1), [2.5, 97.5])
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        "ci95": [float(low), float(high)],
    }


@lru_cache(maxsize=2)  # most metrics are defined for the same number of cases
def _drawn(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(count, size=(_BOOTSTRAPS, count))


def metric_value(summary: Mapping[str, Mapping[str, Any]], metric: str) -> float | None:
    """The mean of a metric, or None where it is undefined for every case."""
    return float(summary[metric]["mean"]) if metric in summary else None


def _voxels(case: Case, store: Store) -> int:
    x, y, z = store.shape(store.row(case.id))
    return x * y * z
