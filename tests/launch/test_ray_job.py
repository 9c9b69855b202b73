"""A Ray cluster of a job's own: started on all its nodes, guarded, used once by a user's driver, and gone after it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import Cli, Finished
from golden import assert_golden
from lab.slurm import SlurmLab, until
from voxscale.config.site import Site
from voxscale.launch import ray_process
from voxscale.launch.batch import copy_programs
from voxscale.launch.ray_job import render_with_ray
from voxscale.launch.sbatch import Job, Request, render_sbatch
from voxscale.launch.script import Script
from voxscale.launch.script_end import finish
from voxscale.launch.script_job import render_script
from voxscale.runs import RunFolder

# Says on how many nodes its tasks have run, then ends as it is told
DRIVER = """
import os, socket, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(log_to_driver=False)
@ray.remote(num_cpus=1)
def where():
    return socket.gethostname()
nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
tasks = [where.options(scheduling_strategy=On(node, soft=False)).remote() for node in nodes]
print("hosts", *sorted(ray.get(tasks)), flush=True)
print("resources", ray.cluster_resources()["CPU"], ray.cluster_resources().get("GPU"), flush=True)
print("tokens", [name for name in os.environ if "TOKEN" in name], sys.argv[1:], flush=True)
sys.exit(int(sys.argv[1]))
"""
# Waits for a signal, after which it needs Ray once more
WAIT = """
import signal, sys, time
import ray
told = []
ray.init(log_to_driver=False)
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))  # Ray sets its own when it begins
@ray.remote(num_cpus=1)
def answer():
    return "answers"
print("waits", ray.get(answer.remote()), flush=True)
while not told:
    time.sleep(0.1)
time.sleep(1)
print("Ray still", ray.get(answer.remote()), flush=True)
sys.exit(75)
"""
# Asks a head for its nodes
ASK = "import sys; from ray._raylet import GcsClient; print(len(GcsClient(address=sys.argv[1]).get_all_node_info()))"
FIXED_PORTS = {6379, 8265, 10001, 52365, *range(10002, 20000)}  # what `ray start` takes unless told otherwise


@pytest.fixture
def room() -> Iterator[Path]:
    """A short path for temporary folders of nodes. Whatever still runs with it in the end is ended, and a failure."""
    folder = Path(tempfile.mkdtemp(prefix="vx"))
    folder.chmod(0o777)
    try:
        yield folder
        until(lambda: not processes_in(folder), 15, lambda: f"left behind: {names(processes_in(folder))}")
        assert not list(folder.glob(f"{ray_process._FOLDER}*")), "temporary folders are left behind"
    finally:
        for pid in processes_in(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def processes_in(folder: Path) -> list[int]:
    """Those of this machine, the lab's nodes included, that have it for their temporary files."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def names(pids: list[int]) -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")[:200] for pid in pids]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


class Alone:
    """ray_node.py on this machine, from a run folder, as SLURM would start it; as the one node of a job, or several."""

    def __init__(self, run: Path, room: Path, nodes: int = 1) -> None:
        self.run, self.room, self.reports, self.nodes = run, room, run / "logs", nodes
        self.folder = RunFolder(run)
        self.folder.launch.mkdir(parents=True, mode=0o700)
        copy_programs(self.folder)
        self.folder.command.write_text(json.dumps({"command": ["x"], "nodes": nodes, "devices": 1, "with_ray": True}))

    def words(self, *command: object, options: tuple[str, ...] = (), python: object = sys.executable) -> list[str]:
        program = [python, self.folder.launch / "ray_node.py", "--reports", self.reports, "--wait", "90"]
        program += ["--nodes", self.nodes, *options]
        return [str(word) for word in [*program, "--", *command]]

    @contextlib.contextmanager
    def started(self, *command: object, until_said: str) -> Iterator[subprocess.Popen[bytes]]:
        environ = {**os.environ, "TMPDIR": str(self.room), "RAY_ADDRESS": "192.0.2.99:1", "RAY_AUTH_TOKEN": "foreign"}
        log = self.reports / "rank-0000.log"
        with subprocess.Popen(self.words(*command), env=environ, stdout=subprocess.DEVNULL) as node:
            try:
                until(lambda: log.exists() and until_said in log.read_text(), 60, lambda: "the command did not start")
                yield node
                node.wait(40)
            finally:
                node.kill()

    @contextlib.contextmanager
    def second(
        self, *command: object, options: tuple[str, ...] = (), **variables: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The second node of two."""
        environ = {**os.environ, "TMPDIR": str(self.room), "SLURM_NODEID": "1", **variables}
        with subprocess.Popen(self.words(*command, options=options), env=environ) as node:
            try:
                yield node
            finally:
                node.kill()

    def end(self, index: int = 0) -> dict[str, object]:
        content: dict[str, object] = json.loads((self.reports / f"node-{index:04d}.end.json").read_text())
        return content


@pytest.fixture
def alone(tmp_path: Path, room: Path) -> Alone:
    return Alone(tmp_path / "run", room)


def ask_without_token(address: str) -> Finished:
    strangers = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", ASK, address],
        env={**strangers, "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def ask_with_token(address: str, token: Path) -> str:
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    words = [sys.executable, "-c", ASK, address]
    return subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.ray
def test_who_has_no_token_is_refused_and_the_token_shows_nowhere(alone: Alone, script: Callable[..., Path]) -> None:
    """And SLURM's SIGUSR1, which it sends to every process of a job, reaches the command and does not end Ray."""
    with alone.started(script("wait.py", WAIT), until_said="waits answers") as node:
        (token,) = alone.room.glob("vxray-*/token")
        address = json.loads((alone.reports / "ray.json").read_text())["address"]
        assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert ask_with_token(address, token) == "1\n"
        refused = ask_without_token(address)
        assert (refused.code, refused.out) == (1, "")
        assert "AuthenticationError" in refused.err
        assert places_of(token.read_bytes(), alone.room, alone.run) == [str(token)]
        assert not ports_of(processes_in(alone.room)) & FIXED_PORTS
        for pid in processes_in(alone.room):
            os.kill(pid, signal.SIGUSR1)
    assert node.returncode == 0
    assert "Ray still answers" in (alone.reports / "rank-0000.log").read_text()
    assert (alone.end()["stopped"], alone.end()["codes"]) == (True, [75])
    assert finish(alone.run, alone.reports)["state"] == "stopped"


def places_of(secret: bytes, room: Path, run: Path) -> list[str]:
    """Where a secret can be read: in files of the cluster and the run, or in what processes were started with."""
    files = [path for root in (room, run) for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    told = [Path(f"/proc/{pid}/{what}") for pid in processes_in(room) for what in ("cmdline", "environ")]
    assert len(told) > 10, "Ray has several processes"
    found = []
    for path in [*files, *told]:
        with contextlib.suppress(OSError):  # a process may end
            if secret in path.read_bytes():
                found.append(str(path))
    return found


def ports_of(pids: list[int]) -> set[int]:
    """The TCP ports on which processes listen."""
    own = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            own |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for fields in map(str.split, Path(table).read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                listening.add(int(fields[1].rpartition(":")[2], 16))
    assert len(listening) >= 4, "a head, a raylet and more listen"
    return listening


@pytest.mark.ray
@pytest.mark.cluster
def test_a_killed_node_leaves_no_process_and_the_next_job_removes_its_folder(
    alone: Alone, script: Callable[..., Path]
) -> None:
    with alone.started(script("wait.py", WAIT), until_said="waits answers") as node:
        ray_process._sweep(alone.room)
        assert len(list(alone.room.glob("vxray-*"))) == 1, "one that is in use stays"
        node.kill()
    until(lambda: not processes_in(alone.room), 20, lambda: f"left: {names(processes_in(alone.room))}")
    ray_process._sweep(alone.room)
    assert not list(alone.room.glob("vxray-*"))


def test_an_interpreter_without_ray_is_named(alone: Alone, tmp_path: Path, script: Callable[..., Path]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    python = tmp_path / "bare" / "bin" / "python"
    words = alone.words(script("driver.py", DRIVER), "0", python=python)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert f"no ray in {python}" in done.stderr
    assert "pip install 'voxscale[ray]'" in done.stderr
    assert finish(alone.run, alone.reports)["exit_code"] == 4


@pytest.mark.ray
def test_a_ray_that_does_not_start_says_why(alone: Alone, script: Callable[..., Path]) -> None:
    words = alone.words(script("driver.py", DRIVER), "0", options=("--gpus", "3"))
    environ = {**os.environ, "TMPDIR": str(alone.room), "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert "Ray's head did not start" in done.stderr
    assert "CUDA_VISIBLE_DEVICES" in done.stderr
    assert str(alone.reports / "ray-0000.log") in done.stderr
    assert alone.end()["codes"] == [4]
    assert not (alone.reports / "rank-0000.log").exists()


@pytest.mark.ray
@pytest.mark.cluster
def test_a_command_goes_on_without_a_lost_node(tmp_path: Path, room: Path, script: Callable[..., Path]) -> None:
    file, job = script("wait.py", WAIT), Alone(tmp_path / "run", room, nodes=2)
    with job.second(file) as second, job.started(file, until_said="waits answers") as first:
        assert not (job.reports / "ray-token").exists(), "once all have joined"
        (raylet,) = [pid for pid in descendants(second.pid) if "raylet/raylet" in names([pid])[0].split()[0]]
        os.kill(raylet, signal.SIGKILL)
        assert second.wait(30) == 0
        first.send_signal(signal.SIGUSR1)
    assert "Ray still answers" in (job.reports / "rank-0000.log").read_text()
    assert (job.end(1)["lost"], job.end(1)["failures"]) == ("Ray ended here before the command did", [])
    assert (job.end()["stopped"], job.end()["codes"]) == (True, [75])
    assert finish(job.run, job.reports)["exit_code"] == 75


@pytest.mark.ray
@pytest.mark.cluster
def test_a_node_whose_ray_does_not_start_is_named(tmp_path: Path, room: Path, script: Callable[..., Path]) -> None:
    file, job = script("driver.py", DRIVER), Alone(tmp_path / "run", room, nodes=2)
    environ = {**os.environ, "TMPDIR": str(room)}
    with (
        job.second(file, "0", options=("--gpus", "3"), CUDA_VISIBLE_DEVICES="0") as second,
        subprocess.Popen(job.words(file, "0"), env=environ) as first,
    ):
        assert (first.wait(60), second.wait(60)) == (4, 4)
    assert "CUDA_VISIBLE_DEVICES" in str(job.end(1)["failures"])
    assert job.end()["failures"] == []
    assert finish(job.run, job.reports)["exit_code"] == 4
    assert not (job.reports / "rank-0000.log").exists()
    assert not (job.reports / "ray-token").exists()


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


@pytest.mark.ray
@pytest.mark.cluster
def test_two_jobs_on_one_node_do_not_meet(tmp_path: Path, room: Path, script: Callable[..., Path]) -> None:
    file = script("driver.py", DRIVER)
    jobs = [Alone(tmp_path / name, room) for name in ("a", "b")]
    environ = {**os.environ, "TMPDIR": str(room)}
    running = [subprocess.Popen(job.words(file, "0"), env=environ, stdout=subprocess.DEVNULL) for job in jobs]
    try:
        assert [each.wait(120) for each in running] == [0, 0]
    finally:
        for each in running:
            each.kill()
            each.wait()
    for job in jobs:
        assert f"hosts {socket.gethostname()}\n" in (job.reports / "rank-0000.log").read_text()


def rendered(request: Request, site: Site, **options: object) -> str:
    run = RunFolder(Path("/shared/runs/driver"))
    lines = render_script(Script(Path("/home/me/driver.py"), ("a b",)), run, site, request, ["python"], with_ray=True)
    return "\n".join(lines).replace(str(Path.cwd()), "/home/me")


def test_a_script_with_ray_as_text() -> None:
    text = rendered(Request(2, 4, gpus=True), Site(cpus_per_device=8, interface="ib0"))
    assert_golden("job-with-ray.txt", text + "\n")
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=20, check=False).returncode == 0
    assert "--cpus 6 --gpus 0" in rendered(Request(2, 3), Site(cpus_per_device=2))
    assert "--cpus 5 --gpus 0" in rendered(Request(1, 1, cpus=5), Site())


def test_what_a_job_compares_before_it_queues_itself_again() -> None:
    run = RunFolder(Path("/shared/runs/grid"))
    size = 'stat -c %s "$run/trials.jsonl"'
    lines = render_with_ray(
        '"$PWD"', '-m voxscale.search.drive "$run"', Site(), Request(2), python=["python"], folder=run,
        finish=["end.py"], resumes=True, saved=size,
    )  # fmt: skip
    assert f"saved=$({size})" in lines
    assert any(f'if [ "$({size})" != "$saved" ]; then scontrol requeue' in line for line in lines)
    assert not any("readlink" in line for line in lines)


def test_with_ray_needs_a_job_of_one_driver(cli_here: Cli, script: Callable[..., Path]) -> None:
    done = cli_here("launch", script("driver.py", DRIVER), "--with-ray", "--plain")
    assert done.code == 2
    assert "--with-ray with --on local: the cluster is started inside a job, expected --on slurm" in done.err
    assert "--with-ray and --plain: expected one of them" in done.err


@pytest.fixture
def on_slurm(idle_slurm: SlurmLab, cli: Cli, tmp_path: Path, room: Path) -> Callable[..., Finished]:
    def launch(*arguments: object, **options: object) -> Finished:
        environ = {**idle_slurm.environ, "TMPDIR": str(room)}
        words = ("launch", "--on", "slurm", "--with-ray", "--set", "site.cpus_per_device=1", *arguments)
        return cli(*words, cwd=tmp_path, env=environ, **options)

    return launch


def assert_no_token(run: Path) -> None:
    assert list(run.glob("logs/*-0/ray.json")), "there was a cluster"
    assert not list(run.rglob("ray-token"))


@pytest.mark.ray
def test_a_driver_has_all_nodes_of_its_job(
    on_slurm: Callable[..., Finished], tmp_path: Path, script: Callable[..., Path]
) -> None:
    done = on_slurm(script("driver.py", DRIVER), "0", "$(touch owned)", "--nodes", 2, "--devices", 1, "--json")
    assert done.code == 0, done.err
    assert "hosts node1 node2\n" in done.err
    assert "resources 2.0 None\n" in done.err
    assert "tokens ['RAY_AUTH_TOKEN_PATH'] ['0', '$(touch owned)']" in done.err
    assert (done.json["state"], done.json["world_size"], done.json["nodes"]) == ("done", 1, 2)
    assert_no_token(tmp_path / "runs" / "driver")
    assert not (tmp_path / "owned").exists()


@pytest.mark.ray
@pytest.mark.cluster
def test_a_failing_driver_gives_its_exit_code(
    on_slurm: Callable[..., Finished], tmp_path: Path, script: Callable[..., Path]
) -> None:
    done = on_slurm(script("driver.py", DRIVER), "3", "--nodes", 2, "--devices", 1)
    assert done.code == 3
    assert "node1: the command ended with exit code 3, see " in done.err[done.err.rindex("error:") :]
    assert_no_token(tmp_path / "runs" / "driver")


@pytest.mark.ray
@pytest.mark.cluster
def test_a_cancelled_job_leaves_nothing_on_its_nodes(
    on_slurm: Callable[..., Finished], slurm: SlurmLab, tmp_path: Path, script: Callable[..., Path]
) -> None:
    """SLURM tells every process to end, and Ray may be gone before the command is."""
    done = on_slurm(script("wait.py", WAIT), "--nodes", 2, "--devices", 1, "--detach", "--json")
    (job,) = done.json["jobs"]
    log = tmp_path / "runs" / "wait" / "logs" / f"{job['id']}-0" / "rank-0000.log"
    until(lambda: log.exists() and "waits answers" in log.read_text(), 60, lambda: slurm.state(job["id"]))
    slurm.run("scancel", job["id"])
    slurm.await_state(job["id"], "CANCELLED", timeout=40)
    until(lambda: (tmp_path / "runs" / "wait" / "metrics.json").exists(), 40, lambda: "the job did not say its end")
    assert json.loads((tmp_path / "runs" / "wait" / "metrics.json").read_text())["state"] == "stopped"
    assert_no_token(tmp_path / "runs" / "wait")


@pytest.mark.ray
@pytest.mark.cluster
def test_inside_an_allocation_an_interrupt_ends_driver_and_ray(
    idle_slurm: SlurmLab, tmp_path: Path, room: Path, script: Callable[..., Path]
) -> None:
    words = [sys.executable, "-m", "voxscale", "launch", script("wait.py", WAIT), "--on", "slurm", "--with-ray"]
    environ = {**os.environ, **idle_slurm.environ, "TMPDIR": str(room)}
    said = tmp_path / "all.txt"
    salloc = ["salloc", "-N2", "-c1", *words, "--output", said]
    with subprocess.Popen(salloc, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as inside:
        try:
            until(lambda: said.exists() and "waits answers" in said.read_text(), 60, lambda: "the driver did not start")
            (owner,) = [
                pid
                for pid in descendants(inside.pid)
                if " launch " in names([pid])[0] and "voxscale" in names([pid])[0]
            ]
            os.kill(owner, signal.SIGINT)
            errors = inside.communicate(timeout=60)[1]
        finally:
            inside.kill()
    assert inside.returncode == 5, errors
    assert "the command ended with exit code 5" in errors
    assert_no_token(tmp_path / "runs" / "wait")


# Counts its starts; at the signal before the time limit the first of them says what is left, and makes room
RESUMED = """
import os, signal, sys, time
import ray
starts = os.path.join(os.path.dirname(__file__), "starts")
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
ray.init(log_to_driver=False)
again = os.path.exists(starts)
print("started", again, len(ray.nodes()), flush=True)
while not again and not told:
    time.sleep(0.1)
with open(starts, "a") as file:
    file.write("x")
sys.exit(0 if again else 75)
"""


@pytest.mark.ray
@pytest.mark.cluster
def test_at_the_time_limit_a_job_saves_and_queues_itself_again(
    idle_slurm: SlurmLab, tmp_path: Path, room: Path, script: Callable[..., Path]
) -> None:
    run, file = RunFolder(tmp_path / "run"), script("resumed.py", RESUMED)
    run.launch.mkdir(parents=True)
    copy_programs(run, "script_end.py")
    run.command.write_text(json.dumps({"command": ["x"], "nodes": 2, "devices": 1, "with_ray": True}))
    site, request = Site(cpus_per_device=1), Request(2)
    lines = render_with_ray(
        str(run.root), str(file), site, request, python=[sys.executable], folder=run, resumes=True,
        finish=[f'{run.launch}/script_end.py "$run" --reports "$reports"'], saved=f"stat -c %s {tmp_path}/starts",
    )  # fmt: skip
    job = Job("resumed", "a test", run.root, request, lines, resumes=True)
    (run.launch / "job.sbatch").write_text(render_sbatch(job, site))
    environ = {**os.environ, **idle_slurm.environ, "TMPDIR": str(room)}
    number = int(subprocess.check_output(["sbatch", "--parsable", run.launch / "job.sbatch"], env=environ, timeout=30))
    first, second = (run.logs / f"{number}-{attempt}" / "rank-0000.log" for attempt in (0, 1))
    until(lambda: first.exists() and "started False 2" in first.read_text(), 60, lambda: idle_slurm.state(number))
    idle_slurm.run("scancel", "--batch", "--signal=USR1", number)  # as SLURM does before the limit
    until(lambda: second.exists() and "started True 2" in second.read_text(), 90, lambda: idle_slurm.state(number))
    assert idle_slurm.await_state(number, "COMPLETED", "FAILED") == "COMPLETED"
    assert (tmp_path / "starts").read_text() == "xx"
