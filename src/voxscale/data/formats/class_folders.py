"""A folder per class: `cat/1.png`, `dog/1.png`, … or the same below `train/`, `val/` and `test/`, as ImageNet has it.

Images are 2D (.png, .jpg, .bmp, .tif) or volumes (.nii, .nii.gz). A case's class is the name of its folder; the
folders above that state a split hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from voxscale.config.data import Data
from voxscale.data.cases import TEST, TRAIN, VAL, Case, Manifest
from voxscale.data.findings import Finding
from voxscale.data.formats.sources import (
    VOLUME_ENDINGS,
    distinct_names,
    error,
    is_hidden,
    relative,
    shown,
    stem,
    warning,
    what_is_at,
)
from voxscale.data.images import IMAGE_ENDINGS
from voxscale.errors import DataError

LAYOUT = (
    "a folder per class: cat/1.png, dog/1.png, … (.jpg, .bmp, .tif, .nii.gz too), or train/cat/1.png, val/cat/2.png"
)
COLUMN = "class"

_ENDINGS = (*IMAGE_ENDINGS, *VOLUME_ENDINGS)
_ROLES = {
    **{"train": TRAIN, "training": TRAIN},
    **{"val": VAL, "valid": VAL, "validation": VAL},
    **{"test": TEST, "testing": TEST},
}
# Folders of images and of labels are those of a segmentation, whatever its layout; so is a volume named as a label.
_NO_CLASS = re.compile(r"(image|img|im|scan|volume|vol|label|lab|seg|segmentation|mask|gt)s?(tr|ts|va)?", re.IGNORECASE)
_LABEL = re.compile(r"(.*[_-])?(label|lab|seg|segmentation|mask|gt)([_-].*|[0-9]*)", re.IGNORECASE | re.DOTALL)

_ARE_CLASSES = "if they are classes, say data.format=classes"


@dataclass(frozen=True)
class _Listing:
    """What lies in a folder, in order; hidden things do not count."""

    folders: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def detect(source: Path) -> bool:
    """Whether `source` holds two classes or more, directly or to train on; not where it may be a segmentation's."""
    return source.is_dir() and any(objection is None for objection in _objections(source))


def why_not(source: Path) -> str:
    """Why folders of images are not taken for classes, in words; nothing where there are no folders of images."""
    found = _objections(source) if source.is_dir() else []
    return next(filter(None, found), "") if None not in found else ""


def read_manifest(source: Path, data: Data) -> Manifest:
    """One case per image, its class in `row`."""
    top = _list(source) if source.is_dir() else _Listing()
    parts = _split_folders(source, top)
    findings: list[Finding] = []
    if parts:
        strangers = [name for name in top.folders if name not in parts]
        findings += _passed_over("stray-folder", strangers, "train, val and test only", source, source)
        findings += _passed_over("stray-file", top.images, "a folder per class", source, source)
    images: list[tuple[Path, str]] = []
    for folder, role in {source / part: role for part, role in parts.items()}.items() if parts else [(source, "")]:
        inside = _list(folder) if parts else top
        findings += _passed_over("stray-file", inside.images, "a folder per class", folder, source)
        for name in inside.folders:
            listing = _list(folder / name)
            images += [(folder / name / image, role) for image in listing.images]
            findings += _class_findings(folder / name, listing, source)
    if not images:
        raise DataError(f"data.source {source}: found no folder with images", fix=f"expected {LAYOUT}")
    cases, faults = _make_cases(images, source)
    return Manifest(cases, findings=(*findings, *faults))


def _make_cases(images: Sequence[tuple[Path, str]], source: Path) -> tuple[list[Case], list[Finding]]:
    cases: list[Case] = []
    findings: list[Finding] = []
    names = distinct_names([_without_ending(path, source) for path, _ in images])
    for case, (path, role) in zip(names, images, strict=True):
        where = relative(path, source)
        if (found := what_is_at(path)) is not None:
            fix = "restore the file, or take it out"
            findings.append(error("missing-file", found, "an image", fix, case=case, file=where))
        else:
            row = {COLUMN: path.parent.name}
            cases.append(Case(id=case, images=(path,), label=None, patient=case, role=role, row=row, where=where))
    return cases, findings


def _without_ending(path: Path, source: Path) -> PurePosixPath:
    inner = PurePosixPath(path.relative_to(source))
    return inner if inner.name.lower().endswith(VOLUME_ENDINGS) else inner.with_suffix("")


def _split_folders(source: Path, top: _Listing) -> dict[str, str]:
    """The folders that state a split, with their roles; none where no folder to train on holds folders of images."""
    parts = {name: _ROLES[name.casefold()] for name in top.folders if name.casefold() in _ROLES}
    training = (source / name for name, role in parts.items() if role == TRAIN)
    return parts if any(_list(folder / name).images for folder in training for name in _list(folder).folders) else {}


def _objections(source: Path) -> list[str | None]:
    """What speaks against classes, in each folder that should hold some; None where nothing does."""
    training = [source / part for part, role in _split_folders(source, _list(source)).items() if role == TRAIN]
    return [_objection(folder, _list(folder)) for folder in training or [source]]


def _objection(folder: Path, inside: _Listing) -> str | None:
    """Empty where there is no folder of images."""
    classes = {name: listing for name in inside.folders if (listing := _list(folder / name)).images}
    if len(classes) < 2:
        return "".join(f"one folder of images, {shown(name)}, where classes are two or more" for name in classes)
    if strange := [name for name in classes if _NO_CLASS.fullmatch(name)]:
        return f"a folder of images called {shown(strange[0])} may be a segmentation's; {_ARE_CLASSES}"
    if _may_be_patients({name: list(_volumes(listing)) for name, listing in classes.items()}):
        return f"folders with labels, or all with files of the same names, may be patients; {_ARE_CLASSES}"
    return None


def _may_be_patients(volumes: Mapping[str, Sequence[str]]) -> bool:
    """Whether folders of volumes are rather patients: with labels, or every one with the same few files."""
    if any(_LABEL.fullmatch(volume) for held in volumes.values() for volume in held):
        return True
    kinds = {tuple(volume.replace(name, "") for volume in held) for name, held in volumes.items()}
    same = next(iter(kinds)) if len(kinds) == 1 else ()
    return not all(kind.isdecimal() for kind in same)  # those are counted, class by class


def _volumes(listing: _Listing) -> Iterator[str]:
    return (stem(PurePosixPath(name)) for name in listing.images if name.lower().endswith(VOLUME_ENDINGS))


def _list(folder: Path) -> _Listing:
    """A folder that is named as an image counts as one: it stands in an image's place."""
    folders: list[str] = []
    images: list[str] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(PurePosixPath(entry.name)):
                continue
            named_image = entry.name.lower().endswith(_ENDINGS)
            (images if named_image else folders if entry.is_dir() else others).append(entry.name)
    return _Listing(tuple(sorted(folders)), tuple(sorted(images)), tuple(sorted(others)))


def _class_findings(folder: Path, listing: _Listing, source: Path) -> list[Finding]:
    findings = _passed_over("stray-folder", listing.folders, "images right in the folder of a class", folder, source)
    findings += _passed_over("stray-file", listing.others, f"images ({', '.join(_ENDINGS)})", folder, source)
    if not listing.images:
        fix = "add images, or take the folder out"
        findings.append(warning("empty-class", "no image", "at least one", fix, file=relative(folder, source)))
    return findings


def _passed_over(code: str, names: Sequence[str], expected: str, folder: Path, source: Path) -> list[Finding]:
    """What no case comes from, so that nobody misses it later: a finding for each folder, not for each file."""
    if not names:
        return []
    found = f"{shown(names[0])}{f' and {len(names) - 1} more' if len(names) > 1 else ''}, which no case comes from"
    file = relative(folder, source) if folder != source else ""
    return [warning(code, found, expected, "convert them, or move them away", file=file)]
