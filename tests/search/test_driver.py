"""The driver of a search where no trial gets as far as Ray: signals, and what a stopped search leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from voxscale.config.load import read_config
from voxscale.errors import StoppedEarly
from voxscale.launch.ray import Share
from voxscale.runs import SearchFolder
from voxscale.search import drive
from voxscale.search.driver import Driver
from voxscale.search.ledger import Ledger, Trial
from voxscale.search.opening import OpenedSearch, section_of
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
    return OpenedSearch(SearchFolder(root), read, section_of(read), Share(cpus=1, gpus=0), 1)


@contextmanager
def driver_of(opened: OpenedSearch, stop: StopRequest) -> Iterator[Driver]:
    cluster: Any = SimpleNamespace(answers=True, refuse_if_gone=lambda: None)
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
