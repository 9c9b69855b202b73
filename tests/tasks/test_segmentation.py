"""Decisions and metrics of segmentation, against plain numpy and against what the design says of empty classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from monai.metrics import compute_hausdorff_distance, compute_surface_dice
from numpy.typing import NDArray

from voxscale.config.losses import DiceOptions
from voxscale.errors import ConfigError
from voxscale.tasks.losses import DiceLoss
from voxscale.tasks.segmentation import Segmentation

BRATS = {"TC": (2, 3), "WT": (1, 2, 3), "ET": (3,)}
ORGANS = {"1": (1,), "2": (2,), "5": (5,)}
SPACING = (1.5, 0.5, 2.0)
TASKS = some.sampled_from([(BRATS, False), (ORGANS, True)])


def make(classes: dict[str, tuple[int, ...]], exclusive: bool, **options: Any) -> Segmentation:
    loss = DiceLoss(DiceOptions(), exclusive, channels=len(classes) + int(exclusive))
    return Segmentation(classes, exclusive=exclusive, loss=loss, **options)


def random_output(task: Segmentation, seed: int, shape: tuple[int, int, int] = (11, 6, 7)) -> torch.Tensor:
    return torch.randn(task.out_channels, *shape, generator=torch.Generator().manual_seed(seed))


def random_label(task: Segmentation, seed: int) -> NDArray[np.uint8]:
    values = sorted({0, *(label for labels in task.classes.values() for label in labels)})
    return np.random.default_rng(seed).choice(values, (11, 6, 7)).astype(np.uint8)


@settings(max_examples=40, deadline=None)
@given(
    some.integers(1, 20), some.booleans(), some.integers(0, 2**32), some.sampled_from([torch.float32, torch.bfloat16])
)
def test_decisions_are_the_winner_or_the_signs(classes: int, exclusive: bool, seed: int, dtype: torch.dtype) -> None:
    task = make({f"c{n}": (n,) for n in range(1, classes + 1)}, exclusive)
    output = random_output(task, seed).to(dtype)
    codes = task.decide(output)
    values = output.float().numpy()
    if exclusive:
        expected = values.argmax(0)
    else:
        expected = sum((channel > 0).astype(np.int64) << index for index, channel in enumerate(values))
    assert codes.dtype == (np.uint8 if exclusive or classes <= 8 else np.uint32)
    assert np.array_equal(codes, expected)
    apart = np.concatenate([task.decide(output[:, low : low + 5]) for low in range(0, 11, 5)])
    assert np.array_equal(apart, codes), "a volume may be decided slab by slab"


def test_probabilities_are_those_of_the_decision() -> None:
    output = torch.tensor([2.0, -1.0, 0.5, 0.0]).reshape(4, 1, 1, 1).to(torch.bfloat16)
    together = make(ORGANS, True).probabilities(output)
    assert together.dtype == torch.float32
    assert torch.allclose(together.ravel(), torch.tensor([2.0, -1.0, 0.5, 0.0]).exp() / sum(np.exp([2, -1, 0.5, 0])))
    assert torch.allclose(
        make(BRATS, False).probabilities(output[:3]).ravel(), torch.tensor([0.8808, 0.2689, 0.6225]), atol=1e-4
    )


@settings(max_examples=20, deadline=None)
@given(TASKS, some.integers(0, 2**32))
def test_metrics_are_those_of_the_masks(kind: tuple[dict[str, tuple[int, ...]], bool], seed: int) -> None:
    task = make(*kind, tolerance_mm=1.6)
    codes, label = task.decide(random_output(task, seed)), random_label(task, seed)
    row = task.measure(codes, label, SPACING, full=True)
    assert tuple(row) == task.metrics(full=True), "in the order of columns"
    for mask, (name, labels) in zip(task.masks(codes).astype(bool), task.classes.items(), strict=True):
        truth = np.isin(label, labels)
        both = (mask & truth).sum()
        assert row[f"dice/{name}"] == pytest.approx(2 * both / (mask.sum() + truth.sum()))
        assert row[f"iou/{name}"] == pytest.approx(both / (mask | truth).sum())
        assert row[f"sensitivity/{name}"] == pytest.approx(both / truth.sum())
        assert row[f"precision/{name}"] == pytest.approx(both / mask.sum())
        assert row[f"volume/{name}"] == pytest.approx(mask.sum() * 1.5 / 1000, rel=1e-5)
        assert row[f"volume_label/{name}"] == pytest.approx(truth.sum() * 1.5 / 1000, rel=1e-5)
        pair = [torch.from_numpy(part)[None, None] for part in (mask, truth)]
        far = compute_hausdorff_distance(*pair, include_background=True, percentile=95, spacing=SPACING)
        near = compute_surface_dice(*pair, [1.6], include_background=True, spacing=SPACING)
        assert row[f"hd95/{name}"] == pytest.approx(float(far), rel=1e-4)
        assert row[f"surface_dice/{name}"] == pytest.approx(float(near), rel=1e-6)
    for metric in ("dice", "iou", "sensitivity", "precision", "hd95", "surface_dice"):
        assert row[f"{metric}/mean"] == pytest.approx(np.mean([row[f"{metric}/{name}"] for name in task.classes]))
    quick = {name: value for name, value in row.items() if not name.startswith(("hd95", "surface_dice"))}
    assert task.measure(codes, label, SPACING, full=False) == quick
    assert task.metrics(full=False) == tuple(quick)


def test_a_class_that_is_missing_somewhere_scores_by_the_rules() -> None:
    task = make({"both": (1,), "predicted": (2,), "labelled": (3,), "nowhere": (4,)}, exclusive=True)
    label, codes = np.zeros((2, 4, 4, 4), np.uint8)
    label[0, 0], codes[0, 0] = 1, 1
    codes[2, 0] = 2
    label[3, 0] = 3
    row = task.measure(codes, label, (1.0, 1.0, 1.0), full=True)
    by_class = {
        name: {key.split("/")[0]: value for key, value in row.items() if key.endswith(f"/{name}")}
        for name in (*task.classes, "mean")
    }
    perfect = {"dice": 1, "iou": 1, "sensitivity": 1, "precision": 1, "hd95": 0, "surface_dice": 1}
    four, none = {"volume": 0.004}, {"volume": 0.0}
    assert by_class["both"] == {**perfect, **four, "volume_label": 0.004}
    assert by_class["predicted"] == {
        "dice": 0,
        "iou": 0,
        "precision": 0,
        "surface_dice": 0,
        **four,
        "volume_label": 0.0,
    }
    assert by_class["labelled"] == {
        "dice": 0, "iou": 0, "sensitivity": 0, "surface_dice": 0, **none, "volume_label": 0.004
    }  # fmt: skip
    assert by_class["nowhere"] == {**none, "volume_label": 0.0}
    third = pytest.approx(1 / 3)
    assert by_class["mean"] == {
        "dice": third, "iou": third, "sensitivity": 0.5, "precision": 0.5, "hd95": 0, "surface_dice": third
    }  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(some.integers(0, 2**32))
def test_targets_name_every_voxel_of_a_class(seed: int) -> None:
    """The loss of the perfect output is nothing; that of its opposite is everything."""
    for task in (make(BRATS, False), make(ORGANS, True)):
        label = torch.from_numpy(np.stack([random_label(task, seed + n) for n in range(2)]))
        target = [torch.isin(label, torch.tensor(labels)) for labels in task.classes.values()]
        if task.exclusive:
            target.insert(0, label == 0)
        perfect = torch.stack(target, dim=1).float() * 80 - 40
        assert float(task.loss(task.loss_rows(perfect, label))) == pytest.approx(0, abs=1e-4)
        assert float(task.loss(task.loss_rows(-perfect, label))) > 0.6


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((2, 4, 8, 8, 8), r"\[2, 4, 8, 8, 8\]"),
        ((2, 3, 8, 8, 4), r"\[2, 3, 8, 8, 4\]"),
        ((2, 3, 8, 8), r"\[2, 3, 8, 8\]"),
        ((2, 5, 4, 8, 8, 8), r"\[2, 5, 4, 8, 8, 8\]"),
        (None, "tuple"),
    ],
)
def test_outputs_of_another_shape_are_refused(shape: tuple[int, ...] | None, found: str) -> None:
    task = make(BRATS, False, model="mine.nets:make")
    output: Any = torch.zeros(shape) if shape else (torch.zeros(2, 3, 8, 8, 8),)
    with pytest.raises(ConfigError, match=f"model mine.nets:make: found an output of {found}, expected ") as raised:
        task.loss_rows(output, torch.zeros(2, 8, 8, 8, dtype=torch.uint8))
    assert "[2, 3, 8, 8, 8]" in raised.value.message


def test_outputs_of_several_levels_are_taken() -> None:
    task, label = make(BRATS, False), torch.randint(0, 4, (2, 8, 8, 8), dtype=torch.uint8)
    assert len(task.loss_rows(torch.zeros(2, 3, 3, 8, 8, 8), label)) == 2


def test_classes_that_a_split_lacks_are_all_named() -> None:
    labels = [(0, 1), (0, 1, 2), (0,), (0, 3)]
    store: Any = SimpleNamespace(labels_of=lambda row: labels[row])
    task = make(BRATS, False)
    assert task.check_classes(store, [1, 3], [1, 3]) == []
    errors = task.check_classes(store, [0, 2], [])
    assert [(finding.level, finding.found) for finding in errors] == [
        ("error", "class TC (label 2, 3) in no training case"),
        ("error", "class ET (label 3) in no training case"),
    ]
    assert all(word in errors[0].fix for word in ("seed", "fold", "stratify", "leave the class out"))
    (warning,) = task.check_classes(store, np.array([0, 3], np.int32), [0, 1])
    assert (warning.level, warning.found) == ("warning", "class ET (label 3) in no validation case")
