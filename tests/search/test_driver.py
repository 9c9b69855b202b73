"""The driver of a search where no trial gets as far as Ray: signals, and what a stopped search leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from voxscale.config.load import read_config
from voxscale.config.schema import Config
from voxscale.errors import StoppedEarly, TrainingError
from voxscale.files import remove
from voxscale.launch.folder import is_prepared, load_cases, prepare_cases
from voxscale.launch.outcome import read_state
from voxscale.launch.ray import RayNode, Share
from voxscale.runs import RunFolder, SearchFolder
from voxscale.search import drive
from voxscale.search.driver import Driver, Started
from voxscale.search.ledger import RUNNING, Ledger, Trial
from voxscale.search.opening import OpenedSearch, section_of
from voxscale.search.room import Room
from voxscale.search.screen import Screen, open_screen, render_table
from voxscale.train.stop import StopRequest

SEARCH = {"space": {"optimizer.lr": {"loguniform": [1e-3, 1e-2]}}, "trials": 2}


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Once stopped, a process ignores further signals to its end; this one goes on."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def opened_search(config: Path, root: Path) -> OpenedSearch:
    read = read_config(config)
    return OpenedSearch(SearchFolder(root), read, read, section_of(read), Share(cpus=1, gpus=0), 1)


@contextmanager
def driver_of(opened: OpenedSearch, stop: StopRequest) -> Iterator[Driver]:
    cluster: Any = SimpleNamespace(nodes=(), answers=True, refuse_if_gone=lambda: None)
    with Ledger(opened.folder.ledger) as ledger:
        yield Driver(opened, cluster, {}, ledger, stop, print, lambda _: None, save_time_s=1.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_heard_while_data_are_prepared(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    @contextmanager
    def connected(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(nodes=())

    def prepare_for_long(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(5)
        pytest.fail("it was not heard")

    monkeypatch.setattr(drive, "connected", connected)
    monkeypatch.setattr(drive, "prepare_search", prepare_for_long)
    with pytest.raises(StoppedEarly, match=f"stopped by signal {number.name}; nothing had begun"):
        drive.search_here(read_config(write_config(search=SEARCH)), tmp_path / "run", {})
    assert not (tmp_path / "run").exists()


def test_after_a_signal_no_further_trial_is_opened(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = StopRequest(None)
    started: list[int] = []

    def start(trial: Trial) -> None:
        """Its data are prepared first, which takes long; meanwhile a signal comes."""
        assert not stop.signalled
        started.append(trial.index)
        stop.reason = "signal SIGTERM"

    with driver_of(opened_search(write_config(search=SEARCH), tmp_path), stop) as driver:
        monkeypatch.setattr(driver, "room", lambda: 2)
        monkeypatch.setattr(driver, "_start", start)
        with pytest.raises(StoppedEarly):
            driver.run()
    assert started == [0]


def test_a_search_that_was_stopped_knows_how_far_its_trials_are(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    opened = opened_search(write_config(search=SEARCH), tmp_path)
    with Ledger(opened.folder.ledger) as ledger:
        ledger.write("trial", trial=0, configuration=0, seed=0, params={"optimizer.lr": 0.002})
    events = opened.folder.trial(0).events
    events.parent.mkdir(parents=True)
    events.write_text("".join(json.dumps({"event": "train", "step": step}) + "\n" for step in range(1, 8)))
    opened.folder.steps.parent.mkdir(exist_ok=True)
    stop = StopRequest(None)
    stop.reason = "signal SIGTERM"
    with driver_of(opened, stop) as driver:
        with pytest.raises(StoppedEarly):
            driver.run()
        assert [trial.steps for trial in driver.trials] == [7]
    assert opened.folder.steps.read_text() == "7\n"
    (told,) = [row for row in map(json.loads, opened.folder.ledger.open()) if row["event"] == "stop"]
    assert told == {"event": "stop", "reason": "signal SIGTERM", "steps": {"0": 7}}


def half_prepared(config: Config, kept: int) -> None:
    """The config's store as an interrupted build leaves it, with so many of its 12 cases."""
    store = prepare_cases(load_cases(config, os.environ, threads=1), config, os.environ, threads=1)
    (store.folder / "index.json").unlink()
    for case in sorted((store.folder / "cases").iterdir())[kept:]:
        remove(case)
    assert not is_prepared(config, os.environ)


def signals_itself(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(5)
    pytest.fail("it was not heard")


def test_a_job_that_only_prepares_data_has_something_to_go_on_from(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def connected(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(nodes=())

    config = read_config(write_config(search=SEARCH, data__store=str(tmp_path / "store")))
    half_prepared(config, kept=7)
    folder = SearchFolder(tmp_path / "run")
    monkeypatch.setattr(drive, "connected", connected)
    monkeypatch.setattr(drive, "prepare_search", signals_itself)
    with pytest.raises(StoppedEarly):
        drive.search_here(config, folder.root, os.environ)
    assert not folder.root.exists(), "nobody asked for a job"
    folder.steps.parent.mkdir(parents=True)
    with pytest.raises(StoppedEarly):
        drive.search_here(config, folder.root, os.environ)
    assert folder.steps.read_text() == "0 and 7 cases\n"


def test_a_signal_while_a_trials_data_are_prepared_has_the_others_save(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_search(write_config(search=SEARCH, data__store=str(tmp_path / "store")), tmp_path / "run")
    half_prepared(opened.config, kept=4)
    opened.folder.steps.parent.mkdir(parents=True)
    stop, told = StopRequest(None), []
    group: Any = SimpleNamespace(
        stop=lambda: told.append("stop"), is_over=lambda **_: bool(told), lost=list, close=lambda: told.append("close")
    )
    with stop.on_signals(), driver_of(opened, stop) as driver:
        run = opened.folder.trial(0)
        first = driver._propose()
        driver.running[0] = Started(first, run, group, run.logs / "ray-0", time.monotonic(), 0)
        first.state = RUNNING
        arrival = run.logs / "ray-0" / "node-0000.json"
        arrival.parent.mkdir(parents=True)
        arrival.touch()
        monkeypatch.setattr(driver, "room", lambda: 2)
        monkeypatch.setattr(driver._configs, "learn", lambda _: True)
        monkeypatch.setattr(driver._configs, "open", signals_itself)
        with pytest.raises(StoppedEarly, match="stopped by signal SIGUSR1; 0 of 2 trials have ended"):
            driver.run()
        assert [trial.state for trial in driver.trials] == ["waiting", "waiting"]
    assert told == ["stop", "close"]
    assert opened.folder.steps.read_text() == "0 and 4 cases\n"


def test_a_search_of_which_nothing_comes_has_failed(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_search(write_config(search={"space": {"optimizer.lr": {"grid": [2e37]}}}), tmp_path)
    with Ledger(opened.folder.ledger) as ledger:
        ledger.write("trial", trial=0, configuration=0, seed=0, params={"optimizer.lr": 2e37})
        ledger.write("end", trial=0, state="nan", value=None, steps=1, wall_s=1.0, why="the loss is inf at step 2")
    nodes, said = [RayNode(name, name, 1, 0) for name in "abcd"], list[str]()
    cluster: Any = SimpleNamespace(nodes=nodes, answers=True, refuse_if_gone=lambda: None)
    screen = Screen(said.append, lambda _: None)
    monkeypatch.setattr(Room, "trials", lambda _: 1)
    with pytest.raises(TrainingError, match="none of 1 trials came to a value"):
        drive._drive(opened, cluster, {}, StopRequest(None), screen, 1.0)
    assert read_state(RunFolder(opened.folder.root)) == "failed"
    assert "1 trials, 1 at once, each with 1 CPU, on one node, so that 3 of 4 nodes stay idle; in" in said[0]


def seen_of(driver: Driver) -> list[str]:
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(render_table(driver))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.fixture
def on_the_way(write_config: Callable[..., Path], tmp_path: Path) -> Iterator[Driver]:
    """Of three trials one is done, one runs, and one waits for Ray."""
    opened = opened_search(write_config(search={**SEARCH, "trials": 3}), tmp_path)
    with Ledger(opened.folder.ledger) as ledger:
        for index, lr in enumerate((0.002, 0.00431234, 0.009)):
            ledger.write("trial", trial=index, configuration=index, seed=0, params={"optimizer.lr": lr})
        ledger.write("end", trial=0, state="done", value=0.5, steps=10, wall_s=20.0, why="")
    for index, values in enumerate([(0.4, 0.5), (0.7, 0.6)]):
        rows: list[dict[str, Any]] = [{"event": "start", "step": 0, "steps": 10}]
        rows += [{"event": "validate", "step": 4 * n, "dice/mean": value} for n, value in enumerate(values, start=1)]
        events = opened.folder.trial(index).events
        events.parent.mkdir(parents=True)
        events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    group: Any = SimpleNamespace(close=lambda: None)
    with driver_of(opened, StopRequest(None)) as driver:
        for index in (1, 2):
            trial, run = driver.trials[index], opened.folder.trial(index)
            trial.state = RUNNING
            reports = run.logs / "ray-0"
            reports.mkdir(parents=True)
            driver.running[index] = Started(trial, run, group, reports, time.monotonic() - 8.0, 0)
        (driver.running[1].reports / "node-0000.json").touch()
        for progress in driver.progress.values():
            progress.look()
        yield driver


def test_the_table_says_who_runs_who_leads_and_how_long_it_takes(on_the_way: Driver) -> None:
    title, header, *rows = seen_of(on_the_way)
    assert title == "1 of 3 trials ended, 2 running · best trial 1: 0.7000 · about 0:12 left"
    assert header.split() == ["trial", "state", "step", "dice/mean", "values"]
    assert [row.split() for row in rows] == [
        ["1", "running", "8/10", "0.6000", "optimizer.lr", "0.004312"],
        ["2", "waiting", "optimizer.lr", "0.009"],
        ["0", "done", "8/10", "0.5000", "optimizer.lr", "0.002"],
    ]


@pytest.mark.parametrize("log", ["epoch", "quiet"])
def test_on_a_terminal_the_table_is_live_and_lines_come_above_it(
    on_the_way: Driver, monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    master, slave = os.openpty()
    for name, value in (("TERM", "xterm"), ("COLUMNS", "110")):
        monkeypatch.setenv(name, value)
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with open_screen(log) as screen:
            screen.show(on_the_way)
            screen.say("trial 2 starts: [0.1]")
            screen.say("warning: a node is gone")
        terminal.flush()
        shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert ("trial 2 starts: [0.1]" in shown) == (log != "quiet")
    assert ("best trial 1: 0.7000" in shown) == (log != "quiet")
    assert "warning: a node is gone" in shown
