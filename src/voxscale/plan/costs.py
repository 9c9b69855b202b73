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
    computing; `communication_s` what sharing gradients adds. `rest_bytes` is the process without the network.
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
    communication_s: float
    load_s: float
    spread: float  # of step times, relative
    validate_case_s: float | None
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

    @classmethod
    def from_record(cls, record: Mapping[str, Any], basis: Literal["probe", "table"] = "probe") -> Self:
        """Of a file that `voxscale.train.measure` wrote. Raises TypeError if something is missing."""
        given = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        return cls(**{**given, "basis": basis})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def step_s(self) -> float:
        return self.data_s + self.compute_s + self.communication_s

    @property
    def patches(self) -> int:
        """Of one rank, in a step."""
        return self.micro_batch * self.accumulate

    @property
    def model_bytes(self) -> int:
        """What stays the same however many patches are computed at once."""
        return self.weights_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def activation_bytes(self) -> int:
        """What a micro-batch takes on its way through the network, and back, beside the model."""
        held = (
            self.training_bytes - self.rest_bytes if self.device_training_bytes is None else self.device_training_bytes
        )
        return max(0, held - self.model_bytes)

    @property
    def window_bytes(self) -> int:
        """What validating a case takes beside the model."""
        if self.device_validating_bytes is None:
            return max(0, self.validating_bytes - self.rest_bytes - self.model_bytes)
        return max(0, self.device_validating_bytes - self.model_bytes)
