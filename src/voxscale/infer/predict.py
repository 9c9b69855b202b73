"""Predict: raw images in, label maps, masks or probabilities out, on each image's own grid.

    ensemble = Ensemble.of_one(network, Windows((96, 96, 96)), device)
    predictor = Predictor(ensemble, task, data, channels=1)
    prepared = predictor.read(case)
    label_xyz = task.label_map(predict_codes(predictor, prepared))

`predict_cases` does so for many images, into a folder.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.config.data import Data
from voxscale.data.build import stored_dtype
from voxscale.data.cases import Case
from voxscale.data.formats.sources import what_is_at
from voxscale.data.preprocess import PreparedCase, preprocess
from voxscale.data.restore import Codes, restore_channel, restore_codes
from voxscale.data.volumes import read_case
from voxscale.data.written import Header, read_grid, write_nifti
from voxscale.errors import DataError, InfrastructureError, printable
from voxscale.infer.ensemble import Ensemble, on_disk
from voxscale.infer.outputs import Hashes, Kind, Outputs, hashes_of
from voxscale.tasks.segmentation import Segmentation
from voxscale.terminal import progress

BACKGROUND = "background"
Read = TypeVar("Read")

_NO_MEMORY = "DefaultCPUAllocator"  # what torch's RuntimeError names when the machine has no memory left
_NO_FILE = ("a folder", "no regular file")
_READ_AHEAD_VOXELS = 1 << 26  # of larger images only one is held at a time


@dataclass(frozen=True)
class Predictor:
    """One network or several, whose raw outputs are averaged; `data` says how images are prepared for them."""

    ensemble: Ensemble
    task: Segmentation
    data: Data
    channels: int

    def read(self, case: Case) -> PreparedCase:
        """The case as it would be trained on, or DataError with all that is wrong with it."""
        raw = read_case(replace(case, label=None))
        if len(raw.image_cxyz) != self.channels:
            names = ", ".join(path.name for path in case.images)
            raise DataError(
                f"case {printable(case.id)}: {names}: found {_channels(len(raw.image_cxyz))}, "
                f"expected the {self.channels} that the model was trained on",
                fix="give every channel: in a fourth dimension, or as files CASE_0000, CASE_0001 … of one case",
            )
        try:
            prepared = preprocess(replace(raw, label_xyz=None), self.data)
        except DataError as error:
            raise DataError(f"case {printable(case.id)}: {error.message}", fix=error.fix) from error
        # Training and evaluation read from the store, which rounds.
        return replace(prepared, image_cxyz=prepared.image_cxyz.astype(stored_dtype(self.data)))


@dataclass(frozen=True)
class Outcome:
    """What became of the images, by case."""

    written: list[Path]
    skipped: list[Path]
    failures: list[DataError]

    @property
    def error(self) -> DataError | None:
        """One error that lists every image that could not be predicted."""
        if not self.failures:
            return None
        total = len(self.failures) + len(self.written) + len(self.skipped)
        fixes = dict.fromkeys(failure.fix for failure in self.failures if failure.fix)
        lines = [line for failure in self.failures for line in failure.message.splitlines()]
        rest = "; the others are written" if len(self.failures) < total else ""
        first = f"{len(self.failures)} of {total} {'image' if total == 1 else 'images'} could not be predicted{rest}"
        return DataError("\n".join([first, *(f"  {line}" for line in lines)]), fix="; ".join(fixes))

    def __str__(self) -> str:
        again = f", {len(self.skipped)} were there" if self.skipped else ""
        return f"wrote {len(self.written)} {'prediction' if len(self.written) == 1 else 'predictions'}{again}"

    def as_json(self) -> dict[str, Any]:
        names = {"written": [path.name for path in self.written], "skipped": [path.name for path in self.skipped]}
        return {**names, **({} if self.error is None else {"error": self.error.as_json()})}


def predict_cases(
    predictor: Predictor, cases: Sequence[Case], outputs: Outputs, *, show_progress: bool = False
) -> Outcome:
    """Predict every case that is not done yet. One that fails does not keep the others from being written.

    Raises InfrastructureError where the others would fail too: the disk is full, the device has not enough memory.
    """
    outcome = Outcome([], [], [])

    def read(case: Case) -> _Reading | None:
        outputs.check_name(case)
        hashes = _hashes(case)
        if outputs.is_done(case, hashes):
            return None
        return _Reading(hashes, _grid(case), predictor.read(case))

    with (
        outputs.opened(cases),
        ThreadPoolExecutor(1) as pool,
        progress("predicting", len(cases), shown=show_progress) as advance,
    ):
        for case, future in _read_ahead(read, cases, pool):
            try:
                reading = future.result()
                if reading is None:
                    outcome.skipped.append(outputs.path(case))
                else:
                    _write(predictor, case, reading, outputs)
                    outcome.written.append(outputs.path(case))
            except (DataError, OSError, MemoryError, RuntimeError) as error:
                outcome.failures.append(_failure(error, case, outputs.path(case)))
            reading = None
            del future  # it holds what was read, and an error all that was at hand
            advance()
    return outcome


def predict_codes(predictor: Predictor, prepared: PreparedCase, *, scratch: Path | None = None) -> Codes:
    """What the task decides for each voxel, on the image's own grid; background where the image was cropped.

    `scratch` is where an ensemble whose windows differ keeps its sums.
    """
    codes = predictor.ensemble.decide(predictor.task, prepared.image_cxyz, scratch=scratch)
    return restore_codes(codes, prepared.geometry, overlapping=not predictor.task.exclusive)


@contextmanager
def predict_probabilities(
    predictor: Predictor, prepared: PreparedCase, *, scratch: Path | None = None
) -> Iterator[Iterator[NDArray[np.float32]]]:
    """Yield the probabilities, channel by channel, on the image's own grid; all of them lie in a file in `scratch`."""
    task, shape = predictor.task, (predictor.task.out_channels, *prepared.image_cxyz.shape[1:])
    with on_disk(shape, scratch) as whole:
        for box, output in predictor.ensemble.slabs(prepared.image_cxyz, scratch=scratch):
            whole[(slice(None), *box)] = task.probabilities(output).cpu().numpy()
        sure = [float(task.exclusive and number == 0) for number in range(len(whole))]  # outside is background
        yield (
            restore_channel(np.asarray(channel), prepared.geometry, outside=outside)
            for channel, outside in zip(whole, sure, strict=True)
        )


@dataclass(frozen=True)
class _Reading:
    hashes: Hashes
    grid: Header
    prepared: PreparedCase


def _write(predictor: Predictor, case: Case, reading: _Reading, outputs: Outputs) -> None:
    prepared, grid, kind = reading.prepared, reading.grid, outputs.making.kind
    shape, task = prepared.geometry.shape, predictor.task
    names = _channel_names(task, kind)
    with _named_shortages(case, outputs, predictor, reading), outputs.publishing(case, reading.hashes, names) as path:
        if kind == "probabilities":
            with predict_probabilities(predictor, prepared, scratch=outputs.root) as volumes:
                write_nifti(path, grid, volumes, shape=shape, dtype=np.float32, channels=len(names))
            return
        codes = predict_codes(predictor, prepared, scratch=outputs.root)
        if kind == "masks":
            masks = (_mask(task, codes, number) for number in range(len(names)))
            write_nifti(path, grid, masks, shape=shape, dtype=np.uint8, channels=len(names))
        else:
            label_xyz = task.label_map(codes.T).T  # codes lie as files have them, transposed they are contiguous
            write_nifti(path, grid, [label_xyz], shape=shape, dtype=label_xyz.dtype)


def _channel_names(task: Segmentation, kind: Kind) -> list[str]:
    """What the fourth dimension of an output holds, in order; nothing for label maps."""
    if kind == "labels":
        return []
    return [BACKGROUND, *task.classes] if kind == "probabilities" and task.exclusive else list(task.classes)


def _mask(task: Segmentation, codes: Codes, number: int) -> NDArray[np.bool_]:
    """One class alone: all of them at once would take as much memory as there are classes."""
    return np.asarray(codes == number + 1 if task.exclusive else (codes >> number) & 1 != 0)


def _read_ahead(
    read: Callable[[Case], Read], cases: Sequence[Case], pool: ThreadPoolExecutor
) -> Iterator[tuple[Case, Future[Read]]]:
    """Each case with what `read` gives; the next is being read while the caller works, unless it is large."""
    upcoming: Future[Read] | None = None
    for number, case in enumerate(cases):
        done = upcoming or pool.submit(read, case)
        wait([done])
        following = cases[number + 1] if number + 1 < len(cases) else None
        upcoming = pool.submit(read, following) if following is not None and not _is_large(following) else None
        yield case, done
        del done


def _is_large(case: Case) -> bool:
    try:
        shape = _grid(case).get_data_shape()
    except DataError:
        return False
    return int(np.prod(shape)) * len(case.images) > _READ_AHEAD_VOXELS


def _hashes(case: Case) -> Hashes:
    try:
        if strange := next((path for path in case.images if what_is_at(path) in _NO_FILE), None):
            raise OSError(None, what_is_at(strange), strange)  # a pipe would never end
        return hashes_of(case)
    except OSError as error:
        name = Path(error.filename or case.images[0]).name
        raise DataError(
            f"case {printable(case.id)}: {name}: {error.strerror}", fix="check that the file may be read"
        ) from error


def _grid(case: Case) -> Header:
    try:
        return read_grid(case)
    except ValueError as error:
        raise DataError(
            f"case {printable(case.id)}: {case.images[0].name}: found a damaged file ({error}), "
            "expected a readable volume",
            fix="replace the file, or take it out",
        ) from error


def _failure(error: Exception, case: Case, path: Path) -> DataError:
    """One case's failure in words and without the traceback, which would keep its voxels; what is no such is raised."""
    if isinstance(error, DataError):
        return DataError(error.message, fix=error.fix)
    if isinstance(error, OSError):
        where = f"case {printable(case.id)}: {printable(path.name)}"
        return DataError(f"{where}: {error.strerror or error}", fix="check that --out may be written")
    if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
        return DataError(f"case {printable(case.id)}: does not fit into memory", fix="use a machine with more memory")
    raise error


@contextmanager
def _named_shortages(case: Case, outputs: Outputs, predictor: Predictor, reading: _Reading) -> Iterator[None]:
    """Room and a device's memory do not come back with the next case."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InfrastructureError(
            f"case {printable(case.id)}: the device ran out of memory; what was predicted before it is written",
            fix="hide the GPU with CUDA_VISIBLE_DEVICES= to predict on CPUs, or use a larger one",
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free, needed = shutil.disk_usage(outputs.root).free, _bytes_needed(predictor, reading, outputs.making.kind)
        raise InfrastructureError(
            f"case {printable(case.id)}: {printable(str(outputs.path(case)))}: no room: found {free / 2**20:.1f} MB "
            f"free, expected up to {needed / 2**20:.1f} MB; what was predicted before it is written",
            fix="free some, or choose another --out, then start the same command again",
        ) from error


def _bytes_needed(predictor: Predictor, reading: _Reading, kind: Kind) -> int:
    """At most, for an output: as if nothing of it could be compressed, and with the file that outputs are summed in."""
    task, prepared = predictor.task, reading.prepared
    voxels = int(np.prod(prepared.geometry.shape)) * max(1, len(_channel_names(task, kind)))
    if kind != "probabilities":
        return voxels
    return 4 * (voxels + task.out_channels * int(np.prod(prepared.image_cxyz.shape[1:])))


def _channels(number: int) -> str:
    return "1 channel" if number == 1 else f"{number} channels"
