"""What several verbs tell at their end."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from voxscale.command import answer


def tell_submitted(as_json: bool, what: Literal["run", "search"], root: Path, jobs: Sequence[Any]) -> None:
    """Jobs that nobody waits for."""
    content = {what: str(root), "state": "submitted", "jobs": [vars(job) for job in jobs]}
    answer(as_json, content, f"{what} folder {root}; cancel with: voxscale cancel {shlex.quote(str(root))}")


def tell_commands(as_json: bool, root: Path, commands: Sequence[tuple[str, str]]) -> None:
    """Lines to be run by hand, each with what it is for."""
    text = "\n".join(f"# {purpose}\n{command}" for purpose, command in commands)
    answer(as_json, {"run": str(root), "commands": [command for _, command in commands]}, text)
