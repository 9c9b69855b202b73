"""What a step costs: as `voxscale.train.measure` found it with ranks that were there, or as a table has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Costs:
    """Of one rank of a world, its seconds per step and its bytes.

    `load_s` is what its patches of a step take when nothing else is done, `data_s` what it waits for them beside its
    computing; `communication_s` what sharing gradients adds, None where it is part of `compute_s`, nobody knows which.
    `compute_s` grows with the patches, but a micro-batch takes no less than `calls_s`. To settle how to compute, as a
    run does when it starts, took `settle_s`. `rest_bytes` is the process without the network, `workspace_bytes` the
    part of the device's memory that is the same for any number of patches.
    """

    basis: Literal["probe", "table"]
    device: str
    on_gpu: bool
    world_size: int
    nodes: int
    threads: int
    cpus: int
    computing: str
    micro_batch: int
    accumulate: int
    global_batch: int
    data_s: float
    compute_s: float
    communication_s: float | None
    load_s: float
    spread: float  # of step times, relative
    validate_case_s: float | None  # of middle size
    weights_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    rest_bytes: int
    training_bytes: int  # the most that this process held for itself
    validating_bytes: int
    device_training_bytes: int | None  # of the GPU, where there is one
    device_validating_bytes: int | None
    device_bytes: int | None  # that the GPU has in all
    all_reduce_gb_s: float | None
    launcher_bytes: int | None = None  # of the process that started several ranks; None: not looked at
    calls_s: float = 0.0
    workspace_bytes: int = 0
    cached_bytes: int = 0  # cases that the device held meanwhile
    full_case_s: float | None = None  # of the same, measured in full as at the end; None: as in a validation
    settle_s: float = 0.0

    @classmethod
    def from_record(cls, record: Mapping[str, Any], basis: Literal["probe", "table"] = "probe") -> Self:
        """Of a file that `voxscale.train.measure` wrote. Raises TypeError if something is missing."""
        given = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        return cls(**{**given, "basis": basis})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def step_s(self) -> float:
        return self.data_s + self.computing_s(self.micro_batch, self.accumulate) + self.sharing_s

    @property
    def sharing_s(self) -> float:
        """What sharing gradients is known to add."""
        return self.communication_s or 0.0

    def computing_s(self, micro_batch: int, accumulate: int) -> float:
        """Of a step with so many patches at once, so often."""
        return max(self.compute_s * micro_batch * accumulate / self.patches, accumulate * self.calls_s)

    @property
    def patches(self) -> int:
        """Of one rank, in a step."""
        return self.micro_batch * self.accumulate

    @property
    def model_bytes(self) -> int:
        """Weights, and what belongs to each of them."""
        return self.weights_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def activation_bytes(self) -> int:
        """What a micro-batch takes on its way through the network, and back, beside what stays the same."""
        return self._beside_the_model(self.training_bytes, self.device_training_bytes)

    @property
    def window_bytes(self) -> int:
        """What validating a case takes beside what stays the same."""
        return self._beside_the_model(self.validating_bytes, self.device_validating_bytes)

    def _beside_the_model(self, of_process: int, of_device: int | None) -> int:
        held = of_process - self.rest_bytes if of_device is None else of_device
        return max(0, held - self.model_bytes - self.workspace_bytes - self.cached_bytes)
