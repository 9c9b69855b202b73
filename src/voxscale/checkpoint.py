"""Checkpoints without pickle: safetensors and JSON under a SHA-256 manifest, published by rename.

    checkpoints/step-00000120/    model.safetensors, optimizer.safetensors, state.json, manifest.json
    checkpoints/last, best        links to the newest and to the best one

A checkpoint is verified whole before anything of it is used. One that does not verify is passed over for the
generation before it, and kept aside as damaged-00000120 until the next one is safe. One that cannot be read, or that
another version wrote, is not: nothing tells that it is damaged. Generations are ordered by step, never by time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from voxscale.errors import DataError, InfrastructureError
from voxscale.files import point, publish, remove, remove_temporaries, sha256_of
from voxscale.runs import RunFolder

SCHEMA_VERSION = 1
_MODEL, _OPTIMIZER, _STATE, _MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)

_DAMAGED = "damaged-"

Tensors = dict[str, torch.Tensor]


class BadCheckpointError(DataError):
    """A checkpoint that does not verify."""

    def __init__(
        self, message: str, *, fix: str = "name another checkpoint, or train on: the one before is used"
    ) -> None:
        super().__init__(message, fix=fix)


@dataclass(frozen=True)
class Checkpoint:
    """All that continues a run: tensors, and what of the state is no tensor."""

    model: Tensors
    optimizer: Tensors
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])


def save_checkpoint(run: RunFolder, checkpoint: Checkpoint, *, keep: int, is_best: bool) -> Path:
    """Publish a checkpoint, move `last` (and `best`) to it, and drop what is no longer kept. Rank 0 only.

    A whole one of the same step stays as it is: a run that stopped before it validated saves the step again once it
    has. A folder cannot be replaced in one move, and the older state loses nothing: who goes on from it validates the
    same weights again.
    """
    folder = run.checkpoint(checkpoint.step)
    remove_temporaries(run.checkpoints)
    if not _is_valid(folder):
        remove(folder)
        _write(folder, checkpoint)
    point(run.last, folder.name)
    if is_best:
        point(run.best, folder.name)
    _prune(run, checkpoint.step, keep)
    return folder


def point_best(run: RunFolder, step: int) -> None:
    """Let `best` name the checkpoint of a step: a kill may have come between its publication and that. Rank 0 only."""
    folder = run.checkpoint(step)
    if folder.is_dir() and run.best.resolve() != folder.resolve():
        point(run.best, folder.name)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint, every byte of it verified."""
    contents = _verified(folder)
    state = _state(folder, contents[_STATE])
    try:
        return Checkpoint(load(contents[_MODEL]), load(contents[_OPTIMIZER]), state)
    except SafetensorError as error:
        raise BadCheckpointError(f"{folder}: {error}") from error


def load_last(run: RunFolder, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None for a run that has none yet. Of those it has, one has to verify."""
    generations = _generations(run)
    damages = []
    for folder in generations:
        try:
            return load_checkpoint(folder)
        except BadCheckpointError as error:
            damages.append(error.message)
            warn(f"{error.message}; falling back to the checkpoint before it")
    if damages:
        others = f", and so are all {len(damages) - 1} before it" if damages[1:] else ", and there is none before it"
        raise BadCheckpointError(
            damages[0] + others, fix="restore one of them, or start anew with --fresh, which moves them aside"
        )
    return None


def set_aside_newer(run: RunFolder, step: int) -> None:
    """Take generations beyond the one that a run goes on from, which did not verify, out of their number. Rank 0 only.

    They would count as kept in place of whole ones. What is aside goes when the next checkpoint is safe.
    """
    for folder in _generations(run):
        if folder.name > run.checkpoint(step).name:
            aside = folder.with_name(folder.name.replace("step-", _DAMAGED))
            remove(aside)
            folder.rename(aside)
            point(run.last, run.checkpoint(step).name)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of weights in canonical order, independent of how they are laid out in a file."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    parts = {_MODEL: _contiguous(checkpoint.model), _OPTIMIZER: _contiguous(checkpoint.optimizer)}
    try:
        with publish(folder) as temporary:
            temporary.mkdir()
            for name, tensors in parts.items():
                _write_tensors(temporary / name, tensors)
            (temporary / _STATE).write_bytes(_canonical({"schema": SCHEMA_VERSION, **checkpoint.state}))
            sums = {path.name: (path.stat().st_size, sha256_of(path)) for path in sorted(temporary.iterdir())}
            (temporary / _MANIFEST).write_bytes(_manifest(sums))
    except OSError as error:
        needed = sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values())
        free = shutil.disk_usage(next(parent for parent in folder.parents if parent.exists())).free
        raise InfrastructureError(
            f"checkpoint {folder.name} could not be written: {error.strerror}; it needs {needed:,} bytes, "
            f"{free:,} are free. The checkpoint before it is intact",
            fix="free disk space and start the same command again; the run continues",
        ) from error


def _write_tensors(path: Path, tensors: Tensors) -> None:
    """Straight from where they are: bytes of a model and its optimizer would double what a save needs of memory."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # for all who may see the folder


def _manifest(sums: Mapping[str, tuple[int, str]]) -> bytes:
    """Of files with their sizes and hashes."""
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sums.items()}
    return _canonical({"files": files, "sha256": hashlib.sha256(_canonical(files)).hexdigest()})


def _verified(folder: Path) -> dict[str, bytes]:
    """The files' contents, after sizes and hashes were compared with the manifest, and it with itself."""
    try:
        manifest_bytes = (folder / _MANIFEST).read_bytes()
        contents = {name: (folder / name).read_bytes() for name in (_MODEL, _OPTIMIZER, _STATE)}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise BadCheckpointError(f"{folder}: incomplete: {error.strerror}: {error.filename}") from error
    except OSError as error:  # a file server that is away, say: it may be whole, and must not be passed over
        raise InfrastructureError(
            f"{folder}: could not be read: {error.strerror}: {error.filename}",
            fix="make it readable and start the same command again; moved away, the one before it is used",
        ) from error
    sums = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()}
    if manifest_bytes != _manifest(sums):
        raise BadCheckpointError(f"{folder}: does not match its manifest: {_first_difference(manifest_bytes, sums)}")
    return contents


def _state(folder: Path, content: bytes) -> dict[str, Any]:
    """What is no tensor, of this version and of the step that the folder is named for."""
    try:
        state: dict[str, Any] = json.loads(content)
        schema, name = state.pop("schema"), f"step-{state['step']:08d}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpointError(f"{folder}: {_STATE} does not hold a run's state") from error
    if schema != SCHEMA_VERSION:
        raise DataError(
            f"{folder}: written by another version of voxscale: found schema {schema}, expected {SCHEMA_VERSION}",
            fix="continue with that version, or start anew with --fresh, which moves the run aside",
        )
    if folder.resolve().name.startswith("step-") and folder.resolve().name != name:
        raise BadCheckpointError(f"{folder}: holds {name}")
    return state


def _first_difference(manifest_bytes: bytes, sums: Mapping[str, tuple[int, str]]) -> str:
    try:
        files = json.loads(manifest_bytes)["files"]
        expected = json.loads(_manifest(sums))["files"]
        return next((name for name in expected if files.get(name) != expected[name]), _MANIFEST) + " is damaged"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} is damaged"


def _is_valid(folder: Path) -> bool:
    try:
        load_checkpoint(folder)
    except BadCheckpointError:
        return False
    return True


def _generations(run: RunFolder) -> list[Path]:
    """Checkpoint folders, newest step first."""
    return sorted(run.checkpoints.glob("step-????????"), reverse=True)


def _prune(run: RunFolder, newest: int, keep: int) -> None:
    """Keep the best and the newest; what is beyond the step just saved did not verify and was passed over."""
    current = [folder for folder in _generations(run) if folder.name <= run.checkpoint(newest).name]
    kept = {run.best.resolve().name, *(folder.name for folder in current[:keep])}
    for folder in (*_generations(run), *run.checkpoints.glob(f"{_DAMAGED}*")):
        if folder.name not in kept:
            remove(folder)


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _contiguous(tensors: Tensors) -> Tensors:
    """As safetensors takes them: dense, and none in the memory of another, as tied weights are."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        separate[name] = dense.clone() if dense.untyped_storage().data_ptr() in seen else dense
        seen.add(dense.untyped_storage().data_ptr())
    return separate
