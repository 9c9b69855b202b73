"""Splits: by patient, in proportion, stable under a seed, recorded; what would leak or leave nothing is refused."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from voxscale.config.data import SplitColumns, SplitShares
from voxscale.data.cases import Case
from voxscale.data.split import (
    ROLES,
    assign_roles,
    num_folds,
    read_split,
    recorded_cases,
    recorded_roles,
    split_cases,
    write_split,
)
from voxscale.errors import DataError

shares = some.sampled_from([0.0, 0.1, 0.25, 0.4])
stratified = some.lists(some.sampled_from("aaaabbc"), min_size=12, max_size=80)


def make_cases(patients: list[str], **columns: list[str]) -> list[Case]:
    return [
        Case(f"c{n:03d}", (Path(f"{n}.nii"),), None, patient, row={name: column[n] for name, column in columns.items()})
        for n, patient in enumerate(patients)
    ]


def with_roles(cases: list[Case], roles: list[str]) -> list[Case]:
    return [replace(case, role=role) for case, role in zip(cases, roles, strict=True)]


def roles_of(cases: list[Case]) -> dict[str, str]:
    return {case.id: case.split for case in cases}


@given(some.lists(some.text("abcdefgh", min_size=1, max_size=2), min_size=8, max_size=60), some.integers(0, 99))
def test_a_patient_is_in_one_split_only(patients: list[str], seed: int) -> None:
    if len(set(patients)) < 4:
        return
    cases = split_cases(make_cases(patients), SplitShares(val=0.25, test=0.25, seed=seed))
    assert len({(case.patient, case.split) for case in cases}) == len(set(patients))
    assert {case.split for case in cases} == set(ROLES)


def test_order_of_files_does_not_matter_but_the_seed_does() -> None:
    cases, strata = make_cases([str(n) for n in range(40)]), {f"c{n:03d}": "abc"[n % 3] for n in range(40)}
    split = SplitShares(val=0.2, test=0.1, seed=1)
    roles = roles_of(split_cases(cases, split, strata))
    assert roles == roles_of(split_cases(cases[::-1], split, strata))
    assert roles != roles_of(split_cases(cases, SplitShares(val=0.2, test=0.1, seed=2), strata))
    assert Counter(roles.values()) == {"train": 28, "val": 8, "test": 4}


@given(stratified, shares, shares, some.integers(0, 99))
def test_totals_are_exact_and_each_stratum_gives_its_proportion(
    strata: list[str], val: float, test: float, seed: int
) -> None:
    num = len(strata)
    roles = assign_roles([f"p{n}" for n in range(num)], strata, SplitShares(val=val, test=test, seed=seed))
    for role, share in ((1, val), (2, test)):
        total = max(1, round(share * num)) if share else 0
        assert (roles == role).sum() == total
        for stratum, size in Counter(strata).items():
            found = sum(one == stratum for one, got in zip(strata, roles, strict=True) if got == role)
            assert abs(found - total * size / num) <= 1, f"{stratum}: {found} of {size}"


@given(stratified, some.integers(2, 5), shares, some.integers(0, 99))
def test_folds_part_what_the_test_share_leaves(strata: list[str], folds: int, test: float, seed: int) -> None:
    groups = [f"p{n}" for n in range(len(strata))]
    each = [
        assign_roles(groups, strata, SplitShares(test=test, folds=folds, fold=fold, seed=seed))
        for fold in range(1, folds + 1)
    ]
    assert all(((roles == 2) == (each[0] == 2)).all() for roles in each), "folds differ in their test cases"
    validated = np.sum([roles == 1 for roles in each], axis=0)
    assert (validated == (each[0] != 2)).all(), "a case validates in no fold, or in two"
    for stratum in set(strata):
        counts = [sum((roles == 1) & (np.array(strata) == stratum)) for roles in each]
        assert max(counts) - min(counts) <= 1


def test_strata_are_balanced_only_if_asked_for() -> None:
    groups, strata = [f"p{n}" for n in range(60)], ["common"] * 50 + ["rare"] * 10
    rare = {
        stratify: {
            int((assign_roles(groups, strata, SplitShares(val=0.2, seed=seed, stratify=stratify))[50:] == 1).sum())
            for seed in range(20)
        }
        for stratify in (True, False)
    }
    assert rare[True] == {2}
    assert len(rare[False]) > 2


def test_a_patient_with_cases_of_two_strata_counts_as_one_of_its_own_kind() -> None:
    patients = [str(n // 2) for n in range(80)]
    strata = {f"c{n:03d}": "b" if n % 2 and n < 40 else "a" for n in range(80)}  # 20 patients {a, b}, 20 {a}
    cases = split_cases(make_cases(patients), SplitShares(val=0.2), strata)
    assert Counter(int(case.patient) < 20 for case in cases if case.split == "val") == {True: 8, False: 8}


def test_groups_of_a_column_stay_together() -> None:
    cases = make_cases([str(n) for n in range(30)], Site=[f"site {n % 6}" for n in range(30)])
    split = split_cases(cases, SplitShares(val=0.3, group="Site"))
    assert len({(case.row["Site"], case.split) for case in split}) == 6


def test_an_unknown_group_names_the_nearest_column_and_empty_entries_name_the_cases() -> None:
    cases = make_cases(list("abc"), Site=["x", "", " "])
    with pytest.raises(DataError, match="found no column 'Sites', expected one of the table; did you mean 'Site'?"):
        split_cases(cases, SplitShares(group="Sites"))
    with pytest.raises(DataError, match="c001, c002"):
        split_cases(cases, SplitShares(group="Site"))


def test_too_few_patients_are_refused() -> None:
    with pytest.raises(DataError, match="found 2 patients, expected 1 for validation, 1 for test"):
        split_cases(make_cases(["a", "b"]), SplitShares(val=0.3, test=0.3))
    with pytest.raises(DataError, match="4 patients, 1 of them for test, expected enough for 4 folds"):
        split_cases(make_cases(list("abcd")), SplitShares(test=0.2, folds=4))
    with pytest.raises(DataError, match="0 patients"):
        split_cases([], None)


def test_the_data_states_its_split_for_all_or_for_none() -> None:
    cases = make_cases(list("abcde"))
    own = ["train", "val", "train", "test", "train"]
    assert [case.split for case in split_cases(with_roles(cases, own), None)] == own
    assert roles_of(split_cases(cases, None)) == roles_of(split_cases(cases, SplitShares()))
    with pytest.raises(
        DataError, match="2 cases that do not state their split, expected it of all, as 3 do: cases c003, c004"
    ):
        split_cases(with_roles(cases, ["train", "val", "train", "", ""]), None)
    with pytest.raises(DataError, match="none of 5 cases for training"):
        split_cases(with_roles(cases, ["val"] * 5), None)


@given(some.lists(some.sampled_from(["train", "test", "val", ""]), min_size=12, max_size=40), some.integers(0, 5))
def test_stated_test_cases_stay_and_the_shares_are_of_the_others(stated: list[str], seed: int) -> None:
    cases = with_roles(make_cases([f"p{number}" for number in range(len(stated))]), stated)
    others = [case for case in cases if case.role != "test"]
    split = SplitShares(val=0.25, test=0, seed=seed, keep_test=True)
    assume(2 <= len(others) < len(cases))
    found = roles_of(split_cases(cases, split))
    assert {case.id for case in cases if found[case.id] == "test"} == {case.id for case in cases if case.role == "test"}
    alone = roles_of(split_cases(others, SplitShares(val=0.25, test=0, seed=seed)))
    assert {name: role for name, role in found.items() if role != "test"} == alone


def test_a_kept_test_set_leaves_folds_to_the_others_and_no_patient_in_two_parts() -> None:
    cases = with_roles(make_cases(["p1", "p2", "p3", "p4", "p4"]), ["", "", "train", "test", "test"])
    parts = [roles_of(split_cases(cases, SplitShares(folds=3, fold=fold, keep_test=True))) for fold in (1, 2, 3)]
    assert all(list(part.values()).count("test") == 2 and list(part.values()).count("val") == 1 for part in parts)
    torn = with_roles(make_cases(["p1", "p2", "p3", "p1"]), ["", "", "", "test"])
    with pytest.raises(DataError, match="patient p1: found in"):
        split_cases(torn, SplitShares(keep_test=True))


def test_a_test_set_that_the_data_does_not_state_cannot_be_kept() -> None:
    with pytest.raises(DataError, match="keep_test: found no case that the data states as test"):
        split_cases(make_cases(["p1", "p2", "p3"]), SplitShares(keep_test=True))
    with pytest.raises(ValueError, match="expected test 0"):
        SplitShares(test=0.2, keep_test=True)


def test_columns_are_read_by_their_words_and_by_fold() -> None:
    first, second = ["Training ", "TRAINING", "held", "test"], ["held", "training", "training", "test"]
    cases = make_cases(list("abcd"), Fold_1=first, Fold_2=second)
    split = SplitColumns(column=("Fold_1", "Fold_2"), train="training", val="Held")
    assert [case.split for case in split_cases(cases, split)] == ["train", "train", "val", "test"]
    other = split.model_copy(update={"fold": 2})
    assert [case.split for case in split_cases(cases, other)] == ["val", "train", "train", "test"]


def test_every_wrong_word_is_named_at_once_and_long_lists_are_counted() -> None:
    entries = ["train"] * 2 + ["trian"] + [""] * 25
    with pytest.raises(DataError) as refused:
        split_cases(make_cases([str(n) for n in range(28)], Fold=entries), SplitColumns(column="Fold"))
    message = refused.value.message
    assert "'trian'" in message
    assert "c002" in message
    assert "c022 and 5 more" in message
    assert "c023" not in message


def test_a_missing_column_names_the_nearest() -> None:
    cases = make_cases(list("ab"), Fold_1=["train", "val"])
    with pytest.raises(DataError) as refused:
        split_cases(cases, SplitColumns(column=("Fold_1", "Fold1", "Nothing")))
    assert "did you mean 'Fold_1'" in refused.value.message
    assert "'Nothing'" in refused.value.message, "only the first missing column was named"


def test_every_patient_in_two_splits_is_named_with_its_cases() -> None:
    words = ["train", "val", "train", "train", "test", "val"]
    cases = make_cases(["p", "p", "q", "r", "r", "s"], Fold=words)
    for given_cases, split in ((cases, SplitColumns(column="Fold")), (with_roles(cases, words), None)):
        with pytest.raises(DataError) as refused:
            split_cases(given_cases, split)
        lines = refused.value.message.splitlines()
        assert len(lines) == 2
        assert all(case in lines[0] for case in ("patient p", "c000", "c001"))
        assert all(case in lines[1] for case in ("patient r", "c003", "c004"))


VALIDATED = ["p10", "p14", "p2", "p7"]


def test_the_split_is_the_same_for_ever() -> None:
    """Written down once, when patients were still taken by hash alone: a change here changes every published run."""
    cases = split_cases(make_cases([f"p{n}" for n in range(20)]), SplitShares())
    assert sorted(case.patient for case in cases if case.split == "val") == VALIDATED


def test_patients_that_are_each_their_own_stratum_are_split_by_the_seed_all_the_same() -> None:
    groups = [f"p{n}" for n in range(20)]
    found = {assign_roles(groups, groups, SplitShares(val=0.2, seed=seed)).tobytes() for seed in range(20)}
    assert len(found) > 1
    assert all(roles.count(b"\x01") == 4 for roles in found)


def test_a_patient_does_not_part_where_something_else_is_the_group() -> None:
    cases = make_cases(["ann"] * 8 + ["bob"], site=list("abcdefghi"))
    with pytest.raises(DataError, match="patient ann: found in train .* and val"):
        split_cases(cases, SplitShares(val=0.5, group="site"))


def test_test_cases_leave_their_stratum_less_room() -> None:
    """Strata of one patient each, half for test: what validates has to come from the other half."""
    groups = [f"p{n}" for n in range(20)]
    for seed in range(30):
        roles = assign_roles(groups, groups, SplitShares(val=0.45, test=0.5, seed=seed))
        assert np.bincount(roles).tolist() == [1, 9, 10]


def test_folds_are_counted() -> None:
    splits = (None, SplitShares(), SplitShares(folds=5), SplitColumns(column="a"), SplitColumns(column=("a", "b")))
    assert [num_folds(split) for split in splits] == [1, 1, 5, 1, 2]


def test_a_recorded_split_is_kept_and_changed_data_refused(tmp_path: Path) -> None:
    path, bare = tmp_path / "split.csv", make_cases(["a", "=b", "c", "d,", "é", "f"])
    cases = split_cases(bare, SplitShares(val=0.34))
    write_split(path, cases[::-1])
    assert read_split(path, bare) == cases
    assert [ROLES[role] for role in recorded_roles(path)] == [case.split for case in cases]
    recorded = [(case.id, case.patient, case.split) for case in recorded_cases(path, "val")]
    assert recorded == [(case.id, case.patient, "val") for case in cases if case.split == "val"]
    with pytest.raises(DataError, match="1 cases are gone since the run began, e.g. c000"):
        read_split(path, bare[1:])
    with pytest.raises(DataError, match="1 cases are new"):
        read_split(path, [*bare, *make_cases(list("abcdefg"))[6:]])


printable = some.text(min_size=1, max_size=5).filter(lambda text: text.isprintable() and text[0] != "'")


@given(some.lists(printable, min_size=3, max_size=30, unique=True))
def test_any_id_is_recorded_and_found_at_its_row_of_the_store(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any_split.csv"
    cases = split_cases([Case(name, (), None, f"-{name}") for name in ids], SplitShares(val=0.3))
    write_split(path, cases)
    stored, roles = sorted(ids), roles_of(cases)
    found = recorded_roles(path, stored.__getitem__)
    assert {name: ROLES[role] for name, role in zip(stored, found, strict=True)} == roles
    validated = {(case.id, case.patient) for case in cases if case.split == "val"}
    assert {(case.id, case.patient) for case in recorded_cases(path, "val")} == validated


def test_rows_are_refused_where_the_store_holds_other_cases(tmp_path: Path) -> None:
    path, cases = tmp_path / "split.csv", split_cases(make_cases(list("abcd")), SplitShares(val=0.25))
    ids = [case.id for case in cases]
    write_split(path, cases)
    assert np.bincount(recorded_roles(path, ids.__getitem__)).tolist() == [3, 1]
    for other, said in (
        (ids[:-1], "found case c003 where the store has none"),
        ([*ids, "z"], "found no further case where the store has z"),
        (["b", *ids[1:]], "found case c000 where the store has b"),
    ):
        with pytest.raises(DataError, match=said):
            recorded_roles(path, other.__getitem__)


def test_a_long_record_is_compared_with_the_store_to_its_end(tmp_path: Path) -> None:
    path, names = tmp_path / "split.csv", [f"c{n:04d}" for n in range(1000)]  # several times what is read at once
    write_split(path, [Case(name, (), None, name, split=ROLES[n % 3]) for n, name in enumerate(names)])
    assert recorded_roles(path, names.__getitem__).tolist() == [n % 3 for n in range(1000)]
    with pytest.raises(DataError, match="found case c0999 where the store has c1000"):
        recorded_roles(path, [*names[:-1], "c1000"].__getitem__)
    content = path.read_text()
    path.write_text(content.replace("c0777,c0777", "c0776,c0777"))
    with pytest.raises(DataError, match="damaged: case 'c0776' follows 'c0776', expected each case once"):
        recorded_roles(path)
    path.write_text(content[:-1])
    with pytest.raises(DataError, match="damaged: its last line is cut off"):
        recorded_roles(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "case,patient,split\n",
        "case,split\na,train\n",
        "case,patient,split\na,a,train\nb,b\n",
        "case,patient,split\na,a,train\nb,b,training\n",
        "case,patient,split\nb,b,train\na,a,val\n",
        "case,patient,split\na,a,train\na,a,val\n",
        'case,patient,split\na,"a,train\n',
    ],
    ids=["empty", "no case", "column gone", "cut", "unknown split", "out of order", "twice", "open quote"],
)
def test_a_damaged_record_is_refused_by_all_who_read_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "split.csv"
    path.write_text(content)
    for read in (lambda: read_split(path, []), lambda: recorded_roles(path), lambda: recorded_cases(path, "train")):
        with pytest.raises(DataError, match="split.csv: damaged"):
            read()
    path.unlink()
    with pytest.raises(DataError, match="split.csv: cannot be read"):
        recorded_roles(path)


def test_a_large_manifest_is_split_at_once() -> None:
    """A tenth of a million; generous, since test machines are shared. bench/stream.py measures the million."""
    groups, strata = [f"patient-{n:06d}" for n in range(100_000)], ["ab"[n % 2] for n in range(100_000)]
    began = time.perf_counter()
    roles = assign_roles(groups, strata, SplitShares(val=0.2, test=0.1))
    assert time.perf_counter() - began < 2
    assert np.bincount(roles).tolist() == [70_000, 20_000, 10_000]
