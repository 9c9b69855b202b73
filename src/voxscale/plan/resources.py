"""How many devices to use. What the machine has comes in as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

from voxscale.config.schema import Config, PerDevice
from voxscale.errors import ConfigError, InfrastructureError


@dataclass(frozen=True)
class Machine:
    """What this process may use of its node."""

    gpus: int
    cpus: int

    @property
    def kind(self) -> str:
        return "GPU" if self.gpus else "CPU"


def choose_devices(asked: str, machine: Machine, batch: int | PerDevice, *, nodes: int = 1) -> tuple[int, str]:
    """Return (devices of each node, why). `auto` takes all GPUs, or one process per CPU, as far as the batch divides.

    `machine` is what the job has of one of its nodes.
    """
    each = f"{nodes} nodes × " if nodes > 1 else ""
    if asked == "auto":
        most = machine.gpus or machine.cpus
        if isinstance(batch, PerDevice):
            return most, f"{each}{most} {_plural(machine.kind, most)}"
        devices = max((n for n in range(1, min(most, batch) + 1) if batch % (n * nodes) == 0), default=1)
        left = f" of {most}" if devices < most else ""
        because = f", the most that train.batch {batch} divides over" if devices < most else ""
        return devices, f"{each}{devices}{left} {_plural(machine.kind, most)}{because}"
    if not re.fullmatch(r"[1-9][0-9]{0,4}", asked):
        raise ConfigError(f"--devices: found {asked!r}, expected auto or a number from 1", fix="e.g. --devices 2")
    devices = int(asked)
    if machine.gpus and devices > machine.gpus:
        raise InfrastructureError(
            f"--devices {devices}: this machine has {machine.gpus} {_plural('GPU', machine.gpus)} to use",
            fix=f"ask for at most {machine.gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs",
        )
    return devices, f"{each}{devices} {_plural(machine.kind, devices)}"


def resolve(config: Config, machine: Machine, *, devices: int, nodes: int = 1) -> Config:
    """Settle what `auto` and `per_device` mean here; whatever could change the result is fixed from then on."""
    train = config.train
    if train.backend == "nccl" and not machine.gpus:
        raise InfrastructureError("train.backend nccl needs GPUs, and this machine has none", fix="use auto or gloo")
    batch = train.batch.per_device * devices * nodes if isinstance(train.batch, PerDevice) else train.batch
    settled = {
        "batch": batch,
        "threads": max(1, machine.cpus // devices) if train.threads == "auto" else train.threads,
    }
    return config.model_copy(update={"train": train.model_copy(update=settled)})


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
