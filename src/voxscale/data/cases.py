"""Cases and their split. A patient's cases never part; the split depends on ids and seed alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from voxscale.config.schema import Split
from voxscale.errors import DataError
from voxscale.files import read_csv, write_csv

TRAIN, VAL, TEST = "train", "val", "test"


@dataclass(frozen=True)
class Case:
    """One unit of data: its images (one file per channel, or one with all) and its label."""

    id: str
    images: tuple[Path, ...]
    label: Path | None
    patient: str
    split: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        return self.images if self.label is None else (*self.images, self.label)


def split_cases(cases: Sequence[Case], split: Split) -> list[Case]:
    """Assign every case to train, val or test by patient, in an order that only seed and patient ids decide."""
    patients = sorted({case.patient for case in cases}, key=lambda patient: _shuffle_key(split.seed, patient))
    num_val, num_test = _count(split.val, len(patients)), _count(split.test, len(patients))
    if num_val + num_test >= len(patients):
        raise DataError(
            f"data.split: {len(patients)} patients cannot give {num_val} for validation, {num_test} for test "
            "and at least one for training",
            fix="add cases, or lower data.split.val and data.split.test",
        )
    role: dict[str, str] = dict.fromkeys(patients, TRAIN)
    role.update(dict.fromkeys(patients[:num_val], VAL))
    role.update(dict.fromkeys(patients[num_val : num_val + num_test], TEST))
    return [replace(case, split=role[case.patient]) for case in cases]


def write_split(path: Path, cases: Sequence[Case]) -> None:
    rows = [{"case": case.id, "patient": case.patient, "split": case.split} for case in cases]
    write_csv(path, ("case", "patient", "split"), rows)


def read_split(path: Path, cases: Sequence[Case]) -> list[Case]:
    """Give `cases` the roles that the run has recorded; refuse data that is not the recorded data."""
    try:
        recorded: Mapping[str, dict[str, str]] = {row["case"]: row for row in read_csv(path)}
        roles = {row["split"] for row in recorded.values()}
    except (OSError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: missing or damaged", fix="restore it, or start anew with --fresh") from error
    if not roles or not roles <= {TRAIN, VAL, TEST}:
        raise DataError(f"{path}: damaged: found splits {sorted(map(str, roles))}", fix="restore it, or use --fresh")
    present = {case.id for case in cases}
    if changed := sorted(present ^ recorded.keys()):
        gone = [case for case in changed if case not in present]
        what = f"{len(gone)} cases are gone" if gone else f"{len(changed)} cases are new"
        raise DataError(
            f"{path}: {what} since the run began, e.g. {changed[0]}",
            fix="restore the data, or start anew with --fresh",
        )
    return [replace(case, patient=recorded[case.id]["patient"], split=recorded[case.id]["split"]) for case in cases]


def _count(share: float, total: int) -> int:
    """How many of `total` a share is; a share above zero is at least one."""
    return max(1, round(share * total)) if share > 0 else 0


def _shuffle_key(seed: int, patient: str) -> bytes:
    return hashlib.sha256(f"{seed}:{patient}".encode()).digest()
