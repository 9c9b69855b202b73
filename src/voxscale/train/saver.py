"""Checkpoints in the background: training waits for a copy of its state, not for the disk.

One save at a time; the next waits for it. A save that failed is raised in training, at the next step's end. Only what
has been published is spoken of: its event is written when the save is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from voxscale.checkpoint import Checkpoint, Tensors, save_checkpoint
from voxscale.errors import VoxscaleError
from voxscale.runs import RunFolder


@dataclass(frozen=True)
class _Pending:
    over: Future[Any]
    event: Mapping[str, Any]


class Saver:
    """Saves a run's checkpoints. Rank 0 only. `tell` is given the event of each that is published."""

    def __init__(self, run: RunFolder, *, keep: int, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._run, self._keep, self._tell = run, keep, tell
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._pending: _Pending | None = None

    def save(self, checkpoint: Checkpoint, *, is_best: bool, event: Mapping[str, Any]) -> None:
        """Save a copy of `checkpoint`, whose tensors may change as soon as this returns."""
        self.wait()
        copied = Checkpoint(_copied(checkpoint.model), _copied(checkpoint.optimizer), checkpoint.state)
        over = self._thread.submit(save_checkpoint, self._run, copied, keep=self._keep, is_best=is_best)
        self._pending = _Pending(over, event)

    def look(self) -> None:
        """Tell of the save if it is over. Raises what made it fail."""
        if self._pending is not None and self._pending.over.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save to be over, and tell of it. Raises what made it fail."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.over.result()
            self._tell(pending.event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(VoxscaleError) if error is not None else contextlib.nullcontext():
            self.wait()  # what ended training counts for more than a save that failed after it
        self._thread.shutdown()


def _copied(tensors: Tensors) -> Tensors:
    """Copies in this machine's own memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
