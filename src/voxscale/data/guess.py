"""A config for data that has none: look at the data, choose what fits it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.imageglobals import LoggingOutputSuppressor
from nibabel.orientations import io_orientation
from nibabel.spatialimages import HeaderDataError, ImageDataError
from numpy.typing import NDArray

from voxscale.config.data import Data
from voxscale.config.schema import Patches
from voxscale.data.archive import is_archive, refuse_other_archive
from voxscale.data.cases import TEST, TRAIN, VAL, Case
from voxscale.data.column_names import says_fold
from voxscale.data.formats import class_folders, find_cases, load_manifest, monai_list, nnunet, table, unpack_source
from voxscale.data.formats.sources import shown
from voxscale.data.guess_outcome import guess_outcomes
from voxscale.data.images import is_image, read_image
from voxscale.data.volumes import read_record_case
from voxscale.errors import DataError

_LARGEST_PATCH = 96
_STRIDE = 16  # of the default model
_SHAPES, _SLICES = 32, 3  # how many cases are looked at, evenly spread: their headers, and one slice of them
_CT_WINDOW, _CT_MINIMUM = [-1000.0, 1000.0], -500
_MAX_VOXELS = 2**31
_MOST_WHOLE_VOXELS = 256 * 256 * 64  # of a volume that a network sees as a whole
_MOST_WHOLE_PIXELS = 512 * 512
_SMALL_PICTURE = 64  # pixels along an edge up to which the network must not begin by making it smaller
_BYTES = [0.0, 255.0]
_MANY_CASES, _BATCH, _SMALL_BATCH = 120, 32, 8
_VAL_SHARE = 0.1
_REPLACES_SPLIT = {
    "column",
    "val",
    "test",
    "folds",
    "keep_test",
}  # with one of these, what a table states does not count
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
    refuse_other_archive(path)
    if path.suffix == ".json":
        return monai_list.holds_training(path)
    return path.is_dir() or is_archive(path) or table.detect(path)


@dataclass(frozen=True)
class Guess:
    """Plain config content for data, and what was found and guessed, in words."""

    content: dict[str, Any]
    said: tuple[str, ...] = ()


def guess_config(
    source: Path,
    scratch: Path,
    given: Mapping[str, Any] | None = None,
    *,
    task: str | None = None,
    strict: bool = True,
) -> Guess:
    """Config content for `source`, with the fields in which the defaults do not fit it.

    `given` are fields of `data` that the user states, as may be the `task`; they hold. Raises DataError, listing every
    finding, for data that cannot be trained on; unless `strict`, and for outcomes, whose findings are told together
    later, it looks at what can be read. Archives are unpacked below `scratch`.
    """
    start = {**{name: value for name, value in (given or {}).items() if name != "split"}, "source": str(source)}
    format, unpacked = unpack_source(Data.model_validate(start), scratch)
    fields: dict[str, Any] = {"source": str(source), "format": format}
    given, others, said = dict(given or {}), dict[str, Any](), list[str]()
    if format == "table":
        columns = Data.model_validate(start).columns
        content = table.as_named(table.read_table(unpacked), columns)
        roles = table.find_roles(content, columns, unpacked.name)
        of_outcomes = roles.label is None or task not in (None, "segmentation")
        stated = _with_stated_split(given.get("split"), content, unpacked.name, cells_later=of_outcomes or not strict)
        given |= stated
        if of_outcomes:
            rows = load_manifest(Data.model_validate(fields | given), scratch).cases
            others, said = _guess_outcomes(unpacked, content, rows, roles, given, task)
            said += _other_folds(content, unpacked.name) if stated else []
            given |= others.pop("data")
    elif format in ("classes", "cifar10"):
        others = {"task": "classification"}
    fields |= given
    data = Data.model_validate(fields)
    cases = (find_cases if strict and not others else load_manifest)(data, scratch).cases
    if format in ("classes", "cifar10"):
        others["train"] = {"batch": _BATCH if len(cases) >= _MANY_CASES else _SMALL_BATCH}
        num_classes = len({case.row[class_folders.COLUMN] for case in cases})
        said.append(f"task classification: {num_classes} classes in {len(cases)} images")
    if (split := _kept_test(cases, fields.get("split"))) is not None:
        fields["split"] = split
        said.append(f"guessed: what the data holds out for test stays so, {split['val']:.0%} of the rest validate")
    if format == "nnunet" and (regions := nnunet.declared_regions(unpacked)):
        fields.setdefault("regions", regions)
    looked_at = cases if strict and not others else [case for case in _spread(cases, _SHAPES) if _opens(case)]
    if looked_at and "intensity" not in fields and _is_ct(looked_at):
        fields["intensity"] = {"window": _CT_WINDOW}
    if others:
        others |= _guess_whole(looked_at, fields, said) if looked_at else {}
        return Guess({**others, "data": fields}, tuple(said))
    size = _patch_size(looked_at) if looked_at else list(Patches().size)
    return Guess({"data": fields} | ({} if tuple(size) == Patches().size else {"patches": {"size": size}}))


def _guess_outcomes(
    source: Path,
    content: table.Table,
    cases: Sequence[Case],
    roles: table.Roles,
    given: Mapping[str, Any],
    task: str | None,
) -> tuple[dict[str, Any], list[str]]:
    split = given.get("split") or {}
    folds = split.get("column", ()) if isinstance(split, dict) else ()
    folds = [folds] if isinstance(folds, str) else list(folds)
    ids = [name for name in (roles.case, roles.patient) if name]
    named = {"image": roles.images[0] if len(roles.images) == 1 else list(roles.images)}
    named |= {role: name for role, name in (("case", roles.case), ("patient", roles.patient)) if name}
    given = {**given, "columns": {**named, **given.get("columns", {})}}
    taken = [*roles.images, *ids, *folds, *([roles.label] if roles.label else [])]
    others, said = guess_outcomes(source, content, cases, given, task, taken=taken)
    found = f"images in {', '.join(map(shown, roles.images))}"
    found += f", ids in {', '.join(map(shown, ids))}" if ids else ""
    of_folds = f"folds in {', '.join(map(shown, folds))}" if folds else "no fold columns"
    return others, [f"{found}; {of_folds}", *said]


def _guess_whole(cases: Sequence[Case], fields: dict[str, Any], said: list[str]) -> dict[str, Any]:
    """What a network that sees whole images needs: fields of `data` are added, those beside it returned."""
    shapes = _shapes(cases)
    size = np.median(shapes, axis=0).round().astype(int).tolist()
    if not {"size", "spacing"} & fields.keys() and (whole := _whole_size(shapes)) is not None:
        size = fields["size"] = whole
        said.append(f"guessed: images are resized to {' × '.join(map(str, whole))}")
    if all(_is_picture(case) for case in cases):
        fields.setdefault("orientation", None)
        if all(_middle_slice(case).dtype == np.uint8 for case in _spread(cases, _SLICES)):
            fields.setdefault("intensity", {"window": _BYTES})
    if (shapes[:, 2] > 1).any() or (fields.get("size") or size)[2] != 1:
        return {}
    said.append("guessed: images of one slice, for a network of two dimensions")
    return {"model": {"dims": 2, "stem": "small" if max(size) <= _SMALL_PICTURE else "large"}}


def _whole_size(shapes: NDArray[np.int64]) -> list[int] | None:
    """One size for all images: the median, shrunk where it is large; None where they have one already."""
    median = np.median(shapes, axis=0)
    most, axes = (_MOST_WHOLE_PIXELS, 2) if (shapes[:, 2] == 1).all() else (_MOST_WHOLE_VOXELS, 3)
    shrink = min(1.0, (most / float(np.prod(median))) ** (1 / axes))
    if shrink == 1 and (shapes == shapes[0]).all():
        return None
    return [max(1, round(n * shrink)) for n in median.tolist()]


def _kept_test(cases: Sequence[Case], asked: Any) -> dict[str, Any] | None:
    """The split of data that states which cases are for test but not which validate, with what is asked for besides."""
    roles = {case.role for case in cases}
    if TEST not in roles or VAL in roles or (asked is not None and _replaces_split(asked)):
        return None
    return {"val": _VAL_SHARE, "test": 0.0, "keep_test": True, **(asked or {})}


def _is_picture(case: Case) -> bool:
    """Whether it comes without a place in space, as 2D images and records do."""
    return case.record is not None or is_image(case.images[0])


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
    median = np.median(_shapes(cases), axis=0)
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


def _shapes(cases: Sequence[Case]) -> NDArray[np.int64]:
    return np.array([_shape(case) for case in _spread(cases, 1 if cases[0].record is not None else _SHAPES)])


def _shape(case: Case) -> tuple[int, ...]:
    """Voxels along x, y and z; the axes of a NIfTI file in the order that the default orientation gives them."""
    if case.record is not None:
        return read_record_case(case)[0].shape[1:]
    if is_image(case.images[0]):
        return _read_picture(case.images[0]).shape[:3]
    image = _open(case.images[0])
    order = io_orientation(image.affine)[:, 0] if np.isfinite(image.affine).all() else np.full(3, np.nan)
    shape = tuple(image.shape[:3])
    return tuple(shape[int(axis)] for axis in np.argsort(order)) if np.isfinite(order).all() else shape


def _middle_slice(case: Case) -> NDArray[Any]:
    if case.record is not None:
        image_cxyz = read_record_case(case)[0]
        return image_cxyz[..., image_cxyz.shape[-1] // 2]
    path = case.images[0]
    if is_image(path):
        return _read_picture(path)[:, :, 0]
    image = _open(path)
    try:
        return np.asanyarray(image.dataobj[:, :, image.shape[2] // 2])
    except (OSError, ValueError, EOFError, TypeError, OverflowError, zlib.error, ImageDataError) as error:
        raise _unreadable(path, error) from error


def _read_picture(path: Path) -> NDArray[Any]:
    try:
        return read_image(path)[0]
    except ValueError as error:
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


def _with_stated_split(asked: Any, content: table.Table, name: str, *, cells_later: bool) -> dict[str, Any]:
    """What the table states of the split, with what is asked for besides; nothing where that replaces it.

    Cells that say nothing known are refused here, or `cells_later`, with all else that is wrong, by whoever splits.
    """
    if asked is not None and _replaces_split(asked):
        return {}
    if not cells_later and (problems := _other_folds(content, name)):
        raise DataError.from_findings(
            problems,
            fix="write these words, state the split in data.split (e.g. data.split.val=0.2), or rename the column",
        )
    stated = _stated_split(content, name, strict=not cells_later)
    return {"split": {**stated, **(asked or {})}} if stated else {}


def _replaces_split(asked: Any) -> bool:
    return not isinstance(asked, dict) or bool(_REPLACES_SPLIT & asked.keys())


def _states_split(column: str, cells: Iterable[str]) -> bool:
    """Whether it holds train and another word for a part; one that is called a fold may hold mistakes besides."""
    roles = {_SPLIT_WORDS.get(cell.casefold()) for cell in cells if cell}
    return TRAIN in roles and len(roles) > 1 and (None not in roles or says_fold(column))


def _other_folds(content: table.Table, name: str) -> list[str]:
    """Columns that are called folds but state no split that is known."""
    problems = []
    for column in filter(says_fold, content.columns):
        cells = [row[column].strip() for row in content.rows.values()]
        if not _states_split(column, cells):
            values = ", ".join(map(shown, sorted(set(cells))[:10]))
            problems.append(f"{name}: column {shown(column)}: found {values}, expected train, and val or test")
    return problems


def _stated_split(content: table.Table, name: str, *, strict: bool) -> dict[str, Any]:
    """`data.split` for the columns that hold words for train, val and test, in one spelling each.

    Where a few cells are empty, or hold another word, it is refused: to split at random instead could train on test
    cases. Unless `strict`, it is taken as it is, as is any that is called a fold, for whoever splits by it to name what
    is wrong.
    """
    spelt = {}
    for column in content.columns:
        cells = {number: row[column].strip() for number, row in content.rows.items()}
        if not _states_split(column, cells.values()) and (strict or not says_fold(column)):
            continue
        known = {number: cell.casefold() for number, cell in cells.items() if cell.casefold() in _SPLIT_WORDS}
        if strict and (wrong := [number for number in cells if number not in known]):
            found = ", ".join(f"{shown(cells[row]) if cells[row] else 'no entry'} in row {row}" for row in wrong[:20])
            raise DataError(
                f"{name}: column {shown(column)} states the split, but not everywhere: found {found}, "
                f"expected {', '.join(sorted(set(known.values())))}",
                fix="correct the cells, give data.split, or rename the column",
            )
        words_here = sorted(set(known.values()))
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
