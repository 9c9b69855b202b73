"""Augmentation: sampled, then applied; the label follows in space and keeps its values."""

from __future__ import annotations

import numpy as np
import torch

from voxscale.config.training import AUGMENT_PRESETS, Flip, Rotate90, Scale, Shift
from voxscale.data.augment import apply_parameters, sample_parameters

IMAGE = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).reshape(2, 3, 4, 4)
LABEL = torch.arange(3 * 4 * 4).reshape(3, 4, 4).to(torch.uint8)


def test_image_and_label_move_together() -> None:
    paired = torch.stack([LABEL.float(), LABEL.float()])
    for seed in range(30):
        parameters = sample_parameters([Flip(), Rotate90(axes=(1, 2))], np.random.default_rng(seed))
        image, label = apply_parameters(paired, LABEL, parameters)
        assert torch.equal(image[0], label.float())
        assert torch.equal(label.flatten().sort().values, LABEL.flatten().sort().values)


def test_probabilities_are_kept() -> None:
    rng = np.random.default_rng(0)
    drawn = [sample_parameters([Flip(p=0.3, axes=(0,)), Rotate90(p=0.5), Scale(p=0.2)], rng) for _ in range(4000)]
    assert abs(np.mean([len(flip["flip"]) for flip, _, _ in drawn]) - 0.3) < 0.03
    turns = [turn.get("turns", 0) for _, turn, _ in drawn]
    assert all(abs(np.mean(np.array(turns) == n) - 1 / 6) < 0.03 for n in (1, 2, 3))
    assert abs(np.mean(["factor" in scale for _, _, scale in drawn]) - 0.2) < 0.03


def test_intensity_changes_the_image_only() -> None:
    image, label = apply_parameters(IMAGE, LABEL, [{"factor": 1.1}, {"offset": -0.05}])
    assert torch.allclose(image, IMAGE * 1.1 - 0.05)
    assert torch.equal(label, LABEL)


def test_limits() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        scale, shift = sample_parameters([Scale(p=1, by=0.1), Shift(p=1, by=0.2)], rng)
        assert 0.9 <= scale["factor"] <= 1.1
        assert -0.2 <= shift["offset"] <= 0.2


def test_light_is_row_0() -> None:
    flip, scale, shift = AUGMENT_PRESETS["light"]
    assert flip == Flip(p=0.5, axes=(0, 1, 2))
    assert scale == Scale(p=0.5, by=0.1)
    assert shift == Shift(p=0.5, by=0.1)
