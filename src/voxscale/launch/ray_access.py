"""Who may talk to a Ray cluster: its address, its token, and what is said where either is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
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

_PREFIX, _LOCK = "vx-", "lock"
_NEW_S = 60.0  # a folder may be about to be locked
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
            is_old = time.time() - folder.stat().st_ctime > _NEW_S
            if is_old and folder.stat().st_uid == os.getuid() and not is_locked(folder / _LOCK):
                shutil.rmtree(folder)


def parse_address(address: str) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z0-9_.-]+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        hint = "; `auto` could join a stranger's cluster" if address == "auto" else ""
        raise ConfigError(
            f"Ray's address: found {address!r}, expected HOST:PORT{hint}",
            fix="give the address that `ray start --head` printed with --address or RAY_ADDRESS",
        )
    return match[1], int(match[2])


def refuse_silent(address: str, host: str, port: int) -> None:
    """Ray itself would wait for minutes."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        raise InfrastructureError(
            f"Ray at {address}: does not answer ({error.strerror or error})",
            fix="start the cluster with `ray start --head`, or leave --address out: one is started for you",
        ) from error


def credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """As Ray does: where a token is there, it is used."""
    if "RAY_AUTH_MODE" in environ:
        return {}
    default = Path(environ.get("HOME", "/")) / ".ray" / "auth_token"
    has_token = "RAY_AUTH_TOKEN" in environ or "RAY_AUTH_TOKEN_PATH" in environ or default.is_file()
    return {"RAY_AUTH_MODE": "token" if has_token else "disabled"}


def check_token(address: str) -> None:
    """Refuse a cluster that does not take our token, and warn of one that asks for none."""
    nameless = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    with ThreadPoolExecutor(2) as pool:
        as_we_are, as_nobody = pool.map(
            lambda environ: _health(address, environ),
            (dict(os.environ), {**nameless, "RAY_AUTH_MODE": "disabled"}),
        )
    if as_we_are is not None:
        wrong = "InvalidAuthToken" in as_we_are or "AuthenticationError" in as_we_are
        ours = "refuses our token" if os.environ.get("RAY_AUTH_MODE") == "token" else "asks for a token"
        raise InfrastructureError(
            f"Ray at {address}: " + (ours if wrong else f"is not healthy: {as_we_are.splitlines()[-1]}"),
            fix=_AUTHENTICATE if wrong else "see the logs of its head; is this the port of `ray start --head`?",
        )
    if as_nobody is None:
        print(f"warning: {_OPEN_CLUSTER}", file=sys.stderr, flush=True)


def _health(address: str, environ: Mapping[str, str]) -> str | None:
    """What keeps a cluster from answering; None if nothing does."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return "no answer"
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip() or "no answer"
