"""Predict the outcomes of the cases of a table: what `voxscale predict RUN TABLE.csv --out FILE.csv` does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from voxscale.data.build import store_root, stored_dtype
from voxscale.data.cases import Case
from voxscale.data.findings import ERROR, Finding, as_error, refuse_errors
from voxscale.data.formats import load_manifest
from voxscale.data.preprocess import preprocess
from voxscale.data.unseen import MISSING_COLUMN, encode_unseen
from voxscale.data.volumes import read_case
from voxscale.errors import ConfigError, DataError, NotFiniteError
from voxscale.files import write_csv
from voxscale.infer.outcome import predict_together
from voxscale.parallel import World
from voxscale.runs import RunFolder
from voxscale.tasks.summary import Row
from voxscale.terminal import progress
from voxscale.train.evaluation import elsewhere
from voxscale.train.job import choose_device
from voxscale.train.trained_outcomes import TrainedOutcome, load_outcomes


@dataclass
class Predicted:
    """What became of the cases of a table."""

    rows: list[Row] = field(default_factory=list)
    failures: list[DataError] = field(default_factory=list)

    @property
    def error(self) -> DataError | None:
        """One error that lists every case that could not be predicted."""
        if not self.failures:
            return None
        total = len(self.failures) + len(self.rows)
        lines = [line for failure in self.failures for line in failure.message.splitlines()]
        rest = "; the others are written" if self.rows else ""
        first = f"{len(self.failures)} of {total} cases could not be predicted{rest}"
        fixes = dict.fromkeys(failure.fix for failure in self.failures if failure.fix)
        return DataError("\n".join([first, *(f"  {line}" for line in lines)]), fix="; ".join(fixes))

    def __str__(self) -> str:
        return f"predicted {len(self.rows)} {'case' if len(self.rows) == 1 else 'cases'}"

    def as_json(self) -> dict[str, Any]:
        return {"cases": len(self.rows), **({} if self.error is None else {"error": self.error.as_json()})}


def predict_table(
    runs: Sequence[RunFolder],
    table: Path,
    out: Path,
    environ: Mapping[str, str],
    *,
    checkpoint: str = "best",
    overwrite: bool = False,
    threads: int = 1,
) -> Predicted:
    """Predict every case of `table` into the table `out`; what the runs need of it is checked before any image is."""
    _check_out(out, overwrite=overwrite)
    torch.set_num_threads(threads)
    trained = load_outcomes(runs, checkpoint, choose_device(World()))
    for each in trained:
        if each.needs_learning:
            raise ConfigError(
                f"run {each.run.root}: has not kept what checkpoint {each.checkpoint} needs of the training cases",
                fix="predict with --checkpoint best, or let the run train to its end",
            )
    data = elsewhere(trained[0].config, table)
    manifest = load_manifest(data, store_root(data, environ))
    encodings = [each.outcomes.encoding for each in trained]
    encoded, faults = encode_unseen(encodings, manifest.cases, name=table.name, targets=False)
    if any(fault.code == MISSING_COLUMN for fault in faults):
        refuse_errors([*manifest.findings, *faults])
    predicted = Predicted(failures=_by_case([*manifest.findings, *faults]))
    failed = {fault.case for fault in faults}
    with progress("predicting", len(manifest.cases)) as advance:
        for number, case in enumerate(manifest.cases):  # in the order of ids, as outcomes are
            if case.id not in failed:
                features = [outcomes.features[number] for outcomes in encoded]
                try:
                    predicted.rows.append(_predict(trained, case, features))
                except (DataError, NotFiniteError) as error:
                    predicted.failures.append(DataError(error.message, fix=error.fix))
            advance()
    if predicted.rows:
        columns = [name for name in predicted.rows[0] if name not in ("case", "patient")]
        write_csv(out, ("case", "patient", *columns), predicted.rows)
    return predicted


def _check_out(out: Path, *, overwrite: bool) -> None:
    """It is written last: that it cannot be should be known before hours of predicting."""
    if out.suffix.lower() != ".csv":
        raise ConfigError(f"--out {out}: expected the name of a .csv table", fix="e.g. --out predicted.csv")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"--out {out}: found a place where no file can be, expected one for a table", fix="choose another"
        )
    if out.exists() and not overwrite:
        raise ConfigError(f"--out {out}: is there already", fix="choose another name, or --overwrite")


def _by_case(findings: Iterable[Finding]) -> list[DataError]:
    """The errors among the findings, one for each case or row."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.level == ERROR:
            found.setdefault((finding.case, finding.file), []).append(finding)
    return [as_error(errors) for errors in found.values()]


def _predict(trained: Sequence[TrainedOutcome], case: Case, features: Sequence[Any]) -> Row:
    first = trained[0]
    raw = read_case(case, channels=first.channels if len(case.images) > 1 else 0)
    prepared = preprocess(replace(raw, label_xyz=None), first.config.data)
    image_cxyz = prepared.image_cxyz.astype(stored_dtype(first.config.data))  # as evaluation reads it
    if len(image_cxyz) != first.channels:
        raise DataError(
            f"case {case.id}: found {len(image_cxyz)} channels, expected {first.channels}",
            fix="give every channel that the run was trained on",
        )
    name = f"case {case.id}: {case.where}" if case.where else f"case {case.id}"
    row = predict_together([each.member for each in trained], image_cxyz, features, name=name)
    return {"case": case.id, "patient": case.patient, **first.task.shown(row)}
