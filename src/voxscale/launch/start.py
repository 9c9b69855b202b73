"""Train on this machine: one run, or one for each fold."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from voxscale.config.load import with_fold
from voxscale.config.schema import Config
from voxscale.data.split import num_folds, split_cases
from voxscale.errors import ConfigError
from voxscale.files import read_json
from voxscale.launch.folder import OpenedRun, draft_run, load_cases, open_run
from voxscale.launch.local import train_local
from voxscale.launch.machine import look_at_machine


def train_here(config: Config, root: Path, environ: Mapping[str, str], *, devices: str, fresh: bool) -> OpenedRun:
    """Make the run folder, or open the one that is there, and train it to its end."""
    machine = look_at_machine()
    opened = open_run(draft_run(config, root, machine, devices=devices, fresh=fresh), machine, environ)
    if opened.is_done:
        _note(config, f"{root}: done already; --fresh trains it anew")
        return opened
    plan = opened.plan
    _note(
        config,
        f"training {plan.num_train} cases on {opened.why}: {plan.num_steps} steps of {plan.global_batch} patches, "
        f"{plan.num_val} cases validate",
    )
    train_local(opened.run, opened.devices, environ)
    return opened


def train_folds(config: Config, root: Path, environ: Mapping[str, str], *, devices: str, fresh: bool) -> dict[str, Any]:
    """Train every fold of the cross-validation into a run folder of its own; the best metrics' mean and deviation."""
    count = num_folds(config.data.split)
    if count == 1:
        raise ConfigError(
            "--folds all: data.split has no folds", fix="set data.split={folds: 5}, or several columns of a table"
        )
    cases = load_cases(config, environ, threads=look_at_machine().cpus).cases
    for fold in range(1, count + 1):
        split_cases(cases, with_fold(config, fold).data.split)  # refused now rather than after hours
    runs = []
    for fold in range(1, count + 1):
        _note(config, f"fold {fold} of {count}")
        opened = train_here(with_fold(config, fold), root / f"fold-{fold}", environ, devices=devices, fresh=fresh)
        runs.append({"fold": fold, "run": str(opened.run.root), **read_json(opened.run.metrics)})
    values = [run["best"]["value"] for run in runs if run["best"]] or [float("nan")]
    spread = {"mean": statistics.fmean(values), "std": statistics.pstdev(values)}
    return {"metric": config.validation.metric, **spread, "folds": runs}


def _note(config: Config, text: str) -> None:
    if config.log != "quiet":
        print(text, file=sys.stderr)
