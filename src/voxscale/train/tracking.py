"""TensorBoard files beside the events, for those who look there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from voxscale.train.events import Events

_PLOTTED = {"train": ("loss", "lr", "data_s", "step_s")}


class TensorBoardEvents:
    """Writes the numbers of `train` and `validate` events as scalars, and passes every event on."""

    def __init__(self, folder: Path, inner: Events, *, first_step: int) -> None:
        self._inner = inner
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, event: str, **fields: Any) -> None:
        self._inner.write(event, **fields)
        step = fields.get("step")
        if event in ("train", "validate"):
            names = _PLOTTED.get(event, [name for name in fields if "/" in name])
            for name in names:
                tag = f"train/{name}" if event == "train" else f"validate/{name}"
                self._writer.add_scalar(tag, fields[name], step)

    def close(self) -> None:
        self._writer.close()
