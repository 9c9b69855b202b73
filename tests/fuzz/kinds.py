"""Every kind of input, and its share of ten thousand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chaos.report import Report
from fuzz.configs import fuzz_configs
from fuzz.images import fuzz_images, fuzz_labels
from fuzz.lists import fuzz_lists
from fuzz.pictures import fuzz_pictures
from fuzz.records import fuzz_records
from fuzz.tables import fuzz_tables

KINDS: dict[str, tuple[Callable[..., Report], int]] = {
    "images": (fuzz_images, 3000),
    "labels": (fuzz_labels, 1500),
    "pictures": (fuzz_pictures, 500),
    "lists": (fuzz_lists, 500),
    "tables": (fuzz_tables, 2000),
    "configs": (fuzz_configs, 1500),
    "records": (fuzz_records, 1000),
}


def fuzz_kind(kind: str, root: Path, *, inputs: int, seed: int) -> Report:
    """One kind's share of `inputs` in all."""
    fuzz, share = KINDS[kind]
    whole = sum(each for _, each in KINDS.values())
    return fuzz(root / kind, inputs=inputs * share // whole, seed=seed)
