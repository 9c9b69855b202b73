"""Optimizers and learning-rate schedules from the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from voxscale.config.schema import Config

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def build_optimizer(config: Config, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    options = config.optimizer.model_dump(exclude={"name"})
    return OPTIMIZERS[config.optimizer.name](parameters, **options)


def learning_rate(config: Config, step: int, num_steps: int) -> float:
    """The rate of a step, a pure function of it: nothing to save, nothing to lose."""
    base: float = config.optimizer.lr
    if config.schedule.name == "none":
        return base
    return base * 0.5 * (1 + math.cos(math.pi * (step - 1) / num_steps))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


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
