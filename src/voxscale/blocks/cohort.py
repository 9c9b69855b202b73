"""The cases of a survival table: what the columns say, checked as `voxscale train` checks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from voxscale.config.load import make_config
from voxscale.data.cases import TEST, TRAIN, VAL
from voxscale.data.doctor import check_outcomes
from voxscale.data.findings import refuse_errors
from voxscale.data.formats import load_manifest
from voxscale.data.outcomes import make_outcomes, target_strata
from voxscale.data.split import split_cases


@dataclass(frozen=True)
class SurvivalCase:
    """A row of the table; `time` in the table's unit, `event` 1 or, where it is censored, 0."""

    id: str
    patient: str
    images: tuple[Path, ...]
    time: float
    event: int
    features: NDArray[np.float32]

    @property
    def image(self) -> Path:
        """The first image; a case may have several, as channels."""
        return self.images[0]


@dataclass(frozen=True)
class Cohort:
    """Cases by what they are for, each list in the order of ids; `feature_names` are those of their features."""

    train: tuple[SurvivalCase, ...]
    val: tuple[SurvivalCase, ...]
    test: tuple[SurvivalCase, ...]
    feature_names: tuple[str, ...]


def survival_cases(
    table: str | Path,
    *,
    fold: str | None = None,
    val: float = 0.2,
    test: float = 0.0,
    seed: int = 0,
    features: Sequence[str] = (),
    image: str | Sequence[str] | None = None,
    time: str | None = None,
    event: str | None = None,
    patient: str | None = None,
    case: str | None = None,
) -> Cohort:
    """The cases of a CSV or TSV table with columns of images, times and events; no image is read.

    Columns go by their usual names unless they are named here. `fold` names a column of train, val and test; without
    it patients are split by the shares `val` and `test`, events spread evenly, the same on every rank. `features` are
    encoded as a run does it: words as 0 and 1, numbers scaled, both learnt from the training cases alone. Raises one
    DataError with every finding, rows numbered as a spreadsheet does.
    """
    path = Path(table)
    split = {"column": fold} if fold is not None else {"val": val, "test": test, "seed": seed}
    columns: dict[str, Any] = {"time": time, "event": event, "patient": patient, "case": case}
    columns |= {"image": image if image is None or isinstance(image, str) else list(image), "features": list(features)}
    data = {"source": str(path.absolute()), "format": "table", "columns": columns, "split": split}
    config = make_config({"task": "survival", "data": data}, name="survival_cases", base=Path())
    manifest = load_manifest(config.data, path.parent)
    refuse_errors([*manifest.findings, *check_outcomes(manifest.cases, [config])])
    cases = split_cases(manifest.cases, config.data.split, target_strata(config, manifest.cases))
    outcomes = make_outcomes(config, cases)
    parts: dict[str, list[SurvivalCase]] = {TRAIN: [], VAL: [], TEST: []}
    ordered = sorted(cases, key=lambda each: each.id)
    for each, (days, had), row in zip(ordered, outcomes.targets.tolist(), outcomes.features, strict=True):
        parts[each.split].append(SurvivalCase(each.id, each.patient, each.images, days, int(had), row))
    names = outcomes.encoding.feature_names
    return Cohort(tuple(parts[TRAIN]), tuple(parts[VAL]), tuple(parts[TEST]), names)
