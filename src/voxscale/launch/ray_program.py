"""What Ray runs on a node for us: one program, as the child of an actor. Knows nothing of Ray itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from voxscale.launch.as_rank import stop_with_parent


class NodeProgram:
    """Runs one program to its end, and passes signals on to it."""

    def __init__(self) -> None:
        self._program: subprocess.Popen[bytes] | None = None
        self._told: int | None = None

    def run(self, python: str | None, words: Sequence[str], added: Mapping[str, str], output: str) -> int:
        """Run `python WORDS` to its end, by default with the Python that runs Ray. What it prints goes to `output`.

        The thread that starts a program is the one with which it dies, so the same one waits for it.
        """
        if self._told is not None:
            return -self._told
        with Path(output).open("ab") as stream:
            self._program = subprocess.Popen(
                [python or sys.executable, *words],
                env={**os.environ, **added},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=stop_with_parent,
            )
        return self._program.wait()

    def send(self, number: int) -> None:
        self._told = number
        if self._program is not None and self._program.poll() is None:
            self._program.send_signal(number)
