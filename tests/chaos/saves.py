"""`kill -9` at every file operation of a save, and damage to every part of a checkpoint."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

import voxscale.checkpoint
from chaos.report import Report
from voxscale.checkpoint import (
    BadCheckpointError,
    Checkpoint,
    Tensors,
    load_checkpoint,
    load_last,
    save_checkpoint,
)
from voxscale.runs import RunFolder

_OPERATIONS = (
    *("open", "os.mkdir", "os.chmod", "os.rename", "os.remove", "os.rmdir", "os.symlink"),
    *("os.listdir", "os.scandir"),
)
_DELETIONS = ("os.remove", "os.rmdir")
_STEPS = (2, 4, 6)


@dataclass(frozen=True)
class _Way:
    """What the disturbed save keeps, and whether it is the best so far."""

    keep: int
    is_best: bool

    def save(self, run: RunFolder, step: int) -> None:
        is_best = step == _STEPS[0] or (self.is_best and step == _STEPS[-1])
        save_checkpoint(run, make_checkpoint(step), keep=self.keep, is_best=is_best)

    @property
    def kept(self) -> tuple[int, ...]:
        """The steps that are there in the end."""
        best = _STEPS[-1] if self.is_best else _STEPS[0]
        return tuple(sorted({best, *_STEPS[-self.keep :]}))


_WAYS = (_Way(keep=2, is_best=False), _Way(keep=1, is_best=True))  # one deletes nothing, the other all before it


def make_checkpoint(step: int) -> Checkpoint:
    """A small one, other at each step."""
    model = {"weight": torch.arange(512.0) + step, "bias": torch.full((3,), float(step))}
    optimizer = {"0.exp_avg": torch.arange(512.0) * step, "0.step": torch.tensor(float(step))}
    return Checkpoint(model, optimizer, {"step": step, "best": None, "validated": 0, "wall_s": 0.5})


def kill_in_saves(root: Path) -> Report:
    """Save after two earlier generations and be killed at the first file operation, the second, and so on."""
    report = Report("kill -9 at each file operation of a save")
    with report.timed():
        for way in _WAYS:
            _kill_at_each(root, way, report)
    return report


def _kill_at_each(root: Path, way: _Way, report: Report) -> None:
    folder = RunFolder(root / "save")
    for at in count(1):
        for step in _STEPS[:-1]:
            way.save(folder, step)
        is_over = not _saved_until(folder, at, way)
        if not is_over:
            report.tried += 1
            _check_after_kill(folder, report, at, way)
        shutil.rmtree(folder.root)
        if is_over:
            return


def _check_after_kill(run: RunFolder, report: Report, at: int, way: _Way) -> None:
    """What was committed is there and whole; saving again comes to the end that it would have come to."""
    found = load_last(run, lambda text: report.wrong.append(f"operation {at}: {text}"))
    report.expect(found is not None and found.step in _STEPS[1:], f"operation {at}: {found and found.step} is left")
    report.count(f"left step {found.step}" if found else "left nothing")
    for name in _cut_off(run):
        report.count(f"left a part of {name}")
    best = load_checkpoint(run.best).step
    report.expect(best in {_STEPS[0], way.kept[-1 if way.is_best else 0]}, f"operation {at}: the best is {best}")
    if best == _STEPS[-1]:
        report.count("moved the best")
    if len(list(run.checkpoints.glob("step-*"))) < len(_STEPS) and found and found.step == _STEPS[-1]:
        report.count("deleted old ones")
    way.save(run, _STEPS[-1])
    report.expect(load_checkpoint(run.last).step == _STEPS[-1], f"operation {at}: cannot be saved again")
    names = sorted(path.name for path in run.checkpoints.iterdir())
    expected = ["best", "last", *(run.checkpoint(step).name for step in way.kept)]
    report.expect(names == expected, f"operation {at}: found {names}")


def _cut_off(run: RunFolder) -> list[str]:
    """The files that the killed save had begun to write: they are as long as those of the step before."""
    if not list(run.checkpoints.glob(".step-*.tmp")):
        return []
    whole = {path.name: path.stat().st_size for path in run.checkpoint(_STEPS[1]).iterdir()}
    begun = run.checkpoints.glob(".*.tmp/*")
    return [path.name for path in begun if 0 < path.stat().st_size < whole[path.name]]


def _saved_until(run: RunFolder, at: int, way: _Way) -> bool:
    """Save in a process of its own that is killed at its `at`-th file operation; whether it came so far."""
    child = os.fork()
    if child == 0:
        _die_at(at, run.checkpoints)
        way.save(run, _STEPS[-1])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def _die_at(at: int, folder: Path) -> None:
    """Kill this process just before its `at`-th operation on files: those that Python tells of, writes, and syncs.

    Tensors are written by a library of which Python does not hear: here the same bytes are written in its place.
    """
    left = at

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _OPERATIONS and str(folder) in place_of(event, arguments):
            tick()

    def place_of(event: str, arguments: tuple[Any, ...]) -> str:
        """A deletion may name a file of a folder that is open."""
        opened = arguments[1] if event in _DELETIONS else -1
        return str(Path(f"/proc/self/fd/{opened}").readlink()) if opened >= 0 else str(arguments[:2])

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            tick()
            return operation(*arguments)

        return call

    def write_in_parts(path: Path, content: bytes) -> int:
        with path.open("wb", buffering=0) as stream:
            for part in (content[: len(content) // 2], content[len(content) // 2 :]):
                tick()
                stream.write(part)
        return len(content)

    def write_tensors(tensors: Tensors, path: Path) -> None:
        write_in_parts(path, save(tensors))

    sys.addaudithook(hear)
    os.fsync = counted(os.fsync)
    Path.write_bytes = write_in_parts  # type: ignore[assignment, method-assign]
    voxscale.checkpoint.save_file = write_tensors


def damage_checkpoints(root: Path, *, mutations: int, seed: int) -> Report:
    """Flip, cut, swap and replace bytes of a checkpoint's files: each has to be noticed."""
    report = Report("damage to a checkpoint")
    chance = random.Random(seed)
    folder = save_checkpoint(RunFolder(root / "whole"), make_checkpoint(2), keep=1, is_best=False)
    whole = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    with report.timed():
        while report.tried < mutations:
            name = chance.choice(list(whole))
            kind, damaged = _damaged(whole[name], chance)
            if damaged == whole[name]:
                continue
            report.tried += 1
            report.count(kind)
            (folder / name).write_bytes(damaged)
            try:
                load_checkpoint(folder)
                report.wrong.append(f"{kind} of {name} went unnoticed")
            except BadCheckpointError as error:
                report.expect(str(folder) in error.message, f"{kind} of {name}: not named: {error.message}")
            (folder / name).write_bytes(whole[name])
    return report


def _damaged(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    kind = chance.choice(["a bit", "cut", "zeros", "a byte more", "swapped", "emptied"])
    at = chance.randrange(len(content))
    length = chance.randint(1, 64)
    match kind:
        case "a bit":
            return kind, content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
        case "cut":
            return kind, content[:at]
        case "zeros":
            return kind, content[:at] + bytes(len(content[at : at + length])) + content[at + length :]
        case "a byte more":
            return kind, content[:at] + bytes([chance.randrange(256)]) + content[at:]
        case "swapped":
            other = chance.randrange(len(content))
            changed = bytearray(content)
            changed[at], changed[other] = changed[other], changed[at]
            return kind, bytes(changed)
    return kind, b""
