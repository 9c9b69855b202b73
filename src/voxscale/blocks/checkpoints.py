"""Checkpoints for a loop of your own: whole or not at all, verified, without pickle."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from voxscale import checkpoint as files
from voxscale.checkpoint import Checkpoint
from voxscale.errors import ConfigError
from voxscale.parallel import World, barrier
from voxscale.runs import RunFolder
from voxscale.train.optimize import optimizer_tensors, restore_optimizer


def save_checkpoint(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    world: World | None = None,
    keep: int = 2,
    is_best: bool = False,
) -> Path:
    """Publish `folder`/checkpoints/step-XXXXXXXX and let `last`, and with `is_best` also `best`, name it.

    Every rank calls it: rank 0 writes, and all return once it is there. Of the newest `keep` remain, and the best.
    `state` is whatever else continues your training, as JSON. The optimizer's settings, such as a learning rate that
    has changed, are kept too. A model in DistributedDataParallel is saved as the model inside.
    """
    world, run = world or World(), RunFolder(Path(folder))
    _refuse_other_than_json(state or {})  # on every rank: else the others would wait for rank 0
    if world.is_main:
        settings = optimizer.state_dict()["param_groups"] if optimizer is not None else []
        content = Checkpoint(
            model=_inner(model).state_dict(),
            optimizer=optimizer_tensors(optimizer) if optimizer is not None else {},
            state={"step": step, "optimizer": settings, "state": dict(state or {})},
        )
        files.save_checkpoint(run, content, keep=keep, is_best=is_best)
    barrier(world)
    return run.checkpoint(step)


def load_checkpoint(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    best: bool = False,
) -> tuple[int, dict[str, Any]] | None:
    """Bring model and optimizer to the newest checkpoint in `folder`, or to the best one; return (step, state).

    None where there is none yet: then nothing is changed. Every byte is verified before anything of it is used; one
    that does not verify is passed over for the one before, with a line on standard error. Every rank calls it for
    itself. Raises ConfigError where model or optimizer are of another kind.
    """
    run = RunFolder(Path(folder))
    if best:
        found = files.load_checkpoint(run.best) if run.best.exists() else None
    else:
        found = files.load_last(run, lambda line: print(f"warning: {line}", file=sys.stderr))
    if found is None:
        return None
    try:
        _inner(model).load_state_dict(found.model)
        if optimizer is not None:
            restore_optimizer(optimizer, found.optimizer)
            restored = optimizer.state_dict()
            groups = found.state["optimizer"] or restored["param_groups"]
            optimizer.load_state_dict({**restored, "param_groups": groups})
    except (RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder}: the checkpoint of step {found.step} is of another model or optimizer: {_first_line(error)}",
            fix="build them as they were, or name another folder",
        ) from error
    return found.step, dict(found.state["state"])


def _refuse_other_than_json(state: Mapping[str, Any]) -> None:
    problems = []
    for key, value in state.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            problems.append(f"save_checkpoint: state[{key!r}]: {_first_line(error)}")
    if problems:
        fix = "give plain numbers, texts, lists and mappings, e.g. tensor.tolist()"
        raise ConfigError.from_findings(problems, fix=fix)


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
