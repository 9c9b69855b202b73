"""Real Ray for tests: clusters as users start them, with several raylets on this machine, and a seat to work from.

Everything that is started carries a mark in its environment, by which it is found and ended, whatever became of its
parents. Nothing is started before a test asks for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Finished, tiny_config
from lab.slurm import until
from voxscale.launch.as_rank import stop_with_parent
from voxscale.train.events import read_events

MARK = "VOXSCALE_LAB_RAY"
START_S = 120
# One small network; as long as there is a file `slow` beside it, there is time to disturb a training
NETWORKS = """
import time
from pathlib import Path

import torch


class Paced(torch.nn.Conv3d):
    def forward(self, image):
        if self.training and Path(__file__).with_name("slow").exists():
            time.sleep(0.4)
        return super().forward(image)


def build(in_channels, out_channels):
    return Paced(in_channels, out_channels, 3, padding=1)
"""
COUNT_NODES = (
    "import sys; from ray._raylet import GcsClient;"
    "print(sum(node.state == 0 for node in GcsClient(address=sys.argv[1]).get_all_node_info().values()))"
)


class RayLab:
    """A cluster that a user has started with `ray start`: a head and further raylets, as a context.

    `environ` is what a client needs. Nodes are numbered in the order in which they came; the head is 0. Beside others
    it has a single CPU, so that not everything goes there.
    """

    def __init__(self, *, nodes: int, cpus: int = 2, token: bool = True) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="vxr-"))
        self.cpus, self._first_nodes = cpus, nodes
        self._programs: list[subprocess.Popen[bytes]] = []
        self.environ = {"RAY_AUTH_MODE": "disabled"}
        if token:
            self.token.touch(mode=0o600)
            self.token.write_text(secrets.token_hex(32))
            self.environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        self.address = ""

    @property
    def token(self) -> Path:
        return self.root / "token"

    def __enter__(self) -> RayLab:
        try:
            for _ in range(self._first_nodes):
                self.add_node()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_node(self) -> int:
        """Start a node, and wait for it: several that start at once get into each other's way."""
        number = len(self._programs)
        log = self.root / f"node-{number}.log"
        head = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={self.root / 't'}"]
        place = [f"--address={self.address}"] if self.address else head
        cpus = 1 if number == 0 and self._first_nodes > 1 else self.cpus
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *place, f"--num-cpus={cpus}"]
        own = {
            MARK: f"{self.root.name}/{number}",
            "HOME": str(self.root),
            "RAY_USAGE_STATS_ENABLED": "0",
            **self.environ,
        }
        with log.open("wb") as stream:
            program = subprocess.Popen(
                [*words, "--object-store-memory=100000000"],
                env={**without_ray(os.environ), **own},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=stop_with_parent,
            )
        self._programs.append(program)
        until(
            lambda: "Ray runtime started" in log.read_text() or program.poll() is not None,
            START_S,
            lambda: f"node {number} did not start:\n{log.read_text()}",
        )
        assert program.poll() is None, log.read_text()
        if not self.address:
            found = re.search(r"--address='([^']+)'", log.read_text())
            assert found, log.read_text()
            self.address = found[1]
            self.environ["RAY_ADDRESS"] = self.address
        return number

    def node_of(self, pid: int) -> int:
        """The node on which a process runs."""
        return int(dict(environ_of(pid))[MARK].rpartition("/")[2])

    def pids(self, number: int) -> list[int]:
        return [pid for pid, value in marked(MARK) if value == f"{self.root.name}/{number}"]

    def kill(self, number: int) -> None:
        """Let a node crash: its raylet is gone at once, and what it had started goes after it."""
        service = "gcs_server" if number == 0 else "raylet"
        victims = [pid for pid in self.pids(number) if program_name(pid) == service]
        assert victims, f"node {number} has no {service}"
        for pid in victims:
            kill(pid)

    def num_alive(self) -> int:
        """How many nodes its head knows."""
        done = subprocess.run(
            [sys.executable, "-c", COUNT_NODES, self.address],
            env={**os.environ, **self.environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return int(done.stdout)

    def close(self) -> None:
        below = [pid for program in self._programs for pid in descendants(program.pid)]
        for program in self._programs:
            program.kill()
        for pid in below:  # Ray's agents write their titles over the mark
            kill(pid)
        mine = f"{self.root.name}/"

        def gone() -> bool:
            left = [pid for pid, value in marked(MARK) if value.startswith(mine)]
            for pid in left:
                kill(pid)
            return not left

        try:
            until(gone, 20, lambda: "processes of a Ray cluster cannot be ended")
        finally:
            for program in self._programs:
                program.wait(10)
            shutil.rmtree(self.root, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """What a process has started, and what that has."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            children += map(int, (thread / "children").read_text().split())
    return [*children, *(further for child in children for further in descendants(child))]


class Seat:
    """Where a user works: a folder of configs, temporary files and a home of its own, and commands in processes."""

    def __init__(self, folder: Path, room: Path, dataset: Path, environ: Mapping[str, str]) -> None:
        self.folder, self.room, self._dataset = folder, room, dataset
        self.home = room / "home"
        self.home.mkdir()
        (folder / "tiny_networks.py").write_text(NETWORKS)
        own = {"TMPDIR": str(room), "HOME": str(self.home), "PYTHONPATH": str(folder)}
        self.environ = {**without_ray(environ), **own}

    def write(self, name: str, **fields: Any) -> Path:
        """A config that trains 15 steps with a validation, and so a checkpoint, after every fifth."""
        quick = {"train__epochs": 3, "train__precision": "fp32", "train__compile": False, "train__channels_last": False}
        content = tiny_config(self._dataset, **{"model": {"name": "tiny_networks:build"}, **quick, **fields})
        (self.folder / name).write_text(yaml.safe_dump(content))
        return self.folder / name

    @contextlib.contextmanager
    def slowly(self) -> Iterator[Callable[[], None]]:
        """Slow trainings for the length of the body, or until what is given is called."""
        mark = self.folder / "slow"
        mark.touch()
        try:
            yield lambda: mark.unlink(missing_ok=True)
        finally:
            mark.unlink(missing_ok=True)

    def run(self, *arguments: object, timeout_s: float = 200, **variables: str) -> Finished:
        """Run `voxscale ARGUMENTS` to its end."""
        with self.started(*arguments, **variables) as command:
            return self.end_of(command, timeout_s=timeout_s)

    @contextlib.contextmanager
    def started(self, *arguments: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """A command that runs meanwhile, and is killed if it still does at the end."""
        with subprocess.Popen(
            [sys.executable, "-m", "voxscale", *map(str, arguments)],
            cwd=self.folder,
            env={**self.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=stop_with_parent,
        ) as command:
            try:
                yield command
            finally:
                command.kill()

    def end_of(self, command: subprocess.Popen[str], *, timeout_s: float = 200) -> Finished:
        out, err = command.communicate(timeout=timeout_s)
        return Finished(command.returncode, out, err)

    def processes(self) -> list[int]:
        return [pid for pid, value in marked("TMPDIR") if value == str(self.room)]

    def close(self) -> None:
        """Ends what is left; it is a failure if anything is."""
        try:
            until(lambda: not self.processes(), 20, lambda: f"left behind: {[*map(words_of, self.processes())]}")
            left = [path.name for path in [*self.room.glob("vx*"), *self.room.glob("ray*"), *self.home.glob(".ray")]]
            assert not left, f"left behind: {left}"
        finally:
            for pid in self.processes():
                kill(pid)
            shutil.rmtree(self.room, ignore_errors=True)


def ranks_in(run: Path) -> list[int]:
    """The ranks that train a run now, in order."""
    found: dict[int, int] = {}
    for pid in all_pids():
        words = words_of(pid)
        if words[1:4] == ["-m", "voxscale.train.worker", str(run)]:
            found[int(dict(environ_of(pid)).get("RANK", "0"))] = pid
    return [found[rank] for rank in sorted(found)]


def await_step(run: Path, step: int, *, timeout_s: float = 180) -> None:
    until(
        lambda: step_of(run) >= step,
        timeout_s,
        lambda: f"{run} is at step {step_of(run)} only: {[path.name for path in run.glob('logs/*/*')]}",
    )


def step_of(run: Path) -> int:
    events = run / "events.jsonl"
    return max((event["step"] for event in read_events(events)), default=0) if events.exists() else 0


def without_ray(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("RAY_")}


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def environ_of(pid: int) -> list[tuple[str, str]]:
    """Of a process that is ours and alive; else nothing."""
    with contextlib.suppress(OSError):
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return [(name, value) for name, _, value in (entry.partition("=") for entry in content.split("\0"))]
    return []


def words_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def program_name(pid: int) -> str:
    return Path(words_of(pid)[0]).name if words_of(pid) else ""


def marked(name: str) -> list[tuple[int, str]]:
    return [(pid, dict(environ)[name]) for pid in all_pids() if name in dict(environ := environ_of(pid))]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayLab]:
    """Three raylets and a token, shared by all tests of the session; who kills one of them starts another."""
    with RayLab(nodes=3) as lab:
        yield lab


@pytest.fixture(scope="module")
def seat(tmp_path_factory: pytest.TempPathFactory, dataset: Path, session_environ: dict[str, str]) -> Iterator[Seat]:
    """A user who may start an embedded Ray, and leaves nothing of it."""
    seat = Seat(tmp_path_factory.mktemp("seat"), Path(tempfile.mkdtemp(prefix="vxt-")), dataset, session_environ)
    yield seat
    seat.close()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on Ray is marked so."""
    for item in items:
        if {"ray_cluster", "seat"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("ray")
