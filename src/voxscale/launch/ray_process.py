"""Ray on one node of a job: what `ray start` runs there, in a folder and with a token that are gone when it ends.

Needs the standard library alone, as ray_node.py does, and is copied with it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from voxscale.launch import as_rank, meeting, ranks
else:  # a copy, beside copies of these
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import as_rank
    import meeting
    import ranks

_FOLDER = "vxray-"  # what the names of our temporary folders begin with
_LONGEST = 36  # of their paths: a socket's may have 107 bytes, and Ray adds up to 70
LOOK_S = 0.1  # between two looks at files and processes
_END_S = 10.0  # for Ray to end before it is killed
_CLIENT_PORTS = range(20000, 32000)  # not those that systems hand out, which Ray's own processes get meanwhile
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FOREIGN = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_GCS_SERVER_PORT")
# `ray`, without the modules of the folder it is started in, which may be called as those of others
_APART = "import sys; sys.path[:] = [place for place in sys.path if place]"
RAY_PROGRAM = f"{_APART}; from ray.scripts.scripts import main; sys.exit(main())"
# The same, but an empty line comes when it begins: what comes before is the time to import Ray
ASK_PROGRAM = f"{_APART}; from ray.scripts.scripts import main; print(flush=True); sys.exit(main())"
# Writes the addresses of the nodes that Ray has, whenever they change, until there are enough
WATCH_PROGRAM = f"""{_APART}
import time
from ray._raylet import GcsClient
from ray.core.generated.gcs_pb2 import GcsNodeInfo
client, before, nodes = GcsClient(address=sys.argv[1]), None, int(sys.argv[2])
while before is None or len(before) < nodes:
    infos = client.get_all_node_info(timeout=60).values()
    alive = [info.node_manager_address for info in infos if info.state == GcsNodeInfo.ALIVE]
    if alive != before:
        print(*alive, flush=True)
        before = alive
    time.sleep(0.1)
"""


@dataclass
class Ray:
    """Ray on this node: `ray start --block`, its folder and its log."""

    options: argparse.Namespace
    place: meeting.Place
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def reports(self) -> Path:
        return Path(self.options.reports)

    @property
    def token(self) -> Path:
        return self.folder / "token"

    @property
    def log(self) -> Path:
        return self.reports / f"ray-{self.place.index:04d}.log"

    @property
    def environ(self) -> dict[str, str]:
        """What every process of this cluster is told: where the token is, never what it is."""
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        kept.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # a node without its head soon ends
        return {
            **kept,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # when it is told to end, the command has ended
        }

    def start(self, *words: str) -> None:
        """Start it with every port left to the system: several users' jobs may share a node."""
        ports = ("node-manager", "object-manager", "min-worker", "max-worker", "dashboard-agent-listen",
                 "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")  # fmt: skip
        self.process = self.run(
            [
                *("-c", RAY_PROGRAM, "start", "--block", "--disable-usage-stats", *words),
                *(f"--node-ip-address={self.place.address}", f"--temp-dir={self.folder / 'ray'}"),
                *(f"--num-cpus={self.options.cpus}", f"--num-gpus={self.options.gpus}"),
                *(f"--{name}-port=0" for name in ports),
            ],
            self.log,
        )

    def run(self, words: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """A process of the cluster. SLURM's signals are for the command: SIGUSR1 would end Ray."""

        def begin() -> None:
            as_rank.stop_with_parent()  # killed, it would leave the agents of its raylet behind
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        command, none = [sys.executable, *words], subprocess.DEVNULL
        with output.open("ab") as out, self.log.open("ab") as log:
            return subprocess.Popen(command, env=self.environ, stdin=none, stdout=out, stderr=log, preexec_fn=begin)

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def unable(self, what: str) -> meeting.UnableError:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        said = "; ".join(lines[-1:] if any(line.startswith("Traceback") for line in lines) else lines[-3:])
        return meeting.UnableError(f"{what}: {said or 'it said nothing'}", f"see {self.log}")


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder that only this user can look into; gone at the end, after every process that was started here."""
    root = Path(tempfile.gettempdir())
    root = root if len(str(root)) + len(_FOLDER) + 9 <= _LONGEST else Path("/tmp")  # noqa: S108 made by mkdtemp
    _sweep(root)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=root))
    try:
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / ".lock").rename(folder / "lock")  # locked before it can be seen
            yield folder
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _end_children()
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what this user's jobs left that were killed: their lock is free."""
    for lock in root.glob(f"{_FOLDER}*/lock"):
        with contextlib.suppress(OSError):
            if lock.parent.lstat().st_uid == os.getuid():
                with lock.open() as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)


def _end_children() -> None:
    """End all that descends from this process; what lost its parent has become a child of this one."""
    ranks.signal_children(signal.SIGTERM)
    ranks.await_children(_END_S)
    deadline = time.monotonic() + _END_S
    while ranks.living_children() and time.monotonic() < deadline:
        ranks.signal_children(signal.SIGKILL)
        ranks.await_children(LOOK_S)


def write_secret(path: Path, text: str) -> None:
    """Write a file that nobody else can read, not even for a moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def client_port() -> int:
    """A free port for the server that `ray start` would else put on a fixed one, and cannot leave out."""
    for port in random.SystemRandom().sample(_CLIENT_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise meeting.UnableError("no free port for Ray", f"free some of {_CLIENT_PORTS[0]} to {_CLIENT_PORTS[-1]}")
