"""The ranks of one node: started as torchrun does, told of signals, ended when others have failed.

Needs nothing but the standard library and torch, as node.py does, and is copied with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from voxscale.launch import meeting
else:  # a copy, beside copies of these
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import meeting

OUT_OF_MEMORY = ": out of memory"
_AGENT = "vx-agent-"
_ERRORS = "error-rank-[0-9]*.json"  # what ranks leave of themselves
_GRACE_S = 10.0  # for ranks to notice by themselves that others have failed
_PASS_ON_S = 0.3  # SLURM signals ranks itself; one that ends at once must not be hit again while it does
_TELL_S = 0.1  # until the death of a rank is told
_LOOK_S = 0.5  # between looks at what the ranks have reported
_NEW_S = 5.0  # for an agent to lock the folder it has made
_FLUSH_S = 5.0  # for the agent to end when no rank is left


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended that should not have."""

    rank: int
    exit_code: int
    time_s: float = 0.0
    for_memory: bool = False  # the kernel has killed it

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"rank {self.rank} was killed by signal {-self.exit_code}{OUT_OF_MEMORY if self.for_memory else ''}"
        return f"rank {self.rank} ended with exit code {self.exit_code}"


def start_ranks(
    arguments: Sequence[str],
    devices: int,
    *,
    place: meeting.Place,
    save_time_s: float,
    step_s: Callable[[], float] = float,
    watched: Path | None = None,
) -> tuple[list[RankFailure], list[signal.Signals]]:
    """Run `python ARGUMENTS` as this node's ranks under torch's elastic agent, and wait for them.

    Signals are passed on to the ranks, which get `save_time_s` to save, after as long as `step_s` then says that their
    step may take. Where another node has written a failure to `watched`, the ranks here are ended too. Returns the
    ranks that failed first, and the signals received. Raises UnableError where the nodes have come but do not reach
    each other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a node that ends first is no news to the others
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    wanted: dict[str, Any] = {
        "min_nodes": place.nodes,
        "max_nodes": place.nodes,
        "nproc_per_node": devices,
        "run_id": place.run_id or uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": place.endpoint,
        "rdzv_configs": {"is_host": place.index == 0} if place.nodes > 1 else {},
        "local_addr": place.address,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "signals_to_handle": "SIGQUIT",
        "shutdown_timeout": int(save_time_s),
    }
    meeting.bind_stores(place)
    known = LaunchConfig.__dataclass_fields__  # an older torch has fewer
    logging.disable(logging.ERROR)  # what went wrong is ours to say
    failures: list[RankFailure] = []
    kills = _kills_for_memory()
    loopback = dict.fromkeys(meeting.INTERFACES, "lo") if place.nodes == 1 else {}
    with (
        _variables(loopback),
        _signals_passed_on(save_time_s, step_s) as received,
        _death_told(place.index * devices, received, watched),
        _agent_folder() as logs,
        _watching(watched, logs),
        meeting.apart_told(place, watched),
    ):
        if hasattr(multiprocessing, "DefaultLogsSpecs"):
            wanted["logs_specs"] = multiprocessing.DefaultLogsSpecs(log_dir=str(logs))
        config = LaunchConfig(**{name: value for name, value in wanted.items() if name in known})
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            ended = [RankFailure(rank, each.exitcode, each.timestamp) for rank, each in error.failures.items()]
            failures = _explained(ended, kills)
        finally:
            logging.disable(logging.NOTSET)
    return failures, received


def _explained(failures: Sequence[RankFailure], kills: int) -> list[RankFailure]:
    """The first that was killed, since there were so many kills for want of memory, was so too."""
    killed = [failure for failure in failures if failure.exit_code == -signal.SIGKILL]
    first = min(killed, key=lambda failure: failure.time_s, default=None) if _kills_for_memory() > kills else None
    return [replace(failure, for_memory=failure is first) for failure in failures]


def _kills_for_memory() -> int:
    """How often the kernel has killed for want of memory: in this process's cgroup, else on this machine."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    places = [f"/sys/fs/cgroup{path}/memory.events" for number, _, path in groups if number == "0"]
    places += [f"/sys/fs/cgroup/memory{path}/memory.oom_control" for _, kinds, path in groups if kinds == "memory"]
    for place in (*places, "/proc/vmstat"):
        with contextlib.suppress(OSError):
            counts = dict(line.split()[:2] for line in Path(place).read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


@contextlib.contextmanager
def _variables(added: dict[str, str]) -> Iterator[None]:
    """Set variables for the ranks, unless the user has; this process may go on to start others elsewhere."""
    new = {name: value for name, value in added.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _signals_passed_on(save_time_s: float, step_s: Callable[[], float] = float) -> Iterator[list[signal.Signals]]:
    """Pass signals to the child processes, however often they come; yields the list of those received.

    The agent's own handlers raise, so a second signal would cut short its waiting for the first one's work.
    """
    received: list[signal.Signals] = []
    os.environ["VOXSCALE_PARENT"] = str(os.getpid())  # a rank that starts when this process is gone already is to know

    def after(seconds: float, number: int) -> threading.Timer:
        timer = threading.Timer(seconds, signal_children, [number])
        timer.daemon = True
        return timer

    patience: list[threading.Timer] = []

    def pass_on(number: int, frame: Any) -> None:
        received.append(signal.Signals(number))
        if len(received) == 1:
            patience.append(after(save_time_s + step_s(), signal.SIGKILL))
            patience[0].start()
        # Python answers SIGINT with a traceback, and those who ignore SIGHUP inherited that
        told = signal.SIGTERM if number in (signal.SIGINT, signal.SIGHUP) else number
        after(_PASS_ON_S, told).start()

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is after nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield received
    finally:
        os.environ.pop("VOXSCALE_PARENT")
        for timer in patience:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if received else handler)


@contextlib.contextmanager
def _death_told(first_rank: int, received: Sequence[signal.Signals], reports: Path | None) -> Iterator[None]:
    """Say at once which rank was killed, if that is the first that happens to them.

    The others, whom the agent tells, may be at a long step, or wait on their devices for the dead one: they get a while
    to report where they were.
    """
    others = set(_children())
    ranks: dict[int, int] = {}  # of their processes
    first: list[RankFailure] = []
    to_tell: list[RankFailure] = []
    done = threading.Event()

    def look(number: int, frame: Any) -> None:
        """Before the agent, which forgets at once. It may interrupt itself: telling is left to another thread."""
        for child in _children():
            if child not in others and _leads_a_session(child):
                ranks.setdefault(child, first_rank + len(ranks))
        failed = [RankFailure(rank, code) for child, rank in list(ranks.items()) if (code := _exit_code_of(child))]
        if failed and not first:
            first.append(next((each for each in failed if each.exit_code < 0), failed[0]))
            if first[0].exit_code < 0 and not received and not (reports and list(reports.glob(_ERRORS))):
                to_tell.append(first[0])

    def tell() -> None:
        while not to_tell and not done.wait(_TELL_S):
            pass
        if to_tell:
            print(f"warning: {to_tell[0]}", file=sys.stderr, flush=True)
            if not done.wait(2 * _GRACE_S):
                signal_children(signal.SIGKILL)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    before = signal.signal(signal.SIGCHLD, look)
    signal.siginterrupt(signal.SIGCHLD, False)  # C libraries that wait need not know
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
        done.set()
        telling.join()


@contextlib.contextmanager
def _agent_folder() -> Iterator[Path]:
    """For what torch's agent writes of its ranks, locked while it is used; by itself it would leave one each time."""
    sweep_agent_folders()
    folder = Path(tempfile.mkdtemp(prefix=_AGENT))
    try:
        with (folder / "held").open("w") as held:
            fcntl.lockf(held, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_agent_folders() -> None:
    """Remove those of killed agents."""
    for left in Path(tempfile.gettempdir()).glob(f"{_AGENT}*"):
        with contextlib.suppress(OSError):
            if left.lstat().st_uid != os.getuid():
                continue  # another user's, who may have put anything there
            if not (left / "held").exists() and time.time() - left.stat().st_mtime < _NEW_S:
                continue  # its agent may be about to lock it; else it was killed before
            with (left / "held").open("a") as held:
                fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _watching(reports: Path | None, logs: Path) -> Iterator[None]:
    """End the ranks here soon after those of another node have failed; libraries may wait half an hour for them.

    One that others have waited for in vain is killed: it may not even hear a signal.
    """
    done = threading.Event()

    def watch() -> None:
        while reports is not None and not done.wait(_LOOK_S):
            if _is_one_silent(reports):
                if not done.wait(_LOOK_S):
                    signal_children(signal.SIGKILL)
                return
            ends = [json.loads(path.read_text()) for path in reports.glob("node-*.end.json")]
            if any((end["failures"] or "unable" in end) and not end["stopped"] for end in ends):
                for number in (signal.SIGTERM, signal.SIGKILL):
                    if _outlast(_GRACE_S, done):
                        signal_children(number)
                if not done.wait(_FLUSH_S):  # no rank is left, and the agent would wait five minutes for the other node
                    shutil.rmtree(logs, ignore_errors=True)
                    os._exit(1)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _is_one_silent(reports: Path) -> bool:
    """Whether ranks have reported that another did not answer in time."""
    return any(json.loads(path.read_text()).get("code") == "timed_out" for path in reports.glob(_ERRORS))


def _outlast(patience_s: float, done: threading.Event) -> bool:
    """Whether there are children for so long, and nothing is done."""
    deadline = time.monotonic() + patience_s
    while living_children() and not done.wait(0.5):
        if time.monotonic() > deadline:
            return True
    return False


def signal_children(number: int) -> None:
    for child in living_children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def living_children() -> list[int]:
    """Those that live: ended ones stay listed until somebody asks how they ended."""
    return [child for child in _children() if _exit_code_of(child) is None]


def _children() -> list[int]:
    """In the order in which they were started."""
    own = os.getpid()
    return [int(child) for child in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


def _leads_a_session(child: int) -> bool:
    """As the agent's ranks do, and what copies their output does not."""
    try:
        return os.getsid(child) == child
    except ProcessLookupError:
        return False


def _exit_code_of(child: int) -> int | None:
    """Below zero for a signal; left for others to ask. None if it lives, or others have asked."""
    with contextlib.suppress(ChildProcessError):
        if end := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    return None


def adopt_orphans() -> None:
    """What copies the ranks' output becomes a child of this process, which can then wait for the last lines."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)


def await_children(patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(ChildProcessError):  # there are no more
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def start_one(
    as_rank: Sequence[str], save_time_s: float, *, as_torchrun: bool
) -> tuple[list[RankFailure], list[signal.Signals]]:
    """Run the command once, without torch's agent, though with the variables that it would set if so wished."""
    added = _variables_of_one() if as_torchrun else {}
    kills = _kills_for_memory()
    with _signals_passed_on(save_time_s) as received:
        code = subprocess.run([sys.executable, *as_rank], env={**os.environ, **added}, check=False).returncode
    return _explained([RankFailure(0, code)] if code else [], kills), received


def _variables_of_one() -> dict[str, str]:
    """What torchrun sets for a world of one rank. At port 0 its store takes any that is free; nobody else needs it."""
    ranks = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
    ones = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(ranks, "0"),
        **dict.fromkeys(("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
        **dict.fromkeys(ones, "1"),
        "MASTER_ADDR": "127.0.0.1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
