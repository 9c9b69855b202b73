"""One network or several as one: raw outputs averaged, slab by slab, and what the task decides from them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.errors import ConfigError
from voxscale.infer.windows import Box, Network, Windows, predict_slabs
from voxscale.tasks import VolumeTask


@dataclass(frozen=True)
class Member:
    """A network, which gets (1, c, x, y, z) and is in evaluation mode, and how its windows slide."""

    network: Network
    windows: Windows


@dataclass(frozen=True)
class Ensemble:
    """Networks whose raw outputs are averaged; often there is but one."""

    members: tuple[Member, ...]
    device: torch.device

    @classmethod
    def of_one(cls, network: Network, windows: Windows, device: torch.device) -> Ensemble:
        return cls((Member(network, windows),), device)

    def decide(
        self, task: VolumeTask, image_cxyz: NDArray[Any], *, scratch: Path | None = None
    ) -> NDArray[np.integer[Any]]:
        """What the task decides for a whole volume, (x, y, z); raw outputs are held for a slab of it at a time."""
        codes: NDArray[np.integer[Any]] | None = None
        for box, output_cxyz in self.slabs(image_cxyz, scratch=scratch):
            if len(output_cxyz) != task.out_channels:
                raise ConfigError(
                    f"the model: found {len(output_cxyz)} channels of output, expected {task.out_channels}",
                    fix="return as many in evaluation mode as in training",
                )
            decided = task.decide(output_cxyz)
            if codes is None:
                codes = np.empty(image_cxyz.shape[1:], decided.dtype)
            codes[box] = decided
        assert codes is not None  # noqa: S101 - a volume has at least one slab
        return codes

    def slabs(self, image_cxyz: NDArray[Any], *, scratch: Path | None = None) -> Iterator[tuple[Box, torch.Tensor]]:
        """Slabs of raw outputs as `predict_slabs` gives them.

        `scratch` is where members whose windows differ keep their sums.
        """
        image = torch.from_numpy(image_cxyz)
        by_windows: dict[Windows, list[Network]] = {}
        for member in self.members:
            by_windows.setdefault(member.windows, []).append(member.network)
        parts = [
            predict_slabs(_sum_of(networks, 1 / len(self.members)), image, windows, device=self.device)
            for windows, networks in by_windows.items()
        ]
        return parts[0] if len(parts) == 1 else self._added(parts, image_cxyz.shape[1:], scratch)

    def _added(
        self, parts: Sequence[Iterator[tuple[Box, torch.Tensor]]], shape: tuple[int, ...], scratch: Path | None
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """Slabs of different windows do not come in step: they are added up in a file."""
        box, output = next(parts[0])
        with on_disk((len(output), *shape), scratch) as whole:
            whole[(slice(None), *box)] += output.cpu().numpy()
            for part in parts:
                for box, output in part:
                    whole[(slice(None), *box)] += output.cpu().numpy()
            planes = self.members[0].windows.size[0]
            for first in range(0, shape[0], planes):
                rows = slice(first, min(first + planes, shape[0]))
                yield (rows, slice(0, shape[1]), slice(0, shape[2])), torch.from_numpy(whole[:, rows]).to(self.device)


@contextmanager
def on_disk(shape: tuple[int, ...], scratch: Path | None) -> Iterator[NDArray[np.float32]]:
    """Zeros in a file without a name, which is gone at the end, however that comes."""
    with tempfile.TemporaryFile(dir=scratch) as file:
        os.posix_fallocate(file.fileno(), 0, int(np.prod(shape)) * 4)  # a full disk is an error now, not a crash later
        yield np.memmap(file, np.float32, "r+", shape=shape)


def _sum_of(networks: Sequence[Network], weight: float) -> Network:
    if len(networks) == 1 and weight == 1:
        return networks[0]

    def weighted(image: torch.Tensor) -> torch.Tensor:
        total = networks[0](image).float() * weight
        for network in networks[1:]:
            total += network(image).float() * weight
        return total

    return weighted
