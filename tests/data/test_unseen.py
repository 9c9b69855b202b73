"""Cases that trained runs have not seen: what they lack is said once, with what can be done for a trained run."""

from __future__ import annotations

from test_outcomes_table import ROW, cases_of, config_of

from voxscale.data.outcome_encoding import Encoding
from voxscale.data.outcomes import make_outcomes
from voxscale.data.unseen import encode_unseen


def encoding_of(*rows: dict[str, str]) -> Encoding:
    return make_outcomes(config_of(features=["age", "sex"]), cases_of(*rows)).encoding


def test_a_missing_column_is_one_fault_with_the_nearest_name() -> None:
    encoding = encoding_of(ROW, {**ROW, "sex": "M"})
    renamed = [{"time": "", "event": "1", "ageing": "50", "sex": sex} for sex in ("F", "X", "")]
    (outcomes,), faults = encode_unseen([encoding], cases_of(*renamed), name="new.csv", targets=False)
    assert outcomes.features.shape == (3, 3)
    assert [str(fault) for fault in faults] == [
        "new.csv: found no column 'age', expected a feature that the run was trained with; did you mean 'ageing'?",
        "case c1: row 3: found 'X' in 'sex', expected one that a training case has: 'F', 'M'",
        "case c2: row 4: found an empty cell in 'sex', expected one that a training case has: 'F', 'M'",
    ]
    assert not any("data.columns" in fault.fix for fault in faults), "which no longer counts"


def test_outcomes_are_looked_at_where_they_are_wanted() -> None:
    encoding = encoding_of(ROW, {**ROW, "sex": "M"})
    bad = [{"time": "-5", "age": "inf", "sex": "F"}, {"time": "", "age": "1", "sex": "F"}]
    _, faults = encode_unseen([encoding], cases_of(*bad), name="new.csv", targets=True)
    assert [(fault.code, fault.case, fault.found) for fault in faults] == [
        ("columns", "", "no column 'event'"),
        ("bad-outcome", "c0", "'-5' in 'time'"),
        ("bad-outcome", "c1", "an empty cell in 'time'"),
        ("bad-feature", "c0", "'inf' in 'age'"),
    ]


def test_what_any_of_several_runs_cannot_encode_is_said_once() -> None:
    """Folds have seen different words."""
    first, second = encoding_of(ROW, {**ROW, "sex": "M"}), encoding_of(ROW, {**ROW, "sex": "D"})
    cases = cases_of(*({**ROW, "sex": sex} for sex in ("F", "M", "X")))
    outcomes, faults = encode_unseen([first, second], cases, name="new.csv", targets=False)
    assert [each.encoding for each in outcomes] == [first, second]
    assert [(fault.code, fault.case) for fault in faults] == [("unseen-category", "c2"), ("unseen-category", "c1")]
