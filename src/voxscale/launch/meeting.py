"""Where the nodes of a job meet: each publishes its arrival in a folder that all share, and waits for the others.

Needs the standard library alone: copied into run folders beside node.py, it also serves interpreters and images in
which voxscale is not installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import struct
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
BACKLOG = 4096
_REACH_S = 60.0  # for the first node to answer, which has come: as long as torch itself would try


@dataclass(frozen=True)
class Place:
    """Where this node stands among those of the job, and where they all meet."""

    index: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"  # an image may not know localhost
    endpoint: str = "127.0.0.1:0"
    run_id: str = ""
    listening: socket.socket | None = None  # at the endpoint, on the first node: nobody else gets its port


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
    """Publish that this node has come and wait for the others. Raises naming those that do not come, or a first node
    that cannot be reached.

    Which node this is, and what they are called, is SLURM's word unless it is given.
    """
    environ = os.environ
    index = slurm_index() if index is None else index
    names = list(hosts) or expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    names = names if len(names) == nodes else [f"node {number}" for number in range(nodes)]
    peers = [name for number, name in enumerate(names) if number != index]
    address = _address_of(interface) if interface else address_towards(peers)
    arrival: dict[str, Any] = {"node": names[index], "host": socket.gethostname(), "address": address}
    listening = None
    if index == 0:
        listening = socket.create_server((address, 0), backlog=BACKLOG)
        arrival.update(port=listening.getsockname()[1], run_id=uuid.uuid4().hex)
    write_whole(arrival_file(reports, index), arrival)
    interface = interface or next((name for name, its in interfaces().items() if its == address), None)
    _use_interface(interface)
    _await_all(reports, names, index, patience_s)
    head = json.loads(arrival_file(reports, 0).read_text())
    if index != 0:
        _refuse_unreachable(reports, head, interface, min(patience_s, _REACH_S))
    return Place(index, nodes, address, f"{head['address']}:{head['port']}", head["run_id"], listening)


def _await_all(reports: Path, names: Sequence[str], index: int, patience_s: float) -> None:
    """Wait until every node has come. The first that is here says after a while for whom."""
    began, told, numbers = time.monotonic(), False, range(len(names))
    while missing := [number for number in numbers if not arrival_file(reports, number).exists()]:
        waited_s = time.monotonic() - began
        absent = ", ".join(names[number] for number in missing)
        here = f"{len(names) - len(missing)} of {len(names)} nodes are here"
        if waited_s > patience_s:
            raise UnableError(
                f"{absent} did not come within {patience_s:.0f} s; {here}",
                f"see whether {absent} can reach {reports}, and start there: srun -w NODE ls DIR",
            )
        if waited_s > patience_s / 20 and not told:
            told = True
            if index == min(set(numbers) - set(missing)):
                text = f"warning: {names[index]} waits for {absent}, at most {patience_s:.0f} s; {here}"
                print(text, file=sys.stderr, flush=True)
        time.sleep(0.05)
    _leave_it_to_others(reports, len(names))


def _leave_it_to_others(reports: Path, nodes: int) -> None:
    """Raise nothing to be said where another node says why it could not start."""
    if any(end_file(reports, number).exists() for number in range(nodes)):
        raise UnableError("", "")


def _refuse_unreachable(reports: Path, head: dict[str, Any], interface: str | None, patience_s: float) -> None:
    """The first node listens from its arrival on; torch would only say after a minute that it does not answer."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((head["address"], head["port"]), max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            _leave_it_to_others(reports, 1)
            if time.monotonic() > deadline:
                raise unreachable(f"{head['address']}:{head['port']}", f"{head['node']}, {error}", interface) from None
        time.sleep(0.2)


def unreachable(endpoint: str, why: str, interface: str | None) -> UnableError:
    """What a node says that does not get into contact with the first."""
    return UnableError(
        f"cannot reach the first node at {endpoint}{f' over {interface}' if interface else ''}: {why}",
        "set `interface` in the site to a network that all nodes share, and try it: voxscale site check",
    )


@contextlib.contextmanager
def apart_told(place: Place, watched: Path | None) -> Iterator[None]:
    """Say that the nodes do not meet. Once ranks have begun they had met, and others tell of the node that was lost."""
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        yield
    except RendezvousError as error:
        if watched is not None and list(watched.glob("rank-*.log")):
            raise
        raise unreachable(place.endpoint, str(error), os.environ.get(INTERFACES[0])) from error


def bind_stores(place: Place) -> None:
    """Let the stores of torch's agent listen at this node's address alone: they ask for no password, and rendezvous
    unpickles what they hold. The first node's takes over what listens at the endpoint."""
    import torch.distributed
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    library: Any = torch.distributed
    if hasattr(library.TCPStore, "place"):  # by an earlier start in this process
        library.TCPStore.place = place
        return
    if "master_listen_fd" not in (library.TCPStore.__init__.__doc__ or ""):  # an older torch, which binds the port anew
        if place.listening is not None:
            place.listening.close()
        return

    class BoundStore(library.TCPStore):  # type: ignore[misc]
        place: Place

        def __init__(self, host_name: str, port: int, **options: Any) -> None:
            if options.get("is_master"):
                listening = _listen(self.place, port)
                port = listening.getsockname()[1]
                options["master_listen_fd"] = listening.detach()
            super().__init__(host_name, port, **options)

    BoundStore.place = place
    library.TCPStore = BoundStore
    c10d_rendezvous_backend.TCPStore = BoundStore  # type: ignore[assignment, attr-defined]


def _listen(place: Place, port: int) -> socket.socket:
    kept = place.listening
    if kept is not None and kept.fileno() >= 0 and kept.getsockname()[1] == port:
        return kept
    return socket.create_server((place.address, port), backlog=BACKLOG)


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


def _use_interface(name: str | None) -> None:
    """Tell gloo and NCCL where the other nodes are, unless the user has."""
    if name and name != "lo":
        for variable in INTERFACES:
            os.environ.setdefault(variable, name)


class UnableError(Exception):
    """This node cannot start its ranks: why, and how to mend it."""


def slurm_index() -> int:
    return int(os.environ.get("SLURM_NODEID", "0"))


def arrival_file(reports: Path, index: int) -> Path:
    return reports / f"node-{index:04d}.json"


def end_file(reports: Path, index: int) -> Path:
    return reports / f"node-{index:04d}.end.json"


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a file that appears whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(content))
    aside.replace(path)
