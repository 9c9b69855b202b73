"""A task of the Medical Segmentation Decathlon: `dataset.json` beside `imagesTr/` and `labelsTr/`.

`dataset.json` names the labelled cases; the images may have a fourth dimension of modalities. The folder above a
task's own is accepted too where it holds just one task.
"""

from __future__ import annotations

from pathlib import Path

from voxscale.config.data import Data
from voxscale.data.cases import Case, Manifest
from voxscale.data.formats.dataset_json import (
    dataset_folders,
    locate,
    only_folder,
    parse_channels,
    parse_entries,
    parse_labels,
    read_object,
)
from voxscale.data.formats.sources import stem
from voxscale.errors import DataError

LAYOUT = "a Decathlon task: dataset.json + imagesTr/ + labelsTr/, or its .tar"


def detect(source: Path) -> bool:
    """Whether `source` is a task's folder, or the folder above exactly one."""
    return source.is_dir() and len(dataset_folders(source, "decathlon")) == 1


def read_manifest(source: Path, data: Data) -> Manifest:
    """The cases that `dataset.json` lists, with its labels and modalities."""
    folder = only_folder(source, "decathlon", LAYOUT)
    name = locate(folder / "dataset.json", source)
    content = read_object(folder / "dataset.json", name)
    labels, channels = parse_labels(content, name), parse_channels(content, "modality", name)
    entries, findings = parse_entries(content, "training", folder, source, name)
    if not entries and not findings:
        raise DataError(f"{name}: lists no training case", fix="restore it")
    cases = [
        Case(id=stem(entry.images[0]), images=entry.images, label=entry.label, patient=stem(entry.images[0]))
        for entry in entries
    ]
    return Manifest(cases, labels, channels, tuple(findings))
