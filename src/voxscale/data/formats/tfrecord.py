"""TFRecord shards as DistMIS writes them: `train_0.tfrecord`, `valid_0.tfrecord`, `test_0.tfrecord`, …

The name of a shard says which split its cases belong to; each record is one case.
"""

from __future__ import annotations

import re
from pathlib import Path

from voxscale.config.data import Data
from voxscale.data.cases import TEST, TRAIN, VAL, Case, Manifest
from voxscale.data.findings import Finding
from voxscale.data.formats.sources import error, is_hidden, warning, what_is_at
from voxscale.data.tfrecord import scan_records
from voxscale.errors import DataError

LAYOUT = "TFRecord shards: train_0.tfrecord, valid_0.tfrecord, test_0.tfrecord, …"

_ROLES = {"train": TRAIN, "valid": VAL, "val": VAL, "validation": VAL, "test": TEST}
_NAME = re.compile(rf"({'|'.join(_ROLES)})_([0-9]{{1,6}})\.tfrecord")
_FIX = "copy the shard again, or make it anew"


def detect(source: Path) -> bool:
    """Whether `source` holds at least one shard."""
    return source.is_dir() and any(_NAME.fullmatch(path.name) for path in source.iterdir())


def read_manifest(source: Path, data: Data) -> Manifest:
    """One case per record; reads the records' headers only."""
    shards = _shards(source) if source.is_dir() else []
    if not shards:
        raise DataError(f"data.source {source}: found no TFRecord shard", fix=f"expected {LAYOUT}")
    cases: list[Case] = []
    findings: list[Finding] = []
    for path in shards:
        match = _NAME.fullmatch(path.name)
        if match is None:
            fix = "rename it or move it away"
            findings.append(error("stray-file", "another name", "e.g. train_0.tfrecord", fix, file=path.name))
            continue
        if (found := what_is_at(path)) is not None:
            findings.append(error("missing-file", found, "a TFRecord shard", _FIX, file=path.name))
            continue
        try:
            records = scan_records(path)
        except DataError as problem:
            what = problem.message.removeprefix(f"{path.name}: ")
            findings.append(error("damaged-shard", what, "whole records", _FIX, file=path.name))
            continue
        if not records:
            findings.append(warning("empty-shard", "no record", "at least one", _FIX, file=path.name))
        for number, (offset, _) in enumerate(records):
            case = f"{path.stem}-{number:05d}"
            role = _ROLES[match[1]]
            cases.append(Case(id=case, images=(path,), label=path, patient=case, role=role, record=offset))
    return Manifest(cases, findings=(*findings, *_gaps(shards)))


def _shards(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.suffix == ".tfrecord" and not is_hidden(path))


def _gaps(shards: list[Path]) -> list[Finding]:
    """Numbers that a row of shards leaves out: a shard was lost, or never copied."""
    numbers: dict[str, set[int]] = {}
    for path in shards:
        if (match := _NAME.fullmatch(path.name)) is not None:
            numbers.setdefault(match[1], set()).add(int(match[2]))
    lost = [
        f"{name}_{number}.tfrecord"
        for name, there in sorted(numbers.items())
        for number in range(min(max(there), 2 * len(there)))
        if number not in there
    ]
    return [
        warning("missing-shard", "no such shard", "shards numbered from 0 without a gap", _FIX, file=name)
        for name in lost
    ]
