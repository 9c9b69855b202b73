"""One node of a job: meet the other nodes, then start this node's ranks as torchrun does.

    srun --ntasks-per-node 1 python node.py --nodes 2 --devices 4 --reports DIR -- -m voxscale.train.worker RUN …
    srun --ntasks-per-node 1 python node.py --nodes 2 --devices 4 --reports DIR -- script.py ARGUMENTS

Needs nothing but the standard library and torch: copies of this file and as_rank.py in the run folder also serve
interpreters and images in which voxscale is not installed. Each node publishes its arrival in DIR, which all nodes
share, so that one that does not come is named; the first node's arrival carries the address and the free port of the
rendezvous. Each rank's output is kept in DIR/rank-NNNN.log, and how each node ended in DIR/node-NNNN.end.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOPPED = 75  # the exit code of ranks that saved their state and can be continued
_GRACE_S = 10.0  # for ranks to notice by themselves that others have failed
_PASS_ON_S = 0.3  # SLURM signals ranks itself; one that ends at once must not be hit again while it does
_LOOK_S = 0.5  # between looks at what the ranks have reported
_FLUSH_S = 5.0  # for the last lines of ranks to reach their logs


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended that should not have."""

    rank: int
    exit_code: int
    time_s: float = 0.0

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"rank {self.rank} was killed by signal {-self.exit_code}"
        return f"rank {self.rank} ended with exit code {self.exit_code}"


@dataclass(frozen=True)
class Place:
    """Where this node stands among those of the job, and where they all meet."""

    index: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"  # an image may not know localhost
    endpoint: str = "127.0.0.1:0"
    run_id: str = ""


def expand_nodes(text: str) -> list[str]:
    """The names in a node list as SLURM writes it: `gpu[01-03,7],login1` is gpu01 gpu02 gpu03 gpu7 login1."""
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            numbers = [literal] if literal else [number for item in ranges.split(",") for number in _numbers(item)]
            expanded = [start + number for start in expanded for number in numbers]
        names.extend(expanded)
    return names


def _numbers(item: str) -> list[str]:
    first, dash, last = item.partition("-")
    if not dash:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def meet(
    reports: Path,
    *,
    nodes: int,
    interface: str | None,
    patience_s: float,
    index: int | None = None,
    hosts: Sequence[str] = (),
) -> Place:
    """Publish that this node has come and wait for the others. Raises naming those that do not come.

    Which node this is, and what they are called, is SLURM's word unless it is given.
    """
    environ = os.environ
    index = slurm_index() if index is None else index
    names = list(hosts) or expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    names = names if len(names) == nodes else [f"node {number}" for number in range(nodes)]
    peers = [name for number, name in enumerate(names) if number != index]
    address = _address_of(interface) if interface else address_towards(peers)
    arrival: dict[str, Any] = {"node": names[index], "host": socket.gethostname(), "address": address}
    if index == 0:
        arrival.update(port=_free_port(address), run_id=uuid.uuid4().hex)
    write_whole(arrival_file(reports, index), arrival)
    name = interface or next((name for name, its in interfaces().items() if its == address), None)
    _use_interface(name if name != "lo" else None)
    deadline = time.monotonic() + patience_s
    while missing := [number for number in range(nodes) if not arrival_file(reports, number).exists()]:
        if time.monotonic() > deadline:
            absent = ", ".join(names[number] for number in missing)
            raise UnableError(
                f"{absent} did not come within {patience_s:.0f} s; {nodes - len(missing)} of {nodes} nodes are here",
                f"see whether {absent} can reach {reports}, and start there: srun -w NODE ls DIR",
            )
        time.sleep(0.05)
    if any(end_file(reports, number).exists() for number in range(nodes)):
        raise UnableError("", "")  # another node says why
    head = json.loads(arrival_file(reports, 0).read_text())
    return Place(index, nodes, address, f"{head['address']}:{head['port']}", head["run_id"])


def address_towards(peers: Sequence[str]) -> str:
    """This node's address on the way to another one; its own name may only lead to the loopback."""
    for peer in peers:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # nothing is sent
            return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def interfaces() -> dict[str, str]:
    """The network interfaces that have an IPv4 address, with it."""
    ask_address = 0x8915  # SIOCGIFADDR
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, ask_address, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _address_of(interface: str) -> str:
    known = interfaces()
    if interface not in known:
        raise UnableError(
            f"no interface {interface} with an address; found {', '.join(known)}",
            "set `interface` in the site to one that every node has, or leave it out",
        )
    return known[interface]


def _bind_stores(address: str) -> None:
    """Let the stores of torch's agent listen at this address alone: they ask for no password, and rendezvous unpickles
    what they hold."""
    import torch.distributed
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    library: Any = torch.distributed
    if hasattr(library.TCPStore, "bound_to"):  # by an earlier start in this process
        library.TCPStore.bound_to = address
    if "master_listen_fd" not in (library.TCPStore.__init__.__doc__ or ""):
        return  # done, or an older torch

    class BoundStore(library.TCPStore):  # type: ignore[misc]
        bound_to = address

        def __init__(self, host_name: str, port: int, **options: Any) -> None:
            if options.get("is_master"):
                listening = socket.create_server((self.bound_to, port), backlog=4096)
                port = listening.getsockname()[1]
                options["master_listen_fd"] = listening.detach()
            super().__init__(host_name, port, **options)

    library.TCPStore = BoundStore
    c10d_rendezvous_backend.TCPStore = BoundStore  # type: ignore[assignment, attr-defined]


def _use_interface(name: str | None) -> None:
    """Tell gloo and NCCL where the other ranks are, unless the user has."""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def start_ranks(
    arguments: Sequence[str],
    devices: int,
    *,
    place: Place,
    save_time_s: float,
    watched: Path | None = None,
) -> tuple[list[RankFailure], list[signal.Signals]]:
    """Run `python ARGUMENTS` as this node's ranks under torch's elastic agent, and wait for them.

    Signals are passed on to the ranks, which get `save_time_s` to save. Where another node has written a failure to
    `watched`, the ranks here are ended too. Returns the ranks that failed first, and the signals received.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a node that ends first is no news to the others
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    wanted: dict[str, Any] = {
        "min_nodes": place.nodes,
        "max_nodes": place.nodes,
        "nproc_per_node": devices,
        "run_id": place.run_id or uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": place.endpoint,
        "rdzv_configs": {"is_host": place.index == 0} if place.nodes > 1 else {},
        "local_addr": place.address,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "signals_to_handle": "SIGHUP,SIGQUIT",
        "shutdown_timeout": int(save_time_s),
    }
    _bind_stores(place.address)
    if place.nodes == 1:
        _use_interface("lo")
    known = LaunchConfig.__dataclass_fields__  # an older torch has fewer
    logging.disable(logging.ERROR)  # what went wrong is ours to say
    failures: list[RankFailure] = []
    with _signals_passed_on(save_time_s) as received, _agent_folder() as logs, _watching(watched, logs):
        if hasattr(multiprocessing, "DefaultLogsSpecs"):
            wanted["logs_specs"] = multiprocessing.DefaultLogsSpecs(log_dir=str(logs))
        config = LaunchConfig(**{name: value for name, value in wanted.items() if name in known})
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            failures = [RankFailure(rank, each.exitcode, each.timestamp) for rank, each in error.failures.items()]
        finally:
            logging.disable(logging.NOTSET)
    return failures, received


@contextlib.contextmanager
def _signals_passed_on(save_time_s: float) -> Iterator[list[signal.Signals]]:
    """Pass signals to the child processes, however often they come; yields the list of those received.

    The agent's own handlers raise, so a second signal would cut short its waiting for the first one's work.
    """
    received: list[signal.Signals] = []
    os.environ["VOXSCALE_PARENT"] = str(os.getpid())  # a rank that starts when this process is gone already is to know

    def after(seconds: float, number: int) -> threading.Timer:
        timer = threading.Timer(seconds, signal_children, [number])
        timer.daemon = True
        return timer

    patience = after(save_time_s, signal.SIGKILL)

    def pass_on(number: int, frame: Any) -> None:
        received.append(signal.Signals(number))
        if len(received) == 1:
            patience.start()
        told = signal.SIGTERM if number == signal.SIGINT else number  # Python answers SIGINT with a traceback
        after(_PASS_ON_S, told).start()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield received
    finally:
        os.environ.pop("VOXSCALE_PARENT")
        patience.cancel()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if received else handler)


@contextlib.contextmanager
def _agent_folder() -> Iterator[Path]:
    """For what torch's agent writes about its ranks; by itself it would leave a folder behind each time.

    It is locked while it is used, and those of killed agents go.
    """
    for left in Path(tempfile.gettempdir()).glob("vx-agent-*"):
        with contextlib.suppress(OSError), (left / "held").open("r+") as held:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="vx-agent-"))
    try:
        with (folder / "held").open("w") as held:
            fcntl.lockf(held, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _watching(reports: Path | None, logs: Path) -> Iterator[None]:
    """End the ranks here soon after those of another node have failed; libraries may wait half an hour for them.

    One that others have waited for in vain is killed: it may not even hear a signal.
    """
    done = threading.Event()

    def watch() -> None:
        while reports is not None and not done.wait(_LOOK_S):
            if _is_one_silent(reports):
                if not done.wait(_LOOK_S):
                    signal_children(signal.SIGKILL)
                return
            ends = [json.loads(path.read_text()) for path in reports.glob("node-*.end.json")]
            if any((end["failures"] or "unable" in end) and not end["stopped"] for end in ends):
                for number in (signal.SIGTERM, signal.SIGKILL):
                    if _outlast(_GRACE_S, done):
                        signal_children(number)
                if not done.wait(_FLUSH_S):  # no rank is left, and the agent would wait five minutes for the other node
                    shutil.rmtree(logs, ignore_errors=True)
                    os._exit(1)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _is_one_silent(reports: Path) -> bool:
    """Whether ranks have reported that another did not answer in time."""
    return any(
        json.loads(path.read_text()).get("code") == "timed_out" for path in reports.glob("error-rank-[0-9]*.json")
    )


def _outlast(patience_s: float, done: threading.Event) -> bool:
    """Whether there are children for so long, and nothing is done."""
    deadline = time.monotonic() + patience_s
    while living_children() and not done.wait(0.5):
        if time.monotonic() > deadline:
            return True
    return False


def signal_children(number: int) -> None:
    for child in living_children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def living_children() -> list[int]:
    """Those that live: ended ones stay listed until somebody asks how they ended."""
    own = os.getpid()
    return [child for child in map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split()) if _lives(child)]


def _lives(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def adopt_orphans() -> None:
    """What copies the ranks' output becomes a child of this process, which can then wait for the last lines."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)


def await_children(patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(ChildProcessError):  # there are no more
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def run_node(options: argparse.Namespace) -> int:
    """Start this node's ranks, wait for them, and leave word of how they ended."""
    reports: Path = options.reports
    reports.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    index = _index_of(options)
    if index == 0:
        (reports / "step").write_text(os.environ.get("SLURM_STEP_ID", ""))
    failures: list[RankFailure] = []
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, raise_early)
    unable: tuple[str, ...] = ()
    try:
        refuse_unfit(options)
        failures, received = _start(options, reports)
        await_children(_FLUSH_S)
        stopped = bool(received) or bool(failures and all(failure.exit_code == STOPPED for failure in failures))
    except EarlySignal:  # the ranks had not begun
        stopped = True
    except UnableError as error:
        stopped, unable = False, error.args
        if unable[0]:
            print("error: {}: {}\n  fix: {}".format(socket.gethostname(), *unable), file=sys.stderr, flush=True)
            failures = [RankFailure(-1, 4)]
    if stopped:
        signal_children(signal.SIGKILL)  # what the ranks left behind
    end = {
        "failures": [unable[0] if unable else str(failure) for failure in failures],
        "codes": [failure.exit_code for failure in failures],
        "ranks": [failure.rank for failure in failures],
        "times": [failure.time_s for failure in failures],
        "stopped": stopped,
        "wall_s": round(time.monotonic() - began, 3),
        **(dict(zip(("unable", "fix"), unable)) if unable else {}),  # noqa: B905 since Python 3.10
    }
    write_whole(end_file(reports, index), end)
    if unable:
        # the others wait for it, then find the end
        write_whole(arrival_file(reports, index), {"node": socket.gethostname()})
    return 4 if unable else 1 if failures and not stopped else 0


def refuse_unfit(options: argparse.Namespace) -> None:
    """What keeps this node from starting the command, as far as it can be told before."""
    folder, script = options.chdir or Path(), options.command[0]
    fix = "every node has to have the script, its folder, and torch"
    if not folder.is_dir():
        raise UnableError(f"no folder {folder}", fix)
    if not script.startswith("-") and not (folder / script).is_file():
        raise UnableError(f"no script {script}", fix)
    if not options.plain and importlib.util.find_spec("torch") is None:
        raise UnableError(f"no torch in {sys.executable}", fix)


class UnableError(Exception):
    """This node cannot start its ranks: why, and how to mend it."""


class EarlySignal(BaseException):
    """A signal came before there were ranks to pass it on to."""


def raise_early(number: int, frame: Any) -> None:
    raise EarlySignal


def _start(options: argparse.Namespace, reports: Path) -> tuple[list[RankFailure], list[signal.Signals]]:
    place = Place()
    if options.chdir is not None:
        os.chdir(options.chdir)
    if options.nodes > 1:
        place = meet(
            reports,
            nodes=options.nodes,
            interface=options.interface,
            patience_s=options.wait,
            index=_index_of(options),
            hosts=options.hosts.split(",") if options.hosts else (),
        )
    else:
        write_whole(arrival_file(reports, 0), {"node": socket.gethostname(), "host": socket.gethostname()})
    program = Path(__file__).resolve().with_name("as_rank.py")
    as_rank = [str(program), str(reports), options.echo, *options.command]
    if options.plain:
        return _start_one(as_rank, options.save_time, {})
    if options.nodes == options.devices == 1:  # nobody to meet, and torch's agent takes seconds to import
        return _start_one(as_rank, options.save_time, _variables_of_one())
    return start_ranks(as_rank, options.devices, place=place, save_time_s=options.save_time, watched=reports)


def _start_one(
    as_rank: Sequence[str], save_time_s: float, added: dict[str, str]
) -> tuple[list[RankFailure], list[signal.Signals]]:
    """Run the command once, without torch's agent."""
    with _signals_passed_on(save_time_s) as received:
        code = subprocess.run([sys.executable, *as_rank], env={**os.environ, **added}, check=False).returncode
    return ([RankFailure(0, code)] if code else []), received


def _variables_of_one() -> dict[str, str]:
    """What torchrun sets for a world of one rank. At port 0 its store takes any that is free; nobody else needs it."""
    ranks = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
    ones = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(ranks, "0"),
        **dict.fromkeys(("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
        **dict.fromkeys(ones, "1"),
        "MASTER_ADDR": "127.0.0.1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def slurm_index() -> int:
    return int(os.environ.get("SLURM_NODEID", "0"))


def _index_of(options: argparse.Namespace) -> int:
    if options.nodes == 1:
        return 0
    return slurm_index() if options.index is None else int(options.index)


def arrival_file(reports: Path, index: int) -> Path:
    return reports / f"node-{index:04d}.json"


def end_file(reports: Path, index: int) -> Path:
    return reports / f"node-{index:04d}.end.json"


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a file that appears whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Start the ranks of one node of a job.")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="ranks on this node")
    parser.add_argument("--index", type=int, help="which of the nodes this is; default: as SLURM says")
    parser.add_argument("--hosts", help="the nodes' names, with commas; default: as SLURM says")
    parser.add_argument("--reports", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--interface", help="the network interface between the nodes")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="for the other nodes")
    parser.add_argument("--save-time", type=float, default=60.0, metavar="S", help="for ranks to save after a signal")
    parser.add_argument("--echo", choices=("all", "first"), default="all", help="whose output is shown")
    parser.add_argument("--chdir", type=Path, metavar="DIR", help="where the command runs; default: here")
    parser.add_argument("--plain", action="store_true", help="run the command once, without torchrun")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what `python` is to run, after --")
    options = parser.parse_args(argv)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return run_node(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
