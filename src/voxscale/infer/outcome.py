"""Outcomes predicted for whole volumes, by one network or by several whose predictions are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.data.geometry import Shape
from voxscale.errors import NotFiniteError
from voxscale.tasks import OutcomeTask
from voxscale.tasks.summary import Row

Network = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class OutcomeMember:
    """A network in evaluation mode, how much of a volume it sees, and the task that knows what its output means."""

    network: Network
    task: OutcomeTask
    size: Shape
    device: torch.device

    @torch.no_grad()
    def predict(self, image_cxyz: NDArray[Any], features: NDArray[np.float32]) -> Row:
        """What is predicted for a case. It is always by itself, so that nothing depends on the others of a batch.

        Raises FloatingPointError where the output is not finite.
        """
        image = centred(torch.from_numpy(image_cxyz), self.size).to(self.device)
        output = self.network(image[None], torch.from_numpy(features).to(self.device)[None])
        values = output[0].double().cpu().numpy()
        if not np.isfinite(values).all():
            raise FloatingPointError(f"found {', '.join(f'{value:g}' for value in values[:4])}")
        return self.task.predict(values)


def predict_together(
    members: Sequence[OutcomeMember],
    image_cxyz: NDArray[Any],
    features: Sequence[NDArray[np.float32]],
    *,
    name: str,
) -> Row:
    """What the members predict together; each takes features as it was trained to. Errors call the case `name`."""
    try:
        rows = [member.predict(image_cxyz, own) for member, own in zip(members, features, strict=True)]
    except FloatingPointError as problem:
        raise NotFiniteError(
            f"{name}: {problem} as the output of the network, expected finite numbers",
            fix="look at its image and features; if many cases are named, train anew with a lower optimizer.lr",
        ) from problem
    return members[0].task.average(rows)


def centred(image_cxyz: torch.Tensor, size: Shape) -> torch.Tensor:
    """The middle of a volume as float32, with zeros around it where it is smaller: what training sees of it."""
    out = torch.zeros((len(image_cxyz), *size))
    target, source = [slice(None)], [slice(None)]
    for whole, wanted in zip(image_cxyz.shape[1:], size, strict=True):
        first = (whole - wanted) // 2 if whole >= wanted else -((wanted - whole) // 2)
        target.append(slice(max(0, -first), max(0, -first) + min(whole, wanted)))
        source.append(slice(max(0, first), max(0, first) + min(whole, wanted)))
    out[tuple(target)] = image_cxyz[tuple(source)].float()
    return out
