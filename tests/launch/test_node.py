"""What each node of a job runs, apart from a scheduler: node lists, meeting, ranks and their ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import REPOSITORY
from lab.slurm import SlurmLab
from voxscale.errors import InfrastructureError, LostContactError, OutOfMemoryError
from voxscale.files import write_json
from voxscale.launch.meeting import (
    Place,
    UnableError,
    _listen,
    address_towards,
    arrival_file,
    expand_nodes,
    interfaces,
    meet,
    write_whole,
)
from voxscale.launch.outcome import judge, node_failures, unsaid
from voxscale.launch.ranks import _agent_folder, start_ranks
from voxscale.launch.ray_run import are_lost
from voxscale.plan.plan import Plan
from voxscale.runs import RunFolder, error_file

NODE = REPOSITORY / "src" / "voxscale" / "launch" / "node.py"


def test_node_lists_by_example() -> None:
    assert expand_nodes("gpu[01-03,7],login1") == ["gpu01", "gpu02", "gpu03", "gpu7", "login1"]
    assert expand_nodes("rack[1-2]n[08-10]x") == [f"rack{r}n{n}x" for r in (1, 2) for n in ("08", "09", "10")]
    assert expand_nodes("c-1-2,c-1-3") == ["c-1-2", "c-1-3"]
    assert expand_nodes("") == []


names = st.from_regex(r"[a-z]{1,3}-?", fullmatch=True)
ranges = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 5), st.integers(1, 4)).map(
        lambda pair: f"{pair[0]:0{pair[2]}d}" + (f"-{pair[0] + pair[1]:0{pair[2]}d}" if pair[1] else "")
    ),
    min_size=1,
    max_size=3,
)
lists = st.lists(st.tuples(names, ranges).map(lambda part: f"{part[0]}[{','.join(part[1])}]"), min_size=1, max_size=3)


@pytest.mark.slurm
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=lists)
def test_node_lists_as_slurm_itself_expands_them(slurm: SlurmLab, parts: list[str]) -> None:
    text = ",".join(parts)
    assert expand_nodes(text) == slurm.run("scontrol", "show", "hostnames", text).stdout.split()


def test_the_address_is_one_that_others_can_reach() -> None:
    assert address_towards(["127.0.0.1"]) == "127.0.0.1"
    assert address_towards(["no-such-host.invalid"])
    assert interfaces()["lo"] == "127.0.0.1"


def start(index: int, nodes: int, reports: Path, *command: str, wait: float = 20) -> subprocess.Popen[str]:
    environ = {**os.environ, "SLURM_NODEID": str(index), "SLURM_STEP_NODELIST": f"localhost[1-{nodes}]"}
    options = [
        "--nodes",
        str(nodes),
        "--devices",
        "1",
        "--reports",
        str(reports),
        "--wait",
        str(wait),
        "--interface",
        "lo",
    ]
    words = [sys.executable, str(NODE), *options, "--", *command]
    return subprocess.Popen(words, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    first = start(0, 3, tmp_path, "-c", "pass", wait=1.0)
    _, err = first.communicate(timeout=30)
    assert first.returncode == 4
    warning, error, fix = err.splitlines()
    assert warning == "warning: localhost1 waits for localhost2, localhost3, at most 1 s; 1 of 3 nodes are here"
    assert error.endswith(": localhost2, localhost3 did not come within 1 s; 1 of 3 nodes are here")
    assert fix.startswith("  fix: ")


def test_a_first_node_that_cannot_be_reached_is_named_with_the_way_there(tmp_path: Path) -> None:
    """It has come, but a firewall is between, or it is looked for in another network."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    head = {"node": "localhost1", "host": "localhost", "address": "127.0.0.1", "port": port, "run_id": "r"}
    write_whole(arrival_file(tmp_path, 0), head)
    second = start(1, 2, tmp_path, "-c", "pass", wait=0.3)
    _, err = second.communicate(timeout=30)
    what = f"cannot reach the first node at 127.0.0.1:{port} over lo: localhost1, [Errno 111] Connection refused"
    assert (second.returncode, what in err, "`interface`" in err) == (4, True, True), err
    said = unsaid(tmp_path, 2)
    assert isinstance(said, InfrastructureError)
    assert said.message == f"{socket.gethostname()}: {what}"


def test_the_first_node_holds_the_port_that_it_publishes(tmp_path: Path) -> None:
    write_whole(arrival_file(tmp_path, 1), {"node": "b"})
    place = meet(tmp_path, nodes=2, interface="lo", patience_s=5, index=0, hosts=["a", "b"])
    port = int(place.endpoint.partition(":")[2])
    assert place.listening is not None
    with place.listening, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        assert _listen(place, port) is place.listening, "the store takes it over"
    assert json.loads(arrival_file(tmp_path, 0).read_text())["port"] == port


@pytest.mark.cluster
def test_nodes_whose_agents_do_not_reach_each_other_say_so() -> None:
    """torch tries for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(UnableError, match=f"cannot reach the first node at {endpoint}: "):
        start_ranks(["-c", "pass"], 1, place=Place(1, 2, "127.0.0.1", endpoint, "r"), save_time_s=1)


def test_an_interface_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    words = [sys.executable, NODE, "--nodes", "2", "--reports", tmp_path, "--interface", "ib7", "--", "-c", "pass"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert "no interface ib7 with an address; found" in done.stderr


@pytest.mark.ranks
def test_two_nodes_meet_and_a_failure_of_one_ends_the_other(tmp_path: Path) -> None:
    """The other node's rank would sleep for minutes."""
    script = tmp_path / "one_fails.py"
    script.write_text("import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(300)\n")
    began = time.monotonic()
    nodes = [start(index, 2, tmp_path / "reports", str(script)) for index in range(2)]
    for node in nodes:
        node.communicate(timeout=90)
    assert time.monotonic() - began < 45
    assert {node.returncode for node in nodes} == {1}
    ends = [json.loads(path.read_text()) for path in sorted((tmp_path / "reports").glob("node-*.end.json"))]
    assert ["rank 1 ended with exit code 3"] in [end["failures"] for end in ends]
    arrivals = [json.loads(path.read_text()) for path in sorted((tmp_path / "reports").glob("node-000?.json"))]
    assert arrivals[0]["port"] > 0
    assert "port" not in arrivals[1]


LONG_STEP = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(6)
"""


def test_a_rank_that_is_killed_is_named_while_the_others_are_at_a_long_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LONG_STEP)
    options = ["--devices", "2", "--reports", str(tmp_path / "reports"), str(script)]
    with subprocess.Popen([sys.executable, NODE, *options], stderr=subprocess.PIPE, text=True) as node:
        assert node.stderr is not None
        assert node.stderr.readline() == "warning: rank 1 was killed by signal 9\n"
        named = time.monotonic()
        assert node.wait() == 1
    assert time.monotonic() - named > 3
    assert json.loads((tmp_path / "reports" / "node-0000.end.json").read_text())["ranks"] == [1]


def test_ranks_that_end_by_themselves_are_not_called_killed(tmp_path: Path) -> None:
    """The agent ends the others with signals."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)\n")
    options = ["--devices", "2", "--reports", str(tmp_path / "reports"), str(script)]
    ended = subprocess.run([sys.executable, NODE, *options], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_folders_of_other_users_agents_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can make one, with a pipe or a link to anything in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours, theirs = tmp_path / "vx-agent-ours", tmp_path / "vx-agent-theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        os.utime(folder, (0, 0))
    os.chown(theirs, 4711, 4711)
    with _agent_folder() as folder:
        assert sorted(tmp_path.iterdir()) == sorted([folder, theirs])
        assert not list(theirs.iterdir())


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """The list of processes of a real cgroup that may have 60 MB in all; who is on it stays within."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    roots = {"memory": Path("/sys/fs/cgroup/memory"), "": Path("/sys/fs/cgroup")}
    own = next((roots[kinds] / path.lstrip("/") for _, kinds, path in groups if kinds in roots), Path("/none"))
    folder = own / f"vx-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = next(path for path in map(folder.joinpath, ("memory.max", "memory.limit_in_bytes")) if path.exists())
        limit.write_text(str(60 << 20))
    except (OSError, StopIteration):
        pytest.skip("making a memory cgroup needs root")
    yield folder / "cgroup.procs"
    folder.rmdir()


def test_a_rank_that_the_kernel_kills_for_memory_is_not_lost_but_too_large(little_memory: Path, tmp_path: Path) -> None:
    """It would come to the same end again: what did not fit is said, and nobody starts it anew."""
    run = RunFolder(tmp_path / "run")
    reports = run.logs / "7-0"
    (tmp_path / "large.py").write_text("bytearray(200 << 20)")
    words = [sys.executable, str(NODE), "--plain", "--reports", str(reports), "--", str(tmp_path / "large.py")]
    join = f'echo $$ > {little_memory}; exec "$@"'
    assert subprocess.run(["/bin/sh", "-c", join, "sh", *words], check=False, timeout=60).returncode == 1
    (failure,) = node_failures(reports)
    assert failure.endswith("rank 0 was killed by signal 9: out of memory")
    patch, shape = (96, 96, 64), {"channels": 1, "labels": (0, 1), "store": "s", "config_sha256": "", "data_sha256": ""}
    write_json(run.plan, Plan(2, 4, 2, 1, 9, 3, 2, 8, 4, patch, "global", **shape).as_json())
    other = LostContactError("another rank is gone").at("at step 5", [["a", "b"], ["c"]])
    write_json(error_file(reports, 1), {**other.as_json(), "rank": 1})
    with pytest.raises(OutOfMemoryError) as caught:
        judge(run, reports, [failure], world_size=2)
    what = f"{failure} at step 5, with cases a, b, 2 patches of 96 × 96 × 64 at once"
    assert caught.value.message == what
    assert "train.micro_batch lower" in caught.value.fix
    assert not are_lost(reports), "nor on Ray"
