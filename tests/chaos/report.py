"""What came of a kind of fault: how often it was tried, and everything that went wrong."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """One line of the table. `wrong` says what should not have happened; it is empty where all is well."""

    name: str
    tried: int = 0
    took_s: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """One more is tried; now and then it is said how far it is."""
        self.tried += 1
        if self.tried % 10 == 0:
            print(f"{self.name}: {self.tried} so far, {len(self.wrong)} wrong", file=sys.stderr, flush=True)

    def count(self, what: str) -> None:
        self.add(what, 1)

    def add(self, what: str, number: int) -> None:
        self.seen[what] = self.seen.get(what, 0) + number

    def slowest(self, what: str, took_s: float, *, limit: float) -> None:
        """Keep the longest of these times, none of which may be above the limit."""
        self.seen[what] = max(self.seen.get(what, 0), round(took_s, 1))
        self.expect(took_s <= limit, f"{took_s:.1f} {what}, expected at most {limit:g}")

    def expect(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            self.wrong.append(otherwise)

    def compare(self, found: Mapping[str, Any], expected: Mapping[str, Any], name: str) -> None:
        """Whether a run ended as one that nobody disturbed."""
        differing = [key for key in expected if found[key] != expected[key]]
        self.expect(not differing, f"{name}: {', '.join(differing)} differ")
        self.count("runs ended otherwise" if differing else "runs ended alike")

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.took_s += time.monotonic() - began


def render(reports: list[Report]) -> str:
    """A Markdown table, as docs/reliability.md holds it."""
    lines = ["| fault | tried | wrong | seen | seconds |", "|---|---|---|---|---|"]
    for report in reports:
        seen = ", ".join(f"{count:g} {what}" for what, count in sorted(report.seen.items()))
        lines.append(f"| {report.name} | {report.tried} | {len(report.wrong)} | {seen} | {report.took_s:.0f} |")
    return "\n".join(lines)
