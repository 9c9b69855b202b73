"""A command that is forked from this process, which has the libraries loaded: of a start, most is loading those.

Only for a process that has not computed anything with torch, whose threads would not survive the fork.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import torch._dynamo
import torch._inductor.config
import torch.distributed.launcher.api  # noqa: F401 - what a start loads

import voxscale.train.worker  # noqa: F401


class WarmStart:
    """A running `voxscale WORDS`, with what is used here of the interface of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], err: Path) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _be_command(words, environ, err)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or 1e9)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("voxscale", timeout or 0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.kill()
        self.wait()


def _be_command(words: Sequence[str], environ: Mapping[str, str], err: Path) -> NoReturn:
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None
        sys.argv = ["voxscale", *words]
        from voxscale.cli import main

        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)
