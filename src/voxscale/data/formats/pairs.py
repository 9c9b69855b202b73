"""A folder of image and label files whose names pair up, e.g. `img3.nii.gz` with `seg3.nii.gz`.

Also `images/` and `labels/` side by side with equal file names, and any other naming that `data.pattern` describes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from voxscale.config.data import Data, Pattern
from voxscale.data.cases import Case, Manifest
from voxscale.data.findings import Finding
from voxscale.data.formats.sources import absent_files, error, is_file, is_hidden, relative, shown, stem, volumes
from voxscale.errors import DataError

LAYOUT = "pairs like img3.nii.gz + seg3.nii.gz, or images/ + labels/ with equal names"

_IMAGE_WORDS = ("image", "img", "im", "scan", "volume", "vol")
_LABEL_WORDS = ("label", "lab", "seg", "segmentation", "mask", "gt")
_IMAGE_FOLDERS = ("images", "imgs", "imagesTr")
_LABEL_FOLDERS = ("labels", "segs", "masks", "labelsTr")
_FIX = f"expected {LAYOUT}; move stray files away"

Named = dict[tuple[str, ...], list[Path]]  # files by (case,) or (patient, case)


def detect(source: Path) -> bool:
    """Whether `source` holds at least one image with its label."""
    if not source.is_dir():
        return False
    images, labels, _ = _files(source)
    return bool(images.keys() & labels.keys())


def read_manifest(source: Path, data: Data) -> Manifest:
    """The cases that have an image, or with `data.pattern` all of them, and a label."""
    if not source.is_dir():
        raise DataError(f"data.source {source}: not a folder", fix="check the path")
    if data.pattern is not None:
        return _read_by_pattern(source, data.pattern)
    images, labels, strays = _files(source)
    if not images and not labels:
        raise DataError(f"data.source {source}: found no image and label files", fix=_FIX)
    findings = [
        error("stray-file", "neither image nor label", LAYOUT, "move it away", file=relative(path, source))
        for path in strays
    ]
    cases, more = _pair_up([images], labels, source, _FIX)
    return Manifest(cases, findings=(*findings, *more))


def _pair_up(channels: list[Named], labels: Named, source: Path, fix: str) -> tuple[list[Case], list[Finding]]:
    """Cases that have one file for each channel and one label; a finding for whatever is amiss with the others."""
    cases: list[Case] = []
    findings: list[Finding] = []
    keys = sorted({key for named in (*channels, labels) for key in named})
    repeated = len({key[-1] for key in keys}) < len(keys)
    for key in keys:
        case = "-".join(key) if repeated else key[-1]
        there = [path for named in (*channels, labels) for path in named.get(key, [])]
        file = relative(there[0], source)
        faults = [
            error(
                "two-files",
                f"{len(paths)} {kind}s: {', '.join(shown(relative(path, source)) for path in paths)}",
                f"one {kind}",
                fix,
                case=case,
                file=relative(paths[0], source),
            )
            for kind, named in (*(("image", named) for named in channels), ("label", labels))
            if len(paths := named.get(key, [])) > 1
        ]
        absent = [number for number, named in enumerate(channels, start=1) if key not in named]
        if len(absent) == len(channels):
            faults.append(error("missing-image", "a label that has no image", "an image", fix, case=case, file=file))
        else:
            faults += [
                error("missing-modality", f"no image {number}", f"{len(channels)} images", fix, case=case, file=file)
                for number in absent
            ]
        if key not in labels:
            faults.append(error("missing-label", "an image that has no label", "a label", fix, case=case, file=file))
        faults += absent_files(case, there, source, fix)
        findings += faults
        if not faults:
            images = tuple(named[key][0] for named in channels)
            cases.append(Case(id=case, images=images, label=labels[key][0], patient=key[0]))
    return cases, findings


def _files(source: Path) -> tuple[Named, Named, list[Path]]:
    """Images and labels by case id, and volumes that are neither."""
    images: Named = {}
    labels: Named = {}
    strays = []
    for image_folder, label_folder in itertools.product(_IMAGE_FOLDERS, _LABEL_FOLDERS):
        if (source / image_folder).is_dir() and (source / label_folder).is_dir():
            for folder, found in ((image_folder, images), (label_folder, labels)):
                for path in volumes(source / folder):
                    found.setdefault((stem(path),), []).append(path)
            return images, labels, []
    for path in volumes(source):
        if (key := _without(stem(path), _LABEL_WORDS)) is not None:
            labels.setdefault((key,), []).append(path)
        elif (key := _without(stem(path), _IMAGE_WORDS)) is not None:
            images.setdefault((key,), []).append(path)
        else:
            strays.append(path)
    return images, labels, strays


def _without(name: str, words: tuple[str, ...]) -> str | None:
    """The case id that is left when a word like `img` or `seg` at either end is taken away."""
    for word in sorted(words, key=len, reverse=True):
        match = re.fullmatch(rf"{word}[_-]?(.+)|(.+)[_-]{word}", name, flags=re.IGNORECASE | re.DOTALL)
        if match:
            return match[1] or match[2]
    return None


def _read_by_pattern(source: Path, pattern: Pattern) -> Manifest:
    by_patient = all("{patient}" in part for part in (*pattern.images, pattern.label))
    patients: dict[str, str] = {}
    parts = (*pattern.images, pattern.label)
    # A file that fits several patterns belongs to the one that says most: c1_seg.nii is no image of a case c1_seg.
    taken: set[Path] = set()
    matches: dict[str, Named] = {}
    for part in sorted(parts, key=lambda part: len(re.sub(r"{.*?}", "", part)), reverse=True):
        matches[part] = _matching(source, part, taken, by_patient=by_patient, patients=patients)
        taken |= {path for paths in matches[part].values() for path in paths}
    *channels, labels = (matches[part] for part in parts)
    fix = "restore the file, move the case's other files away, or correct data.pattern"
    if not any(channels) and not labels:
        patterns = ", ".join(map(shown, (*pattern.images, pattern.label)))
        raise DataError(f"data.source {source}: no file matches {patterns}", fix="correct data.pattern")
    cases, findings = _pair_up(channels, labels, source, fix)
    if not by_patient:
        cases = [
            Case(id=case.id, images=case.images, label=case.label, patient=patients.get(case.id, case.id))
            for case in cases
        ]
    return Manifest(cases, findings=tuple(findings))


def _matching(source: Path, pattern: str, taken: set[Path], *, by_patient: bool, patients: dict[str, str]) -> Named:
    """Files below `source` that fit a pattern and are not taken; whose case is whose is noted in `patients`."""
    whole = re.compile(_expression(pattern), flags=re.DOTALL)
    found: Named = {}
    for path in _walk(source, [re.compile(_expression(part), flags=re.DOTALL) for part in pattern.split("/")]):
        match = whole.fullmatch(relative(path, source))
        if match is None or path in taken:
            continue
        case, patient = match["case"], match.groupdict().get("patient")
        if patient is not None:
            patients.setdefault(case, patient)
        found.setdefault((patient, case) if by_patient and patient is not None else (case,), []).append(path)
    return found


def _expression(pattern: str) -> str:
    """A regular expression for a pattern: a placeholder that stands again must be the same again."""
    pieces = []
    seen: set[str] = set()
    for text, name in re.findall(r"([^{]*)(?:{(case|patient)})?", pattern):
        pieces.append(re.escape(text))
        if name:
            free = "[^/]+?" if name == "patient" else "[^/]+"
            pieces.append(f"(?P={name})" if name in seen else f"(?P<{name}>{free})")
            seen.add(name)
    return "".join(pieces)


def _walk(folder: Path, parts: list[re.Pattern[str]]) -> Iterator[Path]:
    """Files whose names fit the parts of a path, without a look into folders that do not."""
    for path in sorted(folder.iterdir()):
        if is_hidden(path) or not parts[0].fullmatch(path.name):
            continue
        if len(parts) == 1:
            if is_file(path):
                yield path
        elif path.is_dir():
            yield from _walk(path, parts[1:])
