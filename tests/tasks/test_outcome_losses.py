"""Losses of outcomes, as a config asks for them, against torch's own with the same options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional

from voxscale.config.load import make_config
from voxscale.data.cases import Case
from voxscale.data.outcomes import make_outcomes
from voxscale.tasks import build_outcome_task

RANDOM = torch.Generator().manual_seed(5)
OUTPUT = torch.randn(12, 3, generator=RANDOM)
CLASSES = [0, 1, 2, 0, 0, 1, 0, 0, 2, 0, 1, 0]
LABELS = torch.randint(0, 2, (12, 3), generator=RANDOM)
NUMBERS = 20 * torch.randn(12, 3, generator=RANDOM, dtype=torch.float64) + 5
WEIGHTS = {"a": 0.5, "b": 2.0, "c": 3.0}


def loss_of(task: str, columns: dict[str, Any], rows: list[list[str]], **options: Any) -> float:
    """Of the whole batch, from rows that ranks have made of uneven parts of it; the table's columns are a, b and c."""
    data = {"source": "t.csv", "columns": columns}
    config = make_config({"task": task, "data": data, "loss": options}, name="t", base=Path())
    cells = [dict(zip("abc", row, strict=False)) for row in rows]
    cases = [Case(f"c{n:02}", (Path(),), None, f"p{n}", "train", row=row) for n, row in enumerate(cells)]
    outcomes = make_outcomes(config, cases)
    built, targets = build_outcome_task(config, outcomes), torch.from_numpy(outcomes.targets)
    parts = (slice(0, 7), slice(7, 8), slice(8, 12))
    return float(built.loss(torch.cat([built.loss_rows(OUTPUT[part], targets[part]) for part in parts])))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("asked", ["none", "balanced", WEIGHTS])
def test_classes_that_exclude_each_other(asked: str | dict[str, float], smoothing: float) -> None:
    weights = {"none": [1.0] * 3, "balanced": compute_class_weight("balanced", classes=np.arange(3), y=CLASSES)}
    weight = torch.tensor(weights[asked] if isinstance(asked, str) else list(asked.values())).float()
    expected = functional.cross_entropy(OUTPUT, torch.tensor(CLASSES), weight=weight, label_smoothing=smoothing)
    rows = [["abc"[number]] for number in CLASSES]
    found = loss_of("classification", {"classes": "a"}, rows, class_weights=asked, label_smoothing=smoothing)
    assert found == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("asked", ["none", "balanced", WEIGHTS])
def test_labels_that_may_hold_at_once(asked: str | dict[str, float], smoothing: float) -> None:
    """Each is smoothed as torch smooths one of two classes; balanced, every label weighs the same in all."""
    weights = {"none": torch.ones(3), "balanced": LABELS.sum() / (3 * LABELS.sum(0))}
    weight = weights[asked] if isinstance(asked, str) else torch.tensor(list(asked.values()))
    pairs = torch.stack([torch.zeros_like(OUTPUT), OUTPUT], dim=1)
    entropy = functional.cross_entropy(pairs, LABELS, label_smoothing=smoothing, reduction="none")
    rows = [[str(label) for label in row] for row in LABELS.tolist()]
    columns = {"classes": ["a", "b", "c"]}
    found = loss_of("classification", columns, rows, class_weights=asked, label_smoothing=smoothing)
    assert found == pytest.approx(float((entropy * weight).mean()), rel=1e-6)


@pytest.mark.parametrize("delta", [None, 0.5, 1.0, 3.0])
def test_numbers_in_deviations_of_training(delta: float | None) -> None:
    scaled = ((NUMBERS - NUMBERS.mean(0)) / NUMBERS.std(0, correction=0)).float()
    own = {"name": "mse"} if delta is None else {"name": "huber", "delta": delta}
    expected = (
        functional.mse_loss(OUTPUT, scaled) if delta is None else functional.huber_loss(OUTPUT, scaled, delta=delta)
    )
    rows = [[repr(number) for number in row] for row in NUMBERS.tolist()]
    found = loss_of("regression", {"targets": ["a", "b", "c"]}, rows, **own)
    assert found == pytest.approx(float(expected), rel=1e-5)
