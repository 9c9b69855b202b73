"""What is guessed of a table of outcomes: training accepts it, and nothing in it tells the outcome."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from layouts import save_volume
from voxscale.config.load import make_config, with_fold
from voxscale.data.doctor import check_outcomes
from voxscale.data.findings import ERROR
from voxscale.data.formats import load_manifest
from voxscale.data.guess import Guess, guess_config
from voxscale.data.split import num_folds
from voxscale.errors import DataError
from voxscale.tasks import build_outcome_task

TIMES = [331, 420, 500, 610, 700, 850, 990, 1200, 1500, 1900, 2200, 2500]
EVENTS = [1, 0] * 6
AGES = [51, 62, 48, 70, 66, 59, 81, 45, 77, 63, 58, 69]


def _cohort(folder: Path, **columns: Sequence[Any]) -> Path:
    """A table of these columns beside time, event and age, unless those are given; None takes one away."""
    save_volume(folder / "a.nii")
    content = {"time": TIMES, "event": EVENTS, "age": AGES, **columns}
    content = {name: cells for name, cells in content.items() if cells is not None}
    rows = zip(*content.values(), strict=True)
    lines = [f"c{n},a.nii,{','.join(map(str, row))}" for n, row in enumerate(rows)]
    path = folder / "cohort.csv"
    path.write_text("\n".join([f"case,image,{','.join(content)}", *lines]))
    return path


def _accepted(table: Path, **given: Any) -> Guess:
    """The guess, after a check that every fold of it can train."""
    guess = guess_config(table, table.parent, given)
    config = make_config(dict(guess.content), name="guess", base=Path())
    folds = [with_fold(config, number + 1) for number in range(num_folds(config.data.split))]
    cases = load_manifest(config.data, table.parent).cases
    findings = check_outcomes(cases, folds, build_outcome_task)
    assert [finding for finding in findings if finding.level == ERROR] == []
    return guess


def _features(guess: Guess) -> list[str]:
    features: list[str] = guess.content["data"]["columns"]["features"]
    return features


@pytest.mark.parametrize(
    ("times", "events", "horizons"),
    [
        (TIMES, EVENTS, ["1y", "2y", "3y", "4y"]),
        ([time + 500 for time in TIMES], EVENTS, ["3y", "4y", "5y"]),
        ([time + 5000 for time in TIMES], EVENTS, ["15y", "16y", "17y"]),
        (TIMES, [int(n == 4) for n in range(12)], ["2y", "3y", "4y"]),
        (TIMES, [int(n == 8) for n in range(12)], ["50m"]),
        (TIMES, [int(n == 9) for n in range(12)], None),
        ([331] * 9 + [333] * 3, [1] * 12, ["331d"]),
        ([500] * 12, EVENTS, None),
    ],
)
def test_horizons_are_such_as_training_accepts(
    times: list[int], events: list[int], horizons: list[str] | None, tmp_path: Path
) -> None:
    guess = _accepted(_cohort(tmp_path, time=times, event=events, Fold_1=["train"] * 10 + ["val"] * 2))
    assert guess.content["validate"].get("horizons") == horizons
    line = next(line for line in guess.said if "times are in days" in line)
    assert (f"horizons {', '.join(horizons)}" if horizons else "no horizons: no whole day from the first event") in line


def test_horizons_hold_for_the_training_cases_of_every_fold(tmp_path: Path) -> None:
    folds = {f"Fold_{k + 1}": ["val" if n % 4 == k else "train" for n in range(12)] for k in range(4)}
    only_late = [1 if n in (5, 6, 8) else 0 for n in range(12)]
    assert _accepted(_cohort(tmp_path, event=only_late, **folds)).content["validate"]["horizons"][0] == "3y"
    _accepted(_cohort(tmp_path, event=only_late))
    for seed in range(20):
        _accepted(_cohort(tmp_path, event=[int(n in (2, 7)) for n in range(12)]), split={"seed": seed})
    _accepted(_cohort(tmp_path, event=only_late), split={"folds": 3})


def test_columns_that_tell_the_outcome_the_split_or_the_patient_are_no_features(tmp_path: Path) -> None:
    months = [time / 30 for time in TIMES]
    outcome = {
        **dict.fromkeys(("death", "deceased", "OS", "censored", "VitalStatus", "had_event", "is dead"), EVENTS),
        **dict.fromkeys(("survival_days", "OS_months", "days_to_death", "pfsTime", "last-followup"), months),
        "date_of_death": [f"{day}.1." for day in range(12)],
    }
    split = dict.fromkeys(("subset", "Set", "cv", "partition 1", "Group"), [0, 1, 2] * 4)
    ids = {name: range(1000, 1012) for name in ("MRN", "StudyUID", "accession number", "number", "Unnamed: 0")}
    sound = {"lesion number": [1, 2, 3] * 4, "site_id": ["a", "b"] * 6, "smoking_status": ["no", "yes"] * 6}
    sound |= {"age_group": ["old", "young"] * 6}
    table = _cohort(tmp_path, **outcome, **split, **ids, **sound)
    guess = _accepted(table)
    assert _features(guess) == ["age", *sound]
    (line,) = (line for line in guess.said if line.startswith("left out: "))
    for names, why in (
        (outcome, "called like an outcome or a date"),
        (split, "called like a part of a split"),
        (ids, "called like an id"),
    ):
        assert all(f"'{name}' ({why})" in line for name in names)
    stated = _accepted(table, columns={"features": ["subset", "age"]})
    assert _features(stated) == ["subset", "age"], "what the user states holds"


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("NIFTI path,tiem,evnet,sex", "did you mean data.columns.time=tiem and data.columns.event=evnet?"),
        ("NIFTI path,diagnossis,sex", "did you mean data.columns.classes=diagnossis?"),
        ("NIFTI path,time,evnet,sex", "no column is called like the event; 'evnet' looks like one"),
        ("NIFTI pth,time,event,sex", "found no column of images among 'NIFTI pth', 'time', 'event', 'sex'; did you"),
    ],
)
def test_names_that_are_almost_usual_are_offered(header: str, said: str, tmp_path: Path) -> None:
    save_volume(tmp_path / "a.nii")
    (tmp_path / "t.csv").write_text(f"{header}\na.nii{',1' * header.count(',')}\n")
    with pytest.raises(DataError) as caught:
        guess_config(tmp_path / "t.csv", tmp_path)
    assert said in caught.value.message
    assert "'sex' looks" not in caught.value.message


def test_a_task_without_its_columns_offers_what_is_called_almost_so(tmp_path: Path) -> None:
    table = _cohort(tmp_path, time=None, event=None, tiem=TIMES, evnet=EVENTS)
    with pytest.raises(DataError) as caught:
        guess_config(table, tmp_path, task="survival")
    assert caught.value.message.splitlines() == [
        "cohort.csv: data.columns.time: found no column of that kind, expected e.g. time; did you mean 'tiem'?",
        "cohort.csv: data.columns.event: found no column of that kind, expected e.g. event; did you mean 'evnet'?",
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_a_fold_column_of_other_words_is_no_random_split(strict: bool, tmp_path: Path) -> None:
    """Whoever splits by it names every row, beside all else that is wrong."""
    table = _cohort(tmp_path, Fold_1=[0, 1, 2] * 4, mySplit=["A", "B", "test"] * 4, time=[-5, *TIMES[1:]])
    guess = guess_config(table, tmp_path, strict=strict)
    assert guess.content["data"]["split"]["column"] == ["Fold_1", "mySplit"]
    assert guess.said[-2:] == (
        "cohort.csv: column 'Fold_1': found '0', '1', '2', expected train, and val or test",
        "cohort.csv: column 'mySplit': found 'A', 'B', 'test', expected train, and val or test",
    )
    config = make_config(dict(guess.content), name="guess", base=Path())
    findings = check_outcomes(load_manifest(config.data, tmp_path).cases, [config])
    lines = [str(finding) for finding in findings]
    found = [line for line in lines if line.startswith("data.split.column Fold_1: found '1', expected 'train', 'val'")]
    assert found[0].endswith(
        "cases c1 at cohort.csv row 3, c10 at cohort.csv row 12, c4 at cohort.csv row 6, c7 at cohort.csv row 9"
    )
    assert "case c0: cohort.csv row 2: found '-5' in 'time', expected a time of 0 or more" in lines
    assert "data.split={val: 0.2}" in shlex.split(findings[0].fix), "as a shell takes it"
    table = _cohort(tmp_path, Fold_1=[0, 1, 2] * 4)
    assert _features(_accepted(table, split={"val": 0.25})) == ["age"]


@pytest.mark.parametrize(
    ("columns", "role", "both"),
    [
        ({"Time": AGES}, "time", ("time", "Time")),
        ({"time": None, "OS_days": TIMES, "pfs_days": AGES}, "time", ("OS_days", "pfs_days")),
        ({"event": None, "status": EVENTS, "MACE": EVENTS}, "event", ("status", "MACE")),
    ],
)
def test_two_columns_that_could_be_the_outcome_are_refused(
    columns: dict[str, Any], role: str, both: tuple[str, str], tmp_path: Path
) -> None:
    table = _cohort(tmp_path, **columns)
    with pytest.raises(DataError) as caught:
        guess_config(table, tmp_path)
    first, second = both
    assert f"data.columns.{role}: found '{first}' and '{second}', expected one" in caught.value.message
    assert f"data.columns.{role}={first}" in caught.value.message
    for name in both:
        guess = _accepted(table, columns={role: name})
        assert guess.content["data"]["columns"][role] == name
        assert _features(guess) == ["age"]


@pytest.mark.parametrize("empty", ["", "NA", "nan", "NaN", "N/A", "null", "NULL", "-", "?", "<NA>"])
def test_an_empty_cell_however_it_is_written_leaves_the_column_out(empty: str, tmp_path: Path) -> None:
    smokers = [empty if n in (1, 5, 6) else ("no", "yes")[n % 2] for n in range(12)]
    guess = _accepted(_cohort(tmp_path, bmi=[empty, *AGES[1:]], smoker=smokers))
    assert _features(guess) == ["age"]
    assert "left out: 'bmi' (1 empty cells: row 2); 'smoker' (3 empty cells: row 3, 7, 8)" in guess.said


def test_numbers_with_a_decimal_comma_are_left_out_and_said(tmp_path: Path) -> None:
    table = _cohort(tmp_path, bmi=["20.5", "21", "22.5"] * 4)
    table.write_text(table.read_text().replace(",", ";").replace(".5", ",5"))
    guess = _accepted(table)
    assert _features(guess) == ["age"]
    assert "left out: 'bmi' (8 among numbers that are none, e.g. '20,5': row 2, 4, 5, 7, 8, 10, 11, 13)" in guess.said


def test_a_guess_passes_its_own_check(tmp_path: Path) -> None:
    rare = ["no"] * 12
    rare[3] = "weekly"
    table = _cohort(
        tmp_path,
        stage=[*AGES[:11], "unknown"],
        calcium=[*AGES[:11], "inf"],
        smoker=rare,
        surgeon=[f"dr {n}" for n in range(12)],
        Fold_1=["val" if n == 3 else "train" for n in range(12)],
    )
    guess = _accepted(table)
    assert _features(guess) == ["age"]
    (line,) = (line for line in guess.said if line.startswith("left out: "))
    for why in (
        "'stage' (1 among numbers that are none, e.g. 'unknown': row 13)",
        "'calcium' (1 among numbers that are none, e.g. 'inf': row 13)",
        "'smoker' (found 'weekly', expected one that a training case has: 'no': row 5)",
        "'surgeon' (found 'dr 3', expected one that a training case has: 'dr 0'",
    ):
        assert why in line


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("time_months", "months"),
        ("time (years)", "years"),
        ("Survival_Months", "months"),
        ("os_months", "months"),
        ("OS.days", "days"),
        ("pfs_weeks", "weeks"),
        ("followup_months", "months"),
        ("Follow-up time in years", "years"),
        ("survival_in_days", "days"),
        ("months_to_event", "months"),
        ("duration", "days"),
    ],
)
def test_times_are_found_by_their_usual_names(name: str, unit: str, tmp_path: Path) -> None:
    data = _accepted(_cohort(tmp_path, **{"time": None, name: TIMES})).content["data"]
    assert (data["columns"]["time"], data["time_unit"]) == (name, unit)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"time": None, "last_seen_days": TIMES},
            "'event' is the event, and no column is called like the time; 'last_seen_days' looks like one: "
            "data.columns.time=last_seen_days",
        ),
        (
            {"event": None, "outcome": EVENTS},
            "'time' is the time, and no column is called like the event; 'outcome' looks like one: "
            "data.columns.event=outcome",
        ),
        ({"event": None}, "'time' is the time, and no column is called like the event"),
    ],
)
def test_half_of_an_outcome_is_named_with_what_could_be_the_other(
    columns: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        guess_config(_cohort(tmp_path, **columns), tmp_path)
    assert caught.value.message.endswith(said)
