"""What memory is left to a process: the least of what machine, cgroups and limits leave it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from voxscale.memory import available_memory, given_memory

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.stat": "inactive_file 1\n"}, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/job_7/step_0\n",
                "sys/fs/cgroup/job_7/step_0/memory.max": "max\n",
                "sys/fs/cgroup/job_7/step_0/memory.current": "5\n",
                "sys/fs/cgroup/job_7/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/job_7/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/job_7/memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
            },
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/7\n0::/\n",
                "sys/fs/cgroup/memory/docker/7/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/docker/7/memory.usage_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            },
            0,
        ),
    ],
    ids=["no cgroup", "no limit", "above, version 2", "overdrawn, version 1"],
)
def test_the_least_counts(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    machine = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
    assert available_memory(write(tmp_path, {**machine, **files})) == expected


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA], ids=["all", "data"])
def test_a_limit_of_the_process_counts(limit: int) -> None:
    code = "from voxscale.memory import available_memory; held = bytearray(2**28); print(available_memory())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(limit, (GIB, GIB)),
    )
    assert GIB - 2**29 < int(done.stdout) < GIB - 2**28


def test_here_there_is_some() -> None:
    assert 0 < available_memory() < 2**50


MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": GIB}),
        ("0::/../outside\n", {"memory.max": GIB}),
        ("0::/\n", {"memory.max": GIB}),
        ("4:cpu:/a\n3:memory:/a/b\n", {"memory/a/b/memory.limit_in_bytes": GIB, "a/memory.max": 1}),
        ("3:memory:/seen/outside\n", {"memory/memory.limit_in_bytes": GIB}),
        ("3:memory:/\n0::/\n", {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory.max": "max"}),
    ],
    ids=["above", "outside", "container", "version 1", "version 1, container", "no limit"],
)
def test_a_container_has_what_it_was_given(groups: str, files: dict[str, object], tmp_path: Path) -> None:
    texts = {f"sys/fs/cgroup/{name}": f"{content}\n" for name, content in files.items()}
    system = write(tmp_path, {"proc/self/cgroup": groups, **texts})
    assert given_memory({}, system) == (GIB if GIB in files.values() else MACHINE)


def test_the_share_of_a_job_counts_on_its_nodes(tmp_path: Path) -> None:
    node = {"SLURMD_NODENAME": "n1", "SLURM_CPUS_ON_NODE": "4"}
    assert given_memory({"SLURM_MEM_PER_NODE": "512"}, tmp_path) == MACHINE, "a shell of salloc is not on its nodes"
    assert given_memory({**node, "SLURM_MEM_PER_NODE": "512"}, tmp_path) == GIB // 2
    assert given_memory({**node, "SLURM_MEM_PER_CPU": "64"}, tmp_path) == GIB // 4
    assert given_memory({**node, "SLURM_MEM_PER_NODE": "0"}, tmp_path) == MACHINE, "all of it"
    assert 0 < given_memory(os.environ) <= MACHINE
