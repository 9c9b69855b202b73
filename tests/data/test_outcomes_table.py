"""What a table says of cases as numbers: fitted on training cases alone, kept to the bit, every fault named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from voxscale.config.load import make_config
from voxscale.config.schema import Config
from voxscale.data.cases import Case
from voxscale.data.outcome_encoding import Numeric
from voxscale.data.outcomes import encode, examine_outcomes, make_outcomes, read_outcomes, write_outcomes
from voxscale.data.sampler import Stream
from voxscale.errors import DataError

ROW = {"time": "10", "event": "1", "age": "50", "sex": "F"}


def config_of(task: str = "survival", **columns: Any) -> Config:
    return make_config({"task": task, "data": {"source": "t.csv", "columns": columns}}, name="t", base=Path())


def cases_of(*rows: dict[str, str], val: int = 0) -> list[Case]:
    """The last `val` of them validate."""
    return [
        Case(
            f"c{n}", (Path(),), None, f"p{n}", "val" if n >= len(rows) - val else "train", row=row, where=f"row {n + 2}"
        )
        for n, row in enumerate(rows)
    ]


def test_scales_and_categories_are_those_of_the_training_cases() -> None:
    ages = ("40", "60", "1000")
    cases = cases_of(*({**ROW, "age": age} for age in ages), val=1)
    outcomes = make_outcomes(config_of(features=["age", "sex"]), cases)
    assert outcomes.encoding.feature_names == ("age", "sex=F")
    assert outcomes.features[:, 0].tolist() == [-1.0, 1.0, 95.0]
    assert outcomes.features[:, 1].tolist() == [1.0, 1.0, 1.0]
    assert outcomes.targets.tolist() == [[10.0, 1.0]] * 3


def test_what_stands_for_an_empty_cell_is_no_category() -> None:
    cases = cases_of(*({**ROW, "sex": sex} for sex in ("F", "NA", "?", "M")))
    outcomes, findings = examine_outcomes(config_of(features=["sex"]), cases)
    assert outcomes.encoding.feature_names == ("sex=F", "sex=M")
    assert [(each.code, each.file) for each in findings if each.case] == [
        ("bad-feature", f"row {row}") for row in (3, 4)
    ]


def test_numbers_with_a_decimal_comma_are_no_words() -> None:
    """As spreadsheets of many countries write them: each is named, none becomes a category."""
    cases = cases_of(*({**ROW, "age": age} for age in ("20,5", "21", "20,5", "21,5")))
    _, findings = examine_outcomes(config_of(features=["age"]), cases)
    found = [(each.code, each.file, each.found) for each in findings if each.case]
    assert found == [
        ("bad-feature", f"row {row}", f"'{age}' in 'age'") for row, age in ((2, "20,5"), (4, "20,5"), (5, "21,5"))
    ]


def test_a_column_that_never_changes_does_no_harm() -> None:
    outcomes = make_outcomes(config_of(features=["age"]), cases_of(ROW, ROW))
    assert outcomes.features.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"time": "-1"}, "bad-outcome"),
        ({"time": "nan"}, "bad-outcome"),
        ({"time": ""}, "bad-outcome"),
        ({"event": "yes"}, "bad-outcome"),
        ({"age": "inf"}, "bad-feature"),
        ({"age": ""}, "bad-feature"),
        ({"age": "old"}, "bad-feature"),
        ({"age": "٥٠"}, "bad-feature"),
        ({"time": "१०"}, "bad-outcome"),
        ({"sex": "X"}, "unseen-category"),
        ({"sex": ""}, "bad-feature"),
        ({"sex": "NA"}, "bad-feature"),
    ],
)
def test_a_cell_that_is_no_number_is_named_with_its_row(change: dict[str, str], code: str) -> None:
    cases = cases_of(ROW, ROW, ROW, {**ROW, **change}, val=2)
    _, (finding,) = examine_outcomes(config_of(features=["age", "sex"]), cases)
    assert (finding.code, finding.case, finding.file) == (code, "c3", "row 5")
    with pytest.raises(DataError, match="case c3: row 5: found"):
        make_outcomes(config_of(features=["age", "sex"]), cases)


def test_validation_that_tells_nothing_is_a_warning() -> None:
    cases = cases_of(ROW, {**ROW, "event": "0"}, val=1)
    _, (finding,) = examine_outcomes(config_of(), cases)
    assert (finding.level, finding.code) == ("warning", "no-event")
    classes = cases_of(*({**ROW, "class": name} for name in "xyx"), val=1)
    _, (finding,) = examine_outcomes(config_of("classification"), classes)
    assert (finding.level, finding.code) == ("warning", "one-class")
    make_outcomes(config_of("classification"), classes)


def test_what_no_training_case_has_is_named_with_its_column() -> None:
    _, findings = examine_outcomes(config_of(), cases_of({**ROW, "event": "0"}, ROW, val=1))
    assert "data.columns.event: found no event in 1 training cases, expected at least one" in map(str, findings)
    _, findings = examine_outcomes(config_of("classification"), cases_of(*({**ROW, "class": "x"},) * 3, val=1))
    assert "data.columns.classes: found 1 class in 2 training cases, expected two or more" in map(str, findings)


def test_without_validation_cases_the_last_model_is_said_to_count() -> None:
    _, (finding,) = examine_outcomes(config_of(), cases_of(ROW, {**ROW, "event": "0"}))
    assert (finding.level, finding.code) == ("warning", "no-validation")
    assert "no validation cases: the last model is taken for the best" in str(finding)


@pytest.mark.parametrize("name", ["mean", "case", "patient", "split", "fold"])
def test_a_target_does_not_take_the_name_of_another_column(name: str) -> None:
    cases = cases_of(*({name: value} for value in "123"), val=1)
    _, (finding,) = examine_outcomes(config_of("regression", targets=[name]), cases)
    assert (finding.level, finding.code, finding.file) == ("error", "reserved-name", "data.columns.targets")
    assert f"found '{name}' among targets, expected another name" in str(finding)
    assert finding.fix == "rename it"


def test_a_class_may_be_called_case_but_not_mean() -> None:
    """Cases and controls: columns of classes have their kind before the name."""
    names = ("case", "control", "mean", "control", "case")
    cases = cases_of(*({"class": name} for name in names), val=2)
    _, (finding,) = examine_outcomes(config_of("classification"), cases)
    assert (finding.code, finding.file, finding.fix) == ("reserved-name", "row 4", "rename it")
    assert "'mean' among classes" in str(finding)


def test_classes_that_are_one_number_are_a_warning() -> None:
    cases = cases_of(*({"grade": name} for name in ("1", "2", "1.0", "1", "2")), val=2)
    outcomes, (finding,) = examine_outcomes(config_of("classification", classes="grade"), cases)
    assert outcomes.encoding.classes == ("1", "1.0", "2")
    assert (finding.level, finding.code) == ("warning", "alike-classes")
    assert "classes '1' and '1.0'" in str(finding)


def test_a_class_that_no_training_case_has_is_not_called_a_cell() -> None:
    cases = cases_of(*({"class": name} for name in "abc"), val=1)
    _, findings = examine_outcomes(config_of("classification"), cases)
    (finding,) = (finding for finding in findings if finding.level == "error")
    assert (finding.code, "cell" in finding.fix, "row" in finding.fix) == ("unseen-class", False, False)


def test_what_32_bits_cannot_hold_once_scaled_is_refused() -> None:
    cases = cases_of(*({**ROW, "age": age} for age in ("0", "2e-20", "1e25")), val=1)
    with np.errstate(all="raise"):
        _, (finding,) = examine_outcomes(config_of(features=["age"]), cases)
    assert (finding.code, finding.case) == ("bad-feature", "c2")
    assert "found '1e25' in 'age', expected a finite number of at most 1e+10" in str(finding)


def test_rounding_is_no_spread() -> None:
    outcomes = make_outcomes(config_of(features=["age"]), cases_of(*[{**ROW, "age": "0.1"}] * 3))
    (feature,) = outcomes.encoding.features
    assert isinstance(feature, Numeric)
    assert feature.scale == 1


def test_without_targets_only_features_are_looked_at() -> None:
    outcomes = make_outcomes(config_of(features=["age"]), cases_of(ROW, {**ROW, "age": "52"}))
    unknown = cases_of({"age": "54"})
    encoded, findings = encode(outcomes.encoding, unknown, targets=False)
    assert findings == []
    assert encoded.features.tolist() == [[3.0]]


@given(
    some.lists(
        some.tuples(
            some.floats(0, 1e6), some.booleans(), some.floats(-1e9, 1e9), some.sampled_from(["F", "M", "=1+1"])
        ),
        min_size=1,
        max_size=20,
    )
)
def test_numbers_are_kept_to_the_bit(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    tmp_path = tmp_path_factory.mktemp("o")
    cells = [{"time": repr(t), "event": str(int(e)), "age": repr(a), "sex": s} for t, e, a, s in rows]
    cells.append({**ROW, "event": "1"})
    outcomes = make_outcomes(config_of(features=["age", "sex"]), cases_of(*cells))
    write_outcomes(tmp_path / "o.csv", tmp_path / "e.json", outcomes)
    again = read_outcomes(tmp_path / "o.csv", tmp_path / "e.json")
    assert (again.encoding, again.cases, again.splits) == (outcomes.encoding, outcomes.cases, outcomes.splits)
    assert np.array_equal(again.targets, outcomes.targets)
    assert np.array_equal(again.features, outcomes.features)


@pytest.mark.parametrize("damage", ["", "case,split\nc0,train\n", "no table"])
def test_a_damaged_table_is_refused(damage: str, tmp_path: Path) -> None:
    write_outcomes(tmp_path / "o.csv", tmp_path / "e.json", make_outcomes(config_of(), cases_of(ROW, ROW)))
    (tmp_path / "o.csv").write_text(damage)
    with pytest.raises(DataError, match=r"o\.csv: missing or damaged"):
        read_outcomes(tmp_path / "o.csv", tmp_path / "e.json")


def test_a_recorded_feature_beyond_32_bits_is_refused(tmp_path: Path) -> None:
    places = tmp_path / "o.csv", tmp_path / "e.json"
    write_outcomes(*places, make_outcomes(config_of(features=["age"]), cases_of({**ROW, "age": "1"}, ROW)))
    rows = [line.split(",") for line in places[0].read_text().splitlines()]
    rows[1][-1] = "1e39"
    places[0].write_text("".join(",".join(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=f"case '{rows[1][0]}': found a number that is not finite"):
        read_outcomes(*places)


def test_classes_come_in_the_order_of_numbers() -> None:
    cases = cases_of(*({**ROW, "grade": grade} for grade in ("10", "2", "1", "2")))
    outcomes = make_outcomes(config_of("classification", classes="grade"), cases)
    assert outcomes.encoding.classes == ("1", "2", "10")
    assert outcomes.targets[:, 0].tolist() == [2.0, 1.0, 0.0, 1.0]


@given(
    strata=some.lists(some.integers(0, 2), min_size=1, max_size=60),
    batch=some.integers(1, 12),
    epoch=some.integers(1, 5),
)
def test_a_balanced_epoch_has_every_case_once_and_each_stratum_evenly(
    strata: list[int], batch: int, epoch: int
) -> None:
    stream = Stream(7, len(strata), 1, batch, strata=tuple(strata))
    cases = stream.cases(epoch)
    assert sorted(cases.tolist()) == list(range(len(strata)))
    for stratum in set(strata):
        share = strata.count(stratum) / len(strata)
        seen = np.cumsum([strata[case] == stratum for case in cases])
        expected = share * np.arange(1, len(strata) + 1)
        assert np.abs(seen - expected).max() <= len(set(strata))


def test_balance_changes_with_the_epoch_and_the_seed() -> None:
    strata = tuple([0] * 20 + [1] * 5)
    orders = {tuple(Stream(seed, 25, 1, 5, strata=strata).cases(epoch)) for seed in (0, 1) for epoch in (1, 2)}
    assert len(orders) == 4
