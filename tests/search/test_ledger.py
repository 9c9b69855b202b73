"""The ledger: whatever is cut off its end, what remains reads, and the next writer goes on after it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from voxscale.errors import InfrastructureError
from voxscale.search.ledger import ENDED, Ledger, Record, read_ledger

Event = tuple[str, dict[str, Any]]

TEXTS = st.text(max_size=20)  # line ends of every kind, quotes, and letters of several bytes
PARAMS = st.dictionaries(TEXTS, st.none() | st.booleans() | st.integers() | TEXTS | st.lists(st.integers()), max_size=3)
VALUES = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def stories(draw: st.DrawFn) -> list[Event]:
    """What a driver could write: trials in order, and anything about those that are there; also after their end."""
    events: list[Event] = []
    count = 0
    for kind in draw(
        st.lists(st.sampled_from(["trial", "start", "lost", "verdict", "end", "again", "stop"]), max_size=25)
    ):
        if kind == "trial":
            events.append(("trial", {"trial": count, "configuration": count, "seed": 0, "params": draw(PARAMS)}))
            count += 1
        elif kind == "stop":
            events.append(("stop", {"reason": "SIGTERM", "steps": {"0": 3}}))
        elif count:
            events.append((kind, {"trial": draw(st.integers(0, count - 1)), **draw(_details(kind))}))
    return events


def _details(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    fields: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "start": {"attempt": st.integers(1, 3)},
        "again": {},
        "lost": {"why": TEXTS},
        "verdict": {"rung": st.integers(1, 9), "value": VALUES, "stopped": st.booleans()},
        "end": {
            "state": st.sampled_from(ENDED),
            "value": st.none() | VALUES,
            "steps": st.integers(0, 99),
            "wall_s": st.floats(0, 1e6),
            "why": TEXTS,
            "lost": st.booleans(),
        },
    }
    return st.fixed_dictionaries(fields[kind])


@contextmanager
def written(events: list[Event]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trials.jsonl"
        append(path, events)
        yield path


def append(path: Path, events: list[Event]) -> None:
    with Ledger(path) as ledger:
        for kind, fields in events:
            ledger.write(kind, **fields)


def record_of(events: list[Event]) -> Record:
    with written(events) as path:
        return read_ledger(path)


@given(events=stories(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_beginning_reads_as_a_beginning_of_the_story(events: list[Event], data: st.DataObject) -> None:
    with written(events) as path:
        content = path.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut])
        found = read_ledger(path)
        whole = content[:cut].count(b"\n")
        # An object whose line end alone is missing has been written all the same.
        whole += bool(content[cut : cut + 1] == b"\n")
        assert found == record_of(events[: max(0, whole - 1)])


@given(events=stories(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_next_writer_goes_on_after_half_a_line(events: list[Event], data: st.DataObject) -> None:
    with written(events) as path:
        content = path.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut])
        before = read_ledger(path)
        count = len(before.trials)
        more = {"trial": count, "configuration": count, "seed": 0, "params": {"a": 1}}
        append(path, [("trial", more)])
        after = read_ledger(path)
        assert after.trials[:-1] == before.trials
        assert after.verdicts == before.verdicts
        assert after.trials[-1].params == {"a": 1}
        assert path.read_bytes().startswith(content[:cut]), "nothing that was written is ever changed"
        first = next(json.loads(line) for line in path.read_bytes().split(b"\n") if is_whole(line))
        assert first == {"event": "search", "version": 1}


def is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@given(events=stories())
@settings(max_examples=100, deadline=None)
def test_a_trial_that_has_ended_never_changes_but_to_be_tried_again(events: list[Event]) -> None:
    ended: dict[int, dict[str, Any]] = {}
    for length in range(len(events) + 1):
        trials = record_of(events[:length]).trials
        kind, fields = events[length - 1] if length else ("", {})
        if kind == "again" and ended.get(fields["trial"], {}).get("was_lost"):
            before, now = ended.pop(fields["trial"]), asdict(trials[fields["trial"]])
            assert (now["state"], now["why"]) == ("waiting", "")
            assert now["losses"] == before["losses"]
        for trial in trials:
            if trial.index in ended:
                assert asdict(trial) == ended[trial.index]
            if trial.has_ended:
                ended.setdefault(trial.index, asdict(trial))


def test_what_was_written_by_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text('{"event": "search", "version": 2}\n')
    with pytest.raises(InfrastructureError, match="written in version 2, expected 1"):
        read_ledger(path)


def test_a_value_that_json_cannot_hold_leaves_no_line(tmp_path: Path) -> None:
    with Ledger(tmp_path / "trials.jsonl") as ledger:
        before = (tmp_path / "trials.jsonl").read_bytes()
        with pytest.raises(ValueError, match="JSON"):
            ledger.write("verdict", value=float("nan"))
    assert (tmp_path / "trials.jsonl").read_bytes() == before
