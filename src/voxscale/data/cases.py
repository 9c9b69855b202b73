"""Cases: what a dataset holds, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from voxscale.data.findings import Finding

TRAIN, VAL, TEST = "train", "val", "test"


@dataclass(frozen=True)
class Case:
    """One unit of data: its images (one file per channel, or one with all) and its label.

    `role` is the split that the data itself states; `row` its line in a table, and `where` how messages name that
    place; `record` its place in a file that holds many cases.
    """

    id: str
    images: tuple[Path, ...]
    label: Path | None
    patient: str
    split: str = ""
    role: str = ""
    row: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    record: int | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Each file once."""
        return tuple(dict.fromkeys(self.images if self.label is None else (*self.images, self.label)))


@dataclass(frozen=True)
class Manifest:
    """What a dataset says of itself: its cases, and where it declares them, its labels and channels."""

    cases: list[Case]
    labels: Mapping[int, str] = field(default_factory=dict)
    channels: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
