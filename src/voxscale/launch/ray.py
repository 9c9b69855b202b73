"""Ray: join a cluster or start one on this machine, and run programs on its nodes with the devices they need.

Together with search/ the only place that knows Ray. A cluster that is started here asks everyone for a token, shows no
dashboard, lives in a folder of its own, and ends with this process; one that was there before is left as it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from voxscale.errors import InfrastructureError, VoxscaleError
from voxscale.launch.ray_access import (
    check_token,
    credentials,
    deaf,
    given_address,
    parse_address,
    private_folder,
    refuse_silent,
    token_in,
    token_source,
    variables,
)
from voxscale.launch.ray_cluster import LostHeadError, RayCluster, RayNode, Share
from voxscale.launch.ray_keeper import kept
from voxscale.launch.ray_process import FOREIGN
from voxscale.launch.ray_program import NodeProgram
from voxscale.plan.resources import Machine

__all__ = [
    "Group",
    "LostHeadError",
    "RayCluster",
    "RayNode",
    "Share",
    "ask_nodes",
    "connected",
    "look_at_nodes",
    "read_answer",
    "refuse_unfit",
    "require_ray",
]
_SLICE_S = 0.5  # of waiting, between two looks at what may have changed
PLACE_S = 60.0  # for a cluster to give what was asked of it, once others have left
_OBJECT_STORE_BYTES = 80 * 2**20  # nothing of ours goes through it; this is the least that Ray takes
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "ONEDNN_", "PYTHONPATH", "VOXSCALE_")
_SAME_EVERYWHERE = "every node needs voxscale in the Python that runs Ray, and the run's folder; choose it with --run"


@contextlib.contextmanager
def connected(address: str | None, environ: Mapping[str, str], machine: Machine) -> Iterator[RayCluster]:
    """Be part of a Ray cluster for the length of the body.

    `address` is a cluster's HOST:PORT. Without it, one with all of `machine` is started for this process.
    """
    require_ray()
    address = given_address(address, environ)
    with contextlib.ExitStack() as stack:
        if address is None:
            stack.enter_context(variables(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0"))
            stack.enter_context(_own_cluster(machine))
        else:
            stack.enter_context(_joined(address, environ))
        import ray

        cluster = RayCluster(
            str(ray.get_runtime_context().gcs_address), tuple(look_at_nodes()), is_ours=address is None
        )
        with _left_at_end(cluster):
            yield cluster


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise InfrastructureError(
            f"no ray in {sys.executable}, which --on ray and search need", fix="pip install 'voxscale[ray]'"
        )


def look_at_nodes() -> list[RayNode]:
    """The nodes that are alive now, in a lasting order."""
    import ray

    found = [
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.host, node.id))


@contextlib.contextmanager
def _own_cluster(machine: Machine) -> Iterator[None]:
    with (
        private_folder() as folder,
        kept(folder),
        variables(**dict.fromkeys(FOREIGN)),
        variables(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token_in(folder))),
        _free_ports(),
    ):
        _init(
            "Ray could not be started on this machine",
            address="local",
            include_dashboard=False,
            _temp_dir=str(folder / "ray"),  # Ray opens it to all, so it lies inside of one that is not
            num_cpus=machine.cpus,
            num_gpus=machine.gpus,
            object_store_memory=_OBJECT_STORE_BYTES,
        )
        yield


@contextlib.contextmanager
def _joined(address: str, environ: Mapping[str, str]) -> Iterator[None]:
    host, port = parse_address(address)
    left_s = refuse_silent(address, host, port)
    source = token_source(environ)
    with variables(**credentials(environ)):
        check_token(address, source, left_s)
        _init(f"Ray at {address}: cannot be joined", address=address)
        yield


@contextlib.contextmanager
def _free_ports() -> Iterator[None]:
    """Ray's agent of each node listens on a fixed port, for which `ray.init` has no word; here the system chooses."""
    try:
        from ray._private.parameter import RayParams
    except ImportError:  # another Ray, of which this is not known
        yield
        return
    begin = RayParams.__init__

    def begin_free(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.dashboard_agent_listen_port = 0

    RayParams.__init__ = begin_free
    try:
        yield
    finally:
        RayParams.__init__ = begin


def _init(otherwise: str, **options: Any) -> None:
    import ray

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        ray.init(**options, namespace="voxscale", log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except (RuntimeError, ConnectionError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise InfrastructureError(
            f"{otherwise}: {_first_line(error)}",
            fix="run this on one of its nodes, with the same Python and Ray as it has"
            if options["address"] != "local"
            else "see whether there is room in /tmp and memory",
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray puts its own in their place
                signal.signal(number, handler)
    with contextlib.suppress(ImportError, AttributeError):  # what Ray prints about lost nodes is ours to say, shorter
        from ray._private import worker

        if callable(worker.print_to_stdstream):
            worker.print_to_stdstream = lambda *_, **__: None


@contextlib.contextmanager
def _left_at_end(cluster: RayCluster) -> Iterator[None]:
    """Take leave of Ray, unless it is gone: then the process can only end abruptly."""
    import ray

    try:
        yield
    except VoxscaleError as error:
        error.is_abrupt = not cluster.answers
        raise
    finally:
        if cluster.answers:
            with deaf():
                ray.shutdown()


class _OnNode(NodeProgram):
    """The actor that holds devices of its node."""

    def host(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())


class Group:
    """The program of each node of one job, with the devices it holds; a context that gives them back.

    A group of one node lives wherever there is room but on nodes to `avoid`; one of several has each on its own.
    """

    def __init__(self, share: Share, *, nodes: int = 1, avoid: Collection[str] = ()) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.share, self.nodes = share, nodes
        self._bundles: Any = None
        remote = ray.remote(max_concurrency=3, num_cpus=share.cpus, num_gpus=share.gpus)(_OnNode)
        elsewhere = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"} if avoid else {}
        options: list[dict[str, Any]] = [{"label_selector": elsewhere}]
        if nodes > 1:
            bundle = {"CPU": share.cpus, **({"GPU": share.gpus} if share.gpus else {})}
            where = [elsewhere] * nodes
            self._bundles = placement_group([bundle] * nodes, strategy="STRICT_SPREAD", bundle_label_selector=where)
            options = [
                {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._bundles, index)}
                for index in range(nodes)
            ]
        self._actors = [remote.options(**option).remote() for option in options]
        self._ends: list[Any] = []

    def hosts(self, *, patience_s: float = PLACE_S, look: Callable[[], None] = lambda: None) -> list[str]:
        """The addresses of the nodes that the group was given. Raises where there are none in time.

        `look` is called between, and may raise.
        """
        import ray

        asked = [actor.host.remote() for actor in self._actors]
        deadline = time.monotonic() + patience_s
        while True:
            look()
            try:
                return list(ray.get(asked, timeout=_SLICE_S))
            except ray.exceptions.GetTimeoutError:
                look()
                self._refuse_hopeless()
            except ray.exceptions.RayError as error:
                raise InfrastructureError(
                    f"Ray could not start a program: {_first_line(error)}", fix=_SAME_EVERYWHERE
                ) from error
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"Ray did not give {self._wanted} within {patience_s:.0f} s",
                    fix="see what holds the cluster with `ray status`, or ask for less",
                )

    @property
    def _wanted(self) -> str:
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''} × {self.share}"

    def _refuse_hopeless(self) -> None:
        """Nobody will leave what is not there."""
        able = [node.host for node in look_at_nodes() if self.share.fits(node)]
        if len(able) < self.nodes:
            raise InfrastructureError(
                f"Ray cannot give {self._wanted}: found {len(able)} that can ({', '.join(able) or 'none'})",
                fix="add nodes: ray start --address HOST:PORT; or ask for less",
            )

    def start(
        self,
        words_of: Callable[[int], Sequence[str]],
        environ: Mapping[str, str],
        outputs: Sequence[Path],
        *,
        python: str | None = None,
        also: Mapping[str, str] | None = None,
    ) -> None:
        """Have the program of each node started, `python` and the words for it, as soon as there is room.

        It gets what ranks need of `environ`, and all of `also`.
        """
        added = {name: value for name, value in environ.items() if name.startswith(_PASSED_ON)} | dict(also or {})
        self._ends = [
            actor.run.remote(python, list(words_of(index)), added, str(output))
            for index, (actor, output) in enumerate(zip(self._actors, outputs, strict=True))
        ]

    def is_over(self, *, wait_s: float = 0.0) -> bool:
        """Whether the program of every node has ended, or one has been lost; waits so long for it."""
        import ray

        ended, running = ray.wait(self._ends, num_returns=len(self._ends), timeout=wait_s)
        return not running or any(_loss_of(end) for end in ended)

    def have_ended(self, *, wait_s: float = 0.0) -> bool:
        """Whether nothing runs any more: the programs that were not lost have ended. Waits so long for it."""
        import ray

        return not ray.wait(self._ends, num_returns=len(self._ends), timeout=wait_s)[1]

    def lost(self) -> list[str]:
        """What Ray says of the programs that it has lost: with their node, or their actor."""
        import ray

        ended, _ = ray.wait(self._ends, num_returns=len(self._ends), timeout=0)
        return [text for end in ended if (text := _loss_of(end))]

    def stop(self) -> None:
        """Ask the programs to save and end."""
        for actor in self._actors:
            actor.send.remote(int(signal.SIGTERM))

    def close(self) -> None:
        """Give the devices back; what still runs is ended."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self._bundles is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._bundles)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not LostHeadError:
            self.close()


def _loss_of(end: Any) -> str:
    """Why the end of a program will never be known, if it has been lost."""
    import ray

    try:
        ray.get(end, timeout=0)
    except ray.exceptions.RayTaskError as error:
        return f"a node could not start it: {_last_line(error)}"
    except ray.exceptions.RayError as error:
        return f"a node or its actor is gone ({type(error).__name__})"
    return ""


def refuse_unfit(nodes: Sequence[RayNode], folder: Path) -> None:
    """Refuse nodes that cannot write to a folder or do not have voxscale. Raises every finding."""
    asked = ask_nodes(nodes, folder)
    findings = [finding for node in nodes if (finding := read_answer(node, asked[node], folder, wait_s=PLACE_S))]
    if findings:
        raise InfrastructureError.from_findings(findings, fix=_SAME_EVERYWHERE)


def ask_nodes(nodes: Sequence[RayNode], folder: Path) -> dict[RayNode, Any]:
    """Ask nodes whether they have voxscale and can write to a folder."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    there = {node: NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes}
    return {node: look.options(scheduling_strategy=there[node]).remote(str(folder)) for node in nodes}


def read_answer(node: RayNode, answer: Any, folder: Path, *, wait_s: float) -> str | None:
    """What keeps a node from taking part, nothing if it is empty; None where it has not answered in time."""
    import ray

    try:
        cannot = f"{node.host}: cannot write to {folder}, which all nodes have to share"
        return "" if ray.get(answer, timeout=wait_s) else cannot
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayTaskError as error:
        return f"{node.host}: cannot run voxscale: {_last_line(error)}"
    except ray.exceptions.RayError:  # gone, though Ray has not noticed for a while: nothing is placed there
        return ""


def _look(folder: str) -> bool:
    return os.access(folder, os.W_OK)


def _first_line(error: Exception) -> str:
    return _lines(error)[0]


def _last_line(error: Exception) -> str:
    """Of what a node raised: before it comes where it did."""
    return _lines(error)[-1]


def _lines(error: Exception) -> list[str]:
    return [line.strip()[:300] for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
