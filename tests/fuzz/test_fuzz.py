"""A few of the inputs that `make fuzz` reads by the thousand."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import inputs
from fuzz.inputs import REFUSED, UNCHANGED, Input, try_inputs
from fuzz.kinds import KINDS, fuzz_kind
from voxscale.errors import DataError


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_input_is_refused_by_name_or_does_no_harm(kind: str, tmp_path: Path) -> None:
    report = fuzz_kind(kind, tmp_path, inputs=500, seed=1)
    assert not report.wrong
    assert report.tried == 500 * KINDS[kind][1] // 10_000
    assert report.seen[REFUSED] > report.tried / 3


def _refuse(message: str) -> str:
    raise DataError(message, fix="replace it")


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        (lambda: UNCHANGED, None),
        (lambda: _refuse("scan7: expected a volume"), None),
        (lambda: _refuse("expected a volume"), "does not say where"),
        (lambda: _refuse("scan7: 'NoneType' object is not iterable"), "without a rule"),
        (lambda: str(1 // 0), "ZeroDivisionError"),
        (lambda: str(len(bytearray(2**34))), "MemoryError"),  # more than these tests can have freed before
        (lambda: str(time.sleep(60)), "took more than 0.5 s"),
        (lambda: str(max(range(10**12))), "died by SIGKILL"),
        (lambda: str(os.kill(os.getpid(), signal.SIGUSR2)), "died by SIGUSR2"),
    ],
)
def test_what_is_wrong_is_seen(
    read: Callable[[], str], wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no signal of Python's own comes through; and the inputs that follow are tried all the same."""
    monkeypatch.setattr(inputs, "_LIMIT_S", 0.5)

    def make(chance: random.Random, root: Path) -> Input:
        (root / "made").open("a").write("x")
        return Input("any", read if len((root / "made").read_text()) == 2 else lambda: UNCHANGED, "^scan7")

    report = try_inputs("any", tmp_path, make, inputs=4, seed=5)
    assert report.tried == 4
    assert [line.partition(wrong or "")[1] for line in report.wrong] == ([wrong] if wrong else [])
    assert all(line.startswith("seed 5, number 1, any: ") for line in report.wrong)
