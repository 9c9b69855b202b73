"""A task of the Medical Segmentation Decathlon: `dataset.json` beside `imagesTr/` and `labelsTr/`.

`dataset.json` names the labelled cases; the images may have a fourth dimension of modalities. The folder above a
task's own is accepted too where it holds just one task.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from voxscale.data.cases import Case
from voxscale.errors import DataError

LAYOUT = "a Decathlon task: dataset.json + imagesTr/ + labelsTr/"


def detect(source: Path) -> bool:
    """Whether `source` is a task's folder, or the folder above exactly one."""
    return _task_folder(source) is not None


def find_cases(source: Path) -> list[Case]:
    folder = _task_folder(source)
    if folder is None:
        raise DataError(f"data.source {source}: found no Decathlon task", fix=f"expected {LAYOUT}")
    findings: list[str] = []
    cases = []
    for number, entry in enumerate(_entries(folder), start=1):
        try:
            image, label = (_inside(folder, entry[key]) for key in ("image", "label"))
        except (KeyError, TypeError, ValueError) as error:
            findings.append(f"{folder.name}/dataset.json: training case {number}: {error}")
            continue
        if image.name.startswith("._"):
            continue  # what macOS archives add
        findings += [
            f"{folder.name}: {path.relative_to(folder)} is missing" for path in (image, label) if not path.is_file()
        ]
        name = image.name.removesuffix(".gz").removesuffix(".nii")
        cases.append(Case(id=name, images=(image,), label=label, patient=name))
    listed = Counter(case.id for case in cases)
    findings += [f"{folder.name}/dataset.json: case {name} is listed {n} times" for name, n in listed.items() if n > 1]
    if not cases and not findings:
        findings = [f"{folder.name}/dataset.json: lists no training case"]
    if findings:
        raise DataError.from_findings(findings, fix="restore the files, or take the cases out of dataset.json")
    return cases


def _task_folder(source: Path) -> Path | None:
    if not source.is_dir():
        return None
    folders = [source, *(path for path in sorted(source.iterdir()) if path.is_dir() and not path.name.startswith("."))]
    tasks = [folder for folder in folders if (folder / "dataset.json").is_file() and (folder / "imagesTr").is_dir()]
    return tasks[0] if tasks and (tasks[0] == source or len(tasks) == 1) else None


def _entries(folder: Path) -> list[Any]:
    try:
        training = json.loads((folder / "dataset.json").read_text())["training"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder.name}/dataset.json: cannot be read: {error}", fix="restore it; it lists `training` cases"
        ) from error
    if not isinstance(training, list):
        raise DataError(f"{folder.name}/dataset.json: training is no list", fix="restore it")
    return training


def _inside(folder: Path, listed: str) -> Path:
    """The listed file, which must lie within the task's folder."""
    path = PurePosixPath(listed)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{listed!r} leads out of the folder")
    return folder / path
