"""An nnU-Net v2 raw dataset: `imagesTr/CASE_0000.nii.gz`, one file per channel, and `labelsTr/CASE.nii.gz`.

`dataset.json` names channels and labels. The folder above the dataset's own is accepted too where it holds just one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from voxscale.config.data import Data
from voxscale.data.cases import Case, Manifest
from voxscale.data.findings import Finding
from voxscale.data.formats.dataset_json import (
    dataset_folders,
    locate,
    only_folder,
    parse_channels,
    parse_labels,
    read_object,
)
from voxscale.data.formats.sources import VOLUME_ENDINGS, absent_files, error, relative, shown, volumes, warning
from voxscale.errors import DataError

LAYOUT = "an nnU-Net dataset: dataset.json + imagesTr/CASE_0000.nii.gz + labelsTr/CASE.nii.gz"

_FIX = "restore the file, or move the case's other files away"


def detect(source: Path) -> bool:
    """Whether `source` is a dataset's folder, or the folder above exactly one."""
    return source.is_dir() and len(dataset_folders(source, "nnunet")) == 1


def read_manifest(source: Path, data: Data) -> Manifest:
    """The cases that have files in `imagesTr`, each with all its channels and its label."""
    folder = only_folder(source, "nnunet", LAYOUT)
    name = locate(folder / "dataset.json", source)
    content = read_object(folder / "dataset.json", name)
    labels = parse_labels(content, name)
    channels = parse_channels(content, "channel_names" if "channel_names" in content else "modality", name)
    ending = content.get("file_ending", ".nii.gz")
    if not channels:
        raise DataError(f"{name}: channel_names: found none", fix='name the channels, e.g. {"0": "CT"}')
    if ending not in VOLUME_ENDINGS:
        raise DataError(
            f"{name}: file_ending: found {shown(ending)}, expected {' or '.join(VOLUME_ENDINGS)}",
            fix="convert the files to NIfTI",
        )
    images, findings = _images_by_case(folder / "imagesTr", ending, channels, source)
    cases: list[Case] = []
    for case, by_channel in sorted(images.items()):
        faults = _case_faults(case, by_channel, folder, ending, channels, source)
        findings += faults
        if not faults:
            files = tuple(by_channel[number] for number in range(len(channels)))
            cases.append(Case(id=case, images=files, label=folder / "labelsTr" / (case + ending), patient=case))
    findings += _lone_labels(folder / "labelsTr", ending, images, source)
    if "ignore" in (content.get("labels") or {}):
        found, expected = "a label `ignore`", "labels that are all learned"
        fix = "turn it into background or a class in the label files, and take it out of dataset.json"
        findings.append(error("ignore-label", found, expected, fix, file=name))
    promised = content.get("numTraining")
    if isinstance(promised, int) and promised != len(images):
        fix = "copy the data again if cases are missing, or correct numTraining"
        found = f"{len(images)} cases in imagesTr"
        findings.append(warning("number-of-cases", found, f"numTraining {shown(promised)}", fix, file=name))
    if not cases and not any(finding.level == "error" for finding in findings):
        raise DataError(f"data.source {source}: imagesTr holds no image", fix=f"expected {LAYOUT}")
    return Manifest(cases, labels, channels, tuple(findings))


def declared_regions(source: Path) -> dict[str, list[int]]:
    """The overlapping regions that `dataset.json` declares, by names that `data.regions` takes; {} for plain labels."""
    folder = only_folder(source, "nnunet", LAYOUT)
    declared = read_object(folder / "dataset.json", "dataset.json").get("labels") or {}
    if not any(isinstance(held, list) and len(held) > 1 for held in declared.values()):
        return {}
    regions: dict[str, list[int]] = {}
    for name, held in declared.items():
        values = [int(value) for value in (held if isinstance(held, list) else [held])]
        if any(values) and name != "ignore":
            regions[_free_name(name, values, regions)] = [value for value in values if value]
    return regions


def _free_name(name: str, values: list[int], taken: Collection[str]) -> str:
    """A name like the declared one that `data.regions` takes, and that no other region has."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "_", name).lstrip("_.+-")
    if plain in ("", "mean"):
        plain = "_".join(["region", *map(str, values)])
    return next(free for n in range(1, len(taken) + 2) if (free := plain if n == 1 else f"{plain}_{n}") not in taken)


def _images_by_case(
    folder: Path, ending: str, channels: tuple[str, ...], source: Path
) -> tuple[dict[str, dict[int, Path]], list[Finding]]:
    images: dict[str, dict[int, Path]] = {}
    findings: list[Finding] = []
    for path in volumes(folder):
        match = re.fullmatch(rf"(.+)_([0-9]{{4}}){re.escape(ending)}", path.name, flags=re.DOTALL)
        if match is not None and int(match[2]) < len(channels):
            images.setdefault(match[1], {})[int(match[2])] = path
        else:
            expected = f"CASE_0000{ending} to CASE_{len(channels) - 1:04d}{ending}"
            file = relative(path, source)
            findings.append(error("stray-file", "another name", expected, "rename it or move it away", file=file))
    return images, findings


def _case_faults(
    case: str,
    by_channel: Mapping[int, Path],
    folder: Path,
    ending: str,
    channels: tuple[str, ...],
    source: Path,
) -> list[Finding]:
    faults = absent_files(case, by_channel.values(), source, _FIX)
    for number, channel in enumerate(channels):
        if number not in by_channel:
            file = relative(folder / "imagesTr" / f"{case}_{number:04d}{ending}", source)
            faults.append(error("missing-modality", f"no {shown(channel)}", "each channel", _FIX, case=case, file=file))
    label = folder / "labelsTr" / (case + ending)
    if absent_files(case, [label], source, _FIX):
        file = relative(label, source)
        faults.append(error("missing-label", "no label", "a label for each case", _FIX, case=case, file=file))
    return faults


def _lone_labels(folder: Path, ending: str, images: Mapping[str, object], source: Path) -> list[Finding]:
    if not folder.is_dir():
        return []
    findings = []
    for path in volumes(folder):
        case, file = path.name.removesuffix(ending), relative(path, source)
        if not path.name.endswith(ending) or (ending == ".nii" and path.name.endswith(".gz")):
            findings.append(
                error("stray-file", "another ending", f"CASE{ending}", "rename it or move it away", file=file)
            )
        elif case not in images:
            findings.append(error("missing-image", "no image", "images for each label", _FIX, case=case, file=file))
    return findings
