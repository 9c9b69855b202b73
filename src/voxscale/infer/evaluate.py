"""Evaluate whole volumes: each case exactly once, on one rank; rows are gathered, then summarised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voxscale.data.cases import Case
from voxscale.data.store import Store
from voxscale.files import write_csv
from voxscale.infer.windows import Size, predict_volume
from voxscale.parallel import World, gather_records
from voxscale.tasks import Task
from voxscale.terminal import progress

Row = dict[str, Any]
_BOOTSTRAPS = 1000


def evaluate_cases(
    network: Callable[[torch.Tensor], torch.Tensor],
    task: Task,
    store: Store,
    cases: Sequence[Case],
    *,
    window: Size,
    overlap: float,
    world: World,
    device: torch.device,
    show_progress: bool = False,
) -> list[Row]:
    """One row per case, in the order of `cases`, the same on every rank. Ranks meet once, at the end."""
    mine = share_cases(cases, store, world.size)[world.rank]
    rows: list[Row] = []
    with (
        torch.inference_mode(),
        progress("evaluating", len(mine), shown=show_progress and world.is_main) as advance,
    ):
        for case in mine:
            row = store.row(case.id)
            image_cxyz = torch.from_numpy(store.read_image(row)).to(device).float()
            output = predict_volume(network, image_cxyz, window, overlap)
            metrics = task.measure(task.decide(output), store.read_label(row))
            rows.append({"case": case.id, "patient": case.patient, "split": case.split, **metrics})
            advance()
    by_case = {row["case"]: row for row in gather_records(rows, world, device)}
    return [by_case[case.id] for case in cases]


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


def summarise(rows: Sequence[Row], metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Mean, median, deviation and a bootstrap interval per metric, over the cases that have it."""
    summary = {}
    for metric in metrics:
        values = np.array([row[metric] for row in rows if metric in row], dtype=np.float64)
        if len(values):
            summary[metric] = _summary(values)
    return summary


def _summary(values: np.ndarray) -> dict[str, Any]:
    drawn = np.random.default_rng(0).integers(len(values), size=(_BOOTSTRAPS, len(values)))
    low, high = np.percentile(values[drawn].mean(1), [2.5, 97.5])
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        "ci95": [float(low), float(high)],
    }


def metric_value(summary: Mapping[str, Mapping[str, Any]], metric: str) -> float | None:
    """The mean of a metric, or None where it is undefined for every case."""
    return float(summary[metric]["mean"]) if metric in summary else None


def _voxels(case: Case, store: Store) -> int:
    x, y, z = store.shape(store.row(case.id))
    return x * y * z
