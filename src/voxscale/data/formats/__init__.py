"""How datasets lie on disk. One module per format, all with the same three names:

`LAYOUT` describes it in a line; `detect(source)` says cheaply whether `source` looks like it; `read_manifest(source,
data)` returns the cases whose files are there, and a finding for each fault. It raises DataError only where the source
as a whole cannot be used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from voxscale.config.data import Columns, Data
from voxscale.data.archive import ARCHIVES, extract_archive, is_archive, refuse_other_archive
from voxscale.data.cases import Case, Manifest
from voxscale.data.findings import Finding, refuse_errors
from voxscale.data.formats import cifar10, class_folders, decathlon, monai_list, nnunet, pairs, table, tfrecord
from voxscale.data.formats.dataset_json import dataset_folders, read_object
from voxscale.data.formats.sources import error, is_hidden, relative, shown
from voxscale.errors import ConfigError, DataError

# In the order in which they are tried: the more a format asks for, the earlier.
FORMATS: dict[str, ModuleType] = {
    "decathlon": decathlon,
    "nnunet": nnunet,
    "tfrecord": tfrecord,
    "cifar10": cifar10,
    "list": monai_list,
    "table": table,
    "pairs": pairs,
    "classes": class_folders,
}


def detect_format(source: Path) -> str:
    """The name of the format that `source` is in. An archive is taken for a Decathlon task until it is unpacked."""
    with _readable(source):
        if source.is_dir() and not any(source.iterdir()):
            raise DataError(f"data.source {source}: the folder is empty", fix=f"put the data there: {_expected()}")
        refuse_other_archive(source)
        if is_archive(source):
            return "decathlon"
        for name, module in FORMATS.items():
            if module.detect(source):
                return name
        raise _unknown_layout(source)


def check_source(data: Data) -> None:
    """Refuse at once what is not there or in no known format; nothing is read yet."""
    source = Path(data.source)
    if data.format == "auto" and data.pattern is None:
        detect_format(source)
    else:
        with _readable(source):
            return


def unpack_source(data: Data, scratch: Path) -> tuple[str, Path]:
    """(format, folder or file) of the data; an archive is unpacked below `scratch` first, once."""
    source = Path(data.source)
    with _readable(source):
        if is_archive(source):
            source = _top_folder(extract_archive(source, scratch / ARCHIVES))
    if data.format != "auto":
        name: str = data.format
    else:
        name = "pairs" if data.pattern is not None else detect_format(source)
    if data.pattern is not None and name != "pairs":
        raise ConfigError(f"data.pattern: belongs to format pairs, found {name}", fix="take out one of the two")
    if data.columns != Columns() and name != "table":
        raise ConfigError(f"data.columns: belongs to format table, found {name}", fix="take out one of the two")
    return name, source


def _top_folder(folder: Path) -> Path:
    """Archives mostly hold one folder with everything in it."""
    inner = [path for path in folder.iterdir() if not is_hidden(path)]
    return inner[0] if len(inner) == 1 and inner[0].is_dir() else folder


def load_manifest(data: Data, scratch: Path) -> Manifest:
    """What the dataset says of itself, its cases ordered by id, with every fault as a finding.

    A case with a fault that makes it unusable is left out of the cases. Raises DataError where the source as a whole
    cannot be used.
    """
    name, source = unpack_source(data, scratch)
    with _readable(source):
        manifest: Manifest = FORMATS[name].read_manifest(source, data)
    cases, faults = _check_names(manifest.cases, source)
    if data.patient is not None:
        cases, strangers = _assign_patients(cases, data.patient)
        faults += strangers
    findings = (*manifest.findings, *faults)
    if not cases and not findings:
        raise DataError(f"data.source {source}: found no case", fix=f"expected {FORMATS[name].LAYOUT}")
    return replace(manifest, cases=sorted(cases, key=lambda case: case.id), findings=findings)


def find_cases(data: Data, scratch: Path) -> Manifest:
    """`load_manifest` for those who train: raises one DataError that lists every error."""
    manifest = load_manifest(data, scratch)
    refuse_errors(manifest.findings)
    if not manifest.cases:
        raise DataError(f"data.source {data.source}: found no case", fix=f"expected {_expected()}")
    return manifest


def _check_names(cases: Sequence[Case], source: Path) -> tuple[list[Case], list[Finding]]:
    """Each case once, by a name that can be a folder's; a finding for the others."""
    kept: dict[str, Case] = {}
    findings: list[Finding] = []
    root = source if source.is_dir() else source.parent
    for case in cases:
        if case.id not in kept and _is_name(case.id) and case.patient.isprintable():
            kept[case.id] = case
            continue
        file = relative(case.images[0], root)
        if not _is_name(case.id):
            expected = "printable characters without /, not starting with a dot, at most 200 bytes"
            found = f"{shown(case.id)}, which cannot name a case"
            findings.append(error("bad-name", found, expected, "rename it", file=file))
        elif not case.patient.isprintable():
            found = f"patient {shown(case.patient)}"
            findings.append(error("bad-name", found, "printable characters", "rename it", case=case.id, file=file))
        else:
            first = relative(kept[case.id].images[0], root)
            found = f"a second case of that name; the first is {first}"
            findings.append(error("duplicate-case", found, "each case once", "take one out", case=case.id, file=file))
    return list(kept.values()), findings


def _assign_patients(cases: Sequence[Case], pattern: str) -> tuple[list[Case], list[Finding]]:
    known: list[Case] = []
    findings: list[Finding] = []
    for case in cases:
        match = re.search(pattern, case.id)
        if match is not None and match[1]:
            known.append(replace(case, patient=match[1]))
        else:
            found, expected = "an id that names no patient", f"a match of data.patient {shown(pattern)}"
            findings.append(error("no-patient", found, expected, "correct data.patient, or rename it", case=case.id))
    return known, findings


def _is_name(case: str) -> bool:
    """Case ids become folder names and table cells."""
    return (
        case != ""
        and case.isprintable()
        and "/" not in case
        and not case.startswith(".")
        and len(case.encode(errors="replace")) <= 200
    )


@contextmanager
def _readable(source: Path) -> Iterator[None]:
    try:
        if not source.exists():
            raise DataError(
                f"data.source {source}: no such file or folder",
                fix="put the data there, or say where it is: data.source=PATH",
            )
        yield
    except OSError as problem:
        raise DataError(
            f"data.source {source}: cannot be read: {problem.strerror or problem}", fix="check that it may be read"
        ) from problem


def _unknown_layout(source: Path) -> DataError:
    """Why nothing fits: several datasets to choose from, a damaged list, or something else altogether."""
    several = [
        folder.name
        for kind in ("decathlon", "nnunet")
        for folder in (dataset_folders(source, kind) if source.is_dir() else [])
    ]
    if len(several) > 1:
        return DataError(
            f"data.source {source}: found {len(several)} datasets: {', '.join(several)}", fix="name one of them"
        )
    for path in sorted(source.glob("*.json")) if source.is_dir() else []:
        try:
            read_object(path, path.name)
        except DataError as damaged:
            return DataError(f"data.source {source}: {damaged.message}", fix=damaged.fix)
    why = class_folders.why_not(source)
    return DataError(
        f"data.source {source}: found no known layout{f': {why}' if why else ''}", fix=f"expected {_expected()}"
    )


def _expected() -> str:
    return (
        "a Decathlon task (also as .tar), nnU-Net data, a MONAI list, a CSV or TSV table, TFRecord shards, CIFAR-10 in "
        "binary form, pairs like img3.nii.gz + seg3.nii.gz, or a folder per class; docs/formats.md shows each"
    )
