"""Which images to predict: files, folders of files, or the unlabelled images of a dataset in any known format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from voxscale.config.data import Columns, Data, Pattern
from voxscale.data.archive import is_archive
from voxscale.data.cases import Case, Manifest
from voxscale.data.findings import ERROR, Finding
from voxscale.data.formats import FORMATS, load_manifest, unpack_source
from voxscale.data.formats.dataset_json import dataset_folders, read_object
from voxscale.data.formats.monai_list import holds_training
from voxscale.data.formats.sources import (
    VOLUME_ENDINGS,
    error,
    inside,
    is_file,
    is_hidden,
    relative,
    stem,
    volumes,
    what_is_at,
)
from voxscale.errors import ConfigError, DataError, printable

Found = tuple[list[Case], list[Finding]]

_CHANNEL = re.compile(r"(.+)_([0-9]{4})", flags=re.DOTALL)  # as nnU-Net names a file per channel
_OF_LABELS = ("missing-label", "stray-file")  # findings that only say what is missing for training
_EXPECTED = "a .nii or .nii.gz file, a folder of them, or a dataset"


def find_inputs(paths: Sequence[Path], data: Data, scratch: Path, *, channels: int = 0) -> Found:
    """The cases to predict, without labels, and a finding for each that is known to be impossible.

    `data` is what the run was trained with: tables are read with its columns, folders with its pattern if that fits.
    `channels` is how many the model takes, 0 if that is not known. Archives are unpacked below `scratch`. Raises
    DataError for a path that leads to no image at all, ConfigError where two images would have one output.
    """
    problems: list[str] = []
    loose = {path: _is_volume(path) for path in paths}
    cases, findings = group_channels([path for path, is_volume in loose.items() if is_volume], channels)
    for path in (path for path, is_volume in loose.items() if not is_volume):
        try:
            found, amiss = _from_source(path, data, scratch, channels)
            cases += found
            findings += amiss
        except DataError as refused:
            problems.append(f"{refused.message}; {refused.fix}" if refused.fix else refused.message)
    if problems:
        raise DataError.from_findings(problems, fix=f"give {_EXPECTED}")
    return _each_once(cases), findings


def group_channels(files: Sequence[Path], channels: int) -> Found:
    """A case for each image; files named CASE_0000, CASE_0001 … are the channels of one.

    To a model of one channel they are single images, and only CASE_0000 by itself is CASE. A case of which channels
    are missing is a finding: the others would take their place.
    """
    numbered: dict[tuple[Path, str], list[tuple[int, Path]]] = {}
    cases: list[Case] = []
    findings: list[Finding] = []
    for path in dict.fromkeys(files):
        match = _CHANNEL.fullmatch(stem(path))
        if match is None:
            cases.append(_case(stem(path), path))
        else:
            numbered.setdefault((path.parent, match[1]), []).append((int(match[2]), path))
    for (_, name), group in numbered.items():
        numbers, images = zip(*sorted(group), strict=True)
        if numbers == (0,):
            cases.append(_case(name, *images))
        elif channels == 1 or 0 not in numbers:
            cases += [_case(stem(image), image) for image in images]
        elif faults := _misnumbered(name, numbers, images, channels):
            findings += faults
        else:
            cases.append(_case(name, *images))
    return cases, findings


def _misnumbered(name: str, numbers: tuple[int, ...], images: tuple[Path, ...], channels: int) -> list[Finding]:
    """What keeps these files from being channels 0, 1, 2 … of one case."""
    expected = range(channels or numbers[-1] + 1)
    ending = images[0].name[len(stem(images[0])) :]
    absent = [f"{name}_{number:04}{ending}" for number in expected if number not in numbers]
    found = [f"no {_few(absent)}"] if absent else []
    twice = [image.name for number, image in zip(numbers, images, strict=True) if numbers.count(number) > 1]
    found += [f"{_few(twice)} for one channel"] if twice else []
    beyond = [image.name for number, image in zip(numbers, images, strict=True) if number not in expected]
    found += [f"{_few(beyond)} beside them"] if beyond else []
    wanted = f"one file for each of {len(expected)} channels"
    fix = "put the missing file there, or move the others of that case away"
    return [error("missing-modality", "; ".join(found), wanted, fix, case=name, file=images[0].name)] if found else []


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _case(name: str, *images: Path) -> Case:
    return Case(id=name, images=images, label=None, patient=name)


def _from_source(source: Path, data: Data, scratch: Path, channels: int) -> Found:
    """The images of a folder, an archive, a table or a list: those without a label, or all where each has one."""
    there = what_is_at(source)
    if there is not None and there.startswith("no "):
        raise DataError(f"{source}: {there.replace('no such file', 'no such file or folder')}", fix="check the path")
    if data.pattern is not None and (there == "a folder" or is_archive(source)):
        found = _from_pattern(Data(source=str(source), pattern=data.pattern), data.pattern, scratch)
        if found is not None:
            return found
    if there == "a folder" and not any(known.detect(source) for known in FORMATS.values()):
        return _from_folder(source, channels)
    columns = data.columns if data.format in ("auto", "table") and source.suffix in (".csv", ".tsv") else Columns()
    given = Data(source=str(source), columns=columns)
    name, place = unpack_source(given, scratch)
    declared, amiss = _declared_test(name, place, channels)
    if declared or amiss:
        return declared, amiss
    manifest = load_manifest(given, scratch)
    faults = [finding for finding in manifest.findings if finding.level == ERROR]
    if name != "pairs":
        return _without_labels(manifest), faults
    lone = [finding for finding in faults if finding.code in _OF_LABELS]
    faults = [finding for finding in faults if finding.code not in (*_OF_LABELS, "missing-image")]
    files = _files_of(lone, place) if lone else [case.images[0] for case in manifest.cases]
    cases, amiss = group_channels(files, channels)
    return cases, [*faults, *amiss]


def _from_pattern(given: Data, pattern: Pattern, scratch: Path) -> Found | None:
    """The cases that the run's pattern finds, as it names them; None if it finds nothing."""
    _, place = unpack_source(given, scratch)
    try:
        manifest = load_manifest(given, scratch)
    except DataError:
        return None
    faults = [finding for finding in manifest.findings if finding.level == ERROR]
    others = {finding.case for finding in faults if finding.code != "missing-label"}
    lone = [finding for finding in faults if finding.code == "missing-label" and finding.case not in others]
    expression = _expression(pattern.images[0])
    cases = []
    for finding, path in zip(lone, _files_of(lone, place), strict=True):
        names = expression.fullmatch(relative(path, place))
        images = [place / _filled(part, names.groupdict()) for part in pattern.images] if names else []
        if images and all(map(is_file, images)):
            cases.append(_case(finding.case, *images))
    done = {case.id for case in cases}
    faults = [finding for finding in faults if finding.code != "missing-image" and finding.case not in done]
    return cases or _without_labels(manifest), faults


def _expression(pattern: str) -> re.Pattern[str]:
    """As the format reads a pattern: a placeholder that stands again must be the same again."""
    text = re.escape(pattern)
    for name, free in (("case", "[^/]+"), ("patient", "[^/]+?")):
        mark = re.escape(f"{{{name}}}")
        text = text.replace(mark, f"(?P<{name}>{free})", 1).replace(mark, f"(?P={name})")
    return re.compile(text, flags=re.DOTALL)


def _filled(pattern: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern


def _files_of(findings: Sequence[Finding], source: Path) -> list[Path]:
    """The files that findings are about. Those show names in a printable form, from which no path can be made."""
    files = [source / finding.file for finding in findings]
    if all(map(is_file, files)):
        return files
    shown = {error("", "", "", "", file=relative(path, source)).file: path for path in source.rglob("*")}
    return [shown.get(finding.file, path) for finding, path in zip(findings, files, strict=True)]


def _from_folder(folder: Path, channels: int) -> Found:
    files = volumes(folder)
    if not files:
        raise DataError(f"{folder}: found no NIfTI file", fix="")
    return group_channels(files, channels)


def _declared_test(name: str, source: Path, channels: int) -> Found:
    """The images that a dataset itself keeps apart for prediction: imagesTs, or the list's `test`."""
    if name in ("decathlon", "nnunet"):
        (folder,) = dataset_folders(source, name)
        return group_channels(volumes(folder / "imagesTs") if (folder / "imagesTs").is_dir() else [], channels)
    if name == "list":
        return [case for path in _list_files(source) for case in _listed_test(path)], []
    return [], []


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
            cases.append(_case(stem(images[0]), *images))
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
        f"{' and '.join(printable(str(case.images[0])) for case in same)}: would be written as one "
        f"{printable(name)}.nii.gz"
        for name, same in by_name.items()
        if len(same) > 1
    ]
    if twice:
        raise ConfigError.from_findings(twice, fix="predict them into folders of their own")
    return sorted(kept.values(), key=lambda case: case.id)


def _is_volume(path: Path) -> bool:
    return path.name.lower().endswith(VOLUME_ENDINGS) and what_is_at(path) not in ("a folder", "no regular file")
