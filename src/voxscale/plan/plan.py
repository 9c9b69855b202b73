"""The plan: global quantities of the config turned into what each rank does. Pure arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from voxscale.config.load import identity
from voxscale.config.models import size_problems
from voxscale.config.schema import Config, turning_problems
from voxscale.data.sampler import Stream
from voxscale.errors import ConfigError
from voxscale.files import read_json
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
    patch: tuple[int, int, int]
    stream: str  # global; or what else but seed, epoch and position the samples depend on
    channels: int  # of the prepared images
    labels: tuple[int, ...]  # that the data has, background included
    store: str
    config_sha256: str
    data_sha256: str

    @property
    def at_once(self) -> str:
        """What a device takes at a time, in words."""
        patches = f"{self.micro_batch} patch{'es' if self.micro_batch > 1 else ''}"
        return f"{patches} of {' × '.join(map(str, self.patch))} at once"

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

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan of a run folder."""
        try:
            content = read_json(path)
            if content["schema"] != SCHEMA_VERSION:
                raise ConfigError(
                    f"{path}: schema {content['schema']}, expected {SCHEMA_VERSION}",
                    fix="use the version that wrote it, or --fresh",
                )
            lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
            return cls(**{name: ({**content, **lists})[name] for name in cls.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: missing or damaged", fix="restore it, or start anew with --fresh") from error


def make_plan(
    config: Config,
    *,
    num_train: int,
    num_val: int,
    world_size: int,
    largest: tuple[int, int, int] = (1, 1, 1),
    channels: int = 1,
    labels: tuple[int, ...] = (),
    store: str = "",
    data_sha256: str = "",
) -> Plan:
    """`largest` is the extent, axis by axis, of the largest prepared volume."""
    micro_batch, accumulate = split_batch(config.train.global_batch, world_size, config.train.micro_batch)
    patch = fitting_patch(config, largest)
    stream = make_stream(config, num_train, world_size)
    if stream.epochs_to_see_all > config.train.epochs:
        raise ConfigError(
            f"data.cache: in {config.train.epochs} epochs not every case would be seen, "
            f"expected at least {stream.epochs_to_see_all} with rate {stream.rate} and replace {stream.replace}",
            fix="train longer, or raise data.cache.rate or data.cache.replace",
        )
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
        patch=patch,
        stream=_describe_stream(stream),
        channels=channels,
        labels=labels,
        store=store,
        config_sha256=identity(config),
        data_sha256=data_sha256,
    )


def make_stream(config: Config, num_train: int, world_size: int) -> Stream:
    cache = config.data.cache
    return Stream(
        config.train.seed,
        num_train,
        config.patches.per_case,
        config.train.global_batch,
        rate=cache.rate,
        replace=cache.replace,
        parts=world_size if cache.share == "rank" else 1,
    )


def fitting_patch(config: Config, largest: tuple[int, int, int]) -> tuple[int, int, int]:
    """The size of patches; refused where the model or a turn by augmentation does not fit it."""
    patch = patch_size(config, largest)
    if problems := size_problems(config.model, "patches.size", patch):
        raise ConfigError.from_findings(problems, fix="set data.size or patches.size, or use fewer model.channels")
    if problems := turning_problems(config.augment, patch):
        raise ConfigError.from_findings(problems, fix="take rotate90 out, or set data.size or patches.size")
    return patch


def patch_size(config: Config, largest: tuple[int, int, int]) -> tuple[int, int, int]:
    """What the network sees at once: the patch, or for whole volumes the largest of all, in whole strides."""
    if config.patches.size != "full":
        return config.patches.size
    x, y, z = (-(-n // config.model.stride) * config.model.stride for n in largest)
    return x, y, z


def _describe_stream(stream: Stream) -> str:
    exceptions = []
    if stream.parts > 1:
        exceptions.append(f"each of {stream.parts} ranks trains on cases of its own (data.cache.share)")
    if stream.replace:
        exceptions.append(f"{stream.epochs_to_see_all} epochs see every case (data.cache.replace)")
    return "; ".join(exceptions) or "global"


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
