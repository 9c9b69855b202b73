"""Batches for one rank: threads read and augment patches ahead, in the order of the stream, into memory that is reused.

On a CPU a thread takes a sample all the way into its row of the batch. For a GPU threads read into pinned memory, and
one more sends off the copies and the augmentation on a stream of their own, beside the training steps before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from voxscale.data.augment import Drawn, adjust, draw, place, source_region
from voxscale.data.augment_batch import adjust_batch, place_batch
from voxscale.data.cache import Memory, Patch, Source
from voxscale.data.filters import Scratch
from voxscale.data.geometry import Shape
from voxscale.data.outcomes import Outcomes
from voxscale.data.readers import Readers
from voxscale.data.sampler import PatchSampler, Prepared, Sample
from voxscale.data.store import Box


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device, good until the next step is asked for: its memory is used again.

    `num_real` rows count; a rank without samples holds one that does not.
    """

    image: torch.Tensor  # (n, c, x, y, z) float32
    target: torch.Tensor  # labels (n, x, y, z) uint8, or outcomes (n, k) float64
    features: torch.Tensor | None  # (n, f) float32, with outcomes
    cases: tuple[str, ...]
    starts: tuple[Shape, ...]
    num_real: int
    seed: int  # for what is random inside the network

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What the network gets."""
        return (self.image,) if self.features is None else (self.image, self.features)


@dataclass(frozen=True)
class _Read:
    """A sample on its way: what to do with it and, for a GPU, its voxels and the memory they lie in."""

    sample: Sample
    drawn: Drawn
    network_seed: int
    patch: Patch | None = None
    origin: Shape = (0, 0, 0)
    slot: _Slot | None = None


class _Slot:
    """Memory for one sample. It can be filled again once the copy out of it has ended."""

    def __init__(self, *, pinned: bool) -> None:
        self.memory = Memory(pinned=pinned)
        self.copied: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _Loading:
    """A micro-batch in the making: on a CPU rows of `memory` that are being filled, else what a GPU has been sent."""

    reads: list[Future[_Read]]
    num_real: int
    memory: Patch | None = None
    sent: Future[tuple[Patch, torch.cuda.Event]] | None = None


class Cases(Prepared, Protocol):
    """What the loader asks of a store."""

    @property
    def channels(self) -> int: ...


class _Mine(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.scratch = Scratch()


@dataclass
class PatchLoader:
    """Yields, for each step, this rank's micro-batches: at least one, on every rank.

    With `outcomes`, by row of the store, these are the targets; labels are left aside. Where steps wait for patches,
    threads are added, up to `most_workers`, and with each a step more is read ahead, up to `most_prefetch`; `workers`
    and `prefetch` say how many there are.
    """

    sampler: PatchSampler
    store: Cases
    source: Source
    size: Shape
    transforms: Sequence[Any]
    rank: int
    world_size: int
    micro_batch: int
    device: torch.device
    workers: int
    prefetch: int
    pin_memory: bool
    outcomes: Outcomes | None = None
    most_workers: int = 0  # no more than there are
    most_prefetch: int = 0  # the same
    _mine: _Mine = field(default_factory=_Mine, init=False)
    _free_rows: deque[Patch] = field(default_factory=deque, init=False)
    _free_slots: deque[_Slot] = field(default_factory=deque, init=False)
    _stream: torch.cuda.Stream | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.source.close()

    @property
    def settings(self) -> dict[str, int | bool]:
        """What speed depends on, as it is now."""
        return {"workers": self.workers, "prefetch": self.prefetch, "pin_memory": self.pin_memory}

    def steps(self, first_step: int, last_step: int) -> Generator[list[Batch], None, None]:
        with (
            ThreadPoolExecutor(1, thread_name_prefix="sender") as sender,
            Readers(self.workers, self.most_workers) as readers,  # ends first: the sender waits for what it is given
        ):
            ahead: deque[list[_Loading]] = deque()
            upcoming = iter(range(first_step, last_step + 1))
            for _ in range(first_step, last_step + 1):
                while len(ahead) <= self.prefetch and (step := next(upcoming, None)) is not None:
                    ahead.append(self._submit(readers, sender, step))
                loading, began = ahead.popleft(), time.perf_counter()
                micro_batches = [self._finish(micro_batch) for micro_batch in loading]
                waited_s = time.perf_counter() - began
                yield micro_batches
                readers.note(waited_s, time.perf_counter() - began)
                added, self.workers = len(readers) - self.workers, len(readers)
                self.prefetch = max(self.prefetch, min(self.prefetch + added, self.most_prefetch))
                self._free_rows.extend(micro.memory for micro in loading if micro.memory is not None)

    def _submit(self, readers: Readers, sender: ThreadPoolExecutor, step: int) -> list[_Loading]:
        stream = self.sampler.stream
        epoch, share = stream.epoch_of(step), stream.share(step, self.rank, self.world_size)
        batches = []
        for offset in range(0, stream.largest_share(step, self.world_size), self.micro_batch):
            real = share[offset : offset + self.micro_batch]
            positions = real or (stream.phantom(step, self.rank),)  # every rank takes part in every collective
            if self._stream is None:
                image, label = self._free_rows.popleft() if self._free_rows else self._empty(self.micro_batch)
                reads = [
                    readers.submit(self._read_into, epoch, position, image[row], label[row])
                    for row, position in enumerate(positions)
                ]
                batches.append(_Loading(reads, len(real), memory=(image, label)))
            else:
                reads = [readers.submit(self._read_to_slot, epoch, position) for position in positions]
                batches.append(_Loading(reads, len(real), sent=sender.submit(self._send, self._stream, reads)))
        return batches

    def _read_into(self, epoch: int, position: int, image: torch.Tensor, label: torch.Tensor) -> _Read:
        """Read and augment one sample into its row. Runs in a thread."""
        read, box, origin = self._plan(epoch, position)
        copied = read.drawn.matrix is None
        image_source, label_source = (self.source.read_channels if copied else self.source.read)(
            read.sample.row, box, epoch, self._mine.memory
        )
        place(
            read.drawn, image_source, label_source, origin=origin,
            out_image=image, out_label=label, scratch=self._mine.scratch,
        )  # fmt: skip
        adjust(image, read.drawn, scratch=self._mine.scratch)
        return read

    def _read_to_slot(self, epoch: int, position: int) -> _Read:
        """Read one sample into pinned memory. Runs in a thread."""
        read, box, origin = self._plan(epoch, position)
        try:
            slot = self._free_slots.pop()
        except IndexError:
            slot = _Slot(pinned=self.pin_memory)
        if slot.copied is not None:
            slot.copied.synchronize()
        image, label = self.source.read(read.sample.row, box, epoch, slot.memory)
        if self.pin_memory and image.device.type == "cpu" and not image.is_pinned():  # shared memory is not
            image, label = (_copied(tensor, slot.memory, name) for tensor, name in ((image, "image"), (label, "label")))
        return _Read(read.sample, read.drawn, read.network_seed, (image, label), origin, slot)

    def _plan(self, epoch: int, position: int) -> tuple[_Read, Box, Shape]:
        """What to read for a sample: the box within the case, and where that lies in the region asked for."""
        sample = self.sampler.sample(epoch, position)
        drawn = draw(self.transforms, sample.rng, channels=self.store.channels)
        start, size = source_region(drawn, sample.start, self.size)
        ends = [
            (max(0, at), min(n, at + m)) for at, m, n in zip(start, size, self.store.shape(sample.row), strict=True)
        ]
        x, y, z = (slice(low, max(low, high)) for low, high in ends)
        i, j, k = (low - at for (low, _), at in zip(ends, start, strict=True))
        return _Read(sample, drawn, int(sample.rng.integers(2**63))), (x, y, z), (i, j, k)

    def _finish(self, loading: _Loading) -> Batch:
        reads = [future.result() for future in loading.reads]
        image, label = loading.memory if loading.memory is not None else self._received(loading)
        target: torch.Tensor = label[: len(reads)]
        features: torch.Tensor | None = None
        if self.outcomes is not None:
            rows = [read.sample.row for read in reads]
            target = self._on_device(self.outcomes.targets[rows])
            features = self._on_device(self.outcomes.features[rows])
        return Batch(
            image=image[: len(reads)],
            target=target,
            features=features,
            cases=tuple(self.store.id(read.sample.row) for read in reads),
            starts=tuple(read.sample.start for read in reads),
            num_real=loading.num_real,
            seed=reads[0].network_seed,
        )

    def _send(self, stream: torch.cuda.Stream, reading: list[Future[_Read]]) -> tuple[Patch, torch.cuda.Event]:
        """Copy and augment a micro-batch on the loader's own stream. Runs in the sender's thread."""
        reads = [future.result() for future in reading]
        with torch.cuda.stream(stream):
            return self._augmented(reads), _recorded(stream)

    def _augmented(self, reads: Sequence[_Read]) -> Patch:
        """Copy a micro-batch to the device and augment it there, all samples together."""
        sources = []
        for read in reads:
            if read.patch is None or read.slot is None:
                raise ValueError("a sample for a GPU without its voxels")
            image, label = (tensor.to(self.device, non_blocking=True) for tensor in read.patch)
            sources.append((image, label))
            read.slot.copied = _recorded(self._stream) if self._stream is not None else None
            self._free_slots.append(read.slot)
        image, label = self._empty(len(reads))
        drawn, origins = [read.drawn for read in reads], [read.origin for read in reads]
        place_batch(drawn, sources, origins, out_image=image, out_label=label)
        adjust_batch(image, drawn)
        return image, label

    def _received(self, loading: _Loading) -> Patch:
        """Hand a sent micro-batch over to the training stream, which waits for it; the host does not."""
        if loading.sent is None:
            raise ValueError("a micro-batch that was neither read nor sent")
        (image, label), ready = loading.sent.result()
        training = torch.cuda.current_stream(self.device)
        training.wait_event(ready)
        image.record_stream(training)
        label.record_stream(training)
        return image, label

    def _on_device(self, numbers: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)

    def _empty(self, count: int) -> Patch:
        image = torch.empty((count, self.store.channels, *self.size), device=self.device)
        return image, torch.empty((count, *self.size), dtype=torch.uint8, device=self.device)


def _copied(tensor: torch.Tensor, memory: Memory, name: str) -> torch.Tensor:
    content = torch.from_numpy(memory.of(name, tensor.numel() * tensor.itemsize))
    content = content[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
    return content.copy_(tensor)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
