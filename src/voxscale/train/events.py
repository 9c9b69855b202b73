"""What happens in a run, one JSON object a line in `events.jsonl`.

Lines are only ever appended. After a `resume` at step s, earlier lines of steps beyond s are superseded:
`read_events` leaves them out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from voxscale.runs import RunFolder


class Events(Protocol):
    def write(self, event: str, **fields: Any) -> None: ...


class NullEvents:
    """For the ranks that do not speak."""

    def write(self, event: str, **fields: Any) -> None:
        return


class JsonlEvents:
    """Appends to `events.jsonl`; a line is handed to the system before `write` returns. Rank 0 only."""

    def __init__(self, run: RunFolder) -> None:
        self._started = time.monotonic()
        _end_cut_line(run.events)
        self._lines = run.events.open("a", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        row = {"event": event, **fields, "time_s": round(time.monotonic() - self._started, 3)}
        self._lines.write(json.dumps(_finite(row)) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """The run's events as if it had never been interrupted, but for the `resume` lines."""
    return without_superseded(parse_events(path.read_bytes().splitlines() if path.exists() else ()))


def without_superseded(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row in events:
        if row["event"] == "resume":
            rows = [earlier for earlier in rows if earlier.get("step", 0) <= row["step"]]
        rows.append(row)
    return rows


def parse_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a line that a killed writer left half
        if isinstance(row, dict) and "event" in row:
            yield row


def _end_cut_line(path: Path) -> None:
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("ab") as lines:
            lines.write(b"\n")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: such numbers are written as null."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
