"""A config for data that has none: look at the data, choose what fits it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.orientations import io_orientation
from nibabel.spatialimages import HeaderDataError, ImageDataError
from numpy.typing import NDArray

from voxscale.config.schema import Columns, Data, Patches
from voxscale.data.archive import is_archive
from voxscale.data.cases import TEST, TRAIN, VAL, Case
from voxscale.data.formats import find_cases, monai_list, nnunet, table, unpack_source
from voxscale.data.formats.sources import shown
from voxscale.data.tfrecord import read_record
from voxscale.errors import DataError

_LARGEST_PATCH = 96
_STRIDE = 16  # of the default model
_SHAPES, _SLICES = 32, 3  # how many cases are looked at, evenly spread: their headers, and one slice of them
_CT_WINDOW, _CT_MINIMUM = [-1000.0, 1000.0], -500
_MAX_VOXELS = 2**31
_SPLIT_WORDS = {
    "train": TRAIN,
    "training": TRAIN,
    "val": VAL,
    "valid": VAL,
    "validation": VAL,
    "test": TEST,
    "testing": TEST,
}


def is_data(path: Path) -> bool:
    """Whether `path` is data rather than a config; both can be JSON files."""
    return path.is_dir() or is_archive(path) or table.detect(path) or monai_list.detect(path)


def guess_config(source: Path, scratch: Path) -> dict[str, Any]:
    """Plain config content for `source`, with the fields in which the defaults do not fit it.

    Raises DataError, listing every finding, for data that cannot be trained on. Archives are unpacked below `scratch`.
    """
    format, unpacked = unpack_source(Data(source=str(source)), scratch)
    fields: dict[str, Any] = {"source": str(source), "format": format}
    if format == "table":
        fields |= _table_fields(unpacked)
    cases = find_cases(Data.model_validate(fields), scratch).cases
    if format == "nnunet" and (regions := nnunet.declared_regions(unpacked)):
        fields["regions"] = regions
    if _is_ct(cases):
        fields["intensity"] = {"window": _CT_WINDOW}
    size = _patch_size(cases)
    return {"data": fields} | ({} if tuple(size) == Patches().size else {"patches": {"size": size}})


def _patch_size(cases: Sequence[Case]) -> list[int]:
    """The largest patch of whole strides that the median volume fills; a tiny volume is padded along one axis.

    A patch of one stride along every axis would end as a single voxel, which instance normalisation refuses.
    """
    shapes = np.array([_shape(case) for case in _spread(cases, 1 if cases[0].record is not None else _SHAPES)])
    median = np.median(shapes, axis=0)
    size = [int(min(_LARGEST_PATCH, max(_STRIDE, n // _STRIDE * _STRIDE))) for n in median]
    if size == [_STRIDE] * 3:
        size[int(np.argmax(median))] = 2 * _STRIDE
    return size


def _is_ct(cases: Sequence[Case]) -> bool:
    """Whether voxels look like Hounsfield units: whole numbers that go down to air."""
    slices = [_middle_slice(case) for case in _spread(cases, 1 if cases[0].record is not None else _SLICES)]
    return min(float(voxels.min()) for voxels in slices) < _CT_MINIMUM and all(
        bool((voxels == np.rint(voxels)).all()) for voxels in slices
    )


def _spread(cases: Sequence[Case], most: int) -> list[Case]:
    return [cases[int(place)] for place in np.linspace(0, len(cases) - 1, min(most, len(cases)))]


def _shape(case: Case) -> tuple[int, ...]:
    """Voxels along x, y and z; the axes of a NIfTI file in the order that the default orientation gives them."""
    if case.record is not None:
        return read_record(case.images[0], case.record)[0].shape[1:]
    image = _open(case.images[0])
    order = io_orientation(image.affine)[:, 0] if np.isfinite(image.affine).all() else np.full(3, np.nan)
    shape = tuple(image.shape[:3])
    return tuple(shape[int(axis)] for axis in np.argsort(order)) if np.isfinite(order).all() else shape


def _middle_slice(case: Case) -> NDArray[Any]:
    if case.record is not None:
        image_cxyz = read_record(case.images[0], case.record)[0]
        return image_cxyz[..., image_cxyz.shape[-1] // 2]
    path = case.images[0]
    image = _open(path)
    try:
        return np.asanyarray(image.dataobj[:, :, image.shape[2] // 2])
    except (OSError, ValueError, EOFError, TypeError, OverflowError, zlib.error, ImageDataError) as error:
        raise _unreadable(path, error) from error


def _open(path: Path) -> Any:
    """The volume's header, checked; its voxels are read on demand."""
    try:
        image = nib.load(path)
        shape, kind = tuple(int(n) for n in image.shape), image.get_data_dtype().kind
    except (OSError, ValueError, EOFError, TypeError, zlib.error, ImageFileError, HeaderDataError) as error:
        raise _unreadable(path, error) from error
    if len(shape) not in (3, 4) or min(shape) < 1 or np.prod(shape, dtype=object) > _MAX_VOXELS or kind not in "iuf":
        raise DataError(
            f"{path.name}: found {shape} voxels of type {image.get_data_dtype()}, expected three dimensions, or four "
            "with channels last, of numbers",
            fix="replace the file",
        )
    return image


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path.name}: cannot be read: {error}", fix="replace the file, or move it away")


def _table_fields(source: Path) -> dict[str, Any]:
    """The split that the table states; raises DataError for a table without labels."""
    content = table.read_table(source)
    roles = table.find_roles(content, Columns(), source.name)
    if roles.label is None:
        raise DataError(
            f"{source.name}: found columns {', '.join(map(shown, content.columns[:40]))}, "
            "expected one with the paths of label volumes, e.g. label or mask",
            fix="add a column with the paths of the labels; outcomes (times, events, classes) as a task come later",
        )
    return _fold_fields(content)


def _fold_fields(content: table.Table) -> dict[str, Any]:
    """`data.split` for columns that hold nothing but words for train, val and test, all spelt alike."""
    spelt = {column: _split_words([row[column] for row in content.rows.values()]) for column in content.columns}
    folds = {column: words for column, words in spelt.items() if words is not None}
    if not folds:
        return {}
    first = next(iter(folds.values()))
    columns = [column for column, words in folds.items() if words | first == first | words]
    words = {role: word for column in columns for role, word in folds[column].items() if role != word}
    return {"split": {"column": columns[0] if len(columns) == 1 else columns, **words}}


def _split_words(cells: Sequence[str]) -> dict[str, str] | None:
    """How a column spells the roles, e.g. {"train": "Training", "val": "Val"}; None for any other column."""
    words: dict[str, str] = {}
    for cell in sorted({cell.strip() for cell in cells}):
        role = _SPLIT_WORDS.get(cell.casefold())
        if role is None or role in words:
            return None
        words[role] = cell
    return words if {TRAIN, VAL} <= words.keys() else None
