"""One node of a job that has a Ray cluster of its own: start Ray here, and on the first node run the command with it.

    srun --ntasks-per-node 1 python ray_node.py --nodes 2 --cpus 8 --gpus 2 --reports DIR -- driver.py ARGUMENTS

Needs nothing but the standard library and the interpreter's own ray: copies of this file and those that it imports, in
the run folder, also serve interpreters and images in which voxscale is not installed. The command runs once, when Ray
has all nodes, with RAY_ADDRESS set; its output is kept in DIR/rank-0000.log, what each Ray says in DIR/ray-NNNN.log,
and how each node ended in DIR/node-NNNN.end.json, as node.py does.

Only who has the token can use the cluster. It is in a file that its owner alone can read: in DIR until all nodes have
joined, then in a folder of each node that is gone with its Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from voxscale.launch import meeting, node, ranks, ray_process
else:  # a copy, beside copies of these
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import meeting
    import node
    import ranks
    import ray_process

STOP = "stop"  # a file in DIR that tells the command alone to end: SLURM would tell all of Ray
_TOKEN, _ADDRESS, _READY, _DONE = "ray-token", "ray.json", "ray-ready.json", "ray-done.json"  # for the other nodes
_PASS_ON_S = 0.3  # SLURM signals the command itself; one that ends at once must not be hit again while it does


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
    with ray_process.own_folder() as folder:
        ray = ray_process.Ray(options, place, folder)
        return _lead(ray) if index == 0 else _follow(ray)


def _lead(ray: ray_process.Ray) -> Ended:
    """On the first node: start the head, wait until Ray has all nodes, run the command, tell the others."""
    secret = secrets.token_hex(32)
    ray_process.write_secret(ray.token, secret)
    try:
        if ray.place.nodes > 1:
            ray_process.write_secret(ray.reports / _TOKEN, secret)
        ray.start(
            "--head", "--port=0", "--include-dashboard=false", f"--ray-client-server-port={ray_process.client_port()}"
        )
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


def _follow(ray: ray_process.Ray) -> Ended:
    """On another node: join the head's cluster, and leave it when the command is over."""
    reports, deadline = ray.reports, time.monotonic() + ray.options.wait
    while not ((reports / _ADDRESS).exists() and (reports / _TOKEN).exists()):  # it is gone if the head gives up
        if meeting.end_file(reports, 0).exists():
            raise meeting.UnableError("", "")  # the first node says why
        if time.monotonic() > deadline:
            raise meeting.UnableError(f"Ray's head did not start within {ray.options.wait:.0f} s", f"see {reports}")
        _look(reports)
    ray_process.write_secret(ray.token, (reports / _TOKEN).read_text())
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
        time.sleep(ray_process.LOOK_S)
    stopped = (reports / _DONE).exists() and json.loads((reports / _DONE).read_text())["stopped"]
    return Ended(stopped=bool(received) or stopped)


def _head_address(ray: ray_process.Ray) -> str:
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


def _await_nodes(ray: ray_process.Ray, address: str) -> None:
    """Wait until Ray has every node of the job. Raises naming those that it does not get."""
    nodes, deadline = ray.place.nodes, time.monotonic() + ray.options.wait
    seen = ray.folder / "seen"
    watcher = ray.run(["-c", ray_process.WATCH_PROGRAM, address, str(nodes)], seen)
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
    time.sleep(ray_process.LOOK_S)


def _run_command(ray: ray_process.Ray, address: str) -> tuple[int, bool]:
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
        time.sleep(ray_process.LOOK_S)
    return code, bool(received)


def _note_signals() -> list[tuple[float, int]]:
    """From now on signals only become part of this list, with when they came."""
    received: list[tuple[float, int]] = []
    for number in ray_process.SIGNALS:
        signal.signal(number, lambda number, frame: received.append((time.monotonic(), number)))
    return received


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
