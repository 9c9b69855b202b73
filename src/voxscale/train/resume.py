"""Where a run goes on from: the same checkpoint on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from voxscale.checkpoint import BadCheckpointError, Checkpoint, load_checkpoint, load_last, set_aside_newer
from voxscale.errors import InfrastructureError
from voxscale.parallel import World, gather_records
from voxscale.runs import RunFolder
from voxscale.train.events import read_events


def load_agreed(run: RunFolder, world: World, device: torch.device, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None for a run that has none yet. All ranks call it, and get the same.

    A node may see an older state of a shared folder, or read it badly. Ranks that went on from different steps would
    train nonsense, and what one of them has found whole must not get lost. A run that has lost all that it ever saved
    does not begin anew by itself.
    """
    found = load_last(run, warn)
    step = found.step if found is not None else 0
    steps = [each["step"] for each in gather_records([{"step": step}], world, device, together=True)]
    newest = max(steps)
    if step != newest:
        try:
            found = load_checkpoint(run.checkpoint(newest))
        except BadCheckpointError as error:
            raise InfrastructureError(
                f"{error.message}, but rank {steps.index(newest)} has read it whole",
                fix="see that every node has the same files, and start the same command again",
            ) from error
    if found is None and (saved := _last_saved(run)):
        raise BadCheckpointError(
            f"{run.checkpoints}: found no checkpoint, expected that of step {saved}, which was saved",
            fix="restore it, or mount the disk that it is on; or start anew with --fresh, which moves the run aside",
        )
    if found is not None and world.is_main:
        set_aside_newer(run, found.step)
    return found


def _last_saved(run: RunFolder) -> int:
    """The step of the last checkpoint that the run tells of; 0: of none."""
    return max((event["step"] for event in read_events(run.events) if event["event"] == "checkpoint"), default=0)
