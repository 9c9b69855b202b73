"""Outcomes of whole volumes: averaged over members, and refused where a network gives no finite number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from voxscale.data.outcome_encoding import Numeric
from voxscale.errors import NotFiniteError
from voxscale.infer.outcome import OutcomeMember, predict_together
from voxscale.tasks.regression import Regression

IMAGE = np.zeros((1, 4, 4, 4), np.float32)
FEATURES = np.ones(2, np.float32)


def member(value: float) -> OutcomeMember:
    task = Regression([Numeric("age", 50.0, 10.0)])
    return OutcomeMember(lambda *_: torch.tensor([[value]]), task, (4, 4, 4), torch.device("cpu"))


def test_members_are_averaged_in_the_units_of_the_target() -> None:
    assert predict_together([member(1.0), member(2.0)], IMAGE, [FEATURES] * 2, name="case P1") == {
        "predicted/age": 65.0
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_that_is_not_finite_is_an_error_that_names_the_case(value: float) -> None:
    with pytest.raises(NotFiniteError, match=f"case P1: t.csv row 2: found {value} as the output of the network"):
        predict_together([member(1.0), member(value)], IMAGE, [FEATURES] * 2, name="case P1: t.csv row 2")
