"""Predict with the checkpoints of one run or several: what `voxscale predict` does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from voxscale.config.load import read_config
from voxscale.data.build import store_root
from voxscale.data.formats.sources import VOLUME_ENDINGS
from voxscale.data.images import IMAGE_ENDINGS
from voxscale.errors import ConfigError, DataError
from voxscale.infer.inputs import find_inputs
from voxscale.infer.outputs import Kind, Making, Outputs
from voxscale.infer.predict import Outcome, Predictor, predict_cases
from voxscale.parallel import World
from voxscale.runs import RunFolder, runs_of
from voxscale.train.job import choose_device
from voxscale.train.outcome_prediction import Predicted, predict_table
from voxscale.train.trained import Trained, load_ensemble

_TABLE = "voxscale predict RUN TABLE.csv --out FILE.csv"


@dataclass(frozen=True)
class Choice:
    """What a user chooses; None leaves it as the run validates."""

    kind: Kind = "labels"
    checkpoint: str = "best"
    overlap: float | None = None
    mirror: bool | None = None


def predict_paths(
    paths: Sequence[Path],
    out: Path,
    environ: Mapping[str, str],
    *,
    choice: Choice,
    overwrite: bool = False,
    threads: int = 1,
) -> Outcome | Predicted:
    """Predict what of `paths` is no run with what is one, into `out`. All is checked before the first image is read."""
    runs, files = part_paths(paths)
    if any(read_config(run.config).predicts_outcomes for run in runs):
        if len(files) > 1 or choice != Choice(checkpoint=choice.checkpoint):
            raise ConfigError(
                "predict: found what belongs to label maps, expected one table, as the run predicts outcomes",
                fix=_TABLE,
            )
        if files[0].name.lower().endswith((*VOLUME_ENDINGS, *IMAGE_ENDINGS)):
            raise ConfigError(
                f"predict: found the image {files[0].name}, expected a table of images, as the run predicts outcomes",
                fix=_TABLE,
            )
        return predict_table(
            runs, files[0], out, environ, checkpoint=choice.checkpoint, overwrite=overwrite, threads=threads
        )
    torch.set_num_threads(threads)
    predictor, making = load_predictor(runs, choice, choose_device(World()))
    cases, findings = find_inputs(
        files, predictor.data, store_root(predictor.data, environ), channels=predictor.channels
    )
    outputs = Outputs(out, making, overwrite)
    outcome = predict_cases(predictor, cases, outputs, show_progress=True)
    amiss = [DataError(str(finding), fix=finding.fix) for finding in findings]
    return Outcome(outcome.written, outcome.skipped, [*amiss, *outcome.failures])


def part_paths(paths: Sequence[Path]) -> tuple[list[RunFolder], list[Path]]:
    """(runs, the rest). A folder of folds stands for all of them."""
    found = {path: runs_of(path) for path in paths}
    runs = list(dict.fromkeys(run for each in found.values() for run in each))
    files = [path for path, each in found.items() if not each]
    if not runs:
        raise ConfigError("predict: found no run folder", fix="give one that `voxscale runs` lists, then the images")
    if not files:
        raise ConfigError("predict: found no image", fix="give .nii or .nii.gz files, or a folder of them, after RUN")
    return runs, files


def load_predictor(runs: Sequence[RunFolder], choice: Choice, device: torch.device) -> tuple[Predictor, Making]:
    """The runs as one predictor, and how its outputs are recorded. Raises ConfigError with all that does not fit."""
    trained, ensemble = load_ensemble(
        runs,
        choice.checkpoint,
        device,
        overlap=choice.overlap,
        mirror=choice.mirror,
        map_labels=choice.kind == "labels",
    )
    first = trained[0]
    predictor = Predictor(ensemble, first.task, first.config.data, first.channels)
    return predictor, Making(choice.kind, [each.as_json() for each in trained], _options(trained))


def _options(trained: Sequence[Trained]) -> dict[str, Any]:
    """Plain data that says how windows slid and images were prepared; what all runs share stands once."""

    def shared(values: list[Any]) -> Any:
        return values[0] if all(value == values[0] for value in values) else values

    preprocessing = json.dumps(trained[0].preprocessing, sort_keys=True).encode()
    return {
        "window": shared([list(each.member.windows.size) for each in trained]),
        "overlap": shared([each.member.windows.overlap for each in trained]),
        "weights": shared([each.member.windows.weights for each in trained]),
        "mirror": shared([each.member.windows.mirror for each in trained]),
        "preprocessing_sha256": hashlib.sha256(preprocessing).hexdigest(),
    }
