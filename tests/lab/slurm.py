"""A SLURM cluster of real daemons on one machine, for tests that must not trust a mock.

Every node is a `slurmd` in a network, host-name, mount and process namespace of its own: it has its own address,
loopback, /dev/shm and process ids, and killing it is a crash of that node alone. Namespaces have no names, so they
vanish with their node; what is left to give back is one bridge and a folder.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from lab import accounting, conf, owned
from lab.conf import Network, Shape
from lab.debian import require, search_path

CLIENT_TIMEOUT_S = 30
START_TIMEOUT_S = 20

# Process 1 of a node. It waits for its end of the cable, and later reaps what jobs leave, as an init does.
_NODE = r"""
set -eu
hostname "$NODE"
read -r _
ip link set lo up
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
ip route add default via "$GATEWAY"
umount -l /sys && mount -t sysfs sysfs /sys
mount --bind "$ROOT/etc/hosts" /etc/hosts
mount --bind "$ROOT/etc/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs -o size=2g,mode=1777 shm /dev/shm
mkdir -p /tmp/ray && mount -t tmpfs -o size=1g,mode=1777 ray /tmp/ray
mount -t tmpfs -o size=2g,mode=1777 local "$ROOT/local"
if [ -e /dev/fuse ]; then mount --bind "$ROOT/fuse" /dev/fuse; fi
slurmd -D -N "$NODE" &
wait
"""


class SlurmLab:
    """A cluster that runs from `up` to `down`; as a context manager both are done for you.

    Start it in the main thread: its daemons die with the thread that started them, so that a killed test session
    leaves none. `keep` starts them for good instead, until `down_at`. Without a root folder it makes one of its own,
    and removes it.
    """

    def __init__(
        self, root: Path | None = None, shape: Shape | None = None, *, accounting: bool = False, keep: bool = False
    ) -> None:
        self.shape = shape or Shape()
        self._given_root = root
        self._accounting = accounting
        self._keep = keep
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._is_down = False

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes with GPUs, those of the default partition."""
        return self.shape.gpu_names

    @property
    def local(self) -> Path:
        """A folder that every node has, each with files of its own, like a local disk."""
        return self.root / "local"

    @property
    def environ(self) -> dict[str, str]:
        """The variables that make SLURM's commands talk to this cluster."""
        return {"SLURM_CONF": str(self.root / "etc/slurm.conf")}

    def up(self) -> SlurmLab:
        """Start everything, and return when every node is idle; skips the test where that cannot be done."""
        if os.geteuid() != 0:
            pytest.skip("a cluster of network namespaces needs root")
        require(["slurmctld", "slurmd", "munged", "sbatch", "ip", "bash"], ["slurm-wlm", "munge", "iproute2"])
        if self._accounting:
            require(["slurmdbd", "mariadbd"], ["slurmdbd", "mariadb-server"])
        if not self._keep:
            atexit.register(self.down)
        with owned.registry_lock():
            owned.sweep()
            self._claim()
        try:
            self._start_controller()
            for name in self.shape.names:
                self._start_node(name)
            self._await_idle(self.shape.names)
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End all that was started and remove it; safe to call twice."""
        if self._is_down or not hasattr(self, "_holdings"):
            return
        self._is_down = True
        atexit.unregister(self.down)
        self._holdings.release()
        for daemon in self._daemons.values():
            daemon.wait(10)

    def __enter__(self) -> SlurmLab:
        return self.up()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def run(
        self, *argv: object, timeout: float = CLIENT_TIMEOUT_S, check: bool = True, user: int = 0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster, as root or as the user with that id; a failure shows what it said."""
        prefix = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        command = [*prefix, *map(str, argv)]
        environ = {**os.environ, **self.environ}
        done = subprocess.run(
            command, env=environ, timeout=timeout, capture_output=True, text=True, check=False, **options
        )
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}: {done.stderr.strip()}\n{done.stdout}")
        return done

    def submit(self, *arguments: object, user: int = 0, **options: Any) -> int:
        """`sbatch ARGUMENTS`; returns the job's number."""
        return int(self.run("sbatch", "--parsable", *arguments, user=user, **options).stdout.split(";")[0])

    def state(self, job: int) -> str:
        """The state SLURM gives the job: PENDING, RUNNING, COMPLETED …"""
        states = self.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T", check=False).stdout.split()
        return states[0] if states else "UNKNOWN"

    def show(self, job: int) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        fields = self.run("scontrol", "-o", "show", "job", job).stdout.split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def await_state(self, job: int, *states: str, timeout: float = 30) -> str:
        """Wait until the job is in one of these states, and return it."""
        until(lambda: self.state(job) in states, timeout, lambda: f"job {job} is {self.state(job)}, not {states}")
        return self.state(job)

    def node_state(self, name: str) -> str:
        """`idle`, `allocated`, `down*` …: the star means that the node does not answer."""
        return self.run("sinfo", "-h", "-N", "-n", name, "-o", "%T").stdout.split()[0]

    @contextlib.contextmanager
    def occupy(self, nodes: Sequence[str], *, partition: str = "main") -> Iterator[int]:
        """Keep whole nodes busy with a job that only sleeps."""
        place = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--exclusive", f"--partition={partition}"]
        job = self.submit(*place, "--job-name=occupy", "--output=/dev/null", "--wrap=sleep 3600")
        try:
            self.await_state(job, "RUNNING")
            yield job
        finally:
            self.run("scancel", job, check=False)

    def kill_node(self, name: str) -> None:
        """Crash a node: its cable is pulled first, so that nobody gets a farewell, then all its processes die."""
        _ip("link", "set", self._link(name), "down")
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait(10)
        _ip("link", "delete", self._link(name))

    def shared_memory(self, name: str) -> list[Path]:
        """What ranks have in the shared memory of a node, as seen from here."""
        return list(Path(f"/proc/{self._daemons[name].pid}/root/dev/shm").glob("voxscale-*"))

    def revive_node(self, name: str) -> None:
        """Start a crashed node again, with empty local disks, and wait until it can take jobs."""
        self._start_node(name)
        self._await_idle([name], or_busy=True)

    def reset(self) -> None:
        """Cancel every job and revive every node, so that the next test finds an empty cluster."""
        jobs = self.run("squeue", "-h", "-o", "%A").stdout.split()
        if jobs:
            self.run("scancel", *jobs, check=False)
            self.run("scancel", "--signal=KILL", "--full", *jobs, check=False)
        for name in self.shape.names:
            if name not in self._daemons:
                self._start_node(name)
        self._await_idle(self.shape.names)

    def _claim(self) -> None:
        """Choose a name, a folder, a subnet and ports that no other lab has, and write them down before use."""
        self.name = secrets.token_hex(3)
        self.root = self._given_root or Path(tempfile.gettempdir()) / f"voxscale-lab-{self.name}"
        subnet = _free_subnet()
        self.network = Network(subnet, _free_port(), _free_port())
        owner = None if self._keep else owned.Process.of(os.getpid())
        self._holdings = owned.Holdings(
            self.name, str(self.root), f"vx{self.name}", subnet, owner, self._given_root is None
        )
        self._holdings.save()
        _ip("link", "add", self._holdings.bridge, "type", "bridge")
        _ip("address", "add", f"{self.network.controller}/24", "dev", self._holdings.bridge)
        _ip("link", "set", self._holdings.bridge, "up")

    def _start_controller(self) -> None:
        self._write_files()
        self._start(
            "munged",
            *("munged", "--foreground", "--force", "--num-threads=2", f"--key-file={self.root}/munge/key"),
            *(f"--socket={self.root}/munge/socket", f"--seed-file={self.root}/munge/seed"),
            f"--pid-file={self.root}/run/munged.pid",
        )
        _await(lambda: (self.root / "munge/socket").exists(), "munged made no socket")
        if self._accounting:
            accounting.start(self.root, self._start)
            _await(lambda: self._listens(self.network.accounting_port), "slurmdbd does not answer")
            accounting.fill(self.run)
        self._start("slurmctld", "slurmctld", "-D")
        _await(lambda: self._listens(self.network.controller_port), f"slurmctld does not answer; see {self.root}/log")

    def _write_files(self) -> None:
        for folder in ("munge", "state", "spool", "log", "run", "etc", "local"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        # Users other than root reach the configuration and the socket.
        self.root.chmod(0o755)
        (self.root / "munge").chmod(0o711)
        (self.root / "munge/key").write_bytes(secrets.token_bytes(1024))
        (self.root / "munge/key").chmod(0o600)
        texts = {
            "slurm.conf": conf.render_slurm(self.root, self.shape, self.network, accounting=self._accounting),
            "gres.conf": conf.render_gres(self.root, self.shape),
            # Left to find out for itself, slurmd stops where no cgroups are mounted.
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "hosts": conf.render_hosts(self.shape, self.network),
            # A node reaches no name server, and would wait for it.
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
            "slurmdbd.conf": conf.render_slurmdbd(self.root, self.network),
        }
        for name, text in texts.items():
            (self.root / "etc" / name).write_text(text)
        (self.root / "etc/slurmdbd.conf").chmod(0o600)
        for number in range(self.shape.gpus):
            _make_device(self.root / f"gpu{number}", 1, 3)
        # Users may mount images, as udev allows it on a real node.
        _make_device(self.root / "fuse", 10, 229)

    def _start_node(self, name: str) -> None:
        (self.root / "spool" / name).mkdir(exist_ok=True)
        place = {
            "NODE": name,
            "ADDRESS": self.network.address(self.shape, name),
            "GATEWAY": self.network.controller,
            "ROOT": str(self.root),
        }
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        node = self._start(name, "unshare", *namespaces, "bash", "-c", _NODE, **place)
        here = Path("/proc/self/ns/net").readlink()
        _await(lambda: Path(f"/proc/{node.pid}/ns/net").readlink() != here, f"{name} has no network of its own")
        _ip("link", "add", self._link(name), "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
        # A connection nobody closed can keep the namespace of a dead node, and with it the link, for a minute.
        self._holdings.links = sorted({*self._holdings.links, self._link(name)})
        self._holdings.save()
        _ip("link", "set", self._link(name), "master", self._holdings.bridge, "up")
        assert node.stdin is not None
        node.stdin.write(b"connected\n")
        node.stdin.close()

    def _start(self, name: str, *argv: str, **variables: str) -> subprocess.Popen[bytes]:
        dies_with_us = [] if self._keep else ["setpriv", "--pdeathsig", "KILL"]
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            daemon = subprocess.Popen(
                [*dies_with_us, *argv],
                env={"PATH": search_path(), "LANG": "C.UTF-8", **self.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.root,
                start_new_session=True,
            )
        self._daemons[name] = daemon
        self._holdings.processes.append(owned.Process.of(daemon.pid))
        self._holdings.save()
        return daemon

    def _link(self, name: str) -> str:
        return f"vx{self.name}-{self.shape.names.index(name) + 1}"

    def _await_idle(self, names: Sequence[str], *, or_busy: bool = False) -> None:
        good = {"idle", "mixed", "allocated"} if or_busy else {"idle"}

        def ready() -> bool:
            listed = self.run("sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %T", check=False).stdout
            states = dict(line.split() for line in listed.splitlines())
            return set(states) == set(names) and set(states.values()) <= good

        _await(ready, f"not every node is idle; see {self.root}/log")

    def _listens(self, port: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.network.controller, port), timeout=1):
            return True
        return False


def down_at(root: Path) -> bool:
    """Stop the lab whose folder is `root`, whoever started it; False where there is none."""
    found = [holdings for holdings in owned.read_all() if Path(holdings.root) == root]
    for holdings in found:
        holdings.release()
    return bool(found)


def until(done: Callable[[], bool], timeout: float, otherwise: Callable[[], str], *, every_s: float = 0.1) -> None:
    """Wait until `done`, or fail with what `otherwise` says."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout:g} s: {otherwise()}")
        time.sleep(every_s)


def _await(done: Callable[[], bool], otherwise: str) -> None:
    until(done, START_TIMEOUT_S, lambda: otherwise, every_s=0.02)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10, env={"PATH": search_path()})


def _make_device(path: Path, major: int, minor: int) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    path.chmod(0o666)


def _free_subnet() -> str:
    """A /24 of 10.0.0.0/8 that this machine has no address or route in, and no lab has claimed."""
    listed = subprocess.run(["ip", "-o", "route", "show", "table", "all"], capture_output=True, text=True, timeout=10)
    taken = listed.stdout + " ".join(f"{holdings.subnet}." for holdings in owned.read_all())
    while True:
        subnet = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
        if f"{subnet}." not in taken:
            return subnet


def _free_port() -> int:
    """A port nobody listens on, below those the system hands out to clients."""
    while True:
        port = 12000 + secrets.randbelow(18000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
