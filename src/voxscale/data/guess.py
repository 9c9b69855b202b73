"""A config for data that has none: look at the data, choose what fits it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.imageglobals import LoggingOutputSuppressor
from nibabel.orientations import io_orientation
from nibabel.spatialimages import HeaderDataError, ImageDataError
from numpy.typing import NDArray

from voxscale.config.schema import Columns, Data, Patches
from voxscale.data.archive import is_archive
from voxscale.data.cases import TEST, TRAIN, VAL, Case
from voxscale.data.formats import find_cases, load_manifest, monai_list, nnunet, table, unpack_source
from voxscale.data.formats.sources import shown
from voxscale.data.tfrecord import read_record
from voxscale.errors import DataError

_LARGEST_PATCH = 96
_STRIDE = 16  # of the default model
_SHAPES, _SLICES = 32, 3  # how many cases are looked at, evenly spread: their headers, and one slice of them
_CT_WINDOW, _CT_MINIMUM = [-1000.0, 1000.0], -500
_MAX_VOXELS = 2**31
_REPLACES_SPLIT = {"column", "val", "test", "folds"}  # with one of these, what a table states does not count
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
    if path.suffix == ".json":
        return monai_list.holds_training(path)
    return path.is_dir() or is_archive(path) or table.detect(path)


def guess_config(
    source: Path, scratch: Path, given: Mapping[str, Any] | None = None, *, strict: bool = True
) -> dict[str, Any]:
    """Plain config content for `source`, with the fields in which the defaults do not fit it.

    `given` are fields of `data` that the user states; they hold. Raises DataError, listing every finding, for data
    that cannot be trained on; unless `strict`, it looks at what can be read. Archives are unpacked below `scratch`.
    """
    start = {**{name: value for name, value in (given or {}).items() if name != "split"}, "source": str(source)}
    format, unpacked = unpack_source(Data.model_validate(start), scratch)
    fields: dict[str, Any] = {"source": str(source), "format": format}
    given = dict(given or {})
    if format == "table":
        content = _labelled_table(unpacked, Data.model_validate(start).columns)
        given |= _with_stated_split(given.get("split"), content, unpacked.name, strict=strict)
    fields |= given
    data = Data.model_validate(fields)
    cases = (find_cases if strict else load_manifest)(data, scratch).cases
    if format == "nnunet" and (regions := nnunet.declared_regions(unpacked)):
        fields.setdefault("regions", regions)
    looked_at = [case for case in cases if strict or _opens(case)]
    if looked_at and "intensity" not in fields and _is_ct(looked_at):
        fields["intensity"] = {"window": _CT_WINDOW}
    size = _patch_size(looked_at) if looked_at else list(Patches().size)
    return {"data": fields} | ({} if tuple(size) == Patches().size else {"patches": {"size": size}})


def _opens(case: Case) -> bool:
    try:
        _middle_slice(case)
    except DataError:
        return False
    return True


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
        with LoggingOutputSuppressor():  # nibabel's remarks on sloppy headers
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


def _labelled_table(source: Path, columns: Columns) -> table.Table:
    """The table; raises DataError for one without labels."""
    content = table.read_table(source)
    if table.find_roles(content, columns, source.name).label is None:
        raise DataError(
            f"{source.name}: found columns {', '.join(map(shown, content.columns[:40]))}, "
            "expected one with the paths of label volumes, e.g. label or mask",
            fix="add a column with the paths of the labels; outcomes (times, events, classes) as a task come later",
        )
    return content


def _with_stated_split(asked: Any, content: table.Table, name: str, *, strict: bool) -> dict[str, Any]:
    """What the table states of the split, with what is asked for besides; nothing where that replaces it."""
    if asked is not None and (not isinstance(asked, dict) or _REPLACES_SPLIT & asked.keys()):
        return {}
    stated = _stated_split(content, name, strict=strict)
    return {"split": {**stated, **(asked or {})}} if stated else {}


def _stated_split(content: table.Table, name: str, *, strict: bool) -> dict[str, Any]:
    """`data.split` for the columns that hold nothing but words for train, val and test, in one spelling each.

    A column that is such but for a few empty cells is refused: to split at random instead could train on test cases.
    Unless `strict`, it is taken as it is, for whoever splits by it to name what is missing.
    """
    spelt = {}
    for column in content.columns:
        cells = {number: row[column].strip() for number, row in content.rows.items()}
        roles = {_SPLIT_WORDS.get(cell.casefold()) for cell in cells.values() if cell}
        if TRAIN not in roles or None in roles or len(roles) == 1:
            continue
        if strict and (empty := [number for number, cell in cells.items() if not cell]):
            raise DataError(
                f"{name}: column {shown(column)} states the split, but not in row {', '.join(map(str, empty[:20]))}",
                fix="fill the cells, or give data.split",
            )
        words_here = sorted({cell.casefold() for cell in cells.values() if cell})
        spelt[column] = {str(_SPLIT_WORDS[word]): word for word in words_here}
        if strict and len(words_here) != len(spelt[column]):
            raise DataError(
                f"{name}: column {shown(column)} has several words for one part of the split: {', '.join(words_here)}",
                fix="use one word for each, or give data.split",
            )
    if not spelt:
        return {}
    words: dict[str, str] = {}
    for column, own in spelt.items():
        if strict and any(words.get(role, word) != word for role, word in own.items()):
            raise DataError(
                f"{name}: column {shown(column)} spells the split otherwise than {shown(next(iter(spelt)))}",
                fix="use the same words in both, or give data.split",
            )
        words |= own
    columns = list(spelt)
    unusual = {role: word for role, word in words.items() if role != word}
    return {"column": columns[0] if len(columns) == 1 else columns, **unusual}
