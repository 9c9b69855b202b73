"""Who may talk to a Ray cluster: its address, its token, and what is said where either is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from voxscale.errors import ConfigError, InfrastructureError
from voxscale.files import is_locked, locked
from voxscale.launch.ray_process import ASK_PROGRAM

_PREFIX, _LOCK = "vx-", "lock"
_NEW_S = 60.0  # a lock may be about to be taken; and a killed cluster's own processes need the folder to end
_HEALTHY, _REFUSED, _SILENT = "healthy", "refused", "silent"
ANSWER_S = 10.0  # within which a cluster has to answer
_AUTHENTICATE = "give the cluster's token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE"
_OPEN_CLUSTER = (
    "this Ray cluster asks for no token: whoever reaches it runs code as you; "
    "start it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE on every node"
)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for a cluster of ours, only its owner's, with a new token in it; gone with the body.

    What such clusters have left whose process was killed goes, too.
    """
    parent = _short_folder()
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with locked(folder / _LOCK):
            _write_token(token_in(folder))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def token_in(folder: Path) -> Path:
    return folder / "token"


def _write_token(file: Path) -> None:
    """A new token that only its owner can read, from the first moment on."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as lines:
        lines.write(secrets.token_hex(32))


def _short_folder() -> Path:
    """Ray's sockets lie deep below it, and the path of a socket has 107 characters."""
    folder = tempfile.gettempdir()
    return Path(folder if len(folder) <= 20 else "/tmp")  # noqa: S108 mkdtemp makes the name


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = (folder / _LOCK).stat()  # other folders of that name have none
            is_old = time.time() - folder.stat().st_ctime > _NEW_S
            if is_old and lock.st_uid == os.getuid() and not is_locked(folder / _LOCK):
                shutil.rmtree(folder)


def given_address(address: str | None, environ: Mapping[str, str]) -> str | None:
    """The cluster that is to be joined; None where one is started."""
    address = address or environ.get("RAY_ADDRESS") or None
    return None if address == "local" else address


def parse_address(address: str) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z0-9_.-]+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        hint = "; `auto` could join a stranger's cluster" if address == "auto" else ""
        raise ConfigError(
            f"Ray's address: found {address!r}, expected HOST:PORT{hint}",
            fix="give the address that `ray start --head` printed with --address or RAY_ADDRESS",
        )
    return match[1], int(match[2])


def refuse_silent(address: str, host: str, port: int, patience_s: float = ANSWER_S) -> float:
    """Refuse a place where nothing listens, whichever of its addresses is tried. Returns what is left of the patience.

    Ray itself would wait for minutes.
    """
    why, deadline = "", time.monotonic() + patience_s
    try:
        for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family) as probe:
                probe.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    probe.connect(where)
                except OSError as error:
                    why = why or str(error.strerror or error)
                else:
                    return max(1.0, deadline - time.monotonic())
    except OSError as error:  # a name that nobody knows
        why = str(error.strerror or error)
    raise InfrastructureError(
        f"Ray at {address}: does not answer ({why})",
        fix="start the cluster with `ray start --head`, or leave --address out: one is started for you",
    )


def token_source(environ: Mapping[str, str]) -> str | None:
    """Where our token comes from, as Ray looks for it; None where we have none. Raises if it cannot be had from there.

    Ray itself ends with a traceback for what is refused here.
    """
    if environ.get("RAY_AUTH_MODE", "token") != "token":
        return None
    if environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    given, default = environ.get("RAY_AUTH_TOKEN_PATH"), Path(environ.get("HOME", "/")) / ".ray" / "auth_token"
    file, name = (Path(given), f"RAY_AUTH_TOKEN_PATH={given}") if given else (default, str(default))
    if not given and "RAY_AUTH_MODE" not in environ and not file.is_file():
        return None
    try:
        what = "is empty" if file.is_file() and not file.read_bytes().strip() else ""
        what = what or ("" if file.is_file() else "is not a file" if file.exists() else "does not exist")
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    if what:
        raise InfrastructureError(f"Ray's token: {name} {what}", fix=_AUTHENTICATE)
    return name


def credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """As Ray does: where a token is there, it is used."""
    if "RAY_AUTH_MODE" in environ:
        return {}
    return {"RAY_AUTH_MODE": "disabled" if token_source(environ) is None else "token"}


def check_token(address: str, source: str | None, patience_s: float) -> None:
    """Refuse a cluster that does not take our token, which is from `source`, and warn of one that asks for none.

    `patience_s` is the cluster's, not that of the programs that ask it.
    """
    nameless = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    with ThreadPoolExecutor(2) as pool:
        as_we_are, as_nobody = pool.map(
            lambda environ: _health(address, environ, patience_s),
            (dict(os.environ), {**nameless, "RAY_AUTH_MODE": "disabled"}),
        )
    if as_we_are == _REFUSED:
        what = "asks for a token" if source is None else f"refuses our token, which is that of {source}"
        raise InfrastructureError(f"Ray at {address}: {what}", fix=_AUTHENTICATE)
    if as_we_are == _SILENT:
        raise InfrastructureError(
            f"Ray at {address}: does not answer as Ray does within {ANSWER_S:.0f} s",
            fix="see the logs of its head; is this the port of `ray start --head`?",
        )
    if as_nobody == _HEALTHY:
        print(f"warning: {_OPEN_CLUSTER}", file=sys.stderr, flush=True)


def _health(address: str, environ: Mapping[str, str], patience_s: float) -> str:
    """Whether a cluster answers us."""
    command, pipe = [sys.executable, "-c", ASK_PROGRAM, "health-check", "--address", address], subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, bufsize=0) as asking:
        if asking.stdout is not None:
            asking.stdout.readline()
        try:
            said = b"".join(asking.communicate(timeout=patience_s)).decode(errors="replace")
        except subprocess.TimeoutExpired:
            asking.kill()
            return _SILENT
    if asking.returncode == 0:
        return _HEALTHY
    return _REFUSED if "InvalidAuthToken" in said or "AuthenticationError" in said else _SILENT


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """A second Ctrl-C would leave half of Ray behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    except ValueError:  # not the main thread
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def variables(**values: str | None) -> Iterator[None]:
    """Environment variables for the length of the body, None being unset: Ray and its children know no other way."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
