"""What a table says otherwise since a run began: the very cells, though one of them changes every scaled number."""

from __future__ import annotations

from test_outcomes_table import ROW, cases_of, config_of

from voxscale.data.outcome_changes import outcome_changes
from voxscale.data.outcomes import Outcomes, make_outcomes

ROWS = [
    {**ROW, "age": age, "sex": sex, "time": time}
    for age, sex, time in (("40.1", "F", "10"), ("0", "M", "20"), ("61.7", "F", "30"))
]


def outcomes_of(task: str = "survival", **changes: dict[str, str]) -> Outcomes:
    rows = [{**row, "class": "ab"[n % 2], **changes.get(f"c{n}", {})} for n, row in enumerate(ROWS)]
    return make_outcomes(config_of(task, features=["age", "sex"]), cases_of(*rows))


def test_each_cell_is_named_with_its_row_as_the_table_has_it() -> None:
    changes = {"c0": {"age": "1e5"}, "c1": {"event": "0", "sex": "F"}, "c2": {"time": "31", "sex": "M"}}
    where = {"c0": "t.csv row 2"}
    assert outcome_changes(outcomes_of(), outcomes_of(**changes), where) == [
        "case c2: found 31 in 'time', expected 30",
        "case c1: found 0 in 'event', expected 1",
        "case c0: t.csv row 2: found 100000 in 'age', expected 40.1",
        "case c1: found 'F' in 'sex', expected 'M'",
        "case c2: found 'M' in 'sex', expected 'F'",
    ]


def test_classes_columns_and_cases_that_differ_are_named() -> None:
    classes = outcomes_of("classification")
    assert outcome_changes(classes, outcomes_of("classification", c2={"class": "b"}), {}) == [
        "case c2: found 'b' in 'class', expected 'a'"
    ]
    longer = make_outcomes(config_of(features=["age", "sex"]), cases_of(*ROWS, ROW))
    assert outcome_changes(outcomes_of(), longer, {}) == ["case c3: found a new row"]
    without = make_outcomes(config_of(features=["age"]), cases_of(*ROWS))
    assert outcome_changes(outcomes_of(), without, {}) == ["features: found ('age',), expected ('age', 'sex')"]


def test_the_last_digits_count_too() -> None:
    assert outcome_changes(outcomes_of(), outcomes_of(c0={"age": "40.10000001"}), {}) == [
        "found cells that differ in their last digits"
    ]
