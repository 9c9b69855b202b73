"""Run a verb as a command: every failure becomes one message and the exit code of its kind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import typer

_CHECK_PLACE = "check that the place exists and may be read and written"


def answer(as_json: bool, content: dict[str, Any], text: str) -> None:
    """What a verb has to say at its end, on standard output: for machines or for people.

    From then on no signal turns what is done into something that was stopped.
    """
    _ignore_signals()
    typer.echo(json.dumps(content) if as_json else text)


def run_verb(app: Callable[..., Any]) -> None:
    """Run the verb that the command line names, and exit."""
    from voxscale.errors import ConfigError, InfrastructureError, StoppedEarly, VoxscaleError

    failure: VoxscaleError
    numbers = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is after nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, _raise_signalled)
    try:
        code = app(prog_name="voxscale", standalone_mode=False)
        _ignore_signals()
        sys.exit(code if isinstance(code, int) else 0)
    except VoxscaleError as error:
        failure = error
    except KeyboardInterrupt:
        failure = StoppedEarly("interrupted", fix="start the same command again")
    except _Signalled as signalled:
        failure = StoppedEarly(f"stopped by {signalled}", fix="start the same command again")
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free disk space and start the same command again" if is_full else _CHECK_PLACE
        failure = InfrastructureError(what, fix=fix)
        failure.__cause__ = error
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click and typer each have their own class of that name
            typer.echo(error.format_message(), err=True)  # type: ignore[attr-defined]
            sys.exit(2)
        if hasattr(error, "format_message"):  # a usage error
            said = error.format_message().replace("Value error, ", "")  # a word of the library that checked it
            failure = ConfigError(said, fix="see `voxscale --help` or `voxscale VERB --help`")
        else:
            failure = VoxscaleError(f"unexpected {type(error).__name__}: {error}", fix="add --debug for the traceback")
            failure.__cause__ = error
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    own = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv  # what follows it is for a user's script
    if "--debug" in own:
        import traceback

        traceback.print_exception(failure)
    with contextlib.suppress(OSError):  # nobody listens any more: the exit code still counts
        if "--json" in own:
            typer.echo(json.dumps({"error": failure.as_json()}))
        else:
            typer.echo(failure.as_text(), err=True)
    if failure.afterwards is not None:
        with contextlib.suppress(KeyboardInterrupt):
            failure.afterwards()
    if failure.is_abrupt:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.exit_code)
    sys.exit(failure.exit_code)


def _ignore_signals() -> None:
    """To the end of the process: an interpreter that leaves gives its own handlers up before it is gone."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class _Signalled(BaseException):
    """A signal came before the training loop listens for signals itself. Libraries swallow what is an Exception."""


def _raise_signalled(number: int, frame: FrameType | None) -> None:
    raise _Signalled(signal.Signals(number).name)
