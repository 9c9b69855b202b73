"""Predict: raw images in, label maps, masks or probabilities out, on each image's own grid.

    ensemble = Ensemble.of_one(network, Windows((96, 96, 96)), device)
    predictor = Predictor(ensemble, task, data, channels=1)
    prepared = predictor.read(case)
    label_xyz = task.label_map(predict_codes(predictor, prepared))

`predict_cases` does so for many images, into a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.config.schema import Data
from voxscale.data.build import stored_dtype
from voxscale.data.cases import Case
from voxscale.data.preprocess import PreparedCase, preprocess
from voxscale.data.restore import Codes, restore_channel, restore_codes
from voxscale.data.volumes import read_case
from voxscale.data.written import Header, read_grid, write_nifti
from voxscale.errors import DataError, InfrastructureError
from voxscale.infer.ensemble import Ensemble, on_disk
from voxscale.infer.outputs import Hashes, Kind, Outputs, hashes_of
from voxscale.tasks.segmentation import Segmentation
from voxscale.terminal import progress

BACKGROUND = "background"
Read = TypeVar("Read")

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
                f"case {case.id}: {names}: found {len(raw.image_cxyz)} channels, expected the {self.channels} that the "
                "model was trained on",
                fix="give every channel: in a fourth dimension, or as files CASE_0000, CASE_0001 … of one case",
            )
        try:
            prepared = preprocess(replace(raw, label_xyz=None), self.data)
        except DataError as error:
            raise DataError(f"case {case.id}: {error.message}", fix=error.fix) from error
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
        first = f"{len(self.failures)} of {total} images could not be predicted; the others are written"
        return DataError("\n".join([first, *(f"  {line}" for line in lines)]), fix="; ".join(fixes))

    def __str__(self) -> str:
        again = f", {len(self.skipped)} were there" if self.skipped else ""
        return f"wrote {len(self.written)} predictions{again}"

    def as_json(self) -> dict[str, Any]:
        names = {"written": [path.name for path in self.written], "skipped": [path.name for path in self.skipped]}
        return {**names, **({} if self.error is None else {"error": self.error.as_json()})}


def predict_cases(
    predictor: Predictor, cases: Sequence[Case], outputs: Outputs, *, show_progress: bool = False
) -> Outcome:
    """Predict every case that is not done yet. One that fails does not keep the others from being written."""
    outcome = Outcome([], [], [])

    def read(case: Case) -> _Reading | None:
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
                    with _named_memory_errors(case):
                        _write(predictor, case, reading, outputs)
                    outcome.written.append(outputs.path(case))
            except DataError as failure:
                outcome.failures.append(failure)
            except MemoryError:
                fix = "use a machine with more memory"
                outcome.failures.append(DataError(f"case {case.id}: does not fit into memory", fix=fix))
            reading = None
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
    with outputs.publishing(case, reading.hashes, names) as path:
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
        return hashes_of(case)
    except OSError as error:
        name = Path(error.filename or case.images[0]).name
        raise DataError(f"case {case.id}: {name}: {error.strerror}", fix="check that the file may be read") from error


def _grid(case: Case) -> Header:
    try:
        return read_grid(case)
    except ValueError as error:
        raise DataError(
            f"case {case.id}: {case.images[0].name}: found a damaged file ({error}), expected a readable volume",
            fix="replace the file, or take it out",
        ) from error


@contextmanager
def _named_memory_errors(case: Case) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InfrastructureError(
            f"case {case.id}: the device ran out of memory; what was predicted before it is written",
            fix="hide the GPU with CUDA_VISIBLE_DEVICES= to predict on CPUs, or use a larger one",
        ) from error
