"""Sections that outcomes have of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from voxscale.config.data import Columns
from voxscale.config.load import make_config
from voxscale.config.losses import CrossEntropyOptions
from voxscale.errors import ConfigError


def test_classes_may_be_called_by_numbers() -> None:
    assert CrossEntropyOptions(class_weights={0: 1, 1: 3.5}).class_weights == {"0": 1.0, "1": 3.5}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("{0: 0, 1: 0}", "loss.class_weights: found no weight above 0; expected at least one"),
        ("{yes: 1, no: 2}", "found the class True; expected its name, in quotes where YAML takes it: 'yes' or 'true'"),
        ("{a: -1, b: 2}", "loss.class_weights.a: found -1"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: str, said: str) -> None:
    content = {"task": "classification", "data": {"source": "."}}
    with pytest.raises(ConfigError) as caught:
        make_config(content, [f"loss.class_weights={weights}"], name="c.yaml", base=Path())
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("task", "fields", "said"),
    [
        ("regression", "train.balance=true", "train.balance: found true with task regression; expected with events or"),
        (
            "survival",
            "data.cache.share=rank; train.balance=true",
            "found true with data.cache.share: rank, which fixes",
        ),
        (
            "segmentation",
            "train.freeze={encoder: 2}",
            "train.freeze: found with task segmentation, whose networks have",
        ),
        ("survival", "validate.horizons=1y", "validate.horizons: found '1y', expected a list in brackets, as [1y]"),
    ],
)
def test_fields_that_do_not_fit_the_task_are_refused(task: str, fields: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"task": task, "data": {"source": "."}}, fields.split("; "), name="c.yaml", base=Path())
    assert said in caught.value.message


@pytest.mark.parametrize("field", ["targets", "classes", "features", "image"])
def test_a_column_counts_once(field: str) -> None:
    names: Any = ["age", "sex", "age"]
    with pytest.raises(ValidationError, match="found 'age' more than once, expected each column once"):
        Columns(**{field: names})
