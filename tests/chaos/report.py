"""What came of a kind of fault: how often it was tried, and everything that went wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Report:
    """One line of the table. `wrong` says what should not have happened; it is empty where all is well."""

    name: str
    tried: int = 0
    took_s: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def expect(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            self.wrong.append(otherwise)

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
        seen = ", ".join(f"{count} {what}" for what, count in sorted(report.seen.items()))
        lines.append(f"| {report.name} | {report.tried} | {len(report.wrong)} | {seen} | {report.took_s:.0f} |")
    return "\n".join(lines)
