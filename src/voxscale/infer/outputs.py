"""A folder of predictions, and the record in it of what each was made from.

`predictions.json` names for each output its inputs and their hashes, the weights and the options. What it says was made
from the very same things is not made again; an output that it does not explain is never written over unasked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from voxscale.data.cases import Case
from voxscale.errors import ConfigError, DataError, InfrastructureError, printable
from voxscale.files import TEMPORARY_SUFFIX, is_at, locked, publish, read_json, sha256_of, write_json

SCHEMA_VERSION = 1
Kind = Literal["labels", "probabilities", "masks"]
Hashes = list[dict[str, str]]  # of a case's files: file, sha256

_RECORD = "predictions.json"
_SUFFIX: dict[Kind, str] = {"labels": "", "probabilities": "_probabilities", "masks": "_masks"}
_LONGEST_NAME = 255 - len(f"..01234567{TEMPORARY_SUFFIX}")  # bytes of a name that `publish` can make temporary
# What a killed command leaves of its own; other files may well be the user's.
_LEFT_BEHIND = re.compile(
    rf"\.({re.escape(_RECORD)}|.+_(probabilities|masks)\.json|.+\.nii\.gz)\.[0-9a-f]{{8}}{re.escape(TEMPORARY_SUFFIX)}",
    flags=re.DOTALL,
)
_ANEW = "choose another --out, or --overwrite to make it anew"


@dataclass(frozen=True)
class Making:
    """How outputs come about, beside their input. `runs` and `options` are plain data."""

    kind: Kind
    runs: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"output": self.kind, "runs": [dict(run) for run in self.runs], "options": dict(self.options)}


def hashes_of(case: Case) -> Hashes:
    """Each file by its name alone, so without the places of this machine, and the hash of its bytes."""
    record = {} if case.record is None else {"record": str(case.record)}
    return [{"file": path.name, "sha256": sha256_of(path), **record} for path in case.images]


@dataclass
class Outputs:
    """The folder, owned by one command at a time."""

    root: Path
    making: Making
    overwrite: bool
    _records: dict[str, Any] = field(default_factory=dict)

    def path(self, case: Case) -> Path:
        return self.root / f"{case.id}{_SUFFIX[self.making.kind]}.nii.gz"

    def _beside(self, case: Case) -> Path:
        return self.root / f"{case.id}{_SUFFIX[self.making.kind]}.json"

    @contextmanager
    def opened(self, cases: Sequence[Case]) -> Iterator[None]:
        """Own the folder for the length of the body; refuses at once what can be known to be in the way."""
        self._records = self._read_records()
        self._refuse_inputs(cases)
        self._refuse_others(cases)
        self.root.mkdir(parents=True, exist_ok=True)
        with _owned(self.root):
            for left in self.root.glob(f".*{TEMPORARY_SUFFIX}"):
                if _LEFT_BEHIND.fullmatch(left.name) and left.is_file() and not left.is_symlink():
                    left.unlink()
            self._records = self._read_records()
            yield

    def check_name(self, case: Case) -> None:
        """Refuse a case whose output could not be named after it."""
        length = len(os.fsencode(self.path(case).name))
        if length > _LONGEST_NAME:
            raise DataError(
                f"case {printable(case.id)}: found an output name of {length} bytes, expected {_LONGEST_NAME} or less",
                fix="rename the image",
            )

    def is_done(self, case: Case, hashes: Hashes) -> bool:
        """Whether the output is there and was made from these files; DataError: it was made otherwise."""
        path = self.path(case)
        if self.overwrite or not path.exists():
            return False
        record = self._records.get(path.name, {})
        if record.get("inputs") != hashes:
            raise DataError(f"case {case.id}: {path.name} was made from another image of that name", fix=_ANEW)
        if record.get("sha256") != sha256_of(path):
            raise DataError(f"case {case.id}: {path.name} was changed after it was made", fix=_ANEW)
        return True

    @contextmanager
    def publishing(self, case: Case, hashes: Hashes, channels: Sequence[str] = ()) -> Iterator[Path]:
        """Yield a path to write the output to; it appears under its name, recorded, once the body has ended well.

        The names of its channels, if it has any, are written beside it.
        """
        path = self.path(case)
        with publish(path) as temporary:
            yield temporary
            # Recorded before the name appears: a crash in between leaves a record without output, which is made anew.
            record = {"inputs": hashes, **self.making.as_json(), "sha256": sha256_of(temporary)}
            records = {**self._records, path.name: record}
            write_json(self.root / _RECORD, {"schema": SCHEMA_VERSION, "outputs": dict(sorted(records.items()))})
            if channels:
                write_json(self._beside(case), {"channels": list(channels)})
        self._records = records

    def _read_records(self) -> dict[str, Any]:
        path = self.root / _RECORD
        if not path.exists():
            return {}
        try:
            content = read_json(path)
            version, outputs = content["schema"], dict(content["outputs"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: damaged: {error}", fix="choose another --out, or remove that file") from error
        if version != SCHEMA_VERSION:
            raise ConfigError(f"{path}: schema {version}, expected {SCHEMA_VERSION}", fix="choose another --out")
        return outputs

    def _refuse_inputs(self, cases: Sequence[Case]) -> None:
        """No output may take the place of an image, its own or another's, asked or not."""
        images = {path.resolve() for case in cases for path in case.images}
        root = self.root.resolve()
        found = [
            f"case {printable(case.id)}: its output would replace the image {printable(self.path(case).name)}"
            for case in cases
            if {root / self.path(case).name, self.path(case).resolve()} & images
        ]
        if found:
            raise ConfigError.from_findings(found, fix="choose an --out that is not the folder of the images")

    def _refuse_others(self, cases: Sequence[Case]) -> None:
        if self.overwrite:
            return
        found = []
        for case in cases:
            record = self._records.get(self.path(case).name)
            paths = [self.path(case), *([self._beside(case)] if self.making.kind != "labels" else [])]
            there = next((path for path in paths if os.path.lexists(path)), None)
            if there is not None and (why := self._difference(record)):
                found.append(f"{there}: exists, {why}")
        if found:
            raise ConfigError.from_findings(found, fix=_ANEW)

    def _difference(self, record: Mapping[str, Any] | None) -> str | None:
        """How an output that is there was made otherwise, as far as that is known before its input is read."""
        if record is None:
            return "and was not made by voxscale predict"
        asked, there = self.making.as_json(), dict(record)
        if asked["runs"] != there.get("runs"):
            return f"made with other weights ({_names(there.get('runs'))})"
        options = there.get("options") or {}
        changed = [
            f"{name} {options.get(name)}" for name, value in asked["options"].items() if options.get(name) != value
        ]
        return f"made with {', '.join(changed)}" if changed else None


def _names(runs: Any) -> str:
    return ", ".join(f"{run['run']} {run['checkpoint']}" for run in runs) if isinstance(runs, list) else "unknown"


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Keep other commands out of the folder; the lock's file goes with its owner."""
    path = folder / ".lock"
    with _lock(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock(path: Path) -> ExitStack:
    """Who has locked a file that is gone meanwhile keeps nobody out, and begins again."""
    while True:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(locked(path, wait=False))
            except BlockingIOError:
                raise InfrastructureError(
                    f"--out {path.parent}: another command writes into it", fix="wait for it, or choose another --out"
                ) from None
            if is_at(path, file):
                return stack.pop_all()
