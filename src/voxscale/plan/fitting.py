"""What does not fit, found before hours of queue, each with the change that would make it fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from voxscale.errors import ConfigError
from voxscale.plan.plan import Plan
from voxscale.plan.predict import Layout, Memory

GB = 2**30


@dataclass(frozen=True)
class Given:
    """What there is, as far as it is known: bytes of a device, of a node and its /dev/shm, CPUs for each device; bytes
    that are free where runs are written.

    `is_elsewhere`: those are CPUs of other nodes than the one that steps were measured on.
    """

    device_bytes: int | None
    node_bytes: int | None
    shared_bytes: int | None
    cpus_per_device: int
    devices_per_node: int | None = None
    is_elsewhere: bool = False
    disk_bytes: int | None = None


@dataclass(frozen=True)
class Problem:
    what: str
    fix: str


def refuse_unfit(
    plan: Plan, layout: Layout, memory: Memory, given: Given, *, run_bytes: int = 0, others: Sequence[Problem] = ()
) -> None:
    """Raise everything that cannot work, what was found before included; `run_bytes` are those of checkpoints."""
    found = (
        _in_node(layout, given),
        _on_device(plan, memory, given),
        _on_node(plan, layout, memory, given),
        _in_shared_memory(memory, given),
        _on_disk(run_bytes, given),
    )
    raise_problems([*others, *filter(None, found)])


def raise_problems(problems: Sequence[Problem]) -> None:
    """All of them at once, if there are any."""
    if problems:
        fixes = dict.fromkeys(problem.fix for problem in problems)
        raise ConfigError.from_findings([problem.what for problem in problems], fix="; ".join(fixes))


def idle_problem(plan: Plan, layout: Layout) -> Problem | None:
    """More devices than there are cases to validate: some would have nothing to do."""
    if plan.num_val == 0 or plan.num_val >= layout.world_size:
        return None
    cases = "1 validation case" if plan.num_val == 1 else f"{plan.num_val} validation cases"
    return Problem(
        f"found {cases} for {layout.world_size} devices, expected one for each or more",
        f"ask for at most {plan.num_val} device{'s' if plan.num_val > 1 else ''}, or raise data.split.val",
    )


def _in_node(layout: Layout, given: Given) -> Problem | None:
    most = given.devices_per_node
    if most is None or layout.devices <= most:
        return None
    world = layout.world_size
    nodes = next(count for count in range(-(-world // most), world + 1) if world % count == 0)
    return Problem(
        f"--devices {layout.devices}: found {most} on each node of the site (gpus.per_node)",
        f"ask for --nodes {nodes} --devices {world // nodes}",
    )


def _on_device(plan: Plan, memory: Memory, given: Given) -> Problem | None:
    if given.device_bytes is None or memory.device <= given.device_bytes:
        return None
    return Problem(
        f"a device needs {_gb(memory.device)} for {_work(plan, memory)}, expected at most the "
        f"{_gb(given.device_bytes)} that it has",
        _fewer_patches(plan, memory, given.device_bytes),
    )


def _on_node(plan: Plan, layout: Layout, memory: Memory, given: Given) -> Problem | None:
    if given.node_bytes is None or memory.node <= given.node_bytes:
        return None
    ranks = f"{layout.devices} rank{'s' if layout.devices > 1 else ''}"
    limit = f"expected at most the {_gb(given.node_bytes)} that it has"
    if given.device_bytes is not None:  # of its own: a smaller batch leaves the node's as it is
        fewer = "ask for fewer --devices on each node, or " if layout.devices > 1 else ""
        whole = math.ceil(memory.node / GB)
        return Problem(
            f"a node needs {_gb(memory.node)} for {ranks}, {limit}", f"{fewer}set site.memory.per_node={whole}G"
        )
    return Problem(
        f"a node needs {_gb(memory.node)} for {ranks} with {_work(plan, memory)}, {limit}",
        _fewer_patches(plan, memory, memory.device - math.ceil((memory.node - given.node_bytes) / layout.devices)),
    )


def _in_shared_memory(memory: Memory, given: Given) -> Problem | None:
    if given.shared_bytes is None or memory.shared <= given.shared_bytes:
        return None
    return Problem(
        f"data.cache.where host needs {_gb(memory.shared)}, expected at most the {_gb(given.shared_bytes)} of /dev/shm",
        "use data.cache.where=store, or lower data.cache.rate",
    )


def _on_disk(run_bytes: int, given: Given) -> Problem | None:
    if given.disk_bytes is None or run_bytes <= given.disk_bytes:
        return None
    return Problem(
        f"checkpoints need {_gb(run_bytes)}, expected at most the {_gb(given.disk_bytes)} that are free where runs go",
        "free some, write the run elsewhere with --run, or lower checkpoint.keep",
    )


def _fewer_patches(plan: Plan, memory: Memory, limit: int) -> str:
    """The largest micro-batch that fits; the result stays the same."""
    rest, each = memory.device - memory.activations, memory.patches // plan.micro_batch
    if memory.cached and rest + max(memory.window, each) > limit:
        return "use data.cache.where=host, or lower data.cache.rate"
    if rest + memory.window > limit:
        return "choose a smaller validate.window, or a smaller network"
    per_rank = plan.micro_batch * plan.accumulate
    fitting = [n for n in range(1, plan.micro_batch) if per_rank % n == 0 and rest + n * each <= limit]
    if fitting:
        return f"set train.micro_batch={fitting[-1]}, which gives the same result"
    return "choose smaller patches.size, or a smaller network"


def _work(plan: Plan, memory: Memory) -> str:
    """What takes most."""
    if memory.window > memory.patches:
        return "validating a case"
    size = " × ".join(map(str, plan.patch))
    return f"{plan.micro_batch} patch{'es' if plan.micro_batch > 1 else ''} of {size} at once"


def _gb(amount: float) -> str:
    return f"{amount / GB:.1f} GB"
