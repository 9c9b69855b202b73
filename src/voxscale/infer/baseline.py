"""What a threshold alone would reach: the yardstick beside a trained model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from voxscale.data.cases import Case
from voxscale.data.store import Store

_THRESHOLDS = np.linspace(-3, 3, 61)


def threshold_dice(
    store: Store, chosen_on: Sequence[Case], scored_on: Sequence[Case], *, labels: Collection[int] | None = None
) -> float:
    """Mean Dice over `scored_on` of the channel and the one threshold on it that are best over `chosen_on`.

    `labels` are the label values to be found; none: all but background.
    """
    chosen = _dice_curves(store, chosen_on, labels).mean(0)
    channel, threshold = np.unravel_index(np.argmax(chosen), chosen.shape)
    return float(_dice_curves(store, scored_on, labels)[:, channel, threshold].mean())


def _dice_curves(store: Store, cases: Sequence[Case], labels: Collection[int] | None) -> NDArray[np.float64]:
    """Dice (case, channel, threshold) of the voxels above each threshold against those with the labels."""
    curves = []
    for case in cases:
        row = store.row(case.id)
        label_xyz = store.read_label(row)
        truth = label_xyz > 0 if labels is None else np.isin(label_xyz, list(labels))
        curves.append([_dice_curve(channel, truth) for channel in store.read_image(row)])
    return np.array(curves)


def _dice_curve(image_xyz: NDArray[np.floating], truth: NDArray[np.bool_]) -> NDArray[np.float64]:
    passed = np.searchsorted(_THRESHOLDS, image_xyz.ravel())  # how many thresholds a voxel is above
    above, hits = (_at_least(counted) for counted in (passed, passed[truth.ravel()]))
    return np.asarray(2 * hits / np.maximum(1, above + np.count_nonzero(truth)))


def _at_least(passed: NDArray[np.intp]) -> NDArray[np.int64]:
    """For each threshold, how many voxels are above it."""
    counts = np.bincount(passed, minlength=len(_THRESHOLDS) + 1)
    return counts[::-1].cumsum()[::-1][1:]
