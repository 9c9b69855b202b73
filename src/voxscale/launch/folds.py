"""Cross-validation with one command: every fold trained, each case scored by the fold that held it out, all averaged.

DIR/fold-1, fold-2 …     ordinary run folders
DIR/cases.csv            each case once, scored by the run that did not train on it; test cases by all runs as one
DIR/metrics.json         their summary, and what each fold reached

    python -m voxscale.launch.folds DIR --devices 4

brings together folds that an array of jobs has trained.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from voxscale.config.load import read_config, with_fold
from voxscale.config.schema import Config
from voxscale.data.cases import TEST, VAL
from voxscale.data.split import num_folds, recorded_cases, split_cases
from voxscale.errors import ConfigError, VoxscaleError
from voxscale.files import locked, read_csv, read_json, remove, write_csv, write_json
from voxscale.launch.folder import OpenedRun, check_start, check_task, load_cases, prepare_cases, split_prepared
from voxscale.launch.local import Evaluation, evaluate_local
from voxscale.launch.machine import look_at_machine
from voxscale.launch.start import commands_for
from voxscale.runs import RunFolder

_ABOUT_THE_CASE = ("case", "patient", "split", "fold")


def train_folds(
    config: Config, root: Path, environ: Mapping[str, str], train_one: Callable[[Config, Path], OpenedRun]
) -> dict[str, Any]:
    """Train every fold into a run folder of its own, then bring their scores together. Returns `metrics.json`."""
    count = count_folds(config)
    _check_folds(config, root, count, environ)
    RunFolder(root).make()
    remove(RunFolder(root).metrics)  # of an earlier one
    opened = []
    for fold in range(1, count + 1):
        if config.log != "quiet":
            print(f"fold {fold} of {count}", file=sys.stderr)
        opened.append(train_one(with_fold(config, fold), root / f"fold-{fold}"))
    return collect_folds(config, [each.run for each in opened], root, opened[0].devices, environ)


def collect_folds(
    config: Config, runs: Sequence[RunFolder], root: Path, devices: int, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Evaluate the test cases by all folds as one, and bring all scores together. Returns `metrics.json`."""
    RunFolder(root).make()  # folds that jobs have trained are in one that nobody has made as such
    with locked(RunFolder(root).collecting):
        return _bring_together(config, runs, RunFolder(root), _test_together(runs, root, devices, environ))


def fold_commands(config: Config, root: Path, environ: Mapping[str, str], **options: Any) -> list[tuple[str, str]]:
    """Lines for starting each fold by hand, as `commands_for` gives them for one run."""
    return [
        (f"fold {fold}, {purpose}", command)
        for fold in range(1, count_folds(config) + 1)
        for purpose, command in commands_for(with_fold(config, fold), root / f"fold-{fold}", environ, **options)
    ]


def count_folds(config: Config) -> int:
    count = num_folds(config.data.split)
    if count == 1:
        raise ConfigError(
            "--folds all: data.split has no folds", fix="set data.split='{folds: 5}', or several columns of a table"
        )
    return count


def _check_folds(config: Config, root: Path, count: int, environ: Mapping[str, str]) -> None:
    """What is wrong with any fold is said now rather than after hours."""
    for fold in range(1, count + 1):
        check_start(config, RunFolder(root / f"fold-{fold}"))
    cpus = look_at_machine().cpus
    manifest = load_cases(config, environ, threads=cpus)
    for fold in range(1, count + 1):
        split_cases(manifest.cases, with_fold(config, fold).data.split)
    store = prepare_cases(manifest, config, environ, threads=cpus)
    for fold in range(1, count + 1):
        of_fold = with_fold(config, fold)
        check_task(of_fold, store, split_prepared(manifest.cases, of_fold, store))


def _test_together(runs: Sequence[RunFolder], root: Path, devices: int, environ: Mapping[str, str]) -> Path | None:
    """Evaluate all runs as one on the cases that none of them trained on or chose its model by."""
    held_out = [{case.id for case in recorded_cases(run.split, TEST)} for run in runs]
    if not set.intersection(*held_out):
        return None
    out = RunFolder(root).evaluation(TEST)
    evaluate_local(runs, devices, environ, Evaluation(out, TEST))
    return out


def _bring_together(config: Config, runs: Sequence[RunFolder], root: RunFolder, tested: Path | None) -> dict[str, Any]:
    from voxscale.infer.evaluate import as_numbers
    from voxscale.tasks.summary import summarise

    rows: list[dict[str, Any]] = []
    for fold, run in enumerate(runs, start=1):
        rows += [{**row, "fold": fold} for row in read_csv(run.cases) if row["split"] == VAL]
    names = [name for name in rows[0] if name not in _ABOUT_THE_CASE] if rows else []
    together = read_csv(RunFolder(tested).cases) if tested is not None else []
    write_csv(root.cases, (*_ABOUT_THE_CASE, *names), [*rows, *({**row, "fold": ""} for row in together)])
    folds = [
        {"fold": fold, "run": run.name, "best": read_json(run.metrics)["best"]} for fold, run in enumerate(runs, 1)
    ]
    metrics = {
        "task": config.task,
        "state": "done",
        "metric": config.validation.metric,
        "folds": folds,
        "summary": _over_folds(runs)
        if config.predicts_outcomes
        else summarise([as_numbers(row, names) for row in rows], names),
    }
    if tested is not None:
        metrics["test"] = read_json(RunFolder(tested).metrics)["summary"]
    write_json(root.metrics, metrics)
    return metrics


def _over_folds(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """A metric of a cohort is one number a fold: risks of different models do not rank with each other."""
    from voxscale.tasks.summary import summarise

    values = [{name: entry["mean"] for name, entry in read_json(run.metrics)["summary"].items()} for run in runs]
    return summarise(values, list(dict.fromkeys(name for row in values for name in row)))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m voxscale.launch.folds", description="Bring trained folds together."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args(arguments)
    try:
        config = read_config(RunFolder(options.folder / "fold-1").asked)
        runs = [RunFolder(options.folder / f"fold-{fold}") for fold in range(1, count_folds(config) + 1)]
        collect_folds(config, runs, options.folder, options.devices, os.environ)
    except VoxscaleError as error:
        print(error.as_text(), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
