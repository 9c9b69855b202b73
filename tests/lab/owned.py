"""What a lab holds on the machine, written down so that it can be given back by anyone, also after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

REGISTRY = Path("/run/voxscale-lab")


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same id."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _start_time(pid) or 0)

    @property
    def is_alive(self) -> bool:
        return self.started != 0 and _start_time(self.pid) == self.started

    def kill(self) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass
class Holdings:
    """Everything one lab has on the machine. `owner` None: kept until asked to stop."""

    name: str
    root: str
    bridge: str
    subnet: str
    owner: Process | None
    owns_root: bool = False
    processes: list[Process] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    @property
    def record(self) -> Path:
        return REGISTRY / f"{self.name}.json"

    @property
    def is_stale(self) -> bool:
        return self.owner is not None and not self.owner.is_alive

    def save(self) -> None:
        aside = self.record.with_suffix(".part")
        aside.write_text(json.dumps(asdict(self)))
        aside.rename(self.record)

    def release(self) -> None:
        """End every process and remove every link; what is gone already is fine."""
        for process in self.processes:
            process.kill()
        deadline = time.monotonic() + 5
        while any(process.is_alive for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        for link in [*self.links, self.bridge]:
            subprocess.run(["ip", "link", "delete", link], capture_output=True, timeout=10, check=False)
        if self.owns_root:
            shutil.rmtree(self.root, ignore_errors=True)
        self.record.unlink(missing_ok=True)


def read_all() -> list[Holdings]:
    """The holdings of every lab of this machine."""
    return [_read(path) for path in sorted(REGISTRY.glob("*.json"))]


def sweep() -> None:
    """Give back what labs hold whose owner is dead; under the `registry_lock`."""
    for holdings in read_all():
        if holdings.is_stale:
            holdings.release()


@contextlib.contextmanager
def registry_lock() -> Iterator[None]:
    """One lab at a time chooses its subnet and ports."""
    REGISTRY.mkdir(mode=0o755, exist_ok=True)
    with (REGISTRY / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Holdings:
    content = json.loads(path.read_text())
    owner = content.pop("owner")
    processes = [Process(**process) for process in content.pop("processes")]
    return Holdings(**content, owner=Process(**owner) if owner else None, processes=processes)


def _start_time(pid: int) -> int | None:
    """The kernel's start time of a process; None for one that is gone or only waits to be reaped."""
    try:
        # The name in brackets may hold spaces and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
