"""BraTS as DistMIS shards it: `train_{0..15}`, `valid_{0..3}` and `test_{0..3}.tfrecord`, binary labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from voxscale.config.data import Synthetic
from voxscale.data.synthetic.brain import make_brain
from voxscale.data.synthetic.records import write_records

_SHARDS = {"train": 16, "valid": 4, "test": 4}
_HELD_OUT = 0.15  # the share of each of valid and test
_KEPT = slice(2, -1)  # slices of BraTS that the shards keep: 155 become 152


def list_distmis(folder: Path, options: Synthetic) -> list[Callable[[], None]]:
    """A shard at a time; fewer shards where there are fewer cases, numbered from 0 all the same."""
    held_out = max(1, round(options.cases * _HELD_OUT))
    counts = {"train": max(1, options.cases - 2 * held_out), "valid": held_out, "test": held_out}
    files: list[Callable[[], None]] = []
    first = 0
    for role, count in counts.items():
        shards = np.array_split(np.arange(first, first + count), min(_SHARDS[role], count))
        first += count
        for number, indices in enumerate(shards):
            path = folder / f"{role}_{number}.tfrecord"
            files.append(partial(_write_shard, path, options, indices.tolist()))
    return files


def make_example(seed: int, index: int, size: tuple[int, int, int]) -> dict[str, NDArray[np.float32]]:
    """`img` (4, x, y, z), each sequence standardised, and `label` (1, x, y, z): 1 in any part of the tumour."""
    x, y, z = size
    image_cxyz, label = (voxels[..., _KEPT] for voxels in make_brain(seed, index, (x, y, z + 3)))
    mean, deviation = (np.asarray(f(image_cxyz, axis=(1, 2, 3), keepdims=True)) for f in (np.mean, np.std))
    return {
        "img": ((image_cxyz - mean) / deviation).astype(np.float32),
        "label": (label > 0)[None].astype(np.float32),
    }


def _write_shard(path: Path, options: Synthetic, indices: list[int]) -> None:
    examples: Iterator[dict[str, NDArray[np.float32]]] = (
        make_example(options.seed, index, options.size) for index in indices
    )
    write_records(path, examples)
