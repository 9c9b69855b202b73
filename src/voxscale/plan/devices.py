"""GPUs that are not here: what their vendors publish, and what a step would cost on them by that."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from voxscale.errors import ConfigError
from voxscale.plan.costs import Costs
from voxscale.plan.plan import Plan

TABLE = Path(__file__).parent / "devices.toml"
Precision = Literal["fp32", "bf16", "fp16"]

_ARITHMETIC = 0.1  # of the published peak that 3D convolutions reach
_MEMORY = 0.6  # of the published bandwidth of memory
_LINK = 0.7  # of one direction of a link, for summing gradients
_CROSSINGS = 6  # of memory by what a layer keeps: written, read by the next, and twice each on the way back
_CALL_S = 10e-6  # of an operation, however small: starting it takes so long
_WORKSPACE_BYTES = 1 << 30  # the driver's own and what convolutions work in
_HOST_BYTES = 4 << 30  # of the host, by a process that uses a GPU


@dataclass(frozen=True)
class Device:
    """One row of the table."""

    name: str
    title: str
    memory_gb: float
    memory_gb_s: float
    tflops: Mapping[str, float]
    pcie_gb_s: float
    source: str
    nvlink_gb_s: float | None = None

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gb * 1e9)

    @property
    def half(self) -> Precision:
        """The 16-bit format that it has units for."""
        return "bf16" if "bf16" in self.tflops else "fp16"

    @property
    def link_gb_s(self) -> float:
        """One direction of what connects it with the others of its node, as far as that is reached."""
        return _LINK * (self.nvlink_gb_s or self.pcie_gb_s) / 2

    def peak(self, precision: Precision) -> float:
        """Operations a second; convolutions in float32 use TF32 where there are units for it, as PyTorch has it."""
        figure = self.tflops.get("tf32", self.tflops["fp32"]) if precision == "fp32" else self.tflops[precision]
        return figure * 1e12

    def seconds(self, operations: float, kept_bytes: float, precision: Precision) -> float:
        """What computing takes, or moving what is computed where that takes longer."""
        arithmetic = operations / (self.peak(precision) * _ARITHMETIC)
        return max(arithmetic, _CROSSINGS * kept_bytes / (self.memory_gb_s * 1e9 * _MEMORY))


@dataclass(frozen=True)
class Network:
    """What a network does to one patch, counted; `calls` are what a micro-batch of any size is computed by."""

    forward_operations: float
    backward_operations: float
    calls: int
    kept_bytes: int  # for the way back, in float32
    kept_half_bytes: int  # where it computes in 16 bits
    largest_bytes: int  # of what is kept in float32
    passing_bytes: int  # at once, where nothing is kept
    passing_half_bytes: int
    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    def kept(self, precision: Precision) -> int:
        return self.kept_bytes if precision == "fp32" else self.kept_half_bytes

    def passing(self, precision: Precision) -> int:
        return self.passing_bytes if precision == "fp32" else self.passing_half_bytes

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@cache
def known_devices() -> dict[str, Device]:
    """The table."""
    rows = tomllib.loads(TABLE.read_text())
    return {name: Device(name=name, **row) for name, row in rows.items()}


def find_device(text: str) -> Device | None:
    """The device that a name means: the table's own, a site's type such as a100, or as the driver calls it."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    sizes = [word for word in words if re.fullmatch(r"\d+gb", word)]
    found = [
        device
        for name, device in known_devices().items()
        if (parts := name.split("-"))[0] in words and sizes in ([], [parts[1]])
    ]
    if {"pcie", "nvl"} & set(words):  # slower ones, or with other memory
        found = [device for device in found if device.nvlink_gb_s is None]
    return min(found, key=lambda device: device.memory_gb, default=None)


def named_device(text: str) -> Device:
    """The device that `--device` names."""
    if (found := find_device(text)) is None:
        raise ConfigError(
            f"--device: found {text!r}, expected one of {', '.join(known_devices())}",
            fix="name one of these, or run `voxscale plan` without --device on a node that has such a device",
        )
    return found


def table_costs(
    device: Device, network: Network, plan: Plan, *, precision: str, windows: float, cpus: int, window: float = 1.0
) -> tuple[Costs, tuple[str, ...]]:
    """What a step of one device would cost by the table, and all that is assumed for it.

    `plan` is of one device, `windows` the patches' worth of computing that validating a case takes, `window` that of
    one of its windows.
    """
    settled = as_precision(precision, device)
    kept, patches = network.kept(settled), plan.micro_batch * plan.accumulate
    each_s = device.seconds(network.forward_operations + network.backward_operations, kept, settled)
    forward_s = device.seconds(network.forward_operations, kept / 3, settled)
    model = network.weights_bytes + network.gradient_bytes + network.optimizer_bytes
    # Before `auto` becomes 16 bits, a first step is taken in float32: it has to fit.
    widest = network.kept("fp32" if precision == "auto" else settled) + 2 * network.largest_bytes
    held = model + plan.micro_batch * widest + _WORKSPACE_BYTES
    costs = Costs(
        basis="table",
        device=device.title,
        on_gpu=True,
        world_size=1,
        nodes=1,
        threads=1,
        cpus=cpus,
        computing=settled,
        micro_batch=plan.micro_batch,
        accumulate=plan.accumulate,
        global_batch=plan.global_batch,
        data_s=0.0,
        compute_s=patches * each_s,
        communication_s=0.0,
        load_s=0.0,
        spread=0.0,
        validate_case_s=windows * max(forward_s, network.calls / 3 * _CALL_S),
        weights_bytes=network.weights_bytes,
        gradient_bytes=network.gradient_bytes,
        optimizer_bytes=network.optimizer_bytes,
        rest_bytes=_HOST_BYTES,
        training_bytes=_HOST_BYTES,
        validating_bytes=_HOST_BYTES,
        device_training_bytes=held,
        device_validating_bytes=model + round(window * network.passing(settled)) + _WORKSPACE_BYTES,
        device_bytes=device.memory_bytes,
        all_reduce_gb_s=None,
        calls_s=network.calls * _CALL_S,
        workspace_bytes=_WORKSPACE_BYTES,
    )
    return costs, _assumptions(device, network, settled)


def as_precision(asked: str, device: Device) -> Precision:
    """What `train.precision` becomes on the device; `auto` takes 16 bits where a run is long enough to try them."""
    if asked == "fp32":
        return "fp32"
    return "bf16" if asked == "bf16" and "bf16" in device.tflops else device.half if asked != "fp16" else "fp16"


def precision_warnings(asked: str, device: Device) -> tuple[str, ...]:
    """Where the device computes otherwise than it is asked to."""
    settled = as_precision(asked, device)
    if asked in ("auto", settled):
        return ()
    return (f"train.precision {asked}: the {device.title} has no units for it, so {settled} is planned: set that",)


def _assumptions(device: Device, network: Network, precision: Precision) -> tuple[str, ...]:
    operations = (network.forward_operations + network.backward_operations) / 1e9
    return (
        f"{operations:,.3g} billion operations a patch, counted; {device.peak(precision) / 1e12:g} Tflop/s in "
        f"{precision} published, {_ARITHMETIC:.0%} of it reached",
        f"what layers keep, counted, crosses memory {_CROSSINGS} times, at {_MEMORY:.0%} of its {device.memory_gb_s:g} "
        f"GB/s, and each of {network.calls} calls takes {_CALL_S * 1e6:g} µs; the slowest of these counts",
        f"{_WORKSPACE_BYTES >> 30} GB of the device for driver and workspaces, {_HOST_BYTES >> 30} GB of the host for "
        "each process",
        f"devices of a node share gradients at {device.link_gb_s:g} GB/s, {_LINK:.0%} of one direction of "
        f"{'NVLink' if device.nvlink_gb_s else 'PCIe'}",
        "patches come in time, and no step takes longer than another",
        f"the {device.title} is meant, by the {device.source}",
    )
