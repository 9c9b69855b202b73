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
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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
    _use_interface(interface or next((name for name, its in interfaces().items() if its == address), None))
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


def _use_interface(name: str | None) -> None:
    """Tell gloo and NCCL where the other nodes are, unless the user has."""
    if name and name != "lo":
        for variable in INTERFACES:
            os.environ.setdefault(variable, name)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


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
