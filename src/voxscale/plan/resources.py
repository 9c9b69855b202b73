"""How many devices to use. What the machine has comes in as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

from voxscale.config.schema import Config, PerDevice
from voxscale.config.training import RatePerDevice
from voxscale.errors import ConfigError, InfrastructureError


@dataclass(frozen=True)
class Machine:
    """What this process may use of its node."""

    gpus: int
    cpus: int

    @property
    def kind(self) -> str:
        return "GPU" if self.gpus else "CPU"


def choose_devices(
    asked: str, machine: Machine, batch: int | PerDevice, *, nodes: int = 1, preferred: int | str = "auto"
) -> tuple[int, str]:
    """Return (devices of each node, why). `auto` takes all GPUs, or one process per CPU, as far as the batch divides.

    `machine` is what the job has of one of its nodes. `preferred` is the config's own answer to `auto`, train.devices:
    so many over all nodes.
    """
    each = f"{nodes} nodes × " if nodes > 1 else ""
    if asked == "auto" and preferred == "auto":
        most = machine.gpus or machine.cpus
        if isinstance(batch, PerDevice):
            return most, f"{each}{most} {_plural(machine.kind, most)}"
        devices = max((n for n in range(1, min(most, batch) + 1) if batch % (n * nodes) == 0), default=1)
        left = f" of {most}" if devices < most else ""
        because = f", the most that train.batch {batch} divides over" if devices < most else ""
        return devices, f"{each}{devices}{left} {_plural(machine.kind, most)}{because}"
    devices, where = _share_out(int(preferred), nodes) if asked == "auto" else _read_count(asked)
    if machine.gpus and devices > machine.gpus:
        raise InfrastructureError(
            f"{where}: this machine has {machine.gpus} {_plural('GPU', machine.gpus)} to use",
            fix=f"ask for at most {machine.gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs",
        )
    return devices, f"{each}{devices} {_plural(machine.kind, devices)}"


def resolve(config: Config, machine: Machine, *, devices: int, nodes: int = 1) -> Config:
    """Settle what `auto` and `per_device` mean here; whatever could change the result is fixed from then on."""
    train, optimizer = config.train, config.optimizer
    if train.backend == "nccl" and not machine.gpus:
        raise InfrastructureError("train.backend nccl needs GPUs, and this machine has none", fix="use auto or gloo")
    ranks = devices * nodes
    settled = {
        "batch": train.batch.per_device * ranks if isinstance(train.batch, PerDevice) else train.batch,
        "threads": max(1, machine.cpus // devices) if train.threads == "auto" else train.threads,
    }
    rate = optimizer.rate.per_device * ranks if isinstance(optimizer.rate, RatePerDevice) else optimizer.rate
    sections = {"train": train.model_copy(update=settled), "optimizer": optimizer.model_copy(update={"rate": rate})}
    return config.model_copy(update=sections)


def with_threads(config: Config, cpus: int, *, devices: int) -> Config:
    """The config with the threads of a rank settled as for so many ranks on a node, so that fewer have no more each."""
    if config.train.threads != "auto":
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"threads": max(1, cpus // devices)})})


def loader_threads(config: Config, *, on_gpu: bool) -> tuple[int, int]:
    """Threads that read patches for a rank: at first, and at most, where steps turn out to wait for them.

    On CPUs one is enough for most networks, and more would take the cores that a rank computes on.
    """
    asked, threads = config.loader.workers, config.train.threads
    if asked != "auto":
        return asked, asked
    first = 4 if on_gpu else 1
    return first, max(first, 1 if threads == "auto" else threads)


def prefetch_depth(config: Config) -> tuple[int, int]:
    """Steps that are read ahead: at first, and at most, where they turn out to wait. Each takes a batch's memory."""
    asked = config.loader.prefetch
    return (2, 4) if asked == "auto" else (asked, asked)


def _read_count(asked: str) -> tuple[int, str]:
    """Devices of each node, and the flag that asks for them."""
    if not re.fullmatch(r"[1-9][0-9]{0,4}", asked):
        raise ConfigError(f"--devices: found {asked!r}, expected auto or a number from 1", fix="e.g. --devices 2")
    return int(asked), f"--devices {asked}"


def _share_out(ranks: int, nodes: int) -> tuple[int, str]:
    """Devices of each node, and the field that asks for them."""
    devices, rest = divmod(ranks, nodes)
    if rest or not devices:
        raise ConfigError(
            f"train.devices {ranks} does not divide over {nodes} nodes",
            fix=f"say how many each node has with --devices N, or train.devices={-(-ranks // nodes) * nodes}",
        )
    return devices, f"train.devices {ranks}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
