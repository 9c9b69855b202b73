"""Evaluate whole cases: each exactly once, on one rank; rows are gathered, then summarised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nibabel.affines import voxel_sizes
from numpy.typing import NDArray

from voxscale.data.cases import Case
from voxscale.data.outcomes import Outcomes
from voxscale.data.store import Store
from voxscale.errors import BY_CODE, LostContactError, StoppedEarly, TrainingError, VoxscaleError
from voxscale.files import write_csv
from voxscale.infer.ensemble import Ensemble
from voxscale.infer.outcome import OutcomeMember, predict_together
from voxscale.parallel import Pace, World, gather_records, lost_contact
from voxscale.tasks import VolumeTask
from voxscale.tasks.summary import Row
from voxscale.terminal import progress

Keep = Callable[[Case, NDArray[np.integer[Any]]], None]
Measure = Callable[[Case], Row]


def evaluate_cases(
    measure: Measure,
    store: Store,
    cases: Sequence[Case],
    *,
    world: World,
    device: torch.device,
    show_progress: bool = False,
) -> list[Row]:
    """One row per case, in the order of `cases`, the same on every rank. Ranks wait for each other only at the end.

    A rank that fails comes there too, so that no other waits for it in vain; then all raise. `measure` gives what is
    known of a case, on the rank that has the case. Where it raises StoppedEarly, other ranks end with their next case.
    """
    shares = share_cases(cases, store, world.size)
    mine, pace = shares[world.rank], Pace(world, device)
    records: list[Row] = []
    failure: Exception | None = None
    with progress("evaluating", len(mine), shown=show_progress and world.is_main) as advance:
        for case in mine:
            try:
                records.append({"case": case.id, "patient": case.patient, "split": case.split, **measure(case)})
            except Exception as error:
                failure = error
                records.append({"failed": _describe(error, case, world)})
                break
            advance()
            with _naming(shares):
                pace.advance()
            if pace.is_cut_short:
                break
    with _naming(shares):
        pace.finish(cuts_short=isinstance(failure, StoppedEarly))
        gathered = gather_records(records, world, device, together=True)
    if failure is not None and not isinstance(failure, VoxscaleError):
        raise failure  # its traceback goes into this rank's log
    _refuse_failures(gathered)
    by_case = {row["case"]: row for row in gathered}
    return [by_case[case.id] for case in cases]


@contextmanager
def _naming(shares: Sequence[Sequence[Case]]) -> Iterator[None]:
    """A rank that is gone, or hangs, is told of with the cases it had to evaluate."""
    try:
        yield
    except (LostContactError, RuntimeError) as error:
        lost = error if isinstance(error, LostContactError) else lost_contact(error)
        if lost is None:
            raise
        raise lost.at("while evaluating", [[case.id for case in share] for share in shares]) from error


def of_volumes(ensemble: Ensemble, task: VolumeTask, store: Store, *, full: bool, keep: Keep | None = None) -> Measure:
    """Measures volumes of labels; `keep` is handed what is predicted for a case."""

    def measure(case: Case) -> Row:
        row = store.row(case.id)
        codes = ensemble.decide(task, store.read_image(row))
        if keep is not None:
            keep(case, codes)
        x, y, z = voxel_sizes(store.geometry(row).prepared_affine).tolist()
        return task.measure(codes, store.read_label(row), (x, y, z), full=full)

    return measure


def of_outcomes(members: Sequence[OutcomeMember], store: Store, outcomes: Sequence[Outcomes]) -> Measure:
    """Predicts outcomes, beside what is known; `outcomes` are by row of the store, as each member has them."""

    def measure(case: Case) -> Row:
        row = store.row(case.id)
        features = [own.features[row] for own in outcomes]
        predicted = predict_together(members, store.read_image(row), features, name=f"case {case.id}")
        return {**members[0].task.known(outcomes[0].targets[row]), **predicted}

    return measure


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


def write_cases(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    header = ("case", "patient", "split", *columns)
    write_csv(path, header, ({name: row[name] for name in header if name in row} for row in rows))


def as_numbers(row: Mapping[str, str], metrics: Sequence[str]) -> Row:
    """A row of a written table with its metrics as numbers again; an empty cell is an absent metric."""
    return {name: float(value) if name in metrics else value for name, value in row.items() if value != ""}


def _voxels(case: Case, store: Store) -> int:
    x, y, z = store.shape(store.row(case.id))
    return x * y * z
