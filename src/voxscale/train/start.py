"""Where a run begins: with the encoder of an earlier one, of whatever task."""

from __future__ import annotations

from pathlib import Path

import torch

from voxscale.checkpoint import BadCheckpointError, load_checkpoint
from voxscale.errors import ConfigError
from voxscale.models.transfer import Transfer, take_encoder
from voxscale.runs import RunFolder


def start_from(source: Path, model: torch.nn.Module) -> Transfer:
    """Take the encoder of a run's best checkpoint, or its last where none is best. Every rank calls this."""
    folder = find_start(source)
    try:
        return take_encoder(model, load_checkpoint(folder).model)
    except BadCheckpointError as error:
        raise ConfigError(f"train.init_from {source}: {error.message}", fix="name another run") from error


def find_start(source: Path) -> Path:
    """The checkpoint that `train.init_from` means. Raises ConfigError where there is none."""
    run = RunFolder(source)
    for folder in (run.best, run.last):
        if run.exists and folder.exists():
            return folder.resolve()
    found = "a run without a checkpoint" if run.exists else "no run folder" if source.exists() else "nothing there"
    raise ConfigError(
        f"train.init_from {source}: found {found}, expected a run that has trained", fix="see `voxscale runs`"
    )
