"""What every task must keep to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import tiny_config
from voxscale.config.load import make_config
from voxscale.data.build import prepare
from voxscale.data.formats import find_cases
from voxscale.data.store import Store
from voxscale.errors import ConfigError
from voxscale.tasks import TASKS, Task, build_task

VARIANTS = {
    "segmentation, regions": {"data__regions": {"ball": [1]}},
    "segmentation, classes": {"data__regions": None},
    "segmentation, batch Dice": {"loss__batch": True},
    "segmentation, Dice alone": {"loss__name": "dice"},
}


@pytest.fixture(scope="module")
def store(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    config = make_config(tiny_config(dataset), name="tiny", base=Path())
    root = tmp_path_factory.mktemp("store")
    return prepare(find_cases(config.data, root), config.data, root, patch=None)


@pytest.fixture(params=VARIANTS, ids=VARIANTS.keys())
def task(request: pytest.FixtureRequest, dataset: Path, store: Store) -> Task:
    config = make_config(tiny_config(dataset, **VARIANTS[request.param]), name="tiny", base=Path())
    return build_task(config, store)


@pytest.fixture
def output(task: Task) -> torch.Tensor:
    return torch.randn(4, task.out_channels, 6, 6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()


LABEL = (torch.rand(4, 6, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.6).to(torch.uint8)


def test_every_task_is_covered() -> None:
    assert {name.split(",")[0] for name in VARIANTS} == TASKS.keys()


def test_rows_are_one_per_sample_and_independent(task: Task, output: torch.Tensor) -> None:
    rows = task.loss_rows(output, LABEL)
    assert rows.shape[0] == 4
    apart = torch.cat([task.loss_rows(output[n : n + 1], LABEL[n : n + 1]) for n in range(4)])
    assert torch.allclose(rows, apart, rtol=1e-5)


def test_order_of_rows_does_not_matter(task: Task, output: torch.Tensor) -> None:
    rows = task.loss_rows(output, LABEL).detach()
    assert float(task.loss(rows)) == pytest.approx(float(task.loss(rows[[3, 1, 0, 2]])), rel=1e-6)


def test_coupling_is_declared_truly(task: Task, output: torch.Tensor) -> None:
    """Where samples are not coupled, the loss is the mean over samples: that is what accumulation relies on."""
    rows = task.loss_rows(output, LABEL).detach()
    mean = sum(float(task.loss(row[None])) for row in rows) / 4
    assert (float(task.loss(rows)) == pytest.approx(mean, rel=1e-6)) != task.couples_samples


def test_gradient_through_rows_is_the_gradient_of_the_loss(task: Task, output: torch.Tensor) -> None:
    """The two halves that the training step takes apart belong together."""
    rows = task.loss_rows(output, LABEL)
    (direct,) = torch.autograd.grad(task.loss(rows), output, retain_graph=True)
    leaf = rows.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(task.loss(leaf), leaf)
    (through,) = torch.autograd.grad(rows, output, gradient)
    assert torch.allclose(direct, through, rtol=1e-5, atol=1e-8)
    assert direct.abs().sum() > 0


def test_a_perfect_output_scores_perfectly(task: Task) -> None:
    label = LABEL[0]
    wanted = torch.stack([label == 0, label == 1])[-task.out_channels :].float() * 20 - 10
    row = task.measure(task.decide(wanted), label.numpy())
    assert row["dice/mean"] == 1.0
    assert set(row) == set(task.metrics)


def test_undefined_is_absent_and_missed_is_zero(task: Task) -> None:
    nothing, something = np.zeros((6, 6, 6), np.uint8), LABEL[0].numpy()
    background = torch.stack([torch.full((6, 6, 6), 9.0), torch.full((6, 6, 6), -9.0)])[-task.out_channels :]
    assert task.measure(task.decide(background), nothing) == {}
    assert task.measure(task.decide(background), something)["dice/mean"] == 0.0
    assert task.measure(task.decide(-background), nothing)["dice/mean"] == 0.0


def test_an_unknown_metric_lists_the_valid_ones(dataset: Path, store: Store) -> None:
    config = make_config(tiny_config(dataset, validate__metric="dice/wt"), name="tiny", base=Path())
    with pytest.raises(ConfigError, match="expected one of dice/ball, dice/mean"):
        build_task(config, store)


def test_a_region_of_absent_labels_is_refused(dataset: Path, store: Store) -> None:
    config = make_config(tiny_config(dataset, data__regions={"x": [1, 7]}), name="tiny", base=Path())
    with pytest.raises(ConfigError, match=r"label 7 stands in no case; found labels \[1\]"):
        build_task(config, store)
