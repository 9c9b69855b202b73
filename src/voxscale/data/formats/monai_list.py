"""A MONAI list file, e.g. BTCV's `dataset_0.json`: `training` and `validation` lists of {image, label}.

Paths are relative to the list's folder; several images are channels. `test` entries have no label and do not count.
"""

from __future__ import annotations

from pathlib import Path

from voxscale.config.data import Data
from voxscale.data.cases import TRAIN, VAL, Case, Manifest
from voxscale.data.findings import Finding
from voxscale.data.formats.dataset_json import (
    Entry,
    locate,
    parse_channels,
    parse_entries,
    parse_labels,
    read_object,
)
from voxscale.data.formats.sources import distinct_names, error, is_file, is_hidden, relative
from voxscale.errors import DataError

LAYOUT = 'a MONAI list: a .json with "training" and "validation" lists of {"image": …, "label": …}'

_MAX_LISTS = 32  # more .json files in a folder are something else


def detect(source: Path) -> bool:
    """Whether `source` is a `.json` file, or a folder with exactly one that holds a `training` list."""
    if source.suffix == ".json" and is_file(source):
        return True
    return source.is_dir() and len(_lists(source)) == 1


def read_manifest(source: Path, data: Data) -> Manifest:
    """The listed cases; where there is a validation list, each with the role that the list gives it."""
    path = _list_file(source)
    name, root = locate(path, source), path.parent
    content = read_object(path, name)
    labels, channels = parse_labels(content, name), parse_channels(content, "modality", name)
    training, findings = parse_entries(content, "training", root, root, name)
    validation: list[Entry] = []
    if content.get("validation"):
        validation, more = parse_entries(content, "validation", root, root, name)
        validation, overlap = _apart(training, validation, root)
        findings += more + overlap
    if not training and not validation and not findings:
        raise DataError(f"{name}: lists no training case", fix="restore it")
    roles = [TRAIN if content.get("validation") else ""] * len(training) + [VAL] * len(validation)
    entries = [*training, *validation]
    names = distinct_names([entry.images[0].relative_to(root) for entry in entries])
    cases = [
        Case(id=case, images=entry.images, label=entry.label, patient=case, role=role, row=entry.row)
        for case, entry, role in zip(names, entries, roles, strict=True)
    ]
    return Manifest(cases, labels, channels, tuple(findings))


def _apart(training: list[Entry], validation: list[Entry], root: Path) -> tuple[list[Entry], list[Finding]]:
    """The validation entries that share no image with training, and a finding for each that does."""
    trained = {image for entry in training for image in entry.images}
    kept: list[Entry] = []
    findings: list[Finding] = []
    for entry in validation:
        shared = [image for image in entry.images if image in trained]
        if not shared:
            kept.append(entry)
        for image in shared:
            found = "listed under training and validation"
            fix = "take it out of one of the lists"
            findings.append(error("split-overlap", found, "one of them", fix, file=relative(image, root)))
    return kept, findings


def _list_file(source: Path) -> Path:
    if not source.is_dir():
        return source
    candidates = _lists(source) or _json_files(source)
    if len(candidates) != 1:
        found = ", ".join(path.name for path in candidates) or "none"
        raise DataError(f"data.source {source}: found {found}, expected one list file", fix=f"name it: {LAYOUT}")
    return candidates[0]


def _lists(folder: Path) -> list[Path]:
    return [path for path in _json_files(folder)[:_MAX_LISTS] if holds_training(path)]


def _json_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if not is_hidden(path) and is_file(path))


def holds_training(path: Path) -> bool:
    """Whether a JSON file is such a list."""
    try:
        return isinstance(read_object(path, path.name).get("training"), list)
    except DataError:
        return False
