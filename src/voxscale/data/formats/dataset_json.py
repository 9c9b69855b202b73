"""JSON files that describe a dataset: which kind it is, its labels, its channels, its cases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voxscale.data.findings import Finding
from voxscale.data.formats.sources import absent_files, error, inside, is_file, is_hidden, relative, shown
from voxscale.errors import DataError

MAX_LABEL = 255  # prepared labels are bytes
_MAX_BYTES = 2**30
_FIX_FILES = "restore the files, or take the cases out of the list"


@dataclass(frozen=True)
class Entry:
    """One case as listed: `row` holds what the list says of it besides its files."""

    images: tuple[Path, ...]
    label: Path
    row: Mapping[str, str] = field(default_factory=dict)


def read_object(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file; `name` says in errors which file it is."""
    try:
        if not is_file(path):
            raise ValueError("not a file")
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(content, dict):
            raise ValueError(f"found {shown(content)}, expected an object with fields")
    except (OSError, ValueError, RecursionError) as problem:
        why = "brackets nested too deep" if isinstance(problem, RecursionError) else problem
        raise DataError(f"{name}: cannot be read: {why}", fix="restore the file; it describes the data") from None
    return content


def dataset_folders(source: Path, kind: str) -> list[Path]:
    """`source` itself, or else the folders in it, that hold a dataset of this kind."""
    if (own := _kind(source)) is not None:
        return [source] if own == kind else []
    folders = sorted(path for path in source.iterdir() if path.is_dir() and not is_hidden(path))
    return [folder for folder in folders if _kind(folder) == kind]


def only_folder(source: Path, kind: str, layout: str) -> Path:
    """The one dataset at `source`; raises DataError where there is none, or more to choose from."""
    folders = dataset_folders(source, kind) if source.is_dir() else []
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise DataError(f"data.source {source}: found {len(folders)} datasets: {names}", fix="name one of them")
    if not folders:
        raise DataError(f"data.source {source}: found no such dataset", fix=f"expected {layout}")
    return folders[0]


def _kind(folder: Path) -> str | None:
    """decathlon or nnunet, by what `dataset.json` holds; by the names of the images where it does not say."""
    if not is_file(folder / "dataset.json") or not (folder / "imagesTr").is_dir():
        return None
    try:
        content = read_object(folder / "dataset.json", "")
    except DataError:
        content = {}
    if "channel_names" in content or "file_ending" in content:
        return "nnunet"
    if "training" in content and not _is_numbered(folder):
        return None if content.get("validation") else "decathlon"  # with a validation list it is a MONAI list
    numbered = any(path.name.endswith(("_0000.nii.gz", "_0000.nii")) for path in (folder / "imagesTr").iterdir())
    return "nnunet" if numbered else "decathlon"


def _is_numbered(folder: Path) -> bool:
    """Whether an image has a channel number that its label lacks. nnU-Net v1 lists its cases without that number."""
    return any(
        is_file(folder / "labelsTr" / path.name.replace("_0000.nii", ".nii"))
        for path in (folder / "imagesTr").iterdir()
        if path.name.endswith(("_0000.nii.gz", "_0000.nii")) and not is_hidden(path)
    )


def parse_labels(content: Mapping[str, Any], name: str) -> dict[int, str]:
    """Label values and their names, from {"1": "tumour"} or {"tumour": 1} or, for regions, {"tumour": [1, 2]}.

    A value that only regions of several values hold goes by its number.
    """
    labels: dict[int, str] = {}
    declared = content.get("labels") or {}
    if not isinstance(declared, dict):
        raise _bad_field(name, "labels", declared, 'an object such as {"0": "background", "1": "tumour"}')
    for key, held in declared.items():
        by_value = isinstance(held, str) and not held.isdigit()
        values = [key] if by_value else held if isinstance(held, list) else [held]
        for value in values:
            number = _whole(value)
            if number is None or number > MAX_LABEL:
                raise _bad_field(name, "labels", value, f"whole numbers from 0 to {MAX_LABEL}")
            if len(values) == 1:
                labels[number] = str(held) if by_value else key
            else:
                labels.setdefault(number, str(number))
    return dict(sorted(labels.items()))


def parse_channels(content: Mapping[str, Any], key: str, name: str) -> tuple[str, ...]:
    """Names of the channels in order, from {"0": "FLAIR", "1": "T1w"} or a list."""
    declared = content.get(key) or {}
    if isinstance(declared, list):
        declared = {str(number): value for number, value in enumerate(declared)}
    if not isinstance(declared, dict):
        raise _bad_field(name, key, declared, 'an object such as {"0": "FLAIR", "1": "T1w"}')
    numbered = {_whole(number): channel for number, channel in declared.items()}
    if set(numbered) != set(range(len(declared))) or not all(isinstance(value, str) for value in numbered.values()):
        raise _bad_field(name, key, declared, "names numbered from 0, without a gap")
    return tuple(numbered[number] for number in range(len(numbered)))


def parse_entries(
    content: Mapping[str, Any], section: str, root: Path, source: Path, name: str
) -> tuple[list[Entry], list[Finding]]:
    """The cases of a list whose files are there; a finding for each of the others."""
    listed = content.get(section)
    if not isinstance(listed, list):
        raise _bad_field(name, section, listed, 'a list of {"image": …, "label": …}')
    entries: list[Entry] = []
    findings: list[Finding] = []
    for number, item in enumerate(listed, start=1):
        try:
            entry = _parse_entry(item, root)
        except (TypeError, ValueError) as problem:
            code = "outside-root" if "leads out" in str(problem) else "bad-row"
            what = f"{section} case {number}: {problem}"
            findings.append(error(code, what, "image and label below the data folder", "correct that entry", file=name))
            continue
        if is_hidden(entry.images[0]):
            continue
        case = entry.images[0].name.removesuffix(".gz").removesuffix(".nii")
        absent = absent_files(case, (*entry.images, entry.label), source, _FIX_FILES)
        findings += absent
        if not absent:
            entries.append(entry)
    return entries, findings


def _parse_entry(item: object, root: Path) -> Entry:
    if not isinstance(item, dict):
        raise TypeError(f"found {shown(item)}")
    for key in ("image", "label"):
        if key not in item:
            raise ValueError(f"found no {key}")
    images: Sequence[object] = item["image"] if isinstance(item["image"], list) else [item["image"]]
    if not images:
        raise ValueError("found no image")
    row = {
        key: str(value)
        for key, value in item.items()
        if key not in ("image", "label") and isinstance(value, str | int | float)
    }
    return Entry(tuple(inside(root, image) for image in images), inside(root, item["label"]), row)


def locate(path: Path, source: Path) -> str:
    """How errors name the file: below the source, or by itself where it is the source."""
    return relative(path, source if source.is_dir() else source.parent)


def _whole(value: object) -> int | None:
    """A whole number from 0, given as such or as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 9:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _bad_field(name: str, key: str, found: object, expected: str) -> DataError:
    return DataError(f"{name}: {key}: found {shown(found)}, expected {expected}", fix="correct or restore the file")
