"""What every task must keep to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import tiny_config
from voxscale.config.load import make_config
from voxscale.data.build import prepare
from voxscale.data.cases import Case
from voxscale.data.formats import find_cases
from voxscale.data.outcomes import Outcomes, make_outcomes
from voxscale.data.store import Store
from voxscale.errors import ConfigError
from voxscale.tasks import OUTCOMES, OutcomeTask, Task, VolumeTask, build_outcome_task, build_task

VOLUMES = {
    "segmentation, regions": {"data__regions": {"ball": [1]}},
    "segmentation, classes": {"data__regions": None},
    "segmentation, batch Dice": {"loss__batch": True},
    "segmentation, Dice alone": {"loss__name": "dice"},
    "segmentation, own loss": {"loss": {"name": "own_losses:squares"}},
    "segmentation, own loss of all": {"loss": {"name": "own_losses:sums", "reduce": "own_losses:ratio"}},
}
OUTCOMES_OF: dict[str, dict[str, Any]] = {
    "survival, Efron": {"task": "survival", "validate": {"horizons": ["1y"]}},
    "survival, Breslow": {"task": "survival", "loss": {"ties": "breslow"}},
    "survival, own loss": {"task": "survival", "loss": {"name": "own_losses:sums", "reduce": "own_losses:ratio"}},
    "regression, own loss": {
        "task": "regression",
        "loss": {"name": "own_losses:squares"},
        "data": {"columns": {"targets": ["age"]}},
    },
    "classification, own loss": {"task": "classification", "loss": {"name": "own_losses:squares"}},
    "regression, squares": {"task": "regression", "data": {"columns": {"targets": ["age", "score"]}}},
    "regression, Huber": {"task": "regression", "loss": {"name": "huber"}, "data": {"columns": {"targets": ["age"]}}},
    "classification": {"task": "classification"},
    "classification, weighed": {
        "task": "classification",
        "loss": {"class_weights": "balanced", "label_smoothing": 0.1},
    },
    "classification, labels at once": {
        "task": "classification",
        "data": {"columns": {"classes": ["a", "b"]}},
        "loss": {"class_weights": {"a": 1.0, "b": 3.0}},
    },
}
SPACING = (1.0, 2.0, 0.5)
LABEL = (torch.rand(4, 6, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.6).to(torch.uint8)
COHORT = [
    {"time": "400", "event": "1", "age": "61", "score": "0.5", "class": "x", "a": "1", "b": "0"},
    {"time": "900", "event": "0", "age": "48", "score": "2.5", "class": "y", "a": "0", "b": "1"},
    {"time": "300", "event": "1", "age": "72", "score": "1.5", "class": "x", "a": "1", "b": "1"},
    {"time": "700", "event": "1", "age": "55", "score": "-3", "class": "x", "a": "0", "b": "0"},
]


@pytest.fixture(scope="module")
def store(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    config = make_config(tiny_config(dataset), name="tiny", base=Path())
    root = tmp_path_factory.mktemp("store")
    return prepare(find_cases(config.data, root), config.data, root, patch=None)


@pytest.fixture(params=VOLUMES, ids=VOLUMES.keys())
def task(request: pytest.FixtureRequest, dataset: Path, store: Store) -> VolumeTask:
    config = make_config(tiny_config(dataset, **VOLUMES[request.param]), name="tiny", base=Path())
    return build_task(config, store)


def of_cohort(name: str) -> tuple[OutcomeTask, Outcomes]:
    content = {**OUTCOMES_OF[name], "data": {"source": "cohort.csv", **OUTCOMES_OF[name].get("data", {})}}
    config = make_config(content, name="cohort", base=Path())
    cases = [Case(f"c{n}", (Path(),), None, f"p{n}", "train", row=row) for n, row in enumerate(COHORT)]
    outcomes = make_outcomes(config, cases)
    return build_outcome_task(config, outcomes), outcomes


@dataclass
class Trained:
    """A task, with outputs for four samples and their targets."""

    task: Task
    output: torch.Tensor
    target: torch.Tensor


@pytest.fixture(params=[*VOLUMES, *OUTCOMES_OF])
def trained(request: pytest.FixtureRequest, dataset: Path, store: Store) -> Trained:
    random = torch.Generator().manual_seed(0)
    if request.param in VOLUMES:
        config = make_config(tiny_config(dataset, **VOLUMES[request.param]), name="tiny", base=Path())
        volume = build_task(config, store)
        return Trained(volume, torch.randn(4, volume.out_channels, 6, 6, 6, generator=random).requires_grad_(), LABEL)
    task, outcomes = of_cohort(request.param)
    output = torch.randn(4, task.out_channels, generator=random).requires_grad_()
    return Trained(task, output, torch.from_numpy(outcomes.targets))


def test_every_task_is_covered() -> None:
    assert {name.split(",")[0] for name in (*VOLUMES, *OUTCOMES_OF)} == {"segmentation", *OUTCOMES}


def test_rows_are_one_per_sample_and_independent(trained: Trained) -> None:
    task, output, target = trained.task, trained.output, trained.target
    rows = task.loss_rows(output, target)
    assert rows.shape[0] == 4
    apart = torch.cat([task.loss_rows(output[n : n + 1], target[n : n + 1]) for n in range(4)])
    assert torch.allclose(rows, apart, rtol=1e-5)


def test_order_of_rows_does_not_matter(trained: Trained) -> None:
    rows = trained.task.loss_rows(trained.output, trained.target).detach()
    loss = trained.task.loss
    assert float(loss(rows)) == pytest.approx(float(loss(rows[[3, 1, 0, 2]])), rel=1e-6)


def test_coupling_is_declared_truly(trained: Trained) -> None:
    """Where samples are not coupled, the loss is the mean over samples: that is what accumulation relies on."""
    rows = trained.task.loss_rows(trained.output, trained.target).detach()
    mean = sum(float(trained.task.loss(row[None])) for row in rows) / 4
    assert (float(trained.task.loss(rows)) == pytest.approx(mean, rel=1e-6)) != trained.task.couples_samples


def test_gradient_through_rows_is_the_gradient_of_the_loss(trained: Trained) -> None:
    """The two halves that the training step takes apart belong together."""
    task, output = trained.task, trained.output
    rows = task.loss_rows(output, trained.target)
    (direct,) = torch.autograd.grad(task.loss(rows), output, retain_graph=True)
    leaf = rows.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(task.loss(leaf), leaf)
    (through,) = torch.autograd.grad(rows, output, gradient)
    assert torch.allclose(direct, through, rtol=1e-5, atol=1e-8)
    assert direct.abs().sum() > 0


@pytest.mark.parametrize("name", OUTCOMES_OF)
def test_an_outcome_is_described_by_its_columns_and_measured_by_its_metrics(name: str) -> None:
    task, outcomes = of_cohort(name)
    outputs = np.random.default_rng(0).normal(size=(4, task.out_channels))
    rows = [
        {**task.known(target), **task.predict(output)} for target, output in zip(outcomes.targets, outputs, strict=True)
    ]
    assert all(sorted(row) == sorted(task.columns(full=False)) for row in rows)
    quick = task.summarise(rows, full=False)
    assert quick
    assert set(quick) <= set(task.metrics(full=False))
    if task.learns_from:
        task.learn(rows)
        rows = [
            {**task.known(target), **task.predict(output)}
            for target, output in zip(outcomes.targets, outputs, strict=True)
        ]
        assert all(sorted(row) == sorted(task.columns(full=True)) for row in rows)
    full = task.summarise(rows, full=True)
    assert quick.items() <= full.items()
    assert set(full) <= set(task.metrics(full=True))
    for entry in full.values():
        low, high = entry["ci95"]
        assert low <= high
        assert np.isfinite([entry["mean"], low, high]).all()
    assert task.summarise([], full=True) == {}
    details = json.loads(json.dumps(task.details(rows)))
    if name.startswith("classification"):
        counted = details["confusion"].get("cases") or [*details["confusion"]["a"], *details["confusion"]["b"]]
        assert np.sum(counted) == 4 * (1 if "cases" in details["confusion"] else 2)
    elif name == "survival, Efron":
        assert sum(group["cases"] for group in details["calibration"]["1y"]) == 4
    else:
        assert details == {}


@pytest.mark.parametrize("name", OUTCOMES_OF)
def test_what_was_learnt_is_taken_up_again(name: str) -> None:
    task, outcomes = of_cohort(name)
    output = np.full(task.out_channels, 0.3)
    task.learn([{**task.known(target), **task.predict(output)} for target in outcomes.targets])
    again, _ = of_cohort(name)
    if learnt := task.learnt():
        again.relearn(json.loads(json.dumps(learnt)))
    assert again.predict(output) == task.predict(output)


@pytest.mark.parametrize("name", OUTCOMES_OF)
def test_an_unknown_metric_of_an_outcome_lists_the_valid_ones(name: str) -> None:
    task, _ = of_cohort(name)
    content = {**OUTCOMES_OF[name], "data": {"source": "cohort.csv", **OUTCOMES_OF[name].get("data", {})}}
    content["validate"] = {**content.get("validate", {}), "metric": "dice/mean"}
    config = make_config(content, name="cohort", base=Path())
    with pytest.raises(ConfigError, match="validate.metric: found 'dice/mean'") as raised:
        build_outcome_task(config, of_cohort(name)[1])
    assert all(metric in raised.value.message for metric in task.metrics(full=False))


def test_a_perfect_output_scores_perfectly(task: VolumeTask) -> None:
    label = LABEL[0]
    wanted = torch.stack([label == 0, label == 1])[-task.out_channels :].float() * 20 - 10
    codes = task.decide(wanted)
    row = task.measure(codes, label.numpy(), SPACING, full=True)
    assert row["dice/mean"] == 1.0
    assert tuple(row) == task.metrics(full=True)
    quick = task.measure(codes, label.numpy(), SPACING, full=False)
    assert tuple(quick) == task.metrics(full=False)
    assert quick.items() < row.items()


def test_undefined_is_absent_and_missed_is_zero(task: VolumeTask) -> None:
    nothing, something = np.zeros((6, 6, 6), np.uint8), LABEL[0].numpy()
    background = torch.stack([torch.full((6, 6, 6), 9.0), torch.full((6, 6, 6), -9.0)])[-task.out_channels :]

    def scores(output: torch.Tensor, label_xyz: np.ndarray) -> dict[str, float]:
        row = task.measure(task.decide(output), label_xyz, SPACING, full=True)
        return {name: value for name, value in row.items() if not name.startswith("volume")}

    assert scores(background, nothing) == {}
    for missed in (scores(background, something), scores(-background, nothing)):
        assert missed["dice/mean"] == 0.0
        assert "hd95/mean" not in missed


def test_a_volume_may_be_decided_in_parts(task: VolumeTask) -> None:
    output = torch.randn(1, task.out_channels, 6, 6, 6, generator=torch.Generator().manual_seed(0))
    whole = task.decide(output[0])
    assert np.array_equal(whole, np.concatenate([task.decide(output[0, :, :4]), task.decide(output[0, :, 4:])]))
    assert whole.shape == (6, 6, 6)
    assert np.issubdtype(whole.dtype, np.unsignedinteger)


def test_decisions_become_labels_masks_and_probabilities(task: VolumeTask) -> None:
    label = LABEL[0]
    wanted = torch.stack([label == 0, label == 1])[-task.out_channels :].float() * 20 - 10
    codes = task.decide(wanted)
    assert task.can_map is None
    assert np.array_equal(task.label_map(codes), label)
    assert np.array_equal(task.masks(codes), label[None])
    probabilities = task.probabilities(wanted)
    assert probabilities.shape == wanted.shape
    assert torch.allclose(probabilities[-1], label.float(), atol=1e-3)


def test_classes_are_looked_for_in_each_split(task: VolumeTask, store: Store) -> None:
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
    assert metric in build_task(config, store).choosable()


def test_a_volume_is_measured_but_chooses_no_model(dataset: Path, store: Store) -> None:
    task = build_task(make_config(tiny_config(dataset), name="tiny", base=Path()), store)
    assert set(task.metrics(full=False)) - set(task.choosable()) == {"volume/ball", "volume_label/ball"}
    config = make_config(tiny_config(dataset, validate__metric="volume/ball"), name="tiny", base=Path())
    with pytest.raises(ConfigError, match="validate.metric: found 'volume/ball'"):
        build_task(config, store)


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
