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


SPACING = (1.0, 2.0, 0.5)
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
    codes = task.decide(wanted)
    row = task.measure(codes, label.numpy(), SPACING, surfaces=True)
    assert row["dice/mean"] == 1.0
    assert tuple(row) == task.metrics(surfaces=True)
    quick = task.measure(codes, label.numpy(), SPACING, surfaces=False)
    assert tuple(quick) == task.metrics(surfaces=False)
    assert quick.items() < row.items()


def test_undefined_is_absent_and_missed_is_zero(task: Task) -> None:
    nothing, something = np.zeros((6, 6, 6), np.uint8), LABEL[0].numpy()
    background = torch.stack([torch.full((6, 6, 6), 9.0), torch.full((6, 6, 6), -9.0)])[-task.out_channels :]

    def scores(output: torch.Tensor, label_xyz: np.ndarray) -> dict[str, float]:
        row = task.measure(task.decide(output), label_xyz, SPACING, surfaces=True)
        return {name: value for name, value in row.items() if not name.startswith("volume")}

    assert scores(background, nothing) == {}
    for missed in (scores(background, something), scores(-background, nothing)):
        assert missed["dice/mean"] == 0.0
        assert "hd95/mean" not in missed


def test_a_volume_may_be_decided_in_parts(task: Task, output: torch.Tensor) -> None:
    whole = task.decide(output[0])
    assert np.array_equal(whole, np.concatenate([task.decide(output[0, :, :4]), task.decide(output[0, :, 4:])]))
    assert whole.shape == (6, 6, 6)
    assert np.issubdtype(whole.dtype, np.unsignedinteger)


def test_decisions_become_labels_masks_and_probabilities(task: Task) -> None:
    label = LABEL[0]
    wanted = torch.stack([label == 0, label == 1])[-task.out_channels :].float() * 20 - 10
    codes = task.decide(wanted)
    assert task.can_map is None
    assert np.array_equal(task.label_map(codes), label)
    assert np.array_equal(task.masks(codes), label[None])
    probabilities = task.probabilities(wanted)
    assert probabilities.shape == wanted.shape
    assert torch.allclose(probabilities[-1], label.float(), atol=1e-3)


def test_classes_are_looked_for_in_each_split(task: Task, store: Store) -> None:
    rows = range(len(store))
    assert task.check_classes(store, rows, rows) == []


def test_an_unknown_metric_lists_the_valid_ones(dataset: Path, store: Store) -> None:
    config = make_config(tiny_config(dataset, validate__metric="dice/wt"), name="tiny", base=Path())
    with pytest.raises(ConfigError, match=r"expected one of dice\|.* / ball\|mean") as raised:
        build_task(config, store)
    assert "surfaces" not in raised.value.message


@pytest.mark.parametrize("metric", ["hd95/mean", "surface_dice/ball"])
def test_what_only_the_final_evaluation_measures_cannot_choose_the_best_model(
    metric: str, dataset: Path, store: Store
) -> None:
    config = make_config(tiny_config(dataset, validate__metric=metric), name="tiny", base=Path())
    with pytest.raises(ConfigError, match="surfaces are measured in the final evaluation only"):
        build_task(config, store)


@pytest.mark.parametrize("metric", ["iou/mean", "sensitivity/ball"])
def test_every_quick_score_can_choose_the_best_model(metric: str, dataset: Path, store: Store) -> None:
    config = make_config(tiny_config(dataset, validate__metric=metric), name="tiny", base=Path())
    assert metric in build_task(config, store).metrics(surfaces=False)


def test_all_that_is_wrong_is_said_at_once(dataset: Path, store: Store) -> None:
    fields = {"data__regions": {"x": [1, 7], "y": [9]}, "validate__metric": "dice/ball"}
    config = make_config(tiny_config(dataset, **fields), name="tiny", base=Path())
    with pytest.raises(ConfigError) as raised:
        build_task(config, store)
    assert len(raised.value.message.splitlines()) == 3


def test_a_region_of_absent_labels_is_refused(dataset: Path, store: Store) -> None:
    config = make_config(tiny_config(dataset, data__regions={"x": [1, 7]}), name="tiny", base=Path())
    with pytest.raises(ConfigError, match=r"label 7 stands in no case; found labels \[1\]"):
        build_task(config, store)
