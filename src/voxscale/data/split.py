"""The split of cases: a patient's cases never part; the split depends on ids, strata and seed alone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain, islice, zip_longest
from operator import lt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from voxscale.config.data import SplitColumns, SplitShares
from voxscale.data.cases import TEST, TRAIN, VAL, Case
from voxscale.data.findings import WARNING, Finding
from voxscale.errors import ConfigError, DataError, printable
from voxscale.files import read_rows, write_csv

ROLES = (TRAIN, VAL, TEST)  # a role as a number is its place here
_VAL, _TEST = 1, 2
_ROWS = 256  # of a recorded split that are looked at together
_RECORD = ("case", "patient", "split")
_RESTORE = "restore it, or start anew with --fresh"
_MOST_NAMED = 20  # cases or values in one line of an error
_MOST_LINES = 100

Ints = NDArray[np.int64]
Roles = NDArray[np.uint8]


def split_cases(
    cases: Sequence[Case], split: SplitShares | SplitColumns | None, strata: Mapping[str, str] | None = None
) -> list[Case]:
    """Assign every case to train, val or test.

    Without `split` the data's own holds where it states one. `strata` maps case ids to what every part should hold
    its proportion of, e.g. the labels present. Refused: a patient, or other group, in two parts; no training case.
    """
    if isinstance(split, SplitColumns):
        roles = _column_roles(cases, split)
    elif split is None and (stated := sum(bool(case.role) for case in cases)):
        roles = _stated_roles(cases, stated)
    else:
        split = split or SplitShares()
        roles = _share_roles(cases, split, strata)
    if TRAIN not in roles:
        raise DataError(
            f"data.split: found none of {len(cases)} cases for training, {roles.count(VAL)} for validation and "
            f"{roles.count(TEST)} for test, expected at least one to train on",
            fix="name training cases in the data, or give shares, e.g. data.split='{val: 0.2}'",
        )
    group = split.group if split else "patient"
    for name in dict.fromkeys((group, "patient")):
        _refuse_overlap(cases, roles, name)
    return [replace(case, split=role) for case, role in zip(cases, roles, strict=True)]


def label_strata(labels: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Strata by the labels, ascending and background included, that stand in each case once it is prepared.

    Their spelling decides their order, and with it the split.
    """
    return {case: str(tuple(present)) for case, present in labels.items()}


def check_test_cases(cases: Sequence[Case], split: SplitShares | SplitColumns | None) -> list[Finding]:
    """Shares are of all cases: what the data itself holds out for test may train, which is rarely meant."""
    used = [case.id for case in cases if case.role == TEST != case.split]
    if not used or not isinstance(split, SplitShares):
        return []
    found = f"{len(used)} of the data's own test cases in training or validation: {_listed(used)}"
    fix = "add keep_test: true to data.split, unless that is meant"
    return [Finding(WARNING, "test-used", "", "", found, "test cases that stay so", fix)]


def num_folds(split: SplitShares | SplitColumns | None) -> int:
    """How many folds cross-validation has; 1 where there is none."""
    if isinstance(split, SplitColumns):
        return len(split.columns)
    return (split.folds or 1) if split else 1


def assign_roles(groups: Sequence[str], strata: Sequence[str] | None, split: SplitShares) -> Roles:
    """The role of each case, as its place in ROLES, from its group and stratum; the order of cases does not matter.

    Groups stand in an order by stratum, then by hash. Each stratum gives its proportion, give or take one, and the
    totals are exact. The test cases are chosen first, so that every fold and every share of `val` has the same.
    """
    group, num_groups = _shuffled(groups, split.seed)
    stratum = np.zeros(num_groups, np.int64)
    if strata is not None and split.stratify and num_groups:
        stratum = _group_strata(group, num_groups, strata)
    order = np.argsort(stratum, kind="stable")
    sizes = np.bincount(stratum)
    num_val, num_test = _num_held_out(split, num_groups)
    tests = _allot(sizes, sizes, num_test, _phase(split.seed, TEST, num_groups))
    place = np.arange(num_groups) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of a group within its stratum
    role: Roles = np.zeros(num_groups, np.uint8)
    role[order[place < np.repeat(tests, sizes)]] = _TEST
    if split.folds is not None:
        rest = order[role[order] != _TEST]
        role[rest[split.fold - 1 :: split.folds]] = _VAL
    else:
        vals = _allot(sizes, sizes - tests, num_val, _phase(split.seed, VAL, num_groups))
        role[order[(place < np.repeat(tests + vals, sizes)) & (role[order] != _TEST)]] = _VAL
    return role[group]


def write_split(path: Path, cases: Iterable[Case]) -> None:
    """Record the split, in the order of case ids, which is also the order of the store's rows."""
    in_order = sorted(cases, key=lambda case: case.id)
    write_csv(
        path, _RECORD, (dict(zip(_RECORD, (case.id, case.patient, case.split), strict=True)) for case in in_order)
    )


def read_split(path: Path, cases: Sequence[Case]) -> list[Case]:
    """Give `cases` the roles that the run has recorded; refuse data that is not the recorded data."""
    recorded = {case: (patient, role) for case, patient, role in _read_record(path)}
    present = {case.id for case in cases}
    if changed := sorted(present ^ recorded.keys()):
        gone = [case for case in changed if case not in present]
        what = f"{len(gone)} cases are gone" if gone else f"{len(changed)} cases are new"
        raise DataError(
            f"{path}: {what} since the run began, e.g. {(gone or changed)[0]}",
            fix="restore the data, or start anew with --fresh",
        )
    return [replace(case, patient=recorded[case.id][0], split=recorded[case.id][1]) for case in cases]


def recorded_roles(path: Path, stored: Callable[[slice], Sequence[str]] | None = None) -> Roles:
    """The role of each case of a recorded split, as its place in ROLES, in the order of ids: a byte for each.

    They are those of a store's rows only if it holds the same cases: with `stored`, which gives the ids of a slice of
    its rows, any difference is refused.
    """
    number, roles = {role: n for n, role in enumerate(ROLES)}, bytearray()
    for ids, _, its in _read_blocks(path):
        if stored is not None:
            _refuse_others(path, ids, stored(slice(len(roles), len(roles) + len(ids))))
        roles += bytes(map(number.__getitem__, its))
    if stored is not None:
        _refuse_others(path, (), stored(slice(len(roles), len(roles) + 1)))
    return np.frombuffer(roles, np.uint8)


def recorded_cases(path: Path, split: str) -> list[Case]:
    """The cases of one part of a recorded split: ids and patients, without files."""
    return [Case(case, (), None, patient, role) for case, patient, role in _read_record(path) if role == split]


def _read_record(path: Path) -> Iterator[tuple[str, str, str]]:
    """Case, patient and role, row by row."""
    return chain.from_iterable(zip(*block, strict=True) for block in _read_blocks(path))


def _read_blocks(path: Path) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """Cases, patients and roles of some hundred rows at a time; refused where it is not as `write_split` leaves it."""
    last, known = "", frozenset(ROLES)
    try:
        rows = read_rows(path, _RECORD)
        while block := list(islice(rows, _ROWS)):
            cases, patients, roles = zip(*block, strict=True)
            if not known.issuperset(roles):
                case, role = next((case, role) for case, _, role in block if role not in known)
                raise ValueError(f"case {case}: found split {role!r}, expected {', '.join(ROLES)}")
            before = (last, *cases[:-1])
            if not all(map(lt, before, cases)):
                last, case = next(pair for pair in zip(before, cases, strict=True) if pair[0] >= pair[1])
                raise ValueError(f"case {case!r} follows {last!r}, expected each case once, in order")
            last = cases[-1]
            yield cases, patients, roles
        if not last:
            raise ValueError("no case")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", fix=_RESTORE) from error
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}", fix=_RESTORE) from error


def _refuse_others(path: Path, recorded: Sequence[str], stored: Sequence[str]) -> None:
    if list(recorded) != list(stored):
        case, other = next(pair for pair in zip_longest(recorded, stored) if pair[0] != pair[1])
        found = "no further case" if case is None else f"case {case}"
        raise DataError(
            f"{path}: found {found} where the store has {'none' if other is None else other}",
            fix="restore the data, or start anew with --fresh",
        )


def _num_held_out(split: SplitShares, num_groups: int) -> tuple[int, int]:
    """How many groups validate and test; a share above zero is at least one. Refused: none left to train on."""
    what = "patients" if split.group == "patient" else f"groups ({split.group})"
    num_test = _count(split.test, num_groups)
    if split.folds is not None:
        if num_groups - num_test < split.folds:
            raise DataError(
                f"data.split: found {num_groups} {what}, {num_test} of them for test, expected enough for "
                f"{split.folds} folds",
                fix="add cases, or lower data.split.folds",
            )
        return 0, num_test
    num_val = _count(split.val, num_groups)
    if num_val + num_test >= num_groups:
        raise DataError(
            f"data.split: found {num_groups} {what}, expected {num_val} for validation, {num_test} for test "
            "and at least one for training",
            fix="add cases, or lower data.split.val and data.split.test",
        )
    return num_val, num_test


def _count(share: float, total: int) -> int:
    return max(1, round(share * total)) if share > 0 else 0


def _shuffled(groups: Sequence[str], seed: int) -> tuple[Ints, int]:
    """Number the groups in the order of their hashes; return each case's number, and how many groups there are.

    Eight bytes of a hash are enough: groups that collide would only stay together.
    """
    prefix = f"{seed}:".encode()
    hashes = (sha256(prefix + group.encode(errors="surrogatepass")).digest()[:8] for group in groups)
    keys = np.fromiter(hashes, "S8", len(groups)).view(">u8").astype(np.uint64)
    unique, number = np.unique(keys, return_inverse=True)
    return number.astype(np.int64, copy=False), len(unique)


def _group_strata(group: Ints, num_groups: int, strata: Sequence[str]) -> Ints:
    """Number each group's stratum, which is the sorted set of its cases' strata, in the order of these sets."""
    number = {name: n for n, name in enumerate(sorted(set(strata)))}
    case_stratum = np.fromiter(map(number.__getitem__, strata), np.int64, len(group))
    owner, member = np.divmod(np.unique(group * len(number) + case_stratum), len(number))
    length = np.bincount(owner, minlength=num_groups)
    first = np.cumsum(length) - length
    stratum = np.zeros(num_groups, np.int64)
    for depth in range(int(length.max())):  # as words are sorted: letter by letter, the shorter first
        letter = np.where(depth < length, member[np.minimum(first + depth, len(member) - 1)] + 1, 0)
        stratum = np.unique(stratum * (len(number) + 1) + letter, return_inverse=True)[1].astype(np.int64, copy=False)
    return stratum


def _allot(sizes: Ints, room: Ints, total: int, phase: int) -> Ints:
    """Choose `total` from strata of these sizes: from each its proportion, give or take one, and at most its room.

    Systematic: of all groups in a row every (number / total)-th, beginning at `phase`, so that strata too small for
    a proportion of their own, neighbours in the order of strata, get it together.
    """
    number = int(sizes.sum())
    marks = (np.cumsum(sizes) * total + phase) // max(1, number)
    chosen: Ints = np.minimum(np.diff(marks, prepend=0), room)
    while missing := total - int(chosen.sum()):  # where a stratum had no room: to those furthest below theirs
        short = (sizes * total - chosen * number).astype(np.float64)
        short[chosen >= room] = -np.inf
        takers = np.argsort(-short, kind="stable")[: min(missing, int((chosen < room).sum()))]
        chosen[takers] += 1
    return chosen


def _phase(seed: int, role: str, number: int) -> int:
    return int.from_bytes(sha256(f"{seed}/{role}".encode()).digest()[:8], "big") % max(1, number)


def _share_roles(cases: Sequence[Case], split: SplitShares, strata: Mapping[str, str] | None) -> list[str]:
    kept = [split.keep_test and case.role == TEST for case in cases]
    if split.keep_test and not any(kept):
        raise DataError(
            "data.split.keep_test: found no case that the data states as test, expected at least one",
            fix="leave keep_test out, or give a share: data.split.test",
        )
    others = [case for case, stays in zip(cases, kept, strict=True) if not stays]
    keys = [strata.get(case.id, "") for case in others] if strata else None
    shared = (ROLES[role] for role in assign_roles(_groups(others, split.group), keys, split))
    return [TEST if stays else next(shared) for stays in kept]


def _stated_roles(cases: Sequence[Case], stated: int) -> list[str]:
    if stated < len(cases):
        silent = [_at(case) for case in cases if not case.role]
        raise DataError(
            f"data: found {len(silent)} cases that do not state their split, expected it of all, as {stated} do: "
            f"cases {_listed(silent)}",
            fix="state it for all, or give data.split, e.g. data.split='{val: 0.2}'",
        )
    expected = ", ".join(ROLES)
    if unknown := [
        f"case {_at(case)}: found split {case.role!r}, expected {expected}" for case in cases if case.role not in ROLES
    ]:
        raise DataError.from_findings(_capped(unknown), fix="state one of these")
    return [case.role for case in cases]


def _column_roles(cases: Sequence[Case], split: SplitColumns) -> list[str]:
    words = {_word(word): role for word, role in ((split.train, TRAIN), (split.val, VAL), (split.test, TEST))}
    expected = ", ".join(map(repr, (split.train, split.val, split.test)))
    if len(words) < len(ROLES):
        raise ConfigError(f"data.split: {expected}: differ in case only", fix="give three different words")
    known = _columns(cases)
    if missing := [column for column in split.columns if column not in known]:
        fix = "name a column of the table"
        if all(case.role for case in cases):
            fix = "leave data.split out: the data states its split by itself"
        raise DataError.from_findings([_unknown_column("data.split.column", name, known) for name in missing], fix=fix)
    column = split.columns[split.fold - 1]
    found = [case.row.get(column) or "" for case in cases]
    wrong: dict[str, list[str]] = {}
    for case, value in zip(cases, found, strict=True):
        if _word(value) not in words:
            wrong.setdefault(value.strip(), []).append(_at(case))
    if wrong:
        lines = [
            f"data.split.column {column}: found {repr(value) if value else 'no entry'}, expected {expected}: "
            f"cases {_listed(found_in)}"
            for value, found_in in sorted(wrong.items())
        ]
        raise DataError.from_findings(
            _capped(lines),
            fix="correct the table, name its words in data.split.train, val and test, or split otherwise, e.g. "
            "data.split='{val: 0.2}'",
        )
    return [words[_word(value)] for value in found]


def _word(value: str) -> str:
    return value.strip().casefold()


def _groups(cases: Sequence[Case], group: str) -> list[str]:
    """What must stay together: the patient, or the entry in a column of the table."""
    if group == "patient":
        return [case.patient for case in cases]
    known = _columns(cases)
    if group not in known:
        raise DataError(_unknown_column("data.split.group", group, known), fix="use patient, or a column of the table")
    groups = [(case.row.get(group) or "").strip() for case in cases]
    if empty := [_at(case) for case, entry in zip(cases, groups, strict=True) if not entry]:
        raise DataError(
            f"data.split.group {group}: found no entry, expected one for every case: cases {_listed(empty)}",
            fix="complete the table, or use data.split.group=patient",
        )
    return groups


def _columns(cases: Iterable[Case]) -> list[str]:
    return list(dict.fromkeys(column for case in cases for column in case.row))


def _unknown_column(field: str, name: str, known: Sequence[str]) -> str:
    if not known:
        return f"{field}: found no column {name!r}, expected a table that has it: the data is none"
    close = difflib.get_close_matches(name, known, n=1)
    expected = f"one of the table; did you mean {close[0]!r}?" if close else f"one of {_listed(known)}"
    return f"{field}: found no column {name!r}, expected {expected}"


def _refuse_overlap(cases: Sequence[Case], roles: Sequence[str], group: str) -> None:
    """Refuse a patient, or what else is a group, with cases in two parts; all of them are listed."""
    groups = _groups(cases, group)
    first: dict[str, str] = {}
    torn = {name for name, role in zip(groups, roles, strict=True) if first.setdefault(name, role) != role}
    parts: dict[str, dict[str, list[str]]] = {name: {} for name in sorted(torn)}
    for case, name, role in zip(cases, groups, roles, strict=True):
        if name in torn:
            parts[name].setdefault(role, []).append(_at(case))
    if parts:
        lines = [
            f"{group} {printable(name)}: found in "
            + " and ".join(f"{role} ({_listed(its)})" for role, its in sorted(by.items()))
            + ", expected in one split only"
            for name, by in parts.items()
        ]
        raise DataError.from_findings(
            _capped(lines), fix=f"move all cases of a {group} to one split, or correct what names the {group}"
        )


def _at(case: Case) -> str:
    """The case, and its row where it has one."""
    return f"{case.id} at {case.where}" if case.where else case.id


def _listed(items: Collection[str]) -> str:
    shown = ", ".join(list(items)[:_MOST_NAMED])
    return shown + (f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else "")


def _capped(lines: list[str]) -> list[str]:
    rest = len(lines) - _MOST_LINES
    return lines if rest <= 0 else [*lines[:_MOST_LINES], f"data.split: found {rest} more of that kind, expected none"]
