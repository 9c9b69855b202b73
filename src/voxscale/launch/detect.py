"""Write a site profile from what SLURM tells of the cluster: found, guessed, and said so."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from voxscale.config.load import check_section, parse_yaml
from voxscale.config.site import Site
from voxscale.errors import InfrastructureError, printable
from voxscale.launch.partitions import Cluster, Node, Partition, read_cluster, render_time

_DAY_S = 24 * 3600
_KEPT_FOR_SYSTEM = 0.05
_SCRATCH = ("SCRATCH", "SCRATCHDIR", "SCRATCH_DIR")
_RUNTIMES = {"apptainer": "apptainer", "singularity": "singularity", "ch-run": "charliecloud"}

# Each field: what it is, and an example for one that has no default.
FIELDS: dict[str, tuple[str, str]] = {
    "partition": ("where jobs queue; several with a comma: whichever starts first; else the cluster's default", "gpu"),
    "account": ("who pays; else your default account", "my-group"),
    "qos": ("quality of service", "normal"),
    "reservation": ("nodes that are kept for you", "workshop"),
    "constraint": ("features that nodes must have, joined with & or |", "a100&ib"),
    "gpus": ("how GPUs are asked for (gres, gpus-per-node or none), of which type, how many a node has", ""),
    "cpus_per_device": ("CPUs for each GPU, or for each process where there are none", ""),
    "memory": (
        "asked of each node; per_device: for each of its devices; else the cluster's default",
        "{per_node: 64G}",
    ),
    "exclusive": ("whole nodes, shared with nobody", ""),
    "time": ("limit of a job, D-HH:MM:SS; at it a training saves and is queued again", '"12:00:00"'),
    "signal_s": ("seconds before the limit at which a training is told to save", ""),
    "requeue": ("whether a training that was stopped is queued again, until it is done", ""),
    "mail": ("who hears of a job, and when", "{to: me@example.org, when: [END, FAIL]}"),
    "extra": ("any further #SBATCH options", ""),
    "output": ("where a job's output goes, in its run folder: %x is the job's name, %j its number", ""),
    "error": ("its error output, if apart", "launch/%x.%j.err"),
    "modules": ("modules to load, in this order", ""),
    "conda": ("conda environment to activate, name or folder", "voxscale"),
    "venv": ("virtual environment to activate, a folder", "~/venvs/voxscale"),
    "python": ("interpreter; else that of the environment, or the one voxscale runs in", "python3"),
    "env": ("variables for the ranks, such as NCCL_SOCKET_IFNAME or NCCL_IB_HCA", ""),
    "container": ("image that the ranks run in (apptainer, singularity or charliecloud)", "{image: monai.sif}"),
    "scratch": ("where prepared data are kept; variables are filled in", "$SCRATCH"),
    "interface": ("network interface between nodes", "ib0"),
    "interconnect": ("figures of the network for the plan: bandwidth_gb_s, latency_us", ""),
}


def detect_site(environ: Mapping[str, str]) -> tuple[Site, list[str]]:
    """A site for this cluster, and in words what was found and what was guessed."""
    return make_site(read_cluster(environ), environ)


def make_site(cluster: Cluster, environ: Mapping[str, str]) -> tuple[Site, list[str]]:
    """The same for a cluster that was read."""
    partition = _choose_partition(cluster)
    why = (
        "" if partition.is_default else ", which has GPUs" if partition.most_gpus else ", as no default is open to all"
    )
    notes = [*map(_describe, cluster.partitions), f"chosen: partition {partition.name}{why}"]
    content: dict[str, Any] = {"partition": partition.name, **_devices(partition, notes)}
    content |= _account(cluster, partition, notes)
    limit_s = cluster.max_time_s(Site(account=content.get("account")), partition)
    content |= _time(limit_s, notes) | _scratch(environ, notes)
    for program, runtime in _RUNTIMES.items():
        if shutil.which(program, path=environ.get("PATH")):
            notes.append(
                f"{program} is here: jobs can run in an image with container: {{runtime: {runtime}, image: …}}"
            )
    return check_section(Site, content, "site detect"), notes


def render_site(site: Site, notes: Sequence[str] = ()) -> str:
    """The site as YAML that reads back the same: every field with a comment, those at their default commented out."""
    given = site.model_dump(mode="json", exclude_defaults=True)
    defaults = Site().model_dump(mode="json")
    lines = [
        "# A site: where voxscale's jobs run, and what they have to ask for there.",
        *(f"# {printable(note)}" for note in notes),
    ]
    for name, (comment, example) in FIELDS.items():
        text = _inline(given[name]) if name in given else example or _inline(defaults[name])
        lines += ["", f"# {comment}", f"{'' if name in given else '# '}{name}: {text}"]
    return "\n".join([*lines, ""])


def _choose_partition(cluster: Cluster) -> Partition:
    """The default, unless only others have GPUs; one that is closed to some only where there is no other."""
    usable = [partition for partition in cluster.partitions if partition.state == "UP" and partition.nodes]
    if not usable:
        raise InfrastructureError(
            "SLURM lists no partition that is UP and has nodes", fix="see `sinfo`; ask those who run the cluster"
        )

    def rank(partition: Partition) -> tuple[bool, bool, bool, int]:
        return partition.is_open, partition.most_gpus > 0, partition.is_default, _num_gpus(partition)

    return max(usable, key=rank)


def _num_gpus(partition: Partition) -> int:
    return sum(node.num_gpus(None) for node in partition.nodes)


def _describe(partition: Partition) -> str:
    limit = f"at most {render_time(partition.max_time_s)}" if partition.max_time_s is not None else "no time limit"
    kinds = Counter(f"{node.cpus} CPUs, {node.memory_mb} MB{_gpu_words(node)}" for node in partition.nodes)
    nodes = "; ".join(f"{count} × {kind}" for kind, count in kinds.most_common()) or "no nodes"
    default = " (the default)" if partition.is_default else ""
    return f"found partition {partition.name}{default}, {partition.state.lower()}, {limit}: {nodes}"


def _gpu_words(node: Node) -> str:
    return "".join(f", {count} GPUs{f' {name}' if name else ''}" for name, count in sorted(node.gpus.items()))


def _devices(partition: Partition, notes: list[str]) -> dict[str, Any]:
    """GPUs, CPUs and memory after the kind of node that brings most GPUs, or most CPUs where there are none."""
    kinds = Counter[tuple[str, int]]()
    for node in partition.nodes:
        kinds.update({(name, count): count for name, count in node.gpus.items()})
    if not kinds:
        cpus = min(node.cpus for node in partition.nodes)
        share = max(1, min(Site().cpus_per_device, cpus))
        notes.append("no GPUs: ranks run on CPUs")
        return {"cpus_per_device": share, **_memory(partition.nodes, max(1, cpus // share), notes)}
    ((type, count), _), *others = kinds.most_common()
    alike = [node for node in partition.nodes if node.gpus.get(type) == count]
    if others:
        listed = ", ".join(f"{name or 'untyped'}:{number}" for (name, number), _ in others)
        notes.append(f"guessed: gpus.type {type or 'none'} with {count} a node, of which there are most; also {listed}")
    total = max(node.num_gpus(None) for node in alike)
    cpus = min(node.cpus for node in alike) // total
    gpus = {"ask": "gres", "per_node": count, **({"type": type} if type else {})}
    return {"gpus": gpus, "cpus_per_device": max(1, cpus), **_memory(alike, total, notes)}


def _memory(nodes: Sequence[Node], devices: int, notes: list[str]) -> dict[str, Any]:
    """A device's share of the memory, a little kept for the system."""
    share_mb = int(min(node.memory_mb for node in nodes) * (1 - _KEPT_FOR_SYSTEM)) // devices
    if share_mb < 100:  # RealMemory=1 is what SLURM has where nobody stated it
        notes.append("memory: SLURM does not say how much nodes have; left to the cluster")
        return {}
    return {"memory": {"per_device": f"{share_mb}M"}}


def _time(limit_s: int | None, notes: list[str]) -> dict[str, Any]:
    seconds = min(limit_s, _DAY_S) if limit_s is not None else _DAY_S
    if limit_s is None or limit_s > _DAY_S:
        notes.append("guessed: time 24 hours, though more is allowed; long trainings are queued again")
    signal_s = Site().signal_s
    return {"time": render_time(seconds), **({"signal_s": max(10, seconds // 4)} if seconds <= 2 * signal_s else {})}


def _account(cluster: Cluster, partition: Partition, notes: list[str]) -> dict[str, Any]:
    known = cluster.accounting
    if known is None:
        notes.append("account: not known without SLURM's accounting; set it if the cluster asks for one")
        return {}
    admitted = [name for name in sorted(known.accounts) if partition.accounts.admits(name)]
    if not admitted:
        notes.append(f"account: none of yours is admitted to partition {partition.name}: {', '.join(known.accounts)}")
        return {}
    chosen = known.default if known.default in admitted else admitted[0]
    if len(admitted) > 1:
        notes.append(f"guessed: account {chosen}; yours are {', '.join(admitted)}")
    return {"account": chosen}


def _scratch(environ: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    for name in _SCRATCH:
        if (folder := environ.get(name)) and Path(folder).is_dir():
            notes.append(f"guessed: prepared data go to ${name}; every node has to see it")
            return {"scratch": f"${name}"}
    return {}


def _inline(value: Any) -> str:
    """A value as YAML on one line. What could be read as anything but itself is quoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_inline(key)}: {_inline(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_./$][A-Za-z0-9_./$+-]*", value):
        return value if parse_yaml(value, "site") == value else json.dumps(value)
    return json.dumps(value, ensure_ascii=False)
