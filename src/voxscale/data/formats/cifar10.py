"""CIFAR-10 in its binary form: `data_batch_1.bin` to `data_batch_5.bin`, `test_batch.bin`, `batches.meta.txt`.

A record is a byte for the class and 3072 for the pixels: red, green, blue, 32 rows of 32 each. The test batch is the
test set; what validates is for `data.split` to say.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from voxscale.config.data import Data
from voxscale.data.cases import TEST, TRAIN, Case, Manifest
from voxscale.data.findings import Finding
from voxscale.data.formats.sources import error, is_file, shown, what_is_at
from voxscale.data.images import CIFAR10_CLASSES, CIFAR10_RECORD
from voxscale.errors import DataError

LAYOUT = "CIFAR-10 in binary form: data_batch_1.bin to data_batch_5.bin, test_batch.bin and batches.meta.txt"
FOLDER = "cifar-10-batches-bin"  # what the archive holds
BATCHES = {**{f"data_batch_{number}.bin": TRAIN for number in range(1, 6)}, "test_batch.bin": TEST}
NAMES = "batches.meta.txt"
COLUMN = "class"

_FIX = "download cifar-10-binary.tar.gz again"
_MAX_NAMES_BYTES = 1 << 16


def detect(source: Path) -> bool:
    """Whether `source`, or the archive's folder in it, holds a batch."""
    if not source.is_dir():
        return False
    folder = _folder(source)
    return any(is_file(folder / name) for name in BATCHES) or _is_pickled(folder)


def read_manifest(source: Path, data: Data) -> Manifest:
    """One case per record, its class in `row`; reads the classes and none of the pixels."""
    folder = _folder(source)
    if _is_pickled(folder):
        raise DataError(
            f"data.source {source}: found CIFAR-10 for Python, which is pickled: it could run code",
            fix="download the binary version: cifar-10-binary.tar.gz",
        )
    if not any(is_file(folder / name) for name in BATCHES):
        raise DataError(f"data.source {source}: found no batch", fix=f"expected {LAYOUT}")
    names, findings = _class_names(folder / NAMES)
    cases: list[Case] = []
    for batch, role in BATCHES.items():
        try:
            classes = _classes(folder / batch)
        except ValueError as problem:
            code = "missing-file" if what_is_at(folder / batch) else "damaged-batch"
            expected = f"records of {CIFAR10_RECORD} bytes, each of class 0 to {CIFAR10_CLASSES - 1}"
            findings.append(error(code, str(problem), expected, _FIX, file=batch))
            continue
        cases += _batch_cases(folder / batch, role, classes, names)
    return Manifest(cases, findings=tuple(findings))


def _batch_cases(path: Path, role: str, classes: list[int], names: list[str]) -> list[Case]:
    cases = []
    for number, value in enumerate(classes):
        case, row = f"{path.stem}-{number:05d}", {COLUMN: names[value]}
        where = f"{path.name} record {number}"
        record = number * CIFAR10_RECORD
        cases.append(
            Case(id=case, images=(path,), label=None, patient=case, role=role, row=row, where=where, record=record)
        )
    return cases


def _folder(source: Path) -> Path:
    return source / FOLDER if (source / FOLDER).is_dir() else source


def _is_pickled(folder: Path) -> bool:
    return is_file(folder / "batches.meta") and is_file(folder / "data_batch_1")


def _classes(path: Path) -> list[int]:
    """The class of every record; raises ValueError with the reason for a batch that is not as it should be."""
    if (found := what_is_at(path)) is not None:
        raise ValueError(found)
    size = path.stat().st_size
    if not size or size % CIFAR10_RECORD:
        whole, rest = divmod(size, CIFAR10_RECORD)
        raise ValueError(f"{size} bytes, which are {whole} records and {rest} bytes")
    try:
        classes = np.memmap(path, np.uint8, mode="r")[::CIFAR10_RECORD]
    except OSError as problem:
        raise ValueError(f"a file that cannot be read ({problem.strerror})") from None
    wrong = np.flatnonzero(classes >= CIFAR10_CLASSES)
    if len(wrong):
        more = f" and {len(wrong) - 1} more such records" if len(wrong) > 1 else ""
        raise ValueError(f"class {classes[wrong[0]]} in record {wrong[0]}{more}")
    held: list[int] = classes.tolist()
    return held


def _class_names(path: Path) -> tuple[list[str], list[Finding]]:
    """What the ten classes are called, a line for each; by their numbers, and a finding, where that is not known."""
    numbers = [str(value) for value in range(CIFAR10_CLASSES)]
    expected = f"{CIFAR10_CLASSES} different names, one on each line"
    if (found := what_is_at(path)) is not None:
        return numbers, [error("missing-file", found, expected, _FIX, file=path.name)]
    with path.open("rb") as file:
        text = file.read(_MAX_NAMES_BYTES).decode(errors="replace")
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if len(set(names)) != CIFAR10_CLASSES or len(names) != CIFAR10_CLASSES or not "".join(names).isprintable():
        some = ", ".join(map(shown, names[:3])) or "none"
        return numbers, [error("class-names", f"{len(names)} names ({some} …)", expected, _FIX, file=path.name)]
    return names, []
