"""How many cases may be read and prepared at the same time: as many as there is memory for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel.imageglobals import LoggingOutputSuppressor
from PIL import Image

from voxscale.config.data import Data
from voxscale.data.cases import Case
from voxscale.data.geometry import Geometry
from voxscale.data.images import is_image
from voxscale.errors import InfrastructureError
from voxscale.memory import available_memory

_LOOKED_AT = 8  # cases: those with the largest files
_OF_VOXEL, _OF_VALUE = 32, 20  # bytes at the peak: of a voxel whatever the channels, and of each number in a channel
_OF_RESAMPLED = 16  # while numbers are interpolated: two neighbours of each, what lies between them, and the result
_OF_RECORD = 8  # at the peak, to those in the file
_RGB = 3


def threads_with_room(cases: Sequence[Case], data: Data, threads: int, *, available: int | None = None) -> int:
    """At most `threads`, and no more than so many cases fit into the memory that this process may still take."""
    needed = bytes_of_case(cases, data)
    room = available_memory() if available is None else available
    return max(1, min(threads, room // needed)) if needed else threads


def bytes_of_case(cases: Sequence[Case], data: Data) -> int:
    """About what the largest case needs from reading to writing; 0 where no file tells."""
    by_size = sorted(cases, key=lambda case: sum(map(_size, case.images)), reverse=True)
    records = Counter(case.images[0] for case in cases if case.record is not None)
    return max((_bytes_of(case, data, records) for case in by_size[:_LOOKED_AT]), default=0)


def refuse_beyond_memory(geometry: Geometry, channels: int) -> None:
    """Raise MemoryError where a resampled grid has no room: whoever only tried would be killed without a word.

    Headers decide how fine that grid is, and one that is wrong can make a small file a thousand times as large.
    """
    if geometry.size == tuple(high - low for low, high in geometry.crop):
        return
    needed, free = _OF_RESAMPLED * channels * int(np.prod(geometry.size, dtype=np.int64)), available_memory()
    if needed > free:
        raise MemoryError(f"resampled to {geometry.size} voxels it takes {needed:,} bytes of memory, {free:,} are free")


def beyond_memory(case: Case, data: Data) -> InfrastructureError:
    """The machine is too small for a case; its files may well be sound."""
    return InfrastructureError(
        f"case {case.id}: found too little memory to prepare it: {available_memory() >> 20} MB free, "
        f"expected about {bytes_of_case([case], data) >> 20} MB",
        fix="use a machine, or a job, with more memory; a coarser data.spacing needs less",
    )


def _bytes_of(case: Case, data: Data, records: Counter[Path]) -> int:
    if case.record is not None:
        return _OF_RECORD * _size(case.images[0]) // records[case.images[0]]
    voxels, values = 0, 0
    try:
        for path in case.images:
            shape, spacing = _grid(path)
            voxels = int(np.prod(shape[:3]))
            values += max(voxels, _prepared(voxels, spacing, data)) * (shape[3] if len(shape) > 3 else 1)
    except Exception:  # of a library, about a damaged file: whoever reads it whole says what is wrong
        return 0
    return _OF_VOXEL * voxels + _OF_VALUE * values


def _grid(path: Path) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Shape and spacing, from the header alone."""
    if is_image(path):
        with Image.open(path) as picture:
            return (*picture.size, 1, _RGB), (1.0, 1.0, 1.0)
    with LoggingOutputSuppressor():  # nibabel's remarks on sloppy headers
        header = nib.load(path).header
    return tuple(map(int, header.get_data_shape())), tuple(map(float, header.get_zooms()[:3]))


def _prepared(voxels: int, spacing: Sequence[float], data: Data) -> int:
    if data.size is not None:
        return int(np.prod(data.size))
    if data.spacing is None:
        return voxels
    return int(voxels * np.prod(spacing) / np.prod(data.spacing))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
