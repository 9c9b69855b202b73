"""Have ranks measure what a step of a config costs: in a run folder of its own, which is removed again."""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from voxscale.config.load import identity, plain
from voxscale.config.schema import Config
from voxscale.data.build import store_root
from voxscale.files import locked, read_json, write_json
from voxscale.launch.folder import OpenedRun, draft_run, open_run
from voxscale.launch.local import run_local
from voxscale.launch.machine import gpu_name, processor_name
from voxscale.launch.placing import own_code_sha256
from voxscale.plan.costs import SCHEMA_VERSION, Costs
from voxscale.plan.resources import Machine, resolve

_MEASURE = "voxscale.train.measure"
SECONDS = 10.0


@contextmanager
def opened_aside(
    config: Config, machine: Machine, environ: Mapping[str, str], *, devices: int, nodes: int = 1
) -> Iterator[OpenedRun]:
    """A run of the config in a temporary folder, with its data prepared; nothing is left of it."""
    train = config.train.model_copy(update={"backend": "auto"}) if not machine.gpus else config.train
    quiet = config.model_copy(update={"log": "quiet", "track": "none", "train": train})
    with tempfile.TemporaryDirectory(prefix="voxscale-") as folder:
        draft = draft_run(quiet, Path(folder) / "run", machine, devices=str(devices), nodes=nodes)
        yield open_run(draft, machine, environ, warn=lambda _: None)


def measure_local(opened: OpenedRun, environ: Mapping[str, str], *, seconds: float = SECONDS) -> dict[str, Any]:
    """What the ranks of an opened run measure on this machine."""
    from voxscale.train.memory import MemoryWatch

    out = opened.run.root / "costs.json"
    with MemoryWatch() as launcher:
        run_local(measure_words(opened.run.root, out, seconds), opened.run.logs, opened.devices)
    record: dict[str, Any] = read_json(out)
    return {**record, "launcher_bytes": launcher.peak if opened.devices > 1 else None}


def measure_words(root: Path, out: Path, seconds: float) -> list[str]:
    """The module that ranks run to measure the run in `root`, and its arguments."""
    return [_MEASURE, str(root), "--out", str(out), "--seconds", str(seconds)]


def kept_costs(config: Config, machine: Machine, environ: Mapping[str, str], *, data: str, world_size: int) -> Path:
    """Where the costs of a config on this machine are kept: beside the stores, where those of others are.

    `data` is a hash of what is in them.
    """
    facts = [cost_identity(config), data, config.train.threads, world_size, *machine_facts(machine)]
    return store_root(config.data, environ) / "costs" / f"{hash_of(facts)}.json"


def cost_identity(config: Config) -> str:
    """A hash of all that could change what a step costs: also how patches are read, and a user's own code."""
    how = [plain(config.loader), config.data.stage, config.train.backend]
    return hash_of([SCHEMA_VERSION, identity(config), how, own_code_sha256(config)])


def machine_facts(machine: Machine) -> list[Any]:
    """What makes another machine of it, for what steps cost."""
    name = gpu_name() if machine.gpus else processor_name()
    return [machine.gpus, machine.cpus, name, metadata.version("torch")]


def hash_of(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def find_costs(
    config: Config, machine: Machine, environ: Mapping[str, str], *, data: str, world_size: int
) -> Costs | None:
    """Costs that were measured before, on a machine like this."""
    return read_costs(kept_costs(config, machine, environ, data=data, world_size=world_size))


def find_costs_of(
    config: Config, environ: Mapping[str, str], *, data: str, world_size: int, such: Callable[[Costs], bool]
) -> Costs | None:
    """Costs that were measured before on any machine with `such` devices, and kept beside the same store."""
    folder, asked = store_root(config.data, environ) / "costs", _of_any_machine(config, data)
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        costs = read_costs(path, asked=asked)
        if costs is not None and costs.world_size == world_size and such(costs):
            return costs
    return None


def read_costs(path: Path, *, asked: str | None = None) -> Costs | None:
    """Costs of a file, if they are there and whole, and of the config that is asked for."""
    try:
        record = read_json(path)
        return Costs.from_record(record) if asked is None or asked == record["asked"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _of_any_machine(config: Config, data: str) -> str:
    """A hash of config and data but for what follows from the machine's CPUs."""
    train = config.train.model_copy(update={"threads": 1})
    return hash_of([cost_identity(config.model_copy(update={"train": train})), data])


def measure_costs(
    config: Config,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    data: str,
    devices: int,
    seconds: float = SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> Costs:
    """Measure on so many ranks of this machine, and keep what was found. One at a time: two would slow each other."""
    settled = resolve(config, machine, devices=devices)
    path = kept_costs(settled, machine, environ, data=data, world_size=devices)
    with _alone(path.parent / f".{platform.node()}.lock", say):
        if (found := read_costs(path)) is not None:  # by the one that was waited for
            return found
        with opened_aside(config, machine, environ, devices=devices) as opened:
            record = measure_local(opened, environ, seconds=seconds)
        write_json(path, {**record, "asked": _of_any_machine(settled, data)})
    return Costs.from_record(record)


@contextmanager
def _alone(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, wait=False))
        except BlockingIOError:
            say("waiting for another measurement on this machine")
            stack.enter_context(locked(lock))
        yield
