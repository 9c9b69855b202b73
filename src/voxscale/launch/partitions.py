"""The cluster as SLURM describes it: partitions, their nodes and limits, the user's accounts.

The one-line forms of `scontrol` are read, which have kept their fields for many versions; what is not known here is
ignored.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from voxscale.config.site import Site, seconds_of
from voxscale.errors import InfrastructureError
from voxscale.launch.limits import QOS_FORMAT, TIME, Limits, Qos, make_qos, read_limits
from voxscale.launch.slurm import ask

_OUT_OF_SERVICE = re.compile(r"DOWN|DRAIN|DRAINED|DRAINING|ERROR|FAIL|FAILING|FUTURE|INVAL|INVALID_REG|NOT_RESPONDING")
_ACCOUNTING_TIMEOUT_S = 20.0
_ASSOCIATION = "account,qos,defaultaccount,defaultqos,partition,maxwall,maxtres,grptres"
_NORMAL = "normal"  # the QOS of a job that neither states one nor has a default


@dataclass(frozen=True)
class Node:
    """What one node gives to a job. `gpus` counts them by type, "" for those without one."""

    name: str
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    state: str = "IDLE"

    @property
    def is_in_service(self) -> bool:
        """Whether it takes jobs now or after those it has. One that does not may come back."""
        flags = self.state.rstrip("*~#!%$@^-").split("+")
        return not self.state.endswith("*") and not any(_OUT_OF_SERVICE.fullmatch(flag) for flag in flags)

    def num_gpus(self, type: str | None) -> int:
        """Its GPUs of a type, or all of them."""
        if type is None:
            return sum(self.gpus.values())
        return sum(count for name, count in self.gpus.items() if name.casefold() == type.casefold())


@dataclass(frozen=True)
class Access:
    """Whom a partition lets in, by account or by QOS; `allowed` None is everyone who is not denied."""

    allowed: frozenset[str] | None = None
    denied: frozenset[str] = frozenset()

    def admits(self, name: str) -> bool:
        return name not in self.denied and (self.allowed is None or name in self.allowed)

    def __str__(self) -> str:
        return ", ".join(sorted(self.allowed)) if self.allowed else f"any but {', '.join(sorted(self.denied))}"


@dataclass(frozen=True)
class Partition:
    """A queue and its nodes. A limit that is None does not exist."""

    name: str
    nodes: tuple[Node, ...] = ()
    is_default: bool = False
    is_open: bool = True  # shown to everyone and for everyone, as far as accounts and QOS go
    state: str = "UP"
    default_time_s: int | None = None
    max_time_s: int | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    accounts: Access = Access()
    qos: Access = Access()
    own_qos: str | None = None  # whose limits its jobs have

    @property
    def most_gpus(self) -> int:
        return max((node.num_gpus(None) for node in self.nodes), default=0)

    @property
    def most_cpus(self) -> int:
        return max((node.cpus for node in self.nodes), default=0)

    @property
    def most_memory_mb(self) -> int:
        return max((node.memory_mb for node in self.nodes), default=0)

    @property
    def unstated_time_s(self) -> int | None:
        """The limit of a job that asks for none."""
        return self.default_time_s if self.default_time_s is not None else self.max_time_s

    def allows_s(self, seconds: int) -> bool:
        return self.max_time_s is None or seconds <= self.max_time_s


@dataclass(frozen=True)
class Accounting:
    """The user's accounts with the QOS of each, and what of it SLURM insists on."""

    accounts: Mapping[str, frozenset[str]]
    default: str | None = None
    enforces_accounts: bool = False
    enforces_qos: bool = False
    default_qos: Mapping[str, str] = field(default_factory=dict)  # by account
    limits: Mapping[str, Limits] = field(default_factory=dict)  # of the user, by account; none that SLURM does not keep
    qos: Mapping[str, Qos] = field(default_factory=dict)

    def limits_of(self, site: Site, partition: Partition) -> Limits:
        """What counts for a site's job there: of each limit the partition's, else the QOS's, else the account's."""
        account = site.account or self.default or ""
        own = self.qos.get(site.qos or self.default_qos.get(account, "") or _NORMAL, Qos({}))
        of_partition = self.qos.get(partition.own_qos or "", Qos({}))
        first, then = (own, of_partition) if own.wins else (of_partition, own)
        return {**self.limits.get(account, {}), **then.limits, **first.limits}


@dataclass(frozen=True)
class Cluster:
    """All partitions; `reservations` and `accounting` are None where SLURM does not tell."""

    partitions: tuple[Partition, ...]
    reservations: tuple[str, ...] | None = None
    accounting: Accounting | None = None

    @property
    def default(self) -> Partition | None:
        return next((partition for partition in self.partitions if partition.is_default), None)

    def find(self, name: str) -> Partition | None:
        return next((partition for partition in self.partitions if partition.name == name), None)

    def chosen(self, site: Site) -> list[Partition]:
        """The partitions that a site's jobs may run in, as far as they exist."""
        if site.partition is None:
            return [self.default] if self.default is not None else []
        return [partition for name in site.partition.split(",") if (partition := self.find(name)) is not None]

    def limits(self, site: Site, partition: Partition) -> Limits:
        return self.accounting.limits_of(site, partition) if self.accounting is not None else {}

    def max_time_s(self, site: Site, partition: Partition) -> int | None:
        """The longest time that a site's job can have there."""
        of_job = self.limits(site, partition).get(TIME)
        limits = [partition.max_time_s, of_job.most if of_job is not None else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def devices_per_node(self, site: Site) -> int:
        """The most devices a job can have on a node there: GPUs, or shares of CPUs where none are asked for."""
        nodes = [node for partition in self.chosen(site) for node in partition.nodes]
        if site.gpus.ask == "none":
            return max([node.cpus // site.cpus_per_device for node in nodes] + [1])
        return max([node.num_gpus(site.gpus.type) for node in nodes] + [1])


def read_cluster(environ: Mapping[str, str]) -> Cluster:
    """Ask SLURM. Raises InfrastructureError where there is none or it does not answer."""
    nodes = ask("scontrol", "-a", "-o", "show", "node", environ=environ)
    partitions = ask("scontrol", "-a", "-o", "show", "partition", environ=environ)
    try:
        listed = ask("scontrol", "-a", "-o", "show", "reservation", environ=environ)
        reservations: tuple[str, ...] | None = tuple(re.findall(r"^ReservationName=(\S+)", listed, re.MULTILINE))
    except InfrastructureError:
        reservations = None
    return Cluster(make_partitions(partitions, nodes), reservations, _read_accounting(environ))


def make_partitions(partitions: str, nodes: str) -> tuple[Partition, ...]:
    """Partitions with their nodes from the one-line forms of `scontrol show`."""
    described = [_fields(line) for line in nodes.splitlines() if line.startswith("NodeName=")]
    listed = [_fields(line) for line in partitions.splitlines() if line.startswith("PartitionName=")]
    return tuple(
        Partition(
            name=fields["PartitionName"],
            nodes=tuple(
                _node(node, fields) for node in described if fields["PartitionName"] in _names(node, "Partitions")
            ),
            is_default=fields.get("Default") == "YES",
            is_open="YES" not in (fields.get("Hidden"), fields.get("RootOnly"), fields.get("ReqResv"))
            and fields.get("AllowGroups", "ALL") == "ALL",
            state=fields.get("State", "UP"),
            default_time_s=_limit_s(fields.get("DefaultTime", "")),
            max_time_s=_limit_s(fields.get("MaxTime", "")),
            min_nodes=_number(fields.get("MinNodes", "")) or 0,
            max_nodes=_number(fields.get("MaxNodes", "")),
            accounts=_access(fields, "Accounts"),
            qos=_access(fields, "Qos"),
            own_qos=next(iter(_names(fields, "QoS")), None),
        )
        for fields in listed
    )


def make_accounting(config: str, associations: str, qos: str = "") -> Accounting:
    """From `scontrol show config`, and from `sacctmgr` lines of _ASSOCIATION's columns and of QOS."""
    enforced = set(re.split(r"[,\s]+", _setting(config, "AccountingStorageEnforce").lower()))
    keeps_limits = bool(enforced & {"all", "limits", "safe"})
    accounts: dict[str, frozenset[str]] = {}
    default_qos: dict[str, str] = {}
    limits: dict[str, Limits] = {}
    default = None
    for line in associations.splitlines():
        account, names, chosen, first, partition, wall, job, group = (*line.split("|"), *[""] * 8)[:8]
        if account:
            accounts[account] = accounts.get(account, frozenset()) | frozenset(filter(None, names.split(",")))
            default = chosen or default
        if account and not partition:
            default_qos[account] = first
            limits[account] = read_limits(f"account {account}", wall=wall, job=job, group=group)
    return Accounting(
        accounts,
        default,
        # Every kind of limit implies that the account is known.
        enforces_accounts=bool(enforced & {"all", "associations", "limits", "qos", "safe", "wckeys"}),
        enforces_qos=bool(enforced & {"all", "qos"}),
        default_qos=default_qos,
        limits=limits if keeps_limits else {},
        qos=make_qos(qos) if keeps_limits else {},
    )


def _read_accounting(environ: Mapping[str, str]) -> Accounting | None:
    """None where there is no accounting, or it does not answer: then nothing can be said of accounts."""
    user = pwd.getpwuid(os.getuid()).pw_name
    try:
        config = ask("scontrol", "show", "config", environ=environ)
        if not _setting(config, "AccountingStorageType").endswith("slurmdbd"):
            return None
        cluster = _setting(config, "ClusterName")
        # `show assoc` has the same columns, but leaves the default account empty.
        words = ["show", "user", user, "withassoc", f"cluster={cluster}", f"format={_ASSOCIATION}"]
        listed = ask("sacctmgr", "-nP", *words, environ=environ, timeout_s=_ACCOUNTING_TIMEOUT_S)
        qos = ask("sacctmgr", "-nP", "show", "qos", QOS_FORMAT, environ=environ, timeout_s=_ACCOUNTING_TIMEOUT_S)
    except InfrastructureError:
        return None
    return make_accounting(config, listed, qos)


def _fields(line: str) -> dict[str, str]:
    """NAME=VALUE pairs; the first of a name counts, as free text such as a node's Reason comes last."""
    fields: dict[str, str] = {}
    for word in line.split():
        name, _, value = word.partition("=")
        fields.setdefault(name, value)
    return fields


def _node(fields: Mapping[str, str], partition: Mapping[str, str]) -> Node:
    """A node with what the partition lets a job have of it."""
    cpus = _number(fields.get("CPUEfctv", "")) or _number(fields.get("CPUTot", "")) or 0
    memory_mb = (_number(fields.get("RealMemory", "")) or 0) - (_number(fields.get("MemSpecLimit", "")) or 0)
    return Node(
        name=fields["NodeName"],
        cpus=_within(partition.get("MaxCPUsPerNode"), cpus),
        memory_mb=_within(partition.get("MaxMemPerNode"), memory_mb),
        gpus=parse_gres(fields.get("Gres", "")),
        features=frozenset(_names(fields, "AvailableFeatures") or _names(fields, "Features")),
        state=fields.get("State", "UNKNOWN"),
    )


def parse_gres(text: str) -> dict[str, int]:
    """GPUs by type from SLURM's list of generic resources, such as gpu:a100:4(S:0-1),mps:400."""
    gpus: dict[str, int] = {}
    for entry in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = entry.split(":")
        count = rest[-1] if rest and rest[-1].isdigit() else "1"
        types = [part for part in rest if part != "no_consume" and not part.isdigit()]
        if name == "gpu":
            gpus[":".join(types)] = gpus.get(":".join(types), 0) + int(count)
    return gpus


def _access(fields: Mapping[str, str], what: str) -> Access:
    allowed = _names(fields, f"Allow{what}")
    return Access(
        None if not allowed or "ALL" in allowed else frozenset(allowed), frozenset(_names(fields, f"Deny{what}"))
    )


def _names(fields: Mapping[str, str], name: str) -> tuple[str, ...]:
    value = fields.get(name, "")
    return () if value in ("", "(null)", "N/A", "NONE") else tuple(value.split(","))


def _within(limit: str | None, value: int) -> int:
    most = _number(limit or "")
    return value if most is None else min(most, value)


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d+", text) else None


def render_time(seconds: int) -> str:
    """Seconds in SLURM's way, as `seconds_of` reads them."""
    minutes, second = divmod(seconds, 60)
    days, minutes = divmod(minutes, 24 * 60)
    return f"{f'{days}-' if days else ''}{minutes // 60:02}:{minutes % 60:02}:{second:02}"


def _limit_s(text: str) -> int | None:
    return seconds_of(text) if re.fullmatch(r"[\d:-]*\d", text) else None


def _setting(config: str, name: str) -> str:
    found = re.search(rf"^{name}\s*=[ \t]*(.*)$", config, re.MULTILINE)
    return found[1].strip() if found else ""
