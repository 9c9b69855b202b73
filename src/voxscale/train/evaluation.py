"""Evaluate a run's checkpoint on whole volumes, as one rank of any number.

    python -m voxscale.train.evaluation RUN --split val --checkpoint best
    torchrun --standalone --nproc-per-node 2 -m voxscale.train.evaluation RUN --split val

Writes `evaluations/NAME/` in the run folder, never over the run's own `cases.csv`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from voxscale.checkpoint import load_checkpoint
from voxscale.data.cases import TEST, TRAIN, VAL
from voxscale.errors import ConfigError, DataError
from voxscale.files import write_json
from voxscale.infer.evaluate import summarise, write_cases
from voxscale.parallel import World, joined, leave
from voxscale.runs import RunFolder
from voxscale.train.job import open_job
from voxscale.train.rank import COLLECTIVE_TIMEOUT_S, add_rank_arguments, run_as_rank

SPLITS = (VAL, TEST, TRAIN)


def evaluate_run(
    run: RunFolder, world: World, environ: Mapping[str, str], *, split: str, checkpoint: str, name: str
) -> None:
    """Evaluate all cases of a split. Every rank calls this; rank 0 writes."""
    folder = run.checkpoints / checkpoint
    if not folder.exists():
        raise ConfigError(f"run {run.root}: has no checkpoint {checkpoint!r}", fix="train it first, or name another")
    job = open_job(run, world, environ)
    cases = job.cases_of(split)
    if not cases:
        raise DataError(f"run {run.root}: no case is in split {split!r}", fix="choose another --split")
    loaded = load_checkpoint(folder)
    job.model.load_state_dict(loaded.model)
    with joined(world, backend=job.backend, device=job.device, timeout_s=COLLECTIVE_TIMEOUT_S):
        rows = job.evaluate(cases, show_progress=True)
    if world.is_main:
        out = RunFolder(run.evaluation(name))
        write_cases(out.cases, rows, job.task.metrics)
        summary = summarise(rows, job.task.metrics)
        write_json(out.metrics, {"task": job.config.task, "split": split, "step": loaded.step, "summary": summary})


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m voxscale.train.evaluation", description="Evaluate as one rank.")
    add_rank_arguments(parser)
    parser.add_argument("--split", choices=SPLITS, default=VAL)
    parser.add_argument("--checkpoint", default="best", help="best, last or step-XXXXXXXX")
    parser.add_argument("--name", default=None, help="folder below evaluations/ (default: the split)")
    options = parser.parse_args(arguments)
    name = options.name or options.split
    work = partial(evaluate_run, split=options.split, checkpoint=options.checkpoint, name=name)
    return run_as_rank(options, work)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
