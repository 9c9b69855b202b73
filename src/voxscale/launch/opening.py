"""Open a run inside a job, where its data were not prepared when it was submitted.

    python -m voxscale.launch.opening RUN --nodes 2 --devices 4 --cpus 16

RUN/launch/asked.yaml holds the config as it was asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from voxscale.config.load import read_config, with_fold
from voxscale.data.split import num_folds
from voxscale.errors import VoxscaleError
from voxscale.files import remove, write_json
from voxscale.launch.folder import draft_run, open_run
from voxscale.launch.machine import look_at_machine
from voxscale.plan.resources import Machine
from voxscale.runs import RunFolder


def open_in_job(root: Path, machine: Machine, *, nodes: int, devices: int, folds: bool) -> None:
    """Prepare the data with this node's CPUs, then write the run folder, or one for each fold."""
    config = read_config(RunFolder(root).asked)
    runs = {root: config}
    if folds:
        count = num_folds(config.data.split)
        runs = {root / f"fold-{fold}": with_fold(config, fold) for fold in range(1, count + 1)}
    for each, its_config in runs.items():
        draft = draft_run(its_config, each, machine, devices=str(devices), nodes=nodes)
        open_run(draft, look_at_machine(), os.environ)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m voxscale.launch.opening", description="Open a run inside a job.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--cpus", type=int, required=True, help="of each node, for training")
    parser.add_argument("--gpus", action="store_true", help="the devices are GPUs")
    parser.add_argument("--folds", action="store_true", help="one run for each fold")
    options = parser.parse_args(arguments)
    remove(RunFolder(options.run).open_error)
    machine = Machine(gpus=options.devices if options.gpus else 0, cpus=options.cpus)
    try:
        open_in_job(options.run, machine, nodes=options.nodes, devices=options.devices, folds=options.folds)
    except VoxscaleError as error:
        write_json(RunFolder(options.run).open_error, error.as_json())
        print(error.as_text(), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
