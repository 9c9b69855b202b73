"""What is wrong with data: one finding per fault, each with case, file, found, expected and fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from voxscale.errors import DataError, printable

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """`error`: training on it would be unsafe, and is refused. `warning`: worth a look."""

    level: str
    code: str  # stable, for machines: missing-file, unreadable, nan, shape …
    case: str
    file: str  # relative to the source
    found: str
    expected: str
    fix: str

    def __str__(self) -> str:
        """One line, whatever names of files, labels or patients may hold."""
        where = ": ".join(part for part in (f"case {self.case}" if self.case else "", self.file) if part)
        return printable(f"{where or 'data'}: found {self.found}, expected {self.expected}")

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def refuse_errors(findings: Iterable[Finding]) -> None:
    """Raise one DataError that lists every finding which makes training unsafe."""
    errors = [finding for finding in findings if finding.level == ERROR]
    if errors:
        raise as_error(errors)


def as_error(findings: Sequence[Finding]) -> DataError:
    fixes = dict.fromkeys(finding.fix for finding in findings)
    return DataError("\n".join(map(str, findings)), fix="; ".join(fixes))
