"""The sample stream: which case, which patch, which augmentation, as a pure function of (seed, epoch, position).

Ranks, world size, loader threads and restarts do not enter. An epoch visits every case once, with `per_case`
patches each; a step takes the next `batch` positions, and the last step of an epoch may be short.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from voxscale.data.store import Box, Store

_ORDER, _SAMPLE = 0, 1  # separate streams of random numbers


@dataclass(frozen=True)
class Sample:
    """One position of the stream: the patch to read, and the random numbers for what comes after."""

    position: int
    case: str
    start: tuple[int, int, int]
    rng: np.random.Generator


@dataclass(frozen=True)
class Stream:
    """The arithmetic of the stream over `num_cases` training cases. Steps count from 1 over the whole run."""

    seed: int
    num_cases: int
    per_case: int
    batch: int

    @property
    def samples_per_epoch(self) -> int:
        return self.num_cases * self.per_case

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.batch)

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 1, that `step` belongs to."""
        return (step - 1) // self.steps_per_epoch + 1

    def positions(self, step: int) -> range:
        """The positions within its epoch that `step` trains on, over all ranks."""
        start = (step - 1) % self.steps_per_epoch * self.batch
        return range(start, min(start + self.batch, self.samples_per_epoch))

    def share(self, step: int, rank: int, world_size: int) -> range:
        """The part of `positions` that one rank trains on: contiguous, even, in rank order."""
        positions = self.positions(step)
        return positions[len(positions) * rank // world_size : len(positions) * (rank + 1) // world_size]

    def case_index(self, epoch: int, position: int) -> int:
        return int(_epoch_order(self.seed, epoch, self.num_cases)[position // self.per_case])

    def rng(self, epoch: int, position: int) -> np.random.Generator:
        return np.random.Generator(_bits(self.seed, _SAMPLE, epoch, position))


class PatchSampler:
    """Samples of the training cases in a store."""

    def __init__(
        self, stream: Stream, store: Store, cases: list[str], size: tuple[int, int, int], foreground: float
    ) -> None:
        self.stream = stream
        self._store = store
        self._cases = cases
        self._size = size
        self._foreground = foreground

    def case(self, epoch: int, position: int) -> str:
        return self._cases[self.stream.case_index(epoch, position)]

    def sample(self, epoch: int, position: int) -> Sample:
        case = self.case(epoch, position)
        rng = self.stream.rng(epoch, position)
        return Sample(position, case, self._start(case, rng), rng)

    def _start(self, case: str, rng: np.random.Generator) -> tuple[int, int, int]:
        """The corner of a patch; with probability `foreground` a patch around a voxel of a random label."""
        entry = self._store.entries[case]
        last = [max(0, whole - size) for whole, size in zip(entry.shape, self._size, strict=True)]
        wants_foreground = rng.random() < self._foreground
        if wants_foreground and entry.voxels:
            label = sorted(entry.voxels)[rng.integers(len(entry.voxels))]
            voxels = self._store.voxels(case, label)
            centre = voxels[rng.integers(len(voxels))].tolist()
            x, y, z = (
                int(min(max(0, at - size // 2), end)) for at, size, end in zip(centre, self._size, last, strict=True)
            )
        else:
            x, y, z = (int(rng.integers(end + 1)) for end in last)
        return x, y, z


def patch_box(start: tuple[int, int, int], size: tuple[int, int, int]) -> Box:
    x, y, z = (slice(at, at + n) for at, n in zip(start, size, strict=True))
    return x, y, z


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, num_cases: int) -> NDArray[np.intp]:
    """A permutation by sorting raw random words: these, unlike numpy's distributions, never change."""
    return np.argsort(_bits(seed, _ORDER, epoch, 0).random_raw(num_cases), kind="stable")


def _bits(seed: int, stream: int, epoch: int, position: int) -> np.random.Philox:
    """Philox is counter-based: seed and stream are its key, the place in the stream its counter."""
    return np.random.Philox(key=[seed, stream], counter=[0, 0, position, epoch])
