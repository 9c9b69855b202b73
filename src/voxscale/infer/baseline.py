"""What a threshold alone would reach: the yardstick beside a trained model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from voxscale.data.cases import Case
from voxscale.data.store import Store


def threshold_dice(store: Store, chosen_on: Sequence[Case], scored_on: Sequence[Case]) -> float:
    """Mean Dice over `scored_on` of the one threshold (on the first channel) that is best over `chosen_on`."""
    thresholds = np.linspace(-3, 3, 61)
    curves = _dice_curves(store, chosen_on, thresholds).mean(0)
    best = int(np.argmax(curves))
    return float(_dice_curves(store, scored_on, thresholds[best : best + 1]).mean())


def _dice_curves(store: Store, cases: Sequence[Case], thresholds: np.ndarray) -> np.ndarray:
    """Dice (case, threshold) of the voxels above each threshold against all labelled voxels."""
    rows = []
    for case in cases:
        row = store.row(case.id)
        image_cxyz, truth = store.read_image(row), store.read_label(row) > 0
        above = [image_cxyz[0] > threshold for threshold in thresholds]
        rows.append([2 * (mask & truth).sum() / max(1, mask.sum() + truth.sum()) for mask in above])
    return np.array(rows)
