"""A search on a real Ray cluster whose trials, raylets and driver are killed again and again."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chaos.report import Report
from lab.ray import RayLab, Seat, kill, ranks_in, step_of
from lab.slurm import until

GRID: dict[str, Any] = {"space": {"optimizer.lr": {"grid": [1e-3, 2e-3, 3e-3, 5e-3]}}, "retries": 100}
LONG: dict[str, Any] = {"train__epochs": 40, "validate__every": 10, "checkpoint": {"every_steps": 2}}
_PATIENCE_S = 180.0
_GONE_S = 30.0


def disturb_search(
    root: Path, dataset: Path, environ: Mapping[str, str], *, trials: int, raylets: int, drivers: int, seed: int
) -> Report:
    """Kill ranks of trials, raylets under them, and the driver, in a random order; the table has to be the same."""
    report = Report("Ray: trials, raylets and drivers killed")
    chance = random.Random(seed)
    kinds = ["trial"] * trials + ["raylet"] * raylets + ["driver"] * drivers
    chance.shuffle(kinds)
    root.mkdir(parents=True, exist_ok=True)
    with report.timed(), RayLab(nodes=3) as cluster:
        seat = Seat(root, Path(tempfile.mkdtemp(prefix="vxt-")), dataset, environ)
        try:
            config = seat.write("grid.yaml", search=GRID, **LONG)
            undisturbed = seat.run("search", config, "--run", "undisturbed", timeout_s=900, **cluster.environ)
            assert undisturbed.code == 0, undisturbed.err
            with seat.slowly():
                left = _disturb(kinds, seat, cluster, config, report, chance)
            done = seat.run("search", config, "--run", "run", timeout_s=600, **cluster.environ)
            report.expect(done.code == 0, f"ended with {done.code}: {done.err[-300:]}")
            report.expect(not left, f"over before {len(left)} kills could come")
            report.expect(_table(root / "run") == _table(root / "undisturbed"), "the table differs")
            ends = Counter(row["trial"] for row in _ledger(root / "run") if row["event"] == "end")
            report.expect(set(ends.values()) == {1}, f"ends of trials: {dict(ends)}")
        finally:
            _close(seat, report)
    return report


def _close(seat: Seat, report: Report) -> None:
    """Processes and temporary folders of the user's that stay are counted, and ended."""
    try:
        seat.close()
    except AssertionError as left:
        report.wrong.append(str(left))


def _count_left(report: Report, living: Callable[[], list[int]], what: str) -> None:
    """What was killed, or belonged to it, has to be gone soon."""
    deadline = time.monotonic() + _GONE_S
    while living() and time.monotonic() < deadline:
        time.sleep(0.1)
    left = living()
    report.expect(not left, f"after the kill of a {what}: processes {left} are left")
    report.add("left behind", len(left))


def _disturb(
    kinds: list[str], seat: Seat, cluster: RayLab, config: Path, report: Report, chance: random.Random
) -> list[str]:
    """Kill one after another, the driver started again whenever it is gone. Returns what could not be."""
    folder = seat.folder / "run"
    while kinds:
        with seat.started("search", config, "--run", "run", **cluster.environ) as driver:
            while kinds:
                training = _await_trial(folder, driver)
                if training is None:
                    report.wrong.append(f"the search ended with {driver.returncode}: {seat.end_of(driver).err[-300:]}")
                    return kinds
                if not (ranks := ranks_in(training)):
                    continue  # it has just ended
                kind = kinds.pop()
                report.begin()
                report.count(f"{kind}s")
                if kind == "driver":
                    kill(driver.pid)
                    driver.wait(30)
                    _count_left(report, lambda: [p for run in folder.glob("trials/*") for p in ranks_in(run)], kind)
                    break
                rank = chance.choice(ranks)
                if kind == "trial":
                    kill(rank)
                    _count_left(report, lambda old=ranks, run=training: list({*old} & {*ranks_in(run)}), kind)
                else:
                    node = cluster.node_of(rank) or _other_than_head(cluster)
                    cluster.kill(node)
                    _count_left(report, lambda lost=node: cluster.pids(lost), kind)
                    cluster.add_node()
    return []


def _other_than_head(cluster: RayLab) -> int:
    """The head is the user's, and its loss another story."""
    return next(number for number in range(1, 100) if cluster.pids(number))


def _await_trial(folder: Path, driver: subprocess.Popen[str]) -> Path | None:
    """A trial that trains, a step further than when it was first seen; None once the search is over."""
    found: list[Path] = []

    def trains() -> bool:
        found[:] = [path for path in sorted(folder.glob("trials/*")) if ranks_in(path)]
        return bool(found) or driver.poll() is not None

    until(trains, _PATIENCE_S, lambda: "no trial trains")
    if not found:
        return None
    at = step_of(found[0])
    until(
        lambda: driver.poll() is not None or not ranks_in(found[0]) or step_of(found[0]) > at,
        _PATIENCE_S,
        lambda: f"{found[0]} does not come beyond step {at}",
    )
    return found[0] if driver.poll() is None else None


def _table(folder: Path) -> list[dict[str, str]]:
    rows = csv.DictReader((folder / "trials.csv").open())
    return [{name: value for name, value in row.items() if name != "wall_s"} for row in rows]


def _ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
