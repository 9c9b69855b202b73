"""Every error a user can see: what went wrong, how to mend it, and the exit code that says which kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self


def printable(text: str) -> str:
    """The text with line breaks, escape codes and what no terminal shows written out."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


class VoxscaleError(Exception):
    """A failure with a message for people (`message`, `fix`) and one for machines (`code`, `exit_code`)."""

    code = "failed"
    exit_code = 1
    is_abrupt = False  # a library would hang, or abort, if the process ended in good order

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.afterwards: Callable[[], object] | None = None  # to be done once it is told of: nobody waits for that

    @classmethod
    def from_findings(cls, findings: Sequence[str], *, fix: str = "") -> VoxscaleError:
        """One error that lists every finding of a check, a line each."""
        return cls("\n".join(findings), fix=fix)

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "fix": self.fix}

    def as_text(self) -> str:
        text = f"error: {self.message}" + (f"\n  fix: {self.fix}" if self.fix else "")
        return "\n".join(map(printable, text.split("\n")))


class TrainingError(VoxscaleError):
    """Training itself failed: a loss that is not finite, no memory, a dead rank."""

    code = "training"
    exit_code = 1


class NotFiniteError(TrainingError):
    """The loss or the gradient is not a number any more: the same start would come to the same end."""

    code = "not_finite"


class OutOfMemoryError(TrainingError):
    """What was asked for does not fit the device: the same start would come to the same end."""

    code = "out_of_memory"


class RankLostError(TrainingError):
    """A rank died or hung without a word: started again from the last checkpoint, the run may well come to its end."""

    code = "rank_lost"


LESS_MEMORY = "set train.micro_batch lower (the result stays the same), or choose smaller patches.size"
ANOTHER_RANK = "another rank"  # whoever started the ranks knows which


class LostContactError(TrainingError):
    """Another rank is gone, or silent: a consequence. `where` is what they were at, with which cases for each rank."""

    code = "lost_contact"

    def __init__(self, message: str, *, fix: str = "", where: str = "", cases: Sequence[Sequence[str]] = ()) -> None:
        super().__init__(message, fix=fix)
        self.where, self.cases = where, cases

    def at(self, where: str, cases: Sequence[Sequence[str]]) -> Self:
        self.where, self.cases = where, cases
        return self

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "where": self.where, "cases": self.cases}


class TimedOutError(LostContactError):
    """Another rank did not answer in time; it may still live."""

    code = "timed_out"


class ConfigError(VoxscaleError):
    """The config, an override or a flag is wrong."""

    code = "config"
    exit_code = 2


class DataError(VoxscaleError):
    """The data is missing, unreadable or unsafe to train on."""

    code = "data"
    exit_code = 3


class InfrastructureError(VoxscaleError):
    """The machine is not as needed: devices, disk, permissions, network, scheduler."""

    code = "infrastructure"
    exit_code = 4


class StoppedEarly(VoxscaleError):
    """Not a failure: the run was asked to stop, saved its state, and can be continued."""

    code = "stopped"
    exit_code = 75


BY_CODE: dict[str, type[VoxscaleError]] = {
    kind.code: kind
    for kind in (
        VoxscaleError,
        TrainingError,
        NotFiniteError,
        OutOfMemoryError,
        ConfigError,
        DataError,
        InfrastructureError,
        StoppedEarly,
    )
}
