"""No way from a file we read, or from a port, to code."""

from __future__ import annotations

import ast
import ipaddress
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from conftest import REPOSITORY
from voxscale.launch.meeting import interfaces

SOURCES = sorted((REPOSITORY / "src").rglob("*.py"))
BANNED_IMPORTS = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "http.server", "socketserver", "wsgiref"}
SAFE_FROM = {"torch": "2.11", "monai": "1.6.1", "ray": "2.56"}  # older ones have known holes
BANNED_READERS = {  # they make of a file what it asks for, code included
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load", "torch.jit.load", "torch.hub.load"),
    *("blosc2.open", "blosc2.load_array", "blosc2.load_tensor", "blosc2.from_cframe", "blosc2.open_lazyarray"),
}
BANNED_CALLS = {"eval", "exec", "extractall", "all_gather_object", "broadcast_object_list", "system", "popen"}


def names_called(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", ""), call)
        for call in calls
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_pickle_no_eval_no_shell(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & BANNED_IMPORTS
    for name, call in names_called(tree):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name == "eval":  # Module.eval() takes nothing, the built-in takes code
            assert isinstance(call.func, ast.Attribute)
            assert not call.args
            continue
        assert name not in BANNED_CALLS
        assert keywords.get("shell") != "True"
        assert keywords.get("weights_only") != "False"
        assert keywords.get("allow_pickle") != "True"
        assert ast.unparse(call.func) not in BANNED_READERS


TORCHRUN = {"ranks.py": "torch.distributed.launcher", "meeting.py": "torch.distributed.elastic.rendezvous"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_torch_distributed_lives_in_parallel_alone(path: Path) -> None:
    if path.name == "parallel.py":
        assert "import torch.distributed" in path.read_text()
    elif path.name in TORCHRUN:
        assert TORCHRUN[path.name] in path.read_text()
        assert not {name for name, _ in names_called(ast.parse(path.read_text()))} & {"init_process_group", "new_group"}
    else:
        imported = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [line for line in imported if "torch.distributed" in line]


@pytest.mark.parametrize("name", ["node", "meeting", "ranks", "as_rank", "ray_node", "ray_process"])
def test_what_nodes_run_needs_nothing_of_voxscale_but_each_other(name: str) -> None:
    text = (REPOSITORY / "src" / "voxscale" / "launch" / f"{name}.py").read_text()
    imported = re.findall(r"^\s*(?:from (voxscale\S*) import (.*)|import (voxscale\S*))$", text, re.M)
    names = {each for package, found, _ in imported for each in found.split(", ") if package == "voxscale.launch"}
    assert names <= {"node", "meeting", "ranks", "as_rank", "ray_process"}
    assert all(package == "voxscale.launch" for package, _, _ in imported)


def test_tests_mirror_sources() -> None:
    """A test folder for every room."""
    rooms = {path.parent.name for path in SOURCES if path.parent.parent.name == "voxscale"} - {"formats"}
    assert rooms <= {path.name for path in (REPOSITORY / "tests").iterdir()}


def test_versions_with_known_holes_are_not_taken() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    found = set()
    for requirement in map(Requirement, lines):
        if lowest := SAFE_FROM.get(requirement.name):
            found.add(requirement.name)
            bounds = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
            assert max(bounds) >= Version(lowest), requirement
    assert found == SAFE_FROM.keys()


@pytest.mark.ranks
def test_ranks_of_one_machine_listen_to_it_alone(
    session_environ: dict[str, str], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Rendezvous and gloo ask for no password."""
    run = tmp_path / "run"
    words = ["train", write_config(train__epochs=500), "--devices", 2, "--run", run]
    with subprocess.Popen([sys.executable, "-m", "voxscale", *map(str, words)], env=session_environ) as launcher:
        deadline = time.monotonic() + 60
        while not (run / "events.jsonl").exists() or '"train"' not in (run / "events.jsonl").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes = [launcher.pid, *children_of(launcher.pid)]
        addresses = [address for pid in processes for address in listening_at(pid)]
        launcher.terminate()
    assert len(processes) >= 3
    assert len(addresses) >= 3
    assert all(address.is_loopback for address in addresses), addresses


RANK = """
import sys, time
from pathlib import Path
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
Path(sys.argv[1], str(dist.get_rank())).touch()
time.sleep(60)
"""


@pytest.mark.ranks
def test_ranks_of_a_job_listen_on_its_interface_alone(tmp_path: Path) -> None:
    name, address = next(((name, its) for name, its in interfaces().items() if name != "lo"), ("lo", "127.0.0.1"))
    (tmp_path / "rank.py").write_text(RANK)
    node = [sys.executable, str(REPOSITORY / "src" / "voxscale" / "launch" / "node.py"), "--nodes", "2"]
    where = ["--hosts", "localhost,localhost", "--interface", name, "--reports", str(tmp_path / "reports")]
    command = ["--", str(tmp_path / "rank.py"), str(tmp_path)]
    nodes = [subprocess.Popen([*node, "--index", str(index), *where, *command]) for index in range(2)]
    deadline = time.monotonic() + 60
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [pid for each in nodes for pid in (each.pid, *children_of(each.pid))]
    addresses = [str(found) for pid in pids for found in listening_at(pid)]
    for each in nodes:
        each.terminate()
    for each in nodes:
        each.wait(30)
    assert len(pids) >= 4
    assert len(addresses) >= 3
    assert set(addresses) == {address}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def listening_at(pid: int) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses at which a process takes connections."""
    links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {link.name for link in links}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                address = words[1].partition(":")[0]
                parts = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                yield ipaddress.ip_address(b"".join(parts))
