"""Long work shows how far it is: as a bar before a person's eyes, line by line in a log."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.terminal import Terminal
from voxscale.terminal import progress


@pytest.mark.parametrize(("verb", "said"), [("doctor", "checking cases"), ("prepare", "preparing cases")])
def test_a_bar_moves_while_cases_are_read(
    verb: str, said: str, write_config: Callable[..., Path], session_environ: dict[str, str]
) -> None:
    config = write_config(data__store=str(write_config().parent / "store"))
    with Terminal(sys.executable, "-m", "voxscale", verb, config, env=session_environ) as terminal:
        terminal.until(rf"{said} .*\d+/12 .*\d+:\d\d")
        assert terminal.wait() == 0
    assert not re.search(r"\d+ of 12 after", terminal.text), "lines are for logs"


def test_a_log_says_now_and_then_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def work(_: int) -> None:
        time.sleep(0.01)
        advance()

    with progress("preparing cases", 40, log_s=0.04) as advance, ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(40)))
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 10, "as time goes by, not case by case"
    said = [re.fullmatch(r"preparing cases: (\d+) of 40 after 0:00, about 0:00 left", line) for line in lines]
    done = [int(match[1]) for match in said if match]
    assert len(done) == len(lines)
    assert done == sorted(set(done))


def test_times_left_are_reckoned_from_what_was_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 130.0, 145.0, 160.0, 999.0])
    monkeypatch.setattr("voxscale.terminal.time.monotonic", lambda: next(now))
    with progress("checking cases", 4) as advance:
        for _ in range(4):
            advance()
    assert capsys.readouterr().err.splitlines() == [
        "checking cases: 1 of 4 after 0:30, about 1:30 left",
        "checking cases: 3 of 4 after 1:00, about 0:20 left",
    ]


def test_what_is_short_or_not_to_be_shown_leaves_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("checking cases", 3) as quick, progress("evaluating", 3, shown=False, log_s=0) as hidden:
        for _ in range(3):
            quick()
            hidden()
    assert capsys.readouterr() == ("", "")
