"""Splits: by patient, stable under a seed, recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from voxscale.config.schema import Split
from voxscale.data.cases import Case, read_split, split_cases, write_split
from voxscale.errors import DataError


def make_cases(patients: list[str]) -> list[Case]:
    return [Case(f"c{n}", (Path(f"{n}.nii"),), None, patient) for n, patient in enumerate(patients)]


@given(some.lists(some.text("abcdefgh", min_size=1, max_size=2), min_size=8, max_size=60), some.integers(0, 99))
def test_a_patient_is_in_one_split_only(patients: list[str], seed: int) -> None:
    if len(set(patients)) < 4:
        return
    cases = split_cases(make_cases(patients), Split(val=0.25, test=0.25, seed=seed))
    roles: dict[str, set[str]] = {}
    for case in cases:
        roles.setdefault(case.patient, set()).add(case.split)
    assert all(len(splits) == 1 for splits in roles.values())
    assert {case.split for case in cases} == {"train", "val", "test"}


def test_order_of_files_does_not_matter_but_the_seed_does() -> None:
    cases = make_cases([str(n) for n in range(40)])
    split = Split(val=0.2, seed=1)
    roles = {case.id: case.split for case in split_cases(cases, split)}
    assert roles == {case.id: case.split for case in split_cases(cases[::-1], split)}
    assert roles != {case.id: case.split for case in split_cases(cases, Split(val=0.2, seed=2))}
    assert sum(role == "val" for role in roles.values()) == 8


def test_too_few_patients_are_refused() -> None:
    with pytest.raises(DataError, match="2 patients cannot give 1 for validation, 1 for test"):
        split_cases(make_cases(["a", "b"]), Split(val=0.3, test=0.3))


def test_a_recorded_split_is_kept_and_changed_data_refused(tmp_path: Path) -> None:
    cases = split_cases(make_cases(list("abcdef")), Split(val=0.34))
    write_split(tmp_path / "split.csv", cases)
    bare = make_cases(list("abcdef"))
    assert read_split(tmp_path / "split.csv", bare) == cases
    with pytest.raises(DataError, match="1 cases are gone since the run began, e.g. c0"):
        read_split(tmp_path / "split.csv", bare[1:])
    with pytest.raises(DataError, match="cases are new"):
        read_split(tmp_path / "split.csv", [*bare, *make_cases(list("abcdefg"))[6:]])
