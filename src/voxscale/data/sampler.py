"""The sample stream: which case, which patch, which augmentation, as a pure function of (seed, epoch, position).

Ranks, world size, loader threads and restarts do not enter. An epoch visits every case once, with `per_case`
patches each; a step takes the next `batch` positions, and the last step of an epoch may be short.

Two settings of `data.cache` are exceptions, reproducible for one (seed, world): with `parts` each rank has cases of
its own, and with `replace` an epoch visits only the cases that are held, which change from epoch to epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_ORDER, _SAMPLE, _CYCLE = 0, 1, 2  # separate streams of random numbers

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Sample:
    """One position of the stream: the patch to read, and the random numbers for what comes after."""

    position: int
    row: int  # of its case in the store
    start: Triple
    rng: np.random.Generator


@dataclass(frozen=True)
class _Block:
    """`count` parts of equal size, side by side in the cycle, of which the first case is at `first`."""

    count: int
    first: int
    size: int
    held: int  # cases of a part that its cache holds
    used: int  # cases of a part that an epoch visits
    exchanged: int  # cases of a part that leave the cache after an epoch

    def slots(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the cycle the cases at `places` of this epoch's window are; a row for each part."""
        if self.exchanged:
            places = (places + (epoch - 1) * self.exchanged) % max(1, self.size)
        slots: NDArray[np.int64] = places + (self.first + self.size * np.arange(self.count))[:, None]
        return slots


@dataclass(frozen=True)
class Stream:
    """The arithmetic of the stream over `num_cases` training cases. Steps count from 1 over the whole run.

    `parts` is the world size where each rank has cases of its own, else 1; parts differ by one case at most. `rate`
    is the share of the cases that is held; with `replace` above 0 an epoch visits these only, and after it that
    share of them is exchanged for the next ones in a fixed cycle through all cases. Positions run part after part.
    `strata`, a number for each case, has each of them spread evenly over an epoch; only for a stream in one part.
    """

    seed: int
    num_cases: int
    per_case: int
    batch: int
    rate: float = 1.0
    replace: float = 0.0
    parts: int = 1
    strata: tuple[int, ...] = field(default=(), hash=False)  # a hash of them all at every sample would cost its time

    @property
    def samples_per_epoch(self) -> int:
        return sum(block.count * block.used for block in self._blocks) * self.per_case

    @cached_property
    def steps_per_epoch(self) -> int:
        return -(-max(block.used for block in self._blocks) * self.per_case // self._part_batch)

    @property
    def epochs_to_see_all(self) -> int:
        """Within so many epochs in a row every case is visited."""
        waits = (-(-(block.size - block.used) // max(1, block.exchanged)) for block in self._blocks)
        return 1 + max(waits)

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 1, that `step` belongs to."""
        return (step - 1) // self.steps_per_epoch + 1

    def positions(self, step: int, part: int = 0) -> range:
        """The positions within its epoch that `step` trains on in one part, over all its ranks."""
        start = (step - 1) % self.steps_per_epoch * self._part_batch
        span = self._span(part) if part else self._first_span
        return span[start : start + self._part_batch]

    def size(self, step: int) -> int:
        """How many samples `step` trains on, over all ranks."""
        large, small = self._blocks
        return large.count * len(self.positions(step)) + small.count * len(self.positions(step, self.parts - 1))

    def share(self, step: int, rank: int, world_size: int) -> range:
        """The positions of `step` that one rank trains on: of its part a contiguous and even share, in rank order."""
        ranks, place = self._ranks_per_part(world_size), rank // self.parts
        positions = self.positions(step, rank % self.parts)
        if ranks == 1:
            return positions
        return positions[len(positions) * place // ranks : len(positions) * (place + 1) // ranks]

    def largest_share(self, step: int, world_size: int) -> int:
        """The most samples that any rank has in `step`; no part is larger than the first."""
        return -(-len(self.positions(step)) // self._ranks_per_part(world_size))

    def phantom(self, step: int, rank: int) -> int:
        """A position for a rank without samples in `step` to read: among its own cases, where it has any."""
        part = rank % self.parts
        return next(chain(self.positions(step, part), self._span(part), [0]))

    def case_index(self, epoch: int, position: int) -> int:
        return int(self.cases(epoch)[position // self.per_case])

    def cases(self, epoch: int) -> NDArray[np.int64]:
        """The cases in the order in which an epoch visits them, part after part. Not to be changed."""
        return _epoch_cases(self, epoch)

    def held(self, epoch: int, rank: int | None = None) -> NDArray[np.int64]:
        """The cases that the cache holds in an epoch: of one rank where ranks have their own, else of all."""
        window = [block.slots(epoch, np.arange(block.held)) for block in self._blocks]
        if rank is not None and self.parts > 1:
            large, part = len(window[0]), rank % self.parts
            slots = window[0][part] if part < large else window[1][part - large]
        else:
            slots = np.concatenate([part.ravel() for part in window])
        return _cases_at(self, slots)

    def rng(self, epoch: int, position: int) -> np.random.Generator:
        return np.random.Generator(_bits(self.seed, _SAMPLE, epoch, position))

    @cached_property
    def _blocks(self) -> tuple[_Block, _Block]:
        """The parts in two blocks, those with one case more first; either may be empty."""
        size, num_larger = divmod(self.num_cases, self.parts)
        return (
            self._block(num_larger, 0, size + 1 if num_larger else 0),
            self._block(self.parts - num_larger, num_larger * (size + 1), size),
        )

    def _block(self, count: int, first: int, size: int) -> _Block:
        held = min(size, max(1, round(self.rate * size)))
        exchanged = max(1, round(self.replace * held)) if self.replace > 0 else 0
        return _Block(count, first, size, held, held if exchanged else size, exchanged)

    @cached_property
    def _part_batch(self) -> int:
        """How many positions a step takes from each part; the plan lets only whole shares of the batch through."""
        return -(-self.batch // self.parts)

    @cached_property
    def _first_span(self) -> range:
        return self._span(0)

    def _span(self, part: int) -> range:
        """The positions of a part in every epoch."""
        large, small = self._blocks
        start = min(part, large.count) * large.used + max(0, part - large.count) * small.used
        used = large.used if part < large.count else small.used
        return range(start * self.per_case, (start + used) * self.per_case)

    def _ranks_per_part(self, world_size: int) -> int:
        ranks, rest = divmod(world_size, self.parts)
        if rest or not ranks:
            raise ValueError(f"a stream in {self.parts} parts cannot be shared by {world_size} ranks")
        return ranks


class Prepared(Protocol):
    """What the sampler asks of a store."""

    def id(self, row: int) -> str: ...
    def shape(self, row: int) -> Triple: ...
    def labels_at(self, row: int) -> tuple[int, ...]: ...
    def places(self, row: int, label: int) -> NDArray[np.int16 | np.int32]: ...


class PatchSampler:
    """Samples of the training cases, which are `rows` of a store."""

    def __init__(
        self, stream: Stream, store: Prepared, rows: NDArray[np.int32], size: Triple, foreground: float
    ) -> None:
        self.stream = stream
        self._store = store
        self._rows = rows
        self._size = size
        self._foreground = foreground

    def row(self, epoch: int, position: int) -> int:
        return int(self._rows[self.stream.case_index(epoch, position)])

    def case(self, epoch: int, position: int) -> str:
        return self._store.id(self.row(epoch, position))

    def sample(self, epoch: int, position: int) -> Sample:
        row = self.row(epoch, position)
        rng = self.stream.rng(epoch, position)
        return Sample(position, row, self._start(row, rng), rng)

    def _start(self, row: int, rng: np.random.Generator) -> Triple:
        """The corner of a patch; with probability `foreground` a patch around a voxel of a random label.

        Along an axis on which the case is smaller than the patch it lies in the middle, so the corner is outside.
        """
        shape = self._store.shape(row)
        last = [max(0, whole - size) for whole, size in zip(shape, self._size, strict=True)]
        wants_foreground = rng.random() < self._foreground
        if wants_foreground and (labels := self._store.labels_at(row)):
            places = self._store.places(row, labels[rng.integers(len(labels))])
            centre = places[rng.integers(len(places))].tolist()
            start = [min(max(0, at - size // 2), end) for at, size, end in zip(centre, self._size, last, strict=True)]
        else:
            start = [int(rng.integers(end + 1)) for end in last]
        x, y, z = (
            at if whole >= size else -((size - whole) // 2)
            for at, whole, size in zip(start, shape, self._size, strict=True)
        )
        return x, y, z


@lru_cache(maxsize=2)
def _epoch_cases(stream: Stream, epoch: int) -> NDArray[np.int64]:
    """A permutation by sorting raw random words: these, unlike numpy's distributions, never change."""
    words = _bits(stream.seed, _ORDER, epoch, 0).random_raw(stream.samples_per_epoch // stream.per_case)
    large, small = stream._blocks
    parts = np.split(words, [large.count * large.used])
    slots = [
        block.slots(epoch, np.argsort(part.reshape(block.count, block.used), axis=1, kind="stable")).ravel()
        for block, part in zip((large, small), parts, strict=True)
    ]
    cases = _cases_at(stream, np.concatenate(slots))
    if stream.strata:
        cases = _spread_evenly(cases, np.array(stream.strata)[cases])
    cases.flags.writeable = False
    return cases


def _spread_evenly(cases: NDArray[np.int64], strata: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same cases, each stratum at even distances and in the order it had."""
    places = np.empty(len(cases))
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        places[members] = (np.arange(len(members)) + 0.5) / len(members)
    return cases[np.argsort(places, kind="stable")]


def _cases_at(stream: Stream, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """The cases at places of the cycle; where one part holds them all, the cycle is their own order."""
    if stream.parts == 1 and stream.replace == 0:
        return slots
    return _cycle(stream.seed, stream.num_cases)[slots]


@lru_cache(maxsize=2)
def _cycle(seed: int, num_cases: int) -> NDArray[np.int64]:
    return np.argsort(_bits(seed, _CYCLE, 0, 0).random_raw(num_cases), kind="stable")


def _bits(seed: int, stream: int, epoch: int, position: int) -> np.random.Philox:
    """Philox is counter-based: seed and stream are its key, the place in the stream its counter."""
    return np.random.Philox(key=[seed, stream], counter=[0, 0, position, epoch])
