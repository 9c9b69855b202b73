"""A folder of image and label files whose names pair up, e.g. `img3.nii.gz` with `seg3.nii.gz`.

Also `images/` and `labels/` side by side with equal file names.
"""

from __future__ import annotations

import itertools
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
    images, labels, _ = _files(source)
    return bool(images.keys() & labels.keys())


def find_cases(source: Path) -> list[Case]:
    images, labels, strays = _files(source)
    findings = [f"{source.name}: {path.name} is neither image nor label" for path in strays]
    for kind, volumes, others, missing in (("image", images, labels, "label"), ("label", labels, images, "image")):
        for key, paths in sorted(volumes.items()):
            if len(paths) > 1:
                findings.append(
                    f"{source.name}: case {key} has {len(paths)} {kind}s: {', '.join(p.name for p in paths)}"
                )
            if key not in others:
                findings.append(f"{source.name}: {kind} {paths[0].name} has no {missing}")
    if not images and not labels:
        findings = [f"data.source {source}: found no image and label files"]
    if findings:
        raise DataError.from_findings(findings, fix=f"expected {LAYOUT}; move stray files away")
    return [Case(id=key, images=(images[key][0],), label=labels[key][0], patient=key) for key in images]


def _files(source: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]], list[Path]]:
    """Images and labels by case id, and volumes that are neither."""
    images: dict[str, list[Path]] = {}
    labels: dict[str, list[Path]] = {}
    strays = []
    for image_folder, label_folder in itertools.product(_IMAGE_FOLDERS, _LABEL_FOLDERS):
        if (source / image_folder).is_dir() and (source / label_folder).is_dir():
            for folder, found in ((image_folder, images), (label_folder, labels)):
                for path in _volumes(source / folder):
                    found.setdefault(_stem(path), []).append(path)
            return images, labels, []
    for path in _volumes(source):
        stem = _stem(path)
        if (key := _without(stem, _LABEL_WORDS)) is not None:
            labels.setdefault(key, []).append(path)
        elif (key := _without(stem, _IMAGE_WORDS)) is not None:
            images.setdefault(key, []).append(path)
        else:
            strays.append(path)
    return images, labels, strays


def _volumes(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.name.endswith((".nii", ".nii.gz")) and not path.name.startswith(".")
    )


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".nii")


def _without(stem: str, words: tuple[str, ...]) -> str | None:
    """The case id that is left when a word like `img` or `seg` at either end is taken away."""
    for word in sorted(words, key=len, reverse=True):
        match = re.fullmatch(rf"{word}[_-]?(.+)|(.+)[_-]{word}", stem, flags=re.IGNORECASE | re.DOTALL)
        if match:
            return match[1] or match[2]
    return None
