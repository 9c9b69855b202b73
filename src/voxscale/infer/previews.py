"""Small pictures of cases, for the page of a run: each the volume as a sheet of slices, and what is labelled and
predicted in it. Those of the cases that are most worth a look are kept."""

from __future__ import annotations

import heapq
import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nibabel.affines import voxel_sizes
from nibabel.orientations import aff2axcodes
from numpy.typing import NDArray
from PIL import Image

from voxscale.data.cases import Case
from voxscale.data.show import to_greys
from voxscale.data.store import Store
from voxscale.files import remove, write_bytes, write_json
from voxscale.infer.evaluate import Measure
from voxscale.parallel import World, barrier, gather_records
from voxscale.runs import RunFolder
from voxscale.tasks import Task, VolumeTask
from voxscale.tasks.summary import Row

SCHEMA_VERSION = 1
TOTAL_BYTES = 9_000_000  # of all cases; a page holds them as base64, a third longer
_MOST_BYTES = 450_000  # of a case
_EDGE = 96  # voxels, along each axis
_CHANNELS = 4
_QUALITY = 80


@dataclass(frozen=True)
class Preview:
    """A case, small: its picture and the codes in it, encoded, and how to read them."""

    image: bytes
    codes: bytes | None
    about: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return len(self.image) + len(self.codes or b"")


class Previews:
    """Keeps, of the cases that this rank measures, the previews of those most worth a look; which, no rank changes."""

    def __init__(self, task: Task, store: Store, *, count: int, of_volumes: VolumeTask | None = None) -> None:
        """`of_volumes` is the task where its labels are volumes: then `keep` has to be told what is predicted."""
        self._task, self._store, self._count, self._of_volumes = task, store, count, of_volumes
        self._kept: list[tuple[tuple[float, _Later], Preview]] = []
        self._codes: NDArray[Any] | None = None

    def keep(self, case: Case, codes_xyz: NDArray[Any]) -> None:
        """Hold what is predicted for the case that is measured just now."""
        self._codes = codes_xyz

    def of(self, measure: Measure) -> Measure:
        """The same, looking at each case once it is measured."""

        def measure_and_look(case: Case) -> Row:
            row = measure(case)
            self._look(case, row)
            self._codes = None
            return row

        return measure_and_look if self._count else measure

    def write(self, run: RunFolder, rows: Sequence[Row], world: World, device: torch.device) -> None:
        """Write those that are wanted of all ranks' cases to the run's folder. All ranks call it; the index comes last,
        so that previews without one do not count."""
        if not self._count:
            return
        chosen = sorted(rows, key=lambda row: (-self._task.worth_a_look(row), row["case"]))[: self._count]
        places = {row["case"]: f"{number:04d}" for number, row in enumerate(chosen)}
        if world.is_main:
            remove(run.preview_index)
        barrier(world)
        mine: list[dict[str, Any]] = []
        try:
            mine = [_write(run, places[_case(each)], each) for _, each in self._kept if _case(each) in places]
        except OSError as error:  # what was trained is worth more than its pictures
            print(f"warning: {run.previews}: {error.strerror}; the report will lack cases", file=sys.stderr)
        about = sorted(gather_records(mine, world, device, together=True), key=lambda each: str(each["image"]))
        if world.is_main and about:
            _remove_others(run, about)
            write_json(run.preview_index, {"schema": SCHEMA_VERSION, **self._classes, "cases": about})

    @property
    def _classes(self) -> dict[str, Any]:
        """What codes mean: the n-th class is the number n, or where classes overlap the n-th bit."""
        if self._of_volumes is None:
            return {}
        return {"classes": list(self._of_volumes.classes), "exclusive": self._of_volumes.exclusive}

    def _look(self, case: Case, row: Row) -> None:
        rank = (self._task.worth_a_look(row), _Later(case.id))
        if len(self._kept) >= self._count and rank < self._kept[0][0]:
            return
        number = self._store.row(case.id)
        affine = self._store.geometry(number).prepared_affine
        spacing = voxel_sizes(affine).tolist()
        codes = None
        if self._codes is not None and self._of_volumes is not None:
            codes = (self._of_volumes.encode(self._store.read_label(number)), self._codes)
        most = min(_MOST_BYTES, TOTAL_BYTES // self._count)
        preview = make_preview(self._store.read_image(number), codes, spacing, most_bytes=most)
        preview.about.update(case=case.id, split=case.split, axes=_axes(affine))
        push = heapq.heappush if len(self._kept) < self._count else heapq.heappushpop
        push(self._kept, (rank, preview))


@dataclass(frozen=True)
class _Later:
    """A name that is less the later it comes: of cases that are alike the first ones stay."""

    name: str

    def __lt__(self, other: _Later) -> bool:
        return self.name > other.name


def make_preview(
    image_cxyz: NDArray[Any],
    codes_xyz: tuple[NDArray[Any], NDArray[Any]] | None,
    spacing_mm: Sequence[float],
    *,
    most_bytes: int = _MOST_BYTES,
) -> Preview:
    """A volume, and what is labelled and predicted in it, in at most so many bytes: coarser until that is so."""
    edge = float(_EDGE)
    while True:
        preview = _encode(image_cxyz[:_CHANNELS], codes_xyz, spacing_mm, edge)
        if preview.nbytes <= most_bytes or edge < 2:
            return preview
        edge *= 0.8


def _encode(
    image_cxyz: NDArray[Any],
    codes_xyz: tuple[NDArray[Any], NDArray[Any]] | None,
    spacing_mm: Sequence[float],
    edge: float,
) -> Preview:
    steps = [max(1, math.ceil(n / edge)) for n in image_cxyz.shape[1:]]
    greys = to_greys(np.stack([_coarser(channel, steps) for channel in image_cxyz]))
    shape = greys[0].shape
    codes = [
        _sampled(each, steps).astype(np.uint8) for each in codes_xyz or ()
    ]  # of overlapping classes the first eight; template/viewer.js says so
    columns = max(1, math.ceil(math.sqrt(shape[2])))
    about = {
        "shape": list(shape),
        "columns": columns,
        "channels": len(greys),
        "spacing_mm": [round(mm * step, 4) for mm, step in zip(spacing_mm, steps, strict=True)],
        "reduced": steps,
    }
    image = _sheets(greys, columns, "JPEG", quality=_QUALITY)
    return Preview(image, _sheets(codes, columns, "PNG", optimize=True) if codes else None, about)


def _coarser(volume_xyz: NDArray[Any], steps: Sequence[int]) -> NDArray[np.float32]:
    """The mean of each block of so many voxels; those at the end may be smaller."""
    out = volume_xyz.astype(np.float32, copy=False)
    for axis, step in reversed(list(enumerate(steps))):
        if step > 1:
            starts = np.arange(0, out.shape[axis], step)
            sizes = np.diff(np.append(starts, out.shape[axis])).astype(np.float32)
            sums: NDArray[np.float32] = np.add.reduceat(out, starts, axis)
            out = sums / sizes.reshape([-1 if each == axis else 1 for each in range(3)])
    return out


def _sampled(codes_xyz: NDArray[Any], steps: Sequence[int]) -> NDArray[Any]:
    """The voxel in the middle of each block."""
    places = [
        np.minimum(np.arange(0, n, step) + step // 2, n - 1) for n, step in zip(codes_xyz.shape, steps, strict=True)
    ]
    sampled: NDArray[Any] = codes_xyz[np.ix_(*places)]
    return sampled


def _sheets(volumes_xyz: Sequence[NDArray[np.uint8]], columns: int, kind: str, **options: Any) -> bytes:
    """Slices along z side by side, x to the right and y downward, in rows of `columns`; volumes one below another."""
    x, y, z = volumes_xyz[0].shape
    rows = math.ceil(z / columns)
    sheet = np.zeros((len(volumes_xyz) * rows * y, columns * x), np.uint8)
    for number, volume in enumerate(volumes_xyz):
        for at in range(z):
            top, left = (number * rows + at // columns) * y, at % columns * x
            sheet[top : top + y, left : left + x] = volume[:, :, at].T
    content = io.BytesIO()
    Image.fromarray(sheet).save(content, format=kind, **options)
    return content.getvalue()


def _axes(affine: NDArray[Any]) -> str:
    """Where the axes lead, as three letters of RAS and LPI."""
    return "".join(str(code) for code in aff2axcodes(affine))


def _case(preview: Preview) -> str:
    return str(preview.about["case"])


def _write(run: RunFolder, place: str, preview: Preview) -> dict[str, Any]:
    names = {"image": f"{place}.jpg", "codes": f"{place}.png" if preview.codes is not None else None}
    write_bytes(run.previews / f"{place}.jpg", preview.image)
    if preview.codes is not None:
        write_bytes(run.previews / f"{place}.png", preview.codes)
    return {**names, **preview.about}


def _remove_others(run: RunFolder, about: Sequence[Mapping[str, Any]]) -> None:
    """Those of an evaluation before, which may have had more."""
    kept = {run.previews / str(each[name]) for each in about for name in ("image", "codes")}
    for path in (*run.previews.glob("*.jpg"), *run.previews.glob("*.png")):
        if path not in kept:
            remove(Path(path))
