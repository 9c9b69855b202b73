"""A command on a terminal of its own, as a user has it before the eyes: what it shows, and what is typed."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Mapping
from types import TracebackType

CTRL_C = "\x03"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs a command on a pseudo-terminal that controls it, so that Ctrl-C is typed and reaches what a user's would.

    To be used as a context manager: what still runs at its end is killed.
    """

    def __init__(self, *argv: object, env: Mapping[str, str], columns: int = 100) -> None:
        self._screen, its_side = pty.openpty()
        termios.tcsetwinsize(its_side, (24, columns))
        environ = {**env, "TERM": "xterm", "COLUMNS": str(columns)}
        try:
            self._child = subprocess.Popen(
                ["setsid", "--ctty", *map(str, argv)],
                stdin=its_side,
                stdout=its_side,
                stderr=its_side,
                env=environ,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run behind &
            )
        finally:
            os.close(its_side)
        self._written = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._child.kill()
        self._child.wait(10)
        os.close(self._screen)

    @property
    def text(self) -> str:
        """All that was shown so far, without what moves the cursor."""
        return _CONTROL.sub("", self._written.decode(errors="replace"))

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def hang_up(self) -> None:
        """What closing its window does: the system tells all that was started there, not the command alone."""
        os.killpg(self._child.pid, signal.SIGHUP)

    def until(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """Wait until the pattern was shown."""
        deadline = time.monotonic() + timeout
        while (found := re.search(pattern, self.text)) is None:
            is_open = self._read(deadline - time.monotonic())
            if time.monotonic() > deadline or not is_open:
                raise AssertionError(f"{pattern!r} was not shown but {self.text}")
        return found

    def wait(self, timeout: float = 30) -> int:
        """The command's exit code, once it has ended."""
        deadline = time.monotonic() + timeout
        while self._read(deadline - time.monotonic()):
            assert time.monotonic() < deadline, f"it does not end: {self.text}"
        return self._child.wait(10)

    def _read(self, seconds: float) -> bool:
        """Read what there is, waiting at most so long; False once nobody can write any more."""
        if not select.select([self._screen], [], [], max(0, min(seconds, 1)))[0]:
            return True
        with contextlib.suppress(OSError):  # Linux' word for the other side being closed
            block = os.read(self._screen, 65536)
            self._written += block
            return bool(block)
        return False
