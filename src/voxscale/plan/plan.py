"""The plan: global quantities of the config turned into what each rank does. Pure arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from voxscale.config.load import identity
from voxscale.config.schema import Config
from voxscale.data.sampler import Stream
from voxscale.errors import ConfigError
from voxscale.runs import SCHEMA_VERSION


@dataclass(frozen=True)
class Plan:
    """What a run of `world_size` ranks does. `global_batch` = `world_size` × `micro_batch` × `accumulate`."""

    world_size: int
    global_batch: int
    micro_batch: int
    accumulate: int
    num_train: int
    num_val: int
    steps_per_epoch: int
    num_steps: int
    validate_every_steps: int
    config_sha256: str
    data_sha256: str

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 1, that a step belongs to; 0 before the first step."""
        return (step - 1) // self.steps_per_epoch + 1

    def validates(self, step: int) -> bool:
        """Every so many epochs, and always at the end."""
        return step % self.validate_every_steps == 0 or step == self.num_steps

    def ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA_VERSION, **asdict(self)}


def make_plan(config: Config, *, num_train: int, num_val: int, world_size: int, data_sha256: str = "") -> Plan:
    stream = make_stream(config, num_train)
    micro_batch, accumulate = split_batch(config.train.global_batch, world_size, config.train.micro_batch)
    return Plan(
        world_size=world_size,
        global_batch=config.train.global_batch,
        micro_batch=micro_batch,
        accumulate=accumulate,
        num_train=num_train,
        num_val=num_val,
        steps_per_epoch=stream.steps_per_epoch,
        num_steps=config.train.epochs * stream.steps_per_epoch,
        validate_every_steps=config.validation.every * stream.steps_per_epoch,
        config_sha256=identity(config),
        data_sha256=data_sha256,
    )


def make_stream(config: Config, num_train: int) -> Stream:
    return Stream(config.train.seed, num_train, config.patches.per_case, config.train.global_batch)


def split_batch(global_batch: int, world_size: int, fits: int | None = None) -> tuple[int, int]:
    """Return (micro-batch per rank, accumulation steps); a device takes at most `fits` patches at once."""
    per_rank, rest = divmod(global_batch, world_size)
    if rest or not per_rank:
        valid = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
        raise ConfigError(
            f"train.batch {global_batch} does not divide over {world_size} ranks",
            fix=f"use {_listed(valid)} devices, or train.batch={-(-global_batch // world_size) * world_size}",
        )
    limit = per_rank if fits is None else fits
    accumulate = next(k for k in range(1, per_rank + 1) if per_rank % k == 0 and per_rank // k <= limit)
    return per_rank // accumulate, accumulate


def _listed(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
