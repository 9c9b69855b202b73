"""Cases that trained runs have not seen, encoded as the runs learnt to; every fault of their table once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from voxscale.data.cases import Case
from voxscale.data.findings import Finding
from voxscale.data.formats.sources import error, nearest, shown
from voxscale.data.outcome_encoding import Encoding
from voxscale.data.outcomes import FILL, Outcomes, check_targets, encode

MISSING_COLUMN = "columns"  # the one fault that is of no single case


def encode_unseen(
    encodings: Sequence[Encoding], cases: Sequence[Case], *, name: str, targets: bool
) -> tuple[list[Outcomes], list[Finding]]:
    """(Outcomes as each run has them, faults of the table `name`). Without `targets` only features are looked at."""
    outcomes: list[Outcomes] = []
    once: dict[tuple[str, str, str], Finding] = {}
    for encoding in encodings:
        encoded, faults = encode(encoding, cases, targets=targets, fix=FILL)
        of_targets = check_targets(encoding, cases) if targets else ()
        for fault in (*_missing_columns(encoding, cases, name, targets=targets), *of_targets, *faults):
            once.setdefault((fault.case, fault.file, fault.found), fault)
        outcomes.append(encoded)
    return outcomes, list(once.values())


def _missing_columns(encoding: Encoding, cases: Sequence[Case], name: str, *, targets: bool) -> Iterator[Finding]:
    columns = encoding.columns
    needed = dict.fromkeys(columns.features, "a feature that the run was trained with")
    if targets:
        of_task = filter(None, (columns.time, columns.event, *columns.targets, *columns.classes))
        needed |= dict.fromkeys(of_task, "an outcome that the run was trained to predict")
    header = list(cases[0].row) if cases else list(needed)
    for column, expected in needed.items():
        if column not in header:
            found, fix = f"no column {shown(column)}", "add the column, or give it the name that it had in training"
            yield error(MISSING_COLUMN, found, f"{expected}{nearest(column, header)}", fix, file=name)
