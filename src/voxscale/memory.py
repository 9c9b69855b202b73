"""How much memory this process may take: still, of what is free and what limits leave, or at most."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

_LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))  # each with its field of /proc/self/statm
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available_memory(system: Path = Path("/")) -> int:
    """Bytes. What cannot be read limits nothing; with no limit at all it is all that a machine can address."""
    return max(0, min([*_of_machine(system), *_of_groups(system), *_of_limits()], default=2**63))


def given_memory(environ: Mapping[str, str], system: Path = Path("/")) -> int:
    """Bytes that processes on this node may take at most: of the machine, its cgroups, or its SLURM job's share."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    of_groups = (_number(folder / limit) for folder, (limit, *_) in _groups(system))
    return min([machine, *(most for most in of_groups if most is not None), *_share_of_job(environ)])


def _share_of_job(environ: Mapping[str, str]) -> Iterator[int]:
    """Of a job on this node, in SLURM's MB; 0 is all that the node has."""
    if environ.get("SLURMD_NODENAME") is None:
        return
    of_node, of_cpu = (environ.get(f"SLURM_MEM_PER_{unit}", "") for unit in ("NODE", "CPU"))
    cpus = environ.get("SLURM_CPUS_ON_NODE", "")
    if of_node.isdigit() and int(of_node):
        yield int(of_node) << 20
    elif of_cpu.isdigit() and int(of_cpu) and cpus.isdigit():
        yield int(of_cpu) * int(cpus) << 20


def _of_machine(system: Path) -> Iterator[int]:
    found = _numbers(system / "proc/meminfo").get("MemAvailable:")
    if found is not None:
        yield found * 1024


def _of_groups(system: Path) -> Iterator[int]:
    for folder, names in _groups(system):
        if (left := _left_in(folder, *names)) is not None:
            yield left


def _groups(system: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, ...]]]]:
    """A job's or a container's cgroup and all above it, of either version, with the names of its files."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for number, kinds, path in (line.split(":", 2) for line in lines):
        if number == "0":
            root, names = system / "sys/fs/cgroup", _V2
        elif "memory" in kinds.split(","):
            root, names = system / "sys/fs/cgroup/memory", _V1
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield folder, names


def _left_in(folder: Path, limit: str, used: str, reclaimed: tuple[str, ...]) -> int | None:
    """What a group may still take; files that it has read are let go of when memory is short."""
    most, taken = _number(folder / limit), _number(folder / used)
    if most is None or taken is None:
        return None
    numbers = _numbers(folder / "memory.stat")
    return most - taken + sum(numbers.get(name, 0) for name in reclaimed)


def _of_limits() -> Iterator[int]:
    pages = [int(word) for word in Path("/proc/self/statm").read_text().split()]
    for limit, field in _LIMITS:
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            yield most - pages[field] * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group in sight, or `max`
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
