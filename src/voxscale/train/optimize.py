"""Optimizers and learning-rate schedules from the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from voxscale.config.schema import Config
from voxscale.config.training import Cosine, OneCycle, Polynomial, Restarts


def _novograd(parameters: Iterable[torch.nn.Parameter], *, averaging: bool, **options: Any) -> torch.optim.Optimizer:
    from monai.optimizers.novograd import Novograd

    optimizer: torch.optim.Optimizer = Novograd(parameters, grad_averaging=averaging, **options)
    return optimizer


# Fused: one pass over each parameter's memory; a third of the time on CPUs too. SGD's fails where some parameters have
# momentum and some have none yet, as when an encoder begins to train (torch 2.13).
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, fused=True),
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": torch.optim.SGD,
    "novograd": _novograd,
}


def build_optimizer(config: Config, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    options = config.optimizer.model_dump(exclude={"name"})
    return OPTIMIZERS[config.optimizer.name](parameters, **options)


def learning_rate(config: Config, step: int, num_steps: int, steps_per_epoch: int) -> float:
    """The rate of a step, counted from 1, a pure function of it: nothing to save, nothing to lose."""
    base: float = config.optimizer.lr
    schedule = config.schedule
    warm_steps = min(round(getattr(schedule, "warmup", 0.0) * steps_per_epoch), num_steps)
    if step <= warm_steps:
        return base * step / warm_steps
    return base * SCHEDULES[schedule.name](schedule, step - warm_steps - 1, num_steps - warm_steps, steps_per_epoch)


def _cosine(schedule: Cosine, done: int, num_steps: int, steps_per_epoch: int) -> float:
    return _between(1.0, schedule.final, done / num_steps)


def _poly(schedule: Polynomial, done: int, num_steps: int, steps_per_epoch: int) -> float:
    return math.pow(1 - done / num_steps, schedule.power)


def _one_cycle(schedule: OneCycle, done: int, num_steps: int, steps_per_epoch: int) -> float:
    """Its last step has the lowest rate, and its peak may fall between two steps."""
    peak = schedule.warm * num_steps - 1
    if done < peak:
        return _between(schedule.start, 1.0, done / peak)
    way = (done - peak) / (num_steps - 1 - peak)
    return _between(1.0, schedule.start * schedule.final, way)


def _restarts(schedule: Restarts, done: int, num_steps: int, steps_per_epoch: int) -> float:
    period = schedule.first * steps_per_epoch
    while done >= period:
        done -= period
        period *= schedule.factor
    return _between(1.0, 0.0, done / period)


def _between(start: float, end: float, way: float) -> float:
    """From start to end on half a cosine; `way` goes from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * way))


# Each gives the share of `optimizer.lr` after `done` of `num_steps` steps, those of the warm-up not counted.
SCHEDULES: dict[str, Callable[[Any, int, int, int], float]] = {
    "none": lambda *_: 1.0,
    "cosine": _cosine,
    "poly": _poly,
    "one_cycle": _one_cycle,
    "restarts": _restarts,
}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the device itself can leave a step out, without asking the host."""
    return bool(optimizer.defaults.get("fused"))


def skip_when(optimizer: torch.optim.Optimizer, flag: torch.Tensor) -> None:
    """Leave steps out while the flag, a bool on the device, is set."""
    optimizer.found_inf = flag.float()  # type: ignore[attr-defined]  # as GradScaler tells fused optimizers


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as flat tensors; its settings come from the config again."""
    return {
        f"{index}.{name}": value if isinstance(value, torch.Tensor) else torch.tensor(value)
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for parameter, entry in optimizer.state.items():
        entry.update({name: _laid_out_as(parameter, value) for name, value in entry.items()})


def _laid_out_as(parameter: torch.Tensor, value: Any) -> Any:
    """A tensor of the state in the memory layout of its parameter (channels last, say): fused kernels walk memory."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
