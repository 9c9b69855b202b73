"""Patches of prepared cases, in the order and with the augmentation that `voxscale train` would draw."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from voxscale.config.base import Section
from voxscale.config.schema import turning_problems
from voxscale.config.training import AUGMENT_PRESETS, Transform, check_transforms
from voxscale.data import store as stores
from voxscale.data.cache import FromStore
from voxscale.data.geometry import Shape
from voxscale.data.loader import Batch, PatchLoader
from voxscale.data.sampler import PatchSampler, Stream
from voxscale.data.store import Store
from voxscale.errors import ConfigError, DataError
from voxscale.parallel import World

Augment = str | Sequence[Section | Mapping[str, Any]]
_TRANSFORMS: TypeAdapter[tuple[Any, ...]] = TypeAdapter(tuple[Transform, ...])


@dataclass(frozen=True)
class Patches:
    """Yields this rank's share of each step. Steps count from 1 over the whole training, epoch after epoch."""

    loader: PatchLoader

    @property
    def steps_per_epoch(self) -> int:
        return self.loader.sampler.stream.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 1, that `step` belongs to."""
        return self.loader.sampler.stream.epoch_of(step)

    def steps(self, first: int, last: int) -> Generator[Batch, None, None]:
        """The batches of steps `first` to `last`; each is good until the next is asked for: its memory is used again.

        `image` is (n, c, x, y, z) float32, `target` the labels (n, x, y, z) uint8, `num_real` how many rows count: 0 on
        a rank for which a short last batch has nothing, and which takes part with one row all the same.
        """
        for (batch,) in self.loader.steps(first, last):
            yield batch


def open_store(folder: str | Path) -> Store:
    """Open prepared cases for reading: the folder that `voxscale prepare DATA` names, or that a run trains from.

    Its index, and that every file is there in full length, are checked now; each chunk when it is first read. Ranks
    open it each for itself and share the files' pages. Raises DataError where it is none, or damaged.
    """
    if not (Path(folder) / "index.json").is_file():
        raise DataError(f"{folder}: found no prepared cases there", fix="`voxscale prepare DATA` makes and names them")
    return stores.open_store(Path(folder))


def patch_loader(
    store: Store,
    *,
    size: Shape,
    batch: int,
    seed: int = 0,
    world: World | None = None,
    cases: Sequence[str] | None = None,
    per_case: int = 1,
    foreground: float = 0.33,
    augment: Augment = "none",
    device: torch.device | str = "cpu",
    workers: int = 1,
    prefetch: int = 2,
) -> Patches:
    """Patches of `size` from a store, `batch` of them over all ranks in each step.

    Which case, which patch and which augmentation is a pure function of (seed, epoch, position): not of ranks, threads
    or restarts. An epoch visits each of `cases` (ids; default: all) once, `per_case` patches each, a share `foreground`
    of them around a labelled voxel; the last batch may be short. `augment` is a preset or a list, as in a config.
    `workers` threads read `prefetch` steps ahead.
    """
    world = world or World()
    for name, value in (("batch", batch), ("per_case", per_case), ("size", min(size))):
        if value < 1:
            raise ConfigError(f"patch_loader: {name}: found {value}, expected 1 or more", fix=f"give another {name}")
    transforms = _transforms(augment, size)
    rows = range(len(store)) if cases is None else sorted(store.row(case) for case in cases)
    if not len(rows):
        raise DataError("patch_loader: found no case, expected at least one", fix="name cases of the store")
    stream = Stream(seed, len(rows), per_case, batch)
    device = torch.device(device)
    loader = PatchLoader(
        sampler=PatchSampler(stream, store, np.array(rows, np.int32), size, foreground),
        store=store,
        source=FromStore(store),
        size=size,
        transforms=transforms,
        rank=world.rank,
        world_size=world.size,
        micro_batch=-(-batch // world.size),
        device=device,
        workers=workers,
        prefetch=prefetch,
        pin_memory=device.type == "cuda",
    )
    return Patches(loader)


def _transforms(augment: Augment, size: Shape) -> tuple[Any, ...]:
    if isinstance(augment, str) and augment not in AUGMENT_PRESETS:
        raise ConfigError(
            f"patch_loader: augment: found {augment!r}",
            fix=f"give {', '.join(AUGMENT_PRESETS)} or a list of transforms",
        )
    try:
        transforms = _TRANSFORMS.validate_python(AUGMENT_PRESETS[augment] if isinstance(augment, str) else augment)
    except ValidationError as error:
        lines = [f"patch_loader: augment.{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in error.errors()]
        raise ConfigError.from_findings(lines, fix="docs/config.md lists transforms and their options") from None
    if problems := [*check_transforms(transforms), *turning_problems(transforms, size)]:
        raise ConfigError.from_findings(problems, fix="change augment or size")
    return transforms
