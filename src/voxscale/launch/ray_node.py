"""One node of a job that has a Ray cluster of its own: start Ray here, and on the first node run the command with it.

    srun --ntasks-per-node 1 python ray_node.py --nodes 2 --cpus 8 --gpus 2 --reports DIR -- driver.py ARGUMENTS

Needs nothing but the standard library and the interpreter's own ray: copies of this file, node.py and as_rank.py in the
run folder also serve interpreters and images in which voxscale is not installed. The command runs once, when Ray has
all nodes, with RAY_ADDRESS set; its output is kept in DIR/rank-0000.log, what each Ray says in DIR/ray-NNNN.log, and
how each node ended in DIR/node-NNNN.end.json, as node.py does.

Only who has the token can use the cluster. It is in a file that its owner alone can read: in DIR until all nodes have
joined, then in a folder of each node that is gone with its Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import random
import secrets
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
    from voxscale.launch import as_rank, meeting, node, ranks
else:  # a copy, beside copies of these
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import as_rank
    import meeting
    import node
    import ranks

STOP = "stop"  # a file in DIR that tells the command alone to end: SLURM would tell all of Ray
_TOKEN, _ADDRESS, _READY, _DONE = "ray-token", "ray.json", "ray-ready.json", "ray-done.json"  # for the other nodes
_FOLDER = "vxray-"  # what the names of our temporary folders begin with
_LONGEST = 36  # of their paths: a socket's may have 107 bytes, and Ray adds up to 70
_LOOK_S = 0.1  # between two looks at files and processes
_PASS_ON_S = 0.3  # SLURM signals the command itself; one that ends at once must not be hit again while it does
_END_S = 10.0  # for Ray to end before it is killed
_CLIENT_PORTS = range(20000, 32000)  # not those that systems hand out, which Ray's own processes get meanwhile
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
FOREIGN = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_GCS_SERVER_PORT")
# `ray`, without the modules of the folder it is started in, which may be called as those of others
_APART = "import sys; sys.path[:] = [place for place in sys.path if place]"
RAY_PROGRAM = f"{_APART}; from ray.scripts.scripts import main; sys.exit(main())"
# Writes the addresses of the nodes that Ray has, whenever they change, until there are enough
_WATCH = f"""{_APART}
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


@dataclass(frozen=True)
class Ended:
    """How a node's part ended; `lost` says what became of its Ray before the command was over."""

    failures: tuple[ranks.RankFailure, ...] = ()
    stopped: bool = False
    lost: str = ""


def run_ray_node(options: argparse.Namespace) -> int:
    """Have Ray on this node for as long as the command runs on the first one, and leave word of how it ended."""
    reports: Path = options.reports
    reports.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    index = meeting.slurm_index() if options.nodes > 1 else 0
    if index == 0:
        (reports / "step").write_text(os.environ.get("SLURM_STEP_ID", ""))
    ranks.adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, node.raise_early)
    unable: tuple[str, ...] = ()
    try:
        node.refuse_unfit(options)
        if importlib.util.find_spec("ray") is None:
            raise meeting.UnableError(f"no ray in {sys.executable}", "pip install 'voxscale[ray]'")
        ended = _take_part(options, index)
    except node.EarlySignal:  # the command had not begun
        ended = Ended(stopped=True)
    except meeting.UnableError as error:
        unable, ended = error.args, Ended((ranks.RankFailure(-1, 4, time.time()),) if error.args[0] else ())
        if unable[0]:
            print("error: {}: {}\n  fix: {}".format(socket.gethostname(), *unable), file=sys.stderr, flush=True)
    if ended.lost:
        print(f"warning: {socket.gethostname()}: {ended.lost}", file=sys.stderr, flush=True)
    _leave_word(reports, index, ended, unable, time.monotonic() - began)
    return 4 if unable else 1 if ended.failures and not ended.stopped else 0


def _leave_word(reports: Path, index: int, ended: Ended, unable: tuple[str, ...], wall_s: float) -> None:
    failures = ended.failures
    end = {
        "failures": [unable[0] if unable else f"{failure}".replace("rank 0", "the command") for failure in failures],
        "codes": [failure.exit_code for failure in failures],
        "ranks": [failure.rank for failure in failures],
        "times": [failure.time_s for failure in failures],
        "stopped": ended.stopped,
        "wall_s": round(wall_s, 3),
        **(dict(zip(("unable", "fix"), unable)) if unable else {}),  # noqa: B905 since Python 3.10
        **({"lost": ended.lost} if ended.lost else {}),
    }
    meeting.write_whole(meeting.end_file(reports, index), end)
    if unable:  # the others wait for its arrival, then find the end
        meeting.write_whole(meeting.arrival_file(reports, index), {"node": socket.gethostname()})


def _take_part(options: argparse.Namespace, index: int) -> Ended:
    if options.chdir is not None:
        os.chdir(options.chdir)
    place = meeting.Place()
    if options.nodes > 1:
        place = meeting.meet(options.reports, nodes=options.nodes, interface=options.interface, patience_s=options.wait)
    else:
        host = socket.gethostname()
        meeting.write_whole(meeting.arrival_file(options.reports, 0), {"node": host, "host": host})
    with _own_folder() as folder:
        ray = Ray(options, place, folder)
        return _lead(ray) if index == 0 else _follow(ray)


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


def _lead(ray: Ray) -> Ended:
    """On the first node: start the head, wait until Ray has all nodes, run the command, tell the others."""
    secret = secrets.token_hex(32)
    _write_secret(ray.token, secret)
    try:
        if ray.place.nodes > 1:
            _write_secret(ray.reports / _TOKEN, secret)
        ray.start("--head", "--port=0", "--include-dashboard=false", f"--ray-client-server-port={_client_port()}")
        address = _head_address(ray)
        meeting.write_whole(ray.reports / _ADDRESS, {"address": address})
        _await_nodes(ray, address)
    finally:
        (ray.reports / _TOKEN).unlink(missing_ok=True)
    meeting.write_whole(ray.reports / _READY, {"address": address})
    code, told = _run_command(ray, address)
    failures = (ranks.RankFailure(0, code, time.time()),) if code else ()
    stopped = told or code == node.STOPPED
    meeting.write_whole(ray.reports / _DONE, {"stopped": stopped})
    return Ended(failures, stopped, "" if ray.lives else "Ray's head ended before the command did")


def _follow(ray: Ray) -> Ended:
    """On another node: join the head's cluster, and leave it when the command is over."""
    reports, deadline = ray.reports, time.monotonic() + ray.options.wait
    while not ((reports / _ADDRESS).exists() and (reports / _TOKEN).exists()):  # it is gone if the head gives up
        if meeting.end_file(reports, 0).exists():
            raise meeting.UnableError("", "")  # the first node says why
        if time.monotonic() > deadline:
            raise meeting.UnableError(f"Ray's head did not start within {ray.options.wait:.0f} s", f"see {reports}")
        _look(reports)
    _write_secret(ray.token, (reports / _TOKEN).read_text())
    ray.start("--address=" + json.loads((reports / _ADDRESS).read_text())["address"])
    while not (reports / _READY).exists() and not meeting.end_file(reports, 0).exists():
        if not ray.lives:
            raise ray.unable("Ray did not start")
        _look(reports)
    received = _note_signals()
    while not (reports / _DONE).exists() and not meeting.end_file(reports, 0).exists():
        if not ray.lives:
            return Ended(stopped=bool(received), lost="Ray ended here before the command did")
        if received and time.monotonic() > received[0][0] + ray.options.save_time:
            break
        time.sleep(_LOOK_S)
    stopped = (reports / _DONE).exists() and json.loads((reports / _DONE).read_text())["stopped"]
    return Ended(stopped=bool(received) or stopped)


def _head_address(ray: Ray) -> str:
    """Where the head can be reached, as soon as it is known: the other nodes start while the head still does."""
    folder, deadline = ray.folder / "ray", time.monotonic() + ray.options.wait
    while ray.lives and time.monotonic() < deadline:
        if ray.place.nodes > 1:
            for file in folder.glob("session_*/gcs_server_port_*"):
                if (port := file.read_text().strip()).isdigit():
                    return f"{ray.place.address}:{port}"
        with contextlib.suppress(OSError):  # not there yet
            if (address := (folder / "ray_current_cluster").read_text().strip()).rpartition(":")[2].isdigit():
                return address
        _look(ray.reports)
    raise ray.unable("Ray's head did not start")


def _await_nodes(ray: Ray, address: str) -> None:
    """Wait until Ray has every node of the job. Raises naming those that it does not get."""
    nodes, deadline = ray.place.nodes, time.monotonic() + ray.options.wait
    seen = ray.folder / "seen"
    watcher = ray.run(["-c", _WATCH, address, str(nodes)], seen)
    while (code := watcher.poll()) is None:
        if not ray.lives:
            raise ray.unable("Ray's head did not start")
        if any(meeting.end_file(ray.reports, number).exists() for number in range(1, nodes)):
            raise meeting.UnableError("", "")  # another node says why
        if time.monotonic() > deadline:
            addresses = (seen.read_text().splitlines() or [""])[-1].split()
            arrivals = [json.loads(meeting.arrival_file(ray.reports, number).read_text()) for number in range(nodes)]
            absent = ", ".join(each["node"] for each in arrivals if each.get("address", address) not in addresses)
            what = f"Ray has {len(addresses)} of {nodes} nodes after {ray.options.wait:.0f} s: {absent} did not join"
            raise meeting.UnableError(what, f"see {ray.reports}/ray-*.log, and whether {absent} can reach {address}")
        _look(ray.reports)
    if code:
        raise ray.unable("Ray's head does not tell its nodes")


def _look(reports: Path) -> None:
    """Wait a moment before the command has begun; it need not begin if it is to stop."""
    if (reports / STOP).exists():
        raise node.EarlySignal
    time.sleep(_LOOK_S)


def _run_command(ray: Ray, address: str) -> tuple[int, bool]:
    """Run `python COMMAND` once; returns its exit code, and whether it was told to stop.

    Signals are passed on to it alone, and after the first it gets `save_time` to end.
    """
    program = Path(__file__).resolve().with_name("as_rank.py")
    words = [sys.executable, str(program), str(ray.reports), "all", *ray.options.command]
    received, told = _note_signals(), 0
    command = subprocess.Popen(words, env={**ray.environ, "RAY_ADDRESS": address})
    while (code := command.poll()) is None:
        now = time.monotonic()
        if not received and (ray.reports / STOP).exists():
            received.append((now, signal.SIGTERM))
        if told < len(received) and now > received[told][0] + _PASS_ON_S:
            number = received[told][1]
            command.send_signal(signal.SIGTERM if number == signal.SIGINT else number)  # INT: a traceback
            told += 1
        if received and now > received[0][0] + ray.options.save_time:
            command.kill()
        time.sleep(_LOOK_S)
    return code, bool(received)


def _note_signals() -> list[tuple[float, int]]:
    """From now on signals only become part of this list, with when they came."""
    received: list[tuple[float, int]] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: received.append((time.monotonic(), number)))
    return received


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
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
        for number in _SIGNALS:
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
        ranks.await_children(_LOOK_S)


def _write_secret(path: Path, text: str) -> None:
    """Write a file that nobody else can read, not even for a moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _client_port() -> int:
    """A free port for the server that `ray start` would else put on a fixed one, and cannot leave out."""
    for port in random.SystemRandom().sample(_CLIENT_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise meeting.UnableError("no free port for Ray", f"free some of {_CLIENT_PORTS[0]} to {_CLIENT_PORTS[-1]}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Be one node of a job's own Ray cluster.")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--cpus", type=int, default=1, help="of this node, for Ray's tasks")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--reports", type=Path, required=True, help="a folder that all nodes share, and nobody else")
    parser.add_argument("--interface", help="the network interface between the nodes")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="for the other nodes, and then for Ray")
    parser.add_argument("--save-time", type=float, default=60.0, metavar="S", help="for the command after a signal")
    parser.add_argument("--chdir", type=Path, metavar="DIR", help="where the command runs; default: here")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what `python` is to run, after --")
    parser.set_defaults(plain=True)
    options = parser.parse_args(argv)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return run_ray_node(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
