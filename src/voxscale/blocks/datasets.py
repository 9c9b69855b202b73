"""Any torch dataset, shared over ranks by the same stream that voxscale itself trains on."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from voxscale.data.sampler import Stream
from voxscale.errors import ConfigError
from voxscale.parallel import World

Collate = Callable[[list[Any]], Any]


class MapStyle(Protocol):
    """A dataset with a length, and samples by their number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Share:
    """This rank's part of a step's batch: what `collate` made of the samples `indices`.

    `num_real` of them count. A rank for which a short last batch has nothing holds one sample that does not, so that it
    can take part in every collective.
    """

    step: int
    batch: Any
    indices: tuple[int, ...]
    num_real: int


@dataclass(frozen=True)
class DistributedLoader:
    """Yields this rank's share of each step. Steps count from 1 over the whole training, epoch after epoch."""

    dataset: MapStyle
    stream: Stream
    world: World
    workers: int
    collate: Collate | None
    pin_memory: bool

    @property
    def steps_per_epoch(self) -> int:
        return self.stream.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 1, that `step` belongs to."""
        return self.stream.epoch_of(step)

    def steps(self, first: int, last: int) -> Generator[Share, None, None]:
        """The shares of steps `first` to `last`. To go on after a stop, begin with the step after the last one done."""
        samples = _Samples(self.stream, range(first, last + 1), self.world)
        loader: DataLoader[Any] = DataLoader(
            _Seeded(self.dataset),  # type: ignore[arg-type]  # a dataset by its methods
            batch_sampler=samples,
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # else it would draw a number from the one that your loop draws from
        )
        for plan, batch in zip(samples.planned(), loader, strict=True):
            indices = tuple(self.stream.case_index(plan.epoch, position) for position in plan.positions)
            yield Share(plan.step, batch, indices, plan.num_real)


def distributed_loader(
    dataset: MapStyle,
    *,
    batch: int,
    seed: int = 0,
    world: World | None = None,
    strata: Sequence[int] | NDArray[Any] | torch.Tensor = (),
    workers: int = 0,
    collate: Collate | None = None,
    pin_memory: bool = False,
) -> DistributedLoader:
    """Batches of a map-style dataset, `batch` samples over all ranks in each step.

    The order is a pure function of (seed, epoch, position), not of ranks, processes or restarts. An epoch visits each
    sample once: none twice to fill up, none left out; the last batch may be short. `strata`, a number for each sample
    (an event, a class), are spread evenly over an epoch. What a sample draws from `random`, `numpy.random` or `torch`
    is seeded by its position, too; generators of its own are its own affair. `workers` processes read ahead.
    """
    size = len(dataset) if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") else None
    problems = []
    if not size:
        found = "no sample" if size == 0 else f"{type(dataset).__name__} without length or index"
        problems.append(f"distributed_loader: dataset: found {found}, expected a map-style dataset with samples")
    if batch < 1:
        problems.append(f"distributed_loader: batch: found {batch}, expected 1 or more")
    if len(strata) and size is not None and len(strata) != size:
        problems.append(f"distributed_loader: strata: found {len(strata)}, expected {size}, one for each sample")
    if problems or size is None:
        raise ConfigError.from_findings(problems, fix="correct these arguments")
    stream = Stream(seed, size, 1, batch, strata=tuple(torch.as_tensor(strata).flatten().tolist()))
    return DistributedLoader(dataset, stream, world or World(), workers, collate, pin_memory)


@dataclass(frozen=True)
class _Planned:
    """What a rank reads for a step: positions of its epoch."""

    step: int
    epoch: int
    positions: Sequence[int]
    num_real: int

    @classmethod
    def of(cls, stream: Stream, step: int, world: World) -> _Planned:
        share = stream.share(step, world.rank, world.size)
        return cls(step, stream.epoch_of(step), share or (stream.phantom(step, world.rank),), len(share))


@dataclass(frozen=True)
class _Samples:
    """The batches as torch's DataLoader takes them: lists of what `_Seeded` takes."""

    stream: Stream
    steps: range
    world: World

    def planned(self) -> Iterator[_Planned]:
        return (_Planned.of(self.stream, step, self.world) for step in self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for plan in self.planned():
            yield [self._sample(plan.epoch, position) for position in plan.positions]

    def _sample(self, epoch: int, position: int) -> tuple[int, int]:
        seed = int(self.stream.rng(epoch, position).integers(2**32))
        return self.stream.case_index(epoch, position), seed


@dataclass(frozen=True)
class _Seeded:
    """The dataset, in which a sample's random numbers depend on its place in the stream alone."""

    dataset: MapStyle

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: tuple[int, int]) -> Any:
        index, seed = sample
        with _seeded(seed):
            return self.dataset[index]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The generators of Python, numpy and torch on the CPU; afterwards they go on as if nothing had been."""
    held, held_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(held)
            np.random.set_state(held_numpy)
