"""Which images to predict: files, folders of files, or the unlabelled images of a dataset in any known format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from voxscale.config.schema import Columns, Data
from voxscale.data.cases import Case, Manifest
from voxscale.data.findings import ERROR, Finding
from voxscale.data.formats import FORMATS, load_manifest, unpack_source
from voxscale.data.formats.dataset_json import dataset_folders, read_object
from voxscale.data.formats.monai_list import holds_training
from voxscale.data.formats.sources import VOLUME_ENDINGS, inside, is_file, is_hidden, stem, volumes
from voxscale.errors import ConfigError, DataError

_CHANNEL = re.compile(r"(.+)_([0-9]{4})", flags=re.DOTALL)  # as nnU-Net names a file per channel
_OF_LABELS = ("missing-label", "stray-file")  # findings that only say what is missing for training
_EXPECTED = "a .nii or .nii.gz file, a folder of them, or a dataset"


def find_inputs(paths: Sequence[Path], data: Data, scratch: Path) -> tuple[list[Case], list[Finding]]:
    """The cases to predict, without labels, and a finding for each that is known to be impossible.

    `data` is what the run was trained with: tables are read with its columns. Archives are unpacked below `scratch`.
    Raises DataError for a path that leads to no image at all, ConfigError where two images would have one output.
    """
    cases: list[Case] = []
    findings: list[Finding] = []
    problems: list[str] = []
    loose = [path for path in paths if _is_volume(path)]
    cases += group_channels(loose)
    for path in dict.fromkeys(path for path in paths if path not in set(loose)):
        try:
            found, amiss = _from_source(path, data, scratch)
            cases += found
            findings += amiss
        except DataError as refused:
            problems.append(f"{refused.message}; {refused.fix}" if refused.fix else refused.message)
    if problems:
        raise DataError.from_findings(problems, fix=f"give {_EXPECTED}")
    return _each_once(cases), findings


def group_channels(files: Sequence[Path]) -> list[Case]:
    """A case for each image; files named CASE_0000, CASE_0001 … are the channels of one."""
    numbered: dict[tuple[Path, str], dict[int, Path]] = {}
    for path in files:
        if match := _CHANNEL.fullmatch(stem(path)):
            numbered.setdefault((path.parent, match[1]), {})[int(match[2])] = path
    cases: dict[tuple[Path, ...], Case] = {}
    for path in files:
        match = _CHANNEL.fullmatch(stem(path))
        group = numbered[path.parent, match[1]] if match else {}
        if match and 0 in group:
            images, name = tuple(group[number] for number in sorted(group)), match[1]
        else:
            images, name = (path,), stem(path)
        cases[images] = Case(id=name, images=images, label=None, patient=name)
    return list(cases.values())


def _from_source(source: Path, data: Data, scratch: Path) -> tuple[list[Case], list[Finding]]:
    """The images of a folder, an archive, a table or a list: those without a label, or all where each has one."""
    if not source.exists():
        raise DataError(f"{source}: no such file or folder", fix="check the path")
    if source.is_dir() and not any(known.detect(source) for known in FORMATS.values()):
        return _from_folder(source), []
    columns = data.columns if data.format in ("auto", "table") and source.suffix in (".csv", ".tsv") else Columns()
    given = Data(source=str(source), columns=columns)
    name, place = unpack_source(given, scratch)
    if unlabelled := _declared_test(name, place):
        return unlabelled, []
    manifest = load_manifest(given, scratch)
    faults = [finding for finding in manifest.findings if finding.level == ERROR]
    if name == "pairs":
        unlabelled = [_lone_image(finding, place) for finding in faults if finding.code in _OF_LABELS]
        faults = [finding for finding in faults if finding.code not in (*_OF_LABELS, "missing-image")]
    return unlabelled or _without_labels(manifest), faults


def _lone_image(finding: Finding, source: Path) -> Case:
    path = source / finding.file
    name = finding.case or stem(path)
    return Case(id=name, images=(path,), label=None, patient=name)


def _from_folder(folder: Path) -> list[Case]:
    files = volumes(folder)
    if not files:
        raise DataError(f"{folder}: found no NIfTI file", fix="")
    return group_channels(files)


def _declared_test(name: str, source: Path) -> list[Case]:
    """The images that a dataset itself keeps apart for prediction: imagesTs, or the list's `test`."""
    if name in ("decathlon", "nnunet"):
        (folder,) = dataset_folders(source, name)
        return group_channels(volumes(folder / "imagesTs")) if (folder / "imagesTs").is_dir() else []
    if name == "list":
        return [case for path in _list_files(source) for case in _listed_test(path)]
    return []


def _list_files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    return [path for path in sorted(source.glob("*.json")) if not is_hidden(path) and holds_training(path)]


def _listed_test(path: Path) -> list[Case]:
    cases = []
    for entry in read_object(path, path.name).get("test") or []:
        listed = entry.get("image") if isinstance(entry, dict) else entry
        try:
            images = tuple(inside(path.parent, image) for image in (listed if isinstance(listed, list) else [listed]))
        except (TypeError, ValueError) as problem:
            raise DataError(f"{path.name}: test: {problem}", fix="correct that entry") from None
        if images and not is_hidden(images[0]):
            cases.append(Case(id=stem(images[0]), images=images, label=None, patient=stem(images[0])))
    return cases


def _without_labels(manifest: Manifest) -> list[Case]:
    return [case if case.record is not None else replace(case, label=None) for case in manifest.cases]


def _each_once(cases: Sequence[Case]) -> list[Case]:
    """What was given twice counts once; different images must not have one name, which is that of their output."""
    kept: dict[tuple[object, ...], Case] = {}
    for case in cases:
        kept.setdefault((*(path.resolve() for path in case.images), case.record), case)
    by_name: dict[str, list[Case]] = {}
    for case in kept.values():
        by_name.setdefault(case.id, []).append(case)
    twice = [
        f"{' and '.join(str(case.images[0]) for case in same)}: would both be written as {name}.nii.gz"
        for name, same in by_name.items()
        if len(same) > 1
    ]
    if twice:
        raise ConfigError.from_findings(twice, fix="predict them into folders of their own")
    return sorted(kept.values(), key=lambda case: case.id)


def _is_volume(path: Path) -> bool:
    return path.name.lower().endswith(VOLUME_ENDINGS) and (is_file(path) or not path.exists())
