"""Checkpoints without pickle: safetensors and JSON under a SHA-256 manifest, published by rename.

    checkpoints/step-00000120/    model.safetensors, optimizer.safetensors, state.json, manifest.json
    checkpoints/last, best        links to the newest and to the best one

A checkpoint is verified whole before anything of it is used. One that does not verify is passed over for the
generation before it. Generations are ordered by step, never by time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from voxscale.errors import DataError, InfrastructureError
from voxscale.files import point, publish, remove, remove_temporaries
from voxscale.runs import RunFolder

SCHEMA_VERSION = 1
_MODEL, _OPTIMIZER, _STATE, _MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)

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
    """Publish a checkpoint, move `last` (and `best`) to it, and drop what is no longer kept. Rank 0 only."""
    folder = run.checkpoint(checkpoint.step)
    contents = {
        _MODEL: save(_contiguous(checkpoint.model)),
        _OPTIMIZER: save(_contiguous(checkpoint.optimizer)),
        _STATE: _canonical({"schema": SCHEMA_VERSION, **checkpoint.state}),
    }
    remove_temporaries(run.checkpoints)
    if not _is_valid(folder):
        remove(folder)
        _write(folder, contents)
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
    state = json.loads(contents[_STATE])
    if state.pop("schema") != SCHEMA_VERSION:
        raise BadCheckpointError(f"{folder}: written by another version", fix="continue with that version")
    try:
        return Checkpoint(load(contents[_MODEL]), load(contents[_OPTIMIZER]), state)
    except SafetensorError as error:
        raise BadCheckpointError(f"{folder}: {error}") from error


def load_last(run: RunFolder, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None for a run that has none yet."""
    generations = _generations(run)
    for folder in generations:
        try:
            return load_checkpoint(folder)
        except BadCheckpointError as error:
            warn(f"{error.message}; falling back to the checkpoint before it")
    if generations:
        warn("there is none before it: starting from step 0")
    return None


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of weights in canonical order, independent of how they are laid out in a file."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    needed = sum(len(content) for content in contents.values())
    try:
        with publish(folder) as temporary:
            temporary.mkdir()
            for name, content in contents.items():
                (temporary / name).write_bytes(content)
            (temporary / _MANIFEST).write_bytes(_manifest(contents))
    except OSError as error:
        free = shutil.disk_usage(next(parent for parent in folder.parents if parent.exists())).free
        raise InfrastructureError(
            f"checkpoint {folder.name} could not be written: {error.strerror}; it needs {needed:,} bytes, "
            f"{free:,} are free. The checkpoint before it is intact",
            fix="free disk space and start the same command again; the run continues",
        ) from error


def _manifest(contents: Mapping[str, bytes]) -> bytes:
    files = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    return _canonical({"files": files, "sha256": hashlib.sha256(_canonical(files)).hexdigest()})


def _verified(folder: Path) -> dict[str, bytes]:
    """The files' contents, after sizes and hashes were compared with the manifest, and it with itself."""
    try:
        manifest_bytes = (folder / _MANIFEST).read_bytes()
        contents = {name: (folder / name).read_bytes() for name in (_MODEL, _OPTIMIZER, _STATE)}
    except OSError as error:
        raise BadCheckpointError(f"{folder}: incomplete: {error.strerror}: {error.filename}") from error
    if manifest_bytes != _manifest(contents):
        raise BadCheckpointError(
            f"{folder}: does not match its manifest: {_first_difference(manifest_bytes, contents)}"
        )
    return contents


def _first_difference(manifest_bytes: bytes, contents: Mapping[str, bytes]) -> str:
    try:
        files = json.loads(manifest_bytes)["files"]
        expected = json.loads(_manifest(contents))["files"]
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
    for folder in _generations(run):
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
