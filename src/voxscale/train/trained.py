"""Trained runs as they predict: config, task and network with a checkpoint's weights. The data need not be there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from voxscale.checkpoint import BadCheckpointError, Checkpoint, digest_of, load_checkpoint
from voxscale.config.load import identity, plain, read_config
from voxscale.config.schema import Config
from voxscale.data.cases import VAL
from voxscale.data.split import recorded_cases
from voxscale.errors import ConfigError, VoxscaleError
from voxscale.files import read_json
from voxscale.infer.ensemble import Ensemble, Member
from voxscale.infer.windows import Windows
from voxscale.models import build_model
from voxscale.plan.plan import Plan
from voxscale.runs import RunFolder
from voxscale.tasks.segmentation import Segmentation
from voxscale.train.compute import Compute

_PREPROCESSING = ("slices", "orientation", "crop_foreground", "spacing", "size", "intensity")


@dataclass(frozen=True)
class Trained:
    """A run as it predicts."""

    run: RunFolder
    config: Config
    task: Segmentation
    channels: int
    member: Member
    checkpoint: str
    weights_sha256: str

    def as_json(self) -> dict[str, Any]:
        return {"run": self.run.name, "checkpoint": self.checkpoint, "weights_sha256": self.weights_sha256}

    @property
    def preprocessing(self) -> dict[str, Any]:
        return preprocessing_of(self.config)


def preprocessing_of(config: Config) -> dict[str, Any]:
    return {name: value for name, value in plain(config.data).items() if name in _PREPROCESSING}


def load_ensemble(
    runs: Sequence[RunFolder],
    checkpoint: str,
    device: torch.device,
    *,
    overlap: float | None = None,
    mirror: bool | None = None,
    map_labels: bool = False,
) -> tuple[list[Trained], Ensemble]:
    """The runs, each with a checkpoint's weights, and all as one. Raises ConfigError with all that does not fit.

    `overlap` and `mirror` are as each run validates where they are None. `map_labels`: label maps will be wanted.
    """
    trained: list[Trained] = []
    problems: list[VoxscaleError] = []
    for run in runs:
        try:
            trained.append(_load(run, checkpoint, device, overlap, mirror))
        except VoxscaleError as error:
            problems.append(error)
    lines = [problem.message for problem in problems]
    fixes = [problem.fix for problem in problems if problem.fix]
    if len(trained) > 1 and (differing := _disagreements(trained)):
        lines += differing
        fixes.append("ensemble runs of one dataset and one preprocessing")
    if trained and map_labels and (why := trained[0].task.can_map) is not None:
        lines.append(f"a label map cannot be made: {why}")
        fixes.append("write --masks or --probabilities instead")
    if lines:
        raise ConfigError.from_findings(lines, fix="; ".join(dict.fromkeys(fixes)))
    return trained, Ensemble(tuple(each.member for each in trained), device)


def _load(run: RunFolder, checkpoint: str, device: torch.device, overlap: float | None, mirror: bool | None) -> Trained:
    config, plan, folder = find_trained(run, checkpoint)
    task = Segmentation.build(config, plan)
    model = build_model(config.model, plan.channels, task.out_channels, patch=plan.patch, seed=config.train.seed)
    compute, weights_sha256 = take_weights(folder, model, run, config, device)
    member = Member(partial(compute.run, model), windows_of(config, plan, overlap=overlap, mirror=mirror))
    return Trained(run, config, task, plan.channels, member, folder.name, weights_sha256)


def windows_of(config: Config, plan: Plan, *, overlap: float | None = None, mirror: bool | None = None) -> Windows:
    """How windows slide; what is None is as the run validates."""
    validation = config.validation
    return Windows(
        validation.window or plan.patch,
        validation.overlap if overlap is None else overlap,
        validation.weights,
        validation.mirror if mirror is None else mirror,
    )


def find_trained(run: RunFolder, checkpoint: str) -> tuple[Config, Plan, Path]:
    """(Config, plan, folder of the checkpoint) of a run. Raises ConfigError where one is not as the run left it.

    Where validation could tell none from another, the last checkpoint is the best.
    """
    config = read_config(run.config)
    folder = run.checkpoints / checkpoint
    if checkpoint == run.best.name and not folder.exists() and run.last.exists() and (why := _why_none_is_best(run)):
        folder = run.last
        last = folder.resolve().name
        print(f"run {run.root}: {why}, so none is best: {last}, its last, is taken", file=sys.stderr)
    if not folder.exists():
        there = sorted(path.name for path in run.checkpoints.glob("*")) or ["none"]
        raise ConfigError(
            f"run {run.root}: has no checkpoint {checkpoint!r}, found {', '.join(there)}",
            fix="train it first, or name another --checkpoint",
        )
    folder = folder.resolve()  # a run that trains on may move `best`
    plan = Plan.read(run.plan)  # it tells the data's channels and labels: neither data nor store need be there
    if plan.config_sha256 != identity(config):
        raise ConfigError(f"{run.config}: changed since the run was made", fix="undo the change")
    return config, plan, folder


def _why_none_is_best(run: RunFolder) -> str:
    """Why a run has no best checkpoint though it is done, or will have none; empty where it should have one."""
    if not recorded_cases(run.split, VAL):
        return "has no validation cases"
    metrics = read_json(run.metrics) if run.metrics.exists() else {}
    if metrics.get("state") == "done" and metrics["best"] is None:
        return "its metric was undefined whenever it validated"
    return ""


def take_weights(
    folder: Path, model: torch.nn.Module, run: RunFolder, config: Config, device: torch.device
) -> tuple[Compute, str]:
    """Bring a checkpoint's weights into the model, on its device and for evaluation; returns how to run it, and the
    digest of the weights."""
    loaded = _fitting_checkpoint(folder, model, run)
    model.load_state_dict(loaded.model)
    model.to(device).eval()
    compute = Compute.of(config.train, device)
    compute.lay_out(model)
    return compute, digest_of(loaded.model)


def _fitting_checkpoint(folder: Path, model: torch.nn.Module, run: RunFolder) -> Checkpoint:
    """The checkpoint, if its weights are those of the model that the config describes."""
    try:
        loaded = load_checkpoint(folder)
    except BadCheckpointError as error:
        raise ConfigError(f"run {run.root}: {error.message}", fix="name another --checkpoint") from error
    found = {name: list(tensor.shape) for name, tensor in loaded.model.items()}
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    if differing:
        name = differing[0]
        raise ConfigError(
            f"run {run.root}: checkpoint {folder.name} is of another task, model or number of channels: "
            f"{name}: found {found.get(name, 'none')}, expected {expected.get(name, 'none')}"
            f"{f' (and {len(differing) - 1} more)' if len(differing) > 1 else ''}",
            fix="restore the checkpoint that belongs to the run",
        )
    return loaded


def _disagreements(trained: Sequence[Trained]) -> list[str]:
    """In what each run differs from the first, as far as an ensemble cannot bear it."""
    first = trained[0]
    lines = []
    for other in trained[1:]:
        pairs = [
            ("classes", first.task.classes, other.task.classes),
            ("kind of classes", _kind(first.task), _kind(other.task)),
            ("channels", first.channels, other.channels),
            *((f"data.{name}", value, other.preprocessing[name]) for name, value in first.preprocessing.items()),
        ]
        lines += [
            f"runs {first.run.name} and {other.run.name} do not go together: {name}: "
            f"found {_short(here)} and {_short(there)}"
            for name, here, there in pairs
            if here != there
        ]
    return lines


def _kind(task: Segmentation) -> str:
    return "exclusive" if task.exclusive else "overlapping regions"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
