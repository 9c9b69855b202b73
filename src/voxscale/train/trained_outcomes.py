"""Trained runs as they predict outcomes. The data that they were trained on need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from voxscale.config.schema import Config
from voxscale.data.outcomes import Outcomes, read_outcomes
from voxscale.errors import ConfigError, VoxscaleError
from voxscale.files import read_json
from voxscale.infer.outcome import OutcomeMember
from voxscale.models.outcome import build_outcome_model
from voxscale.runs import RunFolder
from voxscale.tasks import OutcomeTask, build_outcome_task
from voxscale.train.trained import find_trained, preprocessing_of, take_weights


@dataclass(frozen=True)
class TrainedOutcome:
    """A run as it predicts; `outcomes` are those of its own cases."""

    run: RunFolder
    config: Config
    task: OutcomeTask
    outcomes: Outcomes
    channels: int
    member: OutcomeMember
    checkpoint: str
    weights_sha256: str

    def as_json(self) -> dict[str, Any]:
        return {"run": self.run.name, "checkpoint": self.checkpoint, "weights_sha256": self.weights_sha256}

    @property
    def needs_learning(self) -> bool:
        """Whether the task has not what a full evaluation needs of the training cases for these weights."""
        return self.task.learns_from and not self.task.learnt()


def load_outcomes(runs: Sequence[RunFolder], checkpoint: str, device: torch.device) -> list[TrainedOutcome]:
    """The runs, each with a checkpoint's weights. Raises ConfigError with all that does not fit."""
    trained: list[TrainedOutcome] = []
    problems: list[VoxscaleError] = []
    for run in runs:
        try:
            trained.append(_load(run, checkpoint, device))
        except VoxscaleError as error:
            problems.append(error)
    lines = [problem.message for problem in problems]
    fixes = [problem.fix for problem in problems if problem.fix]
    for other in trained[1:]:
        if differing := _disagreements(trained[0], other):
            names = ", ".join(differing)
            lines.append(f"runs {trained[0].run.name} and {other.run.name} do not go together: they differ in {names}")
            fixes.append("average runs of one task, one dataset and one preprocessing")
    if lines:
        raise ConfigError.from_findings(lines, fix="; ".join(dict.fromkeys(fixes)))
    return trained


def _load(run: RunFolder, checkpoint: str, device: torch.device) -> TrainedOutcome:
    config, plan, folder = find_trained(run, checkpoint)
    outcomes = read_outcomes(run.outcomes, run.encoding)
    task = build_outcome_task(config, outcomes)
    num_features = len(outcomes.encoding.feature_names)
    model = build_outcome_model(
        config.model, plan.channels, num_features, task.out_channels, patch=plan.patch, seed=config.train.seed
    )
    compute, weights_sha256 = take_weights(folder, model, run, config, device)
    _take_up_learnt(run, task, weights_sha256)
    member = OutcomeMember(partial(compute.run, model), task, plan.patch, device)
    return TrainedOutcome(run, config, task, outcomes, plan.channels, member, folder.name, weights_sha256)


def _take_up_learnt(run: RunFolder, task: OutcomeTask, weights_sha256: str) -> None:
    """What the run has learnt for its best weights holds for no others."""
    try:
        content = read_json(run.learnt)
        if content.pop("weights_sha256") == weights_sha256:
            task.relearn(content)
    except (OSError, ValueError, KeyError, TypeError):
        return


def _disagreements(first: TrainedOutcome, other: TrainedOutcome) -> list[str]:
    ours, theirs = first.outcomes.encoding, other.outcomes.encoding
    pairs = [
        ("task", first.config.task, other.config.task),
        ("targets", ours.columns.target_names, theirs.columns.target_names),
        ("classes", ours.classes, theirs.classes),
        ("columns", first.task.columns(full=True), other.task.columns(full=True)),
        ("channels", first.channels, other.channels),
        ("preprocessing", preprocessing_of(first.config), preprocessing_of(other.config)),
    ]
    return [name for name, here, there in pairs if here != there]
