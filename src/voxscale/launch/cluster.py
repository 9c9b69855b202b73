"""Whether a request can ever run on the cluster.

SLURM accepts a job that asks for more than exists and lets it wait for ever, so a request is checked before it is
submitted; everything that is wrong is said at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from voxscale.config.site import Site, seconds_of
from voxscale.launch.limits import TIME, find_excess
from voxscale.launch.partitions import Cluster, Node, Partition, read_cluster, render_time
from voxscale.launch.sbatch import Request, cpus_per_task, memory_mb

__all__ = ["Cluster", "cautions", "check_request", "read_cluster"]


@dataclass(frozen=True)
class _Need:
    """Something every node of a job must have: in words, as a test, and what to say where no node passes it."""

    words: str
    is_met: Callable[[Node], bool]
    finding: Callable[[Partition], str]


def check_request(cluster: Cluster, site: Site, request: Request) -> list[str]:
    """Everything for which SLURM would refuse the job or let it wait for ever; a line each.

    Of several partitions one that fits is enough, as SLURM takes the first that can start the job.
    """
    partitions = cluster.chosen(site)
    findings = _check_names(cluster, site) + _check_account(cluster, site) + _check_reservation(cluster, site)
    found_in_each = [_check_partition(cluster, partition, site, request) for partition in partitions]
    return findings + ([finding for found in found_in_each for finding in found] if all(found_in_each) else [])


def cautions(cluster: Cluster, site: Site, request: Request) -> list[str]:
    """What may keep the job waiting or without devices, though it could run."""
    partitions = cluster.chosen(site)
    words = []
    if site.gpus.ask == "none" and any(partition.most_gpus for partition in partitions):
        words.append("gpus.ask is none though nodes have GPUs: the job may see none of them; set gpus.ask to gres")
    for partition in partitions:
        fit = [node for node in partition.nodes if all(need.is_met(node) for need in _needs(site, request))]
        ready = [node for node in fit if node.is_in_service]
        if len(ready) < request.nodes <= len(fit):
            out = ", ".join(f"{node.name} ({node.state})" for node in fit if not node.is_in_service)
            words.append(
                f"--nodes {request.nodes}: partition {partition.name} has only {len(ready)} such "
                f"node{'' if len(ready) == 1 else 's'} in service; the job waits until more come back: {out}"
            )
    return words


def _check_names(cluster: Cluster, site: Site) -> list[str]:
    known = [partition.name for partition in cluster.partitions]
    if site.partition is None:
        expected = f"expected one of {_listing(known)}"
        return [] if cluster.default else [f"partition: none given and the cluster has no default; {expected}"]
    return [
        f"partition {name}: no such partition{_instead(name, known)}"
        for name in site.partition.split(",")
        if name not in known
    ]


def _check_account(cluster: Cluster, site: Site) -> list[str]:
    known = cluster.accounting
    if known is None or not known.enforces_accounts:
        return []
    if not known.accounts:
        return ["account: SLURM's accounting knows none of yours; ask those who run the cluster for one"]
    account = site.account or known.default
    if account is None:
        return [f"account: none given and you have no default; expected one of {_listing(known.accounts)}"]
    if account not in known.accounts:
        return [f"account {account}: not one of yours{_instead(account, known.accounts)}"]
    if site.qos is not None and known.enforces_qos and site.qos not in known.accounts[account]:
        return [f"qos {site.qos}: account {account} has no such QOS{_instead(site.qos, known.accounts[account])}"]
    return []


def _check_reservation(cluster: Cluster, site: Site) -> list[str]:
    if site.reservation is None or cluster.reservations is None:
        return []
    return [
        f"reservation {name}: no such reservation{_instead(name, cluster.reservations)}"
        for name in site.reservation.split(",")
        if name not in cluster.reservations
    ]


def _check_partition(cluster: Cluster, partition: Partition, site: Site, request: Request) -> list[str]:
    findings = []
    where, limits = f"partition {partition.name}", cluster.limits(site, partition)
    if partition.state != "UP":
        up = [other.name for other in cluster.partitions if other.state == "UP"]
        findings.append(f"{where}: it is {partition.state}; expected one that is UP: {_listing(up)}")
    account = site.account or (cluster.accounting.default if cluster.accounting else None)
    if account is not None and not partition.accounts.admits(account):
        findings.append(f"account {account}: {where} does not admit it; expected {partition.accounts}")
    if site.qos is not None and not partition.qos.admits(site.qos):
        findings.append(f"qos {site.qos}: {where} does not admit it; expected {partition.qos}")
    if site.time is not None and not partition.allows_s(seconds_of(site.time)):
        longer = [other.name for other in cluster.partitions if other.allows_s(seconds_of(site.time))]
        other = f", or partition {' or '.join(longer)}" if longer else ""
        limit = render_time(partition.max_time_s or 0)
        findings.append(f"time {site.time}: expected at most {limit}, the limit of {where}{other}")
    elif site.time is not None and (own := limits.get(TIME)) is not None and seconds_of(site.time) > own.most:
        findings.append(f"time {site.time}: expected at most {render_time(own.most)}, the limit of {own.whose}")
    findings += find_excess(limits, site, request)
    unknown = _check_features(partition, site)
    known = site.model_copy(update={"constraint": None}) if unknown else site
    return findings + unknown + _check_nodes(cluster, partition, known, request)


def _check_nodes(cluster: Cluster, partition: Partition, site: Site, request: Request) -> list[str]:
    """Whether the partition has enough nodes, each with what the job asks of one."""
    needs = _needs(site, request)
    missing = [need for need in needs if not any(need.is_met(node) for node in partition.nodes)]
    findings = [need.finding(partition) + _elsewhere(cluster, partition, [need], 1) for need in missing]
    most = min(len(partition.nodes), partition.max_nodes or len(partition.nodes))
    fit = [node for node in partition.nodes if all(need.is_met(node) for need in needs)]
    if not most >= request.nodes >= partition.min_nodes:
        limit = f"of which a job may have {most}" if most < len(partition.nodes) else f"expected at most {most}"
        limit = f"expected at least {partition.min_nodes}" if request.nodes < partition.min_nodes else limit
        other = _elsewhere(cluster, partition, needs, request.nodes)
        findings.append(
            f"--nodes {request.nodes}: partition {partition.name} has {_count(partition.nodes)}, {limit}{other}"
        )
    elif len(fit) < request.nodes and not missing:
        each = " and ".join(need.words for need in needs)
        findings.append(
            f"--nodes {request.nodes}: only {len(fit)} of the {_count(partition.nodes)} of partition {partition.name} "
            f"have {each}" + _elsewhere(cluster, partition, needs, request.nodes)
        )
    return findings


def _needs(site: Site, request: Request) -> list[_Need]:
    needs = [_cpu_need(site, request)]
    if request.gpus and site.gpus.ask != "none":
        needs.insert(0, _gpu_need(site.gpus.type, request.devices))
    if (memory := memory_mb(site, request)) is not None:
        needs.append(_memory_need(site, request, memory))
    if site.constraint is not None:
        needs.append(_feature_need(site.constraint))
    return needs


def _gpu_need(type: str | None, devices: int) -> _Need:
    of_type = f" of type {type}" if type else ""

    def finding(partition: Partition) -> str:
        had = {f"{name or 'without type'}: {count}" for node in partition.nodes for name, count in node.gpus.items()}
        return (
            f"--devices {devices}{f', gpus.type {type}' if type else ''}: no node of partition {partition.name} has "
            f"{devices} GPUs{of_type}; found per node {_listing(had)}"
        )

    return _Need(f"{devices} GPUs{of_type}", lambda node: node.num_gpus(type) >= devices, finding)


def _cpu_need(site: Site, request: Request) -> _Need:
    cpus = cpus_per_task(site, request)

    def finding(partition: Partition) -> str:
        most = partition.most_cpus
        share = f"; expected cpus_per_device of at most {most // request.devices}" if most >= request.devices else ""
        return (
            f"cpus_per_device {site.cpus_per_device} × --devices {request.devices} = {cpus} CPUs: "
            f"found at most {most} per node in partition {partition.name}{share}"
        )

    return _Need(f"{cpus} CPUs", lambda node: node.cpus >= cpus, finding)


def _memory_need(site: Site, request: Request, memory: int) -> _Need:
    is_per_node = site.memory is not None and site.memory.per_node is not None

    def finding(partition: Partition) -> str:
        most = partition.most_memory_mb // (1 if is_per_node else request.devices)
        return (
            f"memory: {memory} MB per node: found at most {partition.most_memory_mb} MB in partition {partition.name}; "
            f"expected memory.{'per_node' if is_per_node else 'per_device'} of at most {most}M"
        )

    return _Need(f"{memory} MB", lambda node: node.memory_mb >= memory, finding)


def _feature_need(constraint: str) -> _Need:
    """Features joined by & or by |. What is more involved is left to SLURM, but for the names in it."""
    names = _features(constraint)

    def is_met(node: Node) -> bool:
        if re.search(r"[\[\](),*!]", constraint) or ("&" in constraint and "|" in constraint):
            return True
        return (any if "|" in constraint else all)(name in node.features for name in names)

    def finding(partition: Partition) -> str:
        had = {feature for node in partition.nodes for feature in node.features}
        return f"constraint {constraint}: no node of partition {partition.name} has that; found {_listing(had)}"

    return _Need(f"the features {constraint}", is_met, finding)


def _features(constraint: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9_.:@+-]+", re.sub(r"\*\d+", "", constraint))


def _check_features(partition: Partition, site: Site) -> list[str]:
    """Names in the constraint that no node has; with one of them SLURM refuses the job."""
    had = {feature for node in partition.nodes for feature in node.features}
    return [
        f"constraint {site.constraint}: no node of partition {partition.name} has {name}{_instead(name, had)}"
        for name in _features(site.constraint or "")
        if name not in had
    ]


def _elsewhere(cluster: Cluster, partition: Partition, needs: Iterable[_Need], nodes: int) -> str:
    """Other partitions with as many nodes of that kind."""
    fit = [
        other.name
        for other in cluster.partitions
        if other.name != partition.name and other.state == "UP" and nodes <= (other.max_nodes or nodes)
        and sum(all(need.is_met(node) for need in needs) for node in other.nodes) >= nodes
    ]  # fmt: skip
    return f"; partition {' or '.join(fit)} would do" if fit else ""


def _instead(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; found {_listing(known)}" + (f"; did you mean {close[0]}?" if close else "")


def _count(nodes: Sequence[Node]) -> str:
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"


def _listing(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
