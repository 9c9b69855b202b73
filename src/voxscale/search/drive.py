"""Run a search to its end, here or as the command of a job.

    python -m voxscale.search.drive FOLDER --reports DIR

continues, or begins, the search whose config is FOLDER/launch/asked.yaml, on the Ray cluster that RAY_ADDRESS names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from voxscale.config.load import read_config
from voxscale.config.schema import Config
from voxscale.errors import StoppedEarly, TrainingError, VoxscaleError
from voxscale.files import remove, write_json
from voxscale.launch.folder import move_aside
from voxscale.launch.local import SAVE_TIME_S
from voxscale.launch.machine import look_at_machine
from voxscale.launch.ray import RayCluster, connected, refuse_unfit
from voxscale.runs import RunFolder, SearchFolder, error_file
from voxscale.search.driver import Driver
from voxscale.search.ledger import Ledger
from voxscale.search.opening import OpenedSearch, draft_search, prepare_search, write_search
from voxscale.search.reached import noted_progress
from voxscale.search.results import best_of_search, read_finished, render_outcome, wall_s_of, write_results
from voxscale.search.room import render_idle
from voxscale.search.screen import Screen, open_screen
from voxscale.train.ownership import claimed
from voxscale.train.stop import StopRequest


def search_here(
    config: Config,
    root: Path,
    environ: Mapping[str, str],
    *,
    address: str | None = None,
    fresh: bool = False,
    save_time_s: float = SAVE_TIME_S,
) -> tuple[dict[str, Any], str]:
    """Search on the Ray cluster at `address`, or on one of this machine. Returns `metrics.json`, and it as text.

    A search that is there is continued. Raises StoppedEarly if a signal comes first, after all trials have saved, and
    TrainingError if no trial came to a value.
    """
    folder = draft_search(config, root, fresh=fresh)
    if not fresh and (metrics := read_finished(folder, config)) is not None:
        return metrics, render_outcome(folder.root, metrics)
    stop = StopRequest(None)
    with stop.on_signals(), connected(address, environ, look_at_machine()) as cluster:
        with noted_progress(folder, config, environ), stop.at_once():
            opened = prepare_search(config, folder, cluster.nodes, environ, fresh=fresh)
        if folder.exists and not opened.held:
            move_aside(RunFolder(folder.root))
        with claimed(RunFolder(folder.root)), open_screen(config.log) as screen:
            write_search(opened)
            refuse_unfit(cluster.nodes, folder.root)
            return _drive(opened, cluster, environ, stop, screen, save_time_s)


def _drive(
    opened: OpenedSearch,
    cluster: RayCluster,
    environ: Mapping[str, str],
    stop: StopRequest,
    screen: Screen,
    save_time_s: float,
) -> tuple[dict[str, Any], str]:
    folder = opened.folder
    earlier_s = wall_s_of(folder)
    with Ledger(folder.ledger) as ledger:
        driver = Driver(opened, cluster, environ, ledger, stop, screen.say, screen.show, save_time_s=save_time_s)
        at_once = min(driver.room(), opened.num_trials)
        idle = render_idle(len(cluster.nodes), at_once)
        screen.say(f"{opened.num_trials} trials, {at_once} at once, each with {opened.share}{idle}; in {folder.root}")
        remove(folder.metrics)  # of an earlier start
        state = "failed"
        try:
            driver.run()
            state = "done" if best_of_search(opened, driver.trials) is not None else "failed"
        except StoppedEarly:
            state = "stopped"
            raise
        finally:
            metrics = write_results(opened, driver.trials, state=state, wall_s=earlier_s + driver.wall_s)
    if metrics["best"] is None:
        raise TrainingError(
            f"search {folder.root}: none of {opened.num_trials} trials came to a value of {opened.metric}",
            fix=f"see the last column of {folder.table}",
        )
    return metrics, render_outcome(folder.root, metrics)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m voxscale.search.drive", description="Continue or begin a search.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reports", type=Path, required=True, help="where the error is left for the job's last line")
    parser.add_argument("--save-time", type=float, default=SAVE_TIME_S, metavar="S", help="for trials, after a signal")
    options = parser.parse_args(arguments)
    folder = SearchFolder(options.folder.resolve())
    try:
        _, text = search_here(read_config(folder.asked), folder.root, os.environ, save_time_s=options.save_time)
    except VoxscaleError as error:
        with contextlib.suppress(OSError):
            write_json(error_file(options.reports, 0), {**error.as_json(), "rank": 0})
        if error.is_abrupt:
            os._exit(error.exit_code)
        return error.exit_code
    print(text.splitlines()[-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
