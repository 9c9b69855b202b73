"""A folder of image and label files whose names pair up, e.g. `img3.nii.gz` with `seg3.nii.gz`.

Also `images/` and `labels/` side by side with equal file names.
"""

from __future__ import annotations

import re
from pathlib import Path

from voxscale.data.cases import Case
from voxscale.errors import DataError

LAYOUT = "pairs like img3.nii.gz + seg3.nii.gz, or images/ + labels/ with equal names"

_IMAGE_WORDS = ("image", "img", "im", "scan", "volume", "vol")
_LABEL_WORDS = ("label", "lab", "seg", "segmentation", "mask", "gt")
_IMAGE_FOLDERS = ("images", "imgs", "imagesTr")
_LABEL_FOLDERS = ("labels", "segs", "masks", "labelsTr")


def detect(source: Path) -> bool:
    """Whether `source` holds at least one image with its label."""
    if not source.is_dir():
        return False
    images, labels = _files(source)
    return bool(images.keys() & labels.keys())


def find_cases(source: Path) -> list[Case]:
    images, labels = _files(source)
    findings = [
        f"{source.name}: image {images[key].name} has no label" for key in sorted(images.keys() - labels.keys())
    ]
    findings += [
        f"{source.name}: label {labels[key].name} has no image" for key in sorted(labels.keys() - images.keys())
    ]
    if not images and not labels:
        findings = [f"data.source {source}: found no image and label files"]
    if findings:
        raise DataError.from_findings(findings, fix=f"expected {LAYOUT}; move stray files away")
    return [Case(id=key, images=(images[key],), label=labels[key], patient=key) for key in images]


def _files(source: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Images and labels by case id."""
    for image_folder in _IMAGE_FOLDERS:
        for label_folder in _LABEL_FOLDERS:
            if (source / image_folder).is_dir() and (source / label_folder).is_dir():
                return (
                    {_stem(path): path for path in _volumes(source / image_folder)},
                    {_stem(path): path for path in _volumes(source / label_folder)},
                )
    images, labels = {}, {}
    for path in _volumes(source):
        stem = _stem(path)
        if (key := _without(stem, _LABEL_WORDS)) is not None:
            labels[key] = path
        elif (key := _without(stem, _IMAGE_WORDS)) is not None:
            images[key] = path
    return images, labels


def _volumes(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.name.endswith((".nii", ".nii.gz")) and not path.name.startswith(".")
    )


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".nii")


def _without(stem: str, words: tuple[str, ...]) -> str | None:
    """The case id that is left when a word like `img` or `seg` at either end is taken away."""
    for word in sorted(words, key=len, reverse=True):
        match = re.fullmatch(rf"{word}[_-]?(.+)|(.+)[_-]{word}", stem, flags=re.IGNORECASE)
        if match:
            return match[1] or match[2]
    return None
