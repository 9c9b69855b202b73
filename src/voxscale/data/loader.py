"""Batches for one rank: threads read patches ahead, in the order of the stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from voxscale.data.augment import Parameters, apply_parameters, sample_parameters
from voxscale.data.sampler import PatchSampler, Sample, patch_box
from voxscale.data.store import Store
from voxscale.data.volumes import Floats, Labels
from voxscale.errors import DataError


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device. `num_real` rows count; a rank without samples holds one that does not."""

    image: torch.Tensor  # (n, c, x, y, z) float32
    label: torch.Tensor  # (n, x, y, z) uint8
    cases: tuple[str, ...]
    starts: tuple[tuple[int, int, int], ...]
    num_real: int
    seed: int  # for what is random inside the network


@dataclass(frozen=True)
class _Read:
    sample: Sample
    image: Floats
    label: Labels
    parameters: list[Parameters]
    network_seed: int


class PatchLoader:
    """Yields, for each step from `first_step` on, this rank's micro-batches (at least one, on every rank)."""

    def __init__(
        self,
        *,
        sampler: PatchSampler,
        store: Store,
        size: tuple[int, int, int],
        transforms: Sequence[Any],
        rank: int,
        world_size: int,
        micro_batch: int,
        device: torch.device,
        workers: int,
        prefetch: int,
        pin_memory: bool,
    ) -> None:
        self._sampler = sampler
        self._store = store
        self._size = size
        self._transforms = transforms
        self._rank, self._world_size = rank, world_size
        self._micro_batch = micro_batch
        self._device = device
        self._workers, self._prefetch = workers, prefetch
        self._pin_memory = pin_memory

    def steps(self, first_step: int, last_step: int) -> Iterator[list[Batch]]:
        with ThreadPoolExecutor(max(1, self._workers), thread_name_prefix="loader") as pool:
            ahead: deque[list[tuple[list[Future[_Read]], int]]] = deque()
            upcoming = iter(range(first_step, last_step + 1))
            try:
                for _ in range(first_step, last_step + 1):
                    while len(ahead) <= self._prefetch and (step := next(upcoming, None)) is not None:
                        ahead.append(self._submit(pool, step))
                    yield [self._assemble([future.result() for future in reads], n) for reads, n in ahead.popleft()]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, step: int) -> list[tuple[list[Future[_Read]], int]]:
        stream = self._sampler.stream
        epoch, share = stream.epoch_of(step), stream.share(step, self._rank, self._world_size)
        largest = -(-len(stream.positions(step)) // self._world_size)
        batches = []
        for offset in range(0, largest, self._micro_batch):
            real = share[offset : offset + self._micro_batch]
            read = real or stream.positions(step)[:1]  # every rank takes part in every collective
            batches.append(([pool.submit(self._read, epoch, position) for position in read], len(real)))
        return batches

    def _read(self, epoch: int, position: int) -> _Read:
        sample = self._sampler.sample(epoch, position)
        box = patch_box(sample.start, self._size)
        try:
            image, label = self._store.read_image(sample.case, box), self._store.read_label(sample.case, box)
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(
                f"case {sample.case}: its prepared volume cannot be read: {error}",
                fix=f"delete {self._store.folder}; it is rebuilt",
            ) from error
        parameters = sample_parameters(self._transforms, sample.rng)
        return _Read(sample, image, label, parameters, network_seed=int(sample.rng.integers(2**63)))

    def _assemble(self, reads: list[_Read], num_real: int) -> Batch:
        """Copy the patches into one batch (padding small cases with zeros), move it, augment it."""
        image = torch.zeros((len(reads), self._store.channels, *self._size), pin_memory=self._pin_memory)
        label = torch.zeros((len(reads), *self._size), dtype=torch.uint8, pin_memory=self._pin_memory)
        for row, read in enumerate(reads):
            x, y, z = read.label.shape
            image[row, :, :x, :y, :z] = torch.from_numpy(np.ascontiguousarray(read.image))
            label[row, :x, :y, :z] = torch.from_numpy(np.ascontiguousarray(read.label))
        image = image.to(self._device, non_blocking=self._pin_memory)
        label = label.to(self._device, non_blocking=self._pin_memory)
        for row, read in enumerate(reads):
            image[row], label[row] = apply_parameters(image[row], label[row], read.parameters)
        return Batch(
            image=image,
            label=label,
            cases=tuple(read.sample.case for read in reads),
            starts=tuple(read.sample.start for read in reads),
            num_real=num_real,
            seed=reads[0].network_seed,
        )
