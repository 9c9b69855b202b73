"""Evaluate a run's checkpoint, or several runs as one, on whole cases, as one rank of any number.

    python -m voxscale.train.evaluation RUN --split val --checkpoint best
    torchrun --standalone --nproc-per-node 2 -m voxscale.train.evaluation RUN --split val

Writes to `evaluations/NAME/` in the run folder, or to --out, never over the run's own `cases.csv`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from voxscale.config.data import Data
from voxscale.config.load import read_config
from voxscale.config.schema import Config
from voxscale.data.build import prepare, store_root
from voxscale.data.cases import TEST, TRAIN, VAL, Case
from voxscale.data.findings import refuse_errors
from voxscale.data.formats import find_cases, load_manifest, table
from voxscale.data.outcomes import Outcomes
from voxscale.data.split import recorded_cases
from voxscale.data.store import Store
from voxscale.data.unseen import encode_unseen
from voxscale.errors import DataError
from voxscale.files import write_json
from voxscale.infer.evaluate import evaluate_cases, of_outcomes, of_volumes, write_cases
from voxscale.infer.previews import Previews
from voxscale.parallel import World, joined, leave
from voxscale.plan.plan import Plan
from voxscale.runs import RunFolder
from voxscale.tasks import Task
from voxscale.train.job import choose_backend, choose_device, open_run_store, threads_of_node
from voxscale.train.ownership import refuse_other_origin
from voxscale.train.rank import add_rank_arguments, require, run_as_rank
from voxscale.train.trained import Trained, load_ensemble
from voxscale.train.trained_outcomes import TrainedOutcome, load_outcomes

SPLITS = (VAL, TEST, TRAIN)


def evaluate_run(
    run: RunFolder,
    world: World,
    environ: Mapping[str, str],
    *,
    out: Path,
    split: str = VAL,
    checkpoint: str = "best",
    others: Sequence[RunFolder] = (),
    data: Path | None = None,
    mirror: bool | None = None,
) -> None:
    """Evaluate all cases of a split, or all of other `data`, into `out`. Every rank calls this; rank 0 writes.

    With `others` the runs are averaged; the cases are those that all of them have in the split.
    """
    require(run)
    config, device = read_config(run.config), choose_device(world)
    torch.set_num_threads(1 if config.train.threads == "auto" else config.train.threads)
    runs, origin = [run, *others], {"split": split} if data is None else {"data": data.resolve().name}
    if config.predicts_outcomes:
        loaded = load_outcomes(runs, checkpoint, device)
        cases, store, outcomes = _outcomes_of(loaded, split, data, world, environ)
        _warn_of_seen(runs, cases if data is not None else (), world)
        with joined(world, backend=choose_backend(config, device), device=device, timeout_s=config.train.timeout_s):
            for each in loaded:
                _learn(each, world, environ)
            if loaded[0].task.learns_from:  # it measures what all predict together
                loaded[0].task.relearn(*(each.task.learnt() for each in loaded))
            previews = Previews(loaded[0].task, store, count=config.validation.previews)
            measure = previews.of(of_outcomes([each.member for each in loaded], store, outcomes))
            rows = evaluate_cases(measure, store, cases, world=world, device=device, show_progress=True)
            previews.write(RunFolder(out), rows, world, device)
        made = {"runs": [each.as_json() for each in loaded]}
        task: Task = loaded[0].task
    else:
        trained, ensemble = load_ensemble(runs, checkpoint, device, mirror=mirror)
        cases, store = _volumes_of(trained, split, data, world, environ)
        _warn_of_seen(runs, cases if data is not None else (), world)
        with joined(world, backend=choose_backend(config, device), device=device, timeout_s=config.train.timeout_s):
            its = trained[0].task
            previews = Previews(its, store, count=config.validation.previews, of_volumes=its)
            measure = previews.of(of_volumes(ensemble, its, store, full=True, keep=previews.keep))
            rows = evaluate_cases(measure, store, cases, world=world, device=device, show_progress=True)
            previews.write(RunFolder(out), rows, world, device)
        made = {"runs": [each.as_json() for each in trained]}
        made["windows"] = [asdict(each.member.windows) for each in trained]
        task = trained[0].task
    if world.is_main:
        folder = RunFolder(out)
        write_cases(folder.cases, rows, task.columns(full=True))
        measured = {"summary": task.summarise(rows, full=True)}
        if details := task.details(rows):
            measured["details"] = details
        write_json(folder.metrics, {"task": config.task, **origin, **made, **measured})


def _volumes_of(
    trained: Sequence[Trained], split: str, data: Path | None, world: World, environ: Mapping[str, str]
) -> tuple[list[Case], Store]:
    first = trained[0]
    if data is not None:
        return _cases_elsewhere(first, data, world, environ)
    cases, store = _cases_of_all(trained, split), open_run_store(first.run, first.config, world, environ)
    refuse_other_origin(first.run, first.config, store)
    return cases, store


def _outcomes_of(
    trained: Sequence[TrainedOutcome], split: str, data: Path | None, world: World, environ: Mapping[str, str]
) -> tuple[list[Case], Store, list[Outcomes]]:
    """(Cases, their store, their outcomes as each run encodes them)."""
    first = trained[0]
    if data is None:
        cases, store = _cases_of_all(trained, split), open_run_store(first.run, first.config, world, environ)
        refuse_other_origin(first.run, first.config, store)
        if any(each.outcomes.cases != first.outcomes.cases for each in trained):
            raise DataError("the runs were trained on different cases", fix="evaluate them on other cases with --data")
        return cases, store, [each.outcomes for each in trained]
    options = elsewhere(first.config, data)
    root = store_root(options, environ)
    manifest = load_manifest(options, root)
    encodings = [each.outcomes.encoding for each in trained]
    outcomes, faults = encode_unseen(encodings, manifest.cases, name=data.name, targets=True)
    refuse_errors([*manifest.findings, *faults])
    if not manifest.cases:
        raise DataError(f"{data}: found no case", fix="give data with cases to evaluate")
    store = prepare(manifest, options, root, patch=None, threads=threads_of_node(first.config, world))
    _refuse_other_channels(data, store, first.channels)
    return [replace(case, split=TEST) for case in manifest.cases], store, outcomes


def _learn(trained: TrainedOutcome, world: World, environ: Mapping[str, str]) -> None:
    """What the run has kept is of its best checkpoint; for another it is found anew. All ranks call it."""
    if not trained.needs_learning:
        return
    store = open_run_store(trained.run, trained.config, world, environ)
    measure = of_outcomes([trained.member], store, [trained.outcomes])
    cases = recorded_cases(trained.run.split, TRAIN)
    trained.task.learn(evaluate_cases(measure, store, cases, world=world, device=trained.member.device))


def elsewhere(config: Config, data: Path) -> Data:
    """How data that the run has never seen is read: prepared as the run's own, its format found anew."""
    fields: dict[str, Any] = {"source": str(data), "format": "auto", "split": None, "synthetic": None}
    if table.detect(data):
        fields["columns"] = table.without_absent_ids(config.data.columns, data)
    return config.data.model_copy(update=fields)


def _cases_of_all(trained: Sequence[Trained] | Sequence[TrainedOutcome], split: str) -> list[Case]:
    """The cases that stand in this split of every run, so that none of the networks has seen one that is held out."""
    by_run = [{case.id: case for case in recorded_cases(each.run.split, split)} for each in trained]
    shared = [case for name, case in by_run[0].items() if all(name in cases for cases in by_run[1:])]
    if shared:
        return shared
    if any(by_run) and len(trained) > 1:
        raise DataError(
            f"{len(trained)} runs: found no case that is in split {split!r} of all; what one holds out, another was "
            "trained on",
            fix="choose --split test if there is one, or evaluate on other cases with --data",
        )
    raise DataError(f"run {trained[0].run.root}: no case is in split {split!r}", fix="choose another --split")


def _cases_elsewhere(first: Trained, data: Path, world: World, environ: Mapping[str, str]) -> tuple[list[Case], Store]:
    options = elsewhere(first.config, data)
    root = store_root(options, environ)
    manifest = find_cases(options, root)
    store = prepare(manifest, options, root, patch=None, threads=threads_of_node(first.config, world))
    _refuse_other_channels(data, store, first.channels)
    known = Plan.read(first.run.plan).labels
    if unknown := sorted(set(store.labels) - set(known)):
        raise DataError(
            f"{data}: found labels {unknown}, expected {list(known)}, which the model was trained on",
            fix="give data with the same labels",
        )
    return [replace(case, split=TEST) for case in manifest.cases], store


def _warn_of_seen(runs: Sequence[RunFolder], cases: Sequence[Case], world: World) -> None:
    """Say how many cases of other data go by the id of one that a run was trained on."""
    trained_on = {case.id for run in runs for case in recorded_cases(run.split, TRAIN)}
    if world.is_main and (seen := [case.id for case in cases if case.id in trained_on]):
        many = f"{len(seen)} of {len(cases)} cases have the id of a training case, e.g. {seen[0]}"
        print(f"warning: {many}: if they are the same, scores are better than on unseen cases", file=sys.stderr)


def _refuse_other_channels(data: Path, store: Store, channels: int) -> None:
    if store.channels != channels:
        raise DataError(
            f"{data}: found {store.channels} channels, expected the {channels} that the model was trained on",
            fix="give data with the same channels",
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m voxscale.train.evaluation", description="Evaluate as one rank.")
    add_rank_arguments(parser)
    parser.add_argument("--split", choices=SPLITS, default=VAL)
    parser.add_argument("--checkpoint", default="best", help="best, last or step-XXXXXXXX")
    parser.add_argument("--with", dest="others", action="append", default=[], type=Path, help="a further run")
    parser.add_argument("--data", type=Path, default=None, help="other data than the run's")
    parser.add_argument("--mirror", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--out", type=Path, default=None, help="default: evaluations/SPLIT in the run folder")
    options = parser.parse_args(arguments)
    work = partial(
        evaluate_run,
        out=options.out or RunFolder(options.run.resolve()).evaluation(options.split),
        split=options.split,
        checkpoint=options.checkpoint,
        others=[RunFolder(other.resolve()) for other in options.others],
        data=options.data,
        mirror=options.mirror,
    )
    return run_as_rank(options, work)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
