"""What SLURM's accounting lets a job, a user or a group have: by partition, QOS and account."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from voxscale.config.site import Site, seconds_of
from voxscale.launch.sbatch import Request, cpus_per_task, memory_mb, memory_of

TIME = "time"
_QOS_COLUMNS = ("name", "maxwall", "maxtres", "maxtresperuser", "grptres", "flags")
QOS_FORMAT = f"format={','.join(_QOS_COLUMNS)}"
_WORDS = {"cpu": "CPUs", "node": "nodes", "mem": "MB of memory", "gres/gpu": "GPUs"}


@dataclass(frozen=True)
class Limit:
    """The most of something; `whose` limit it is, in words. Seconds, MB or a number."""

    most: int
    whose: str


Limits = Mapping[str, Limit]  # by what is limited: time, or SCOPE RESOURCE such as `a job gres/gpu`


@dataclass(frozen=True)
class Qos:
    """The limits of a quality of service, and whether they come before those of the partition's own."""

    limits: Limits
    wins: bool = False


def read_limits(whose: str, *, wall: str = "", job: str = "", user: str = "", group: str = "") -> Limits:
    """As `sacctmgr` prints them: a time, and lists such as `cpu=8,gres/gpu=2,mem=40G`. What is unknown is left out."""
    found = {TIME: Limit(seconds_of(wall), whose)} if re.fullmatch(r"[\d:-]*\d", wall) else {}
    for scope, listed in (("a job", job), ("a user", user), ("all its jobs", group)):
        for name, number in re.findall(r"([^,=]+)=(\d+[KMGT]?)(?=,|$)", listed):
            most = round(memory_of(number)) if name == "mem" else int(re.sub(r"\D", "", number))
            found[f"{scope} {name}"] = Limit(most, whose)
    return found


def make_qos(listed: str) -> dict[str, Qos]:
    """From lines of `sacctmgr show qos` with QOS_FORMAT."""
    rows = [line.split("|") for line in listed.splitlines() if line.count("|") == len(_QOS_COLUMNS) - 1]
    return {
        name: Qos(read_limits(f"qos {name}", wall=wall, job=job, user=user, group=group), "OverPartQOS" in flags)
        for name, wall, job, user, group, flags in rows
    }


def find_excess(limits: Limits, site: Site, request: Request) -> list[str]:
    """What of a request SLURM would refuse, or let wait for ever; a line each."""
    asked = _asked(site, request)
    findings = []
    for what, limit in limits.items():
        scope, _, resource = what.rpartition(" ")
        if (found := asked.get(resource, 0)) > limit.most:
            kind = _WORDS.get(resource, f"GPUs {resource.partition(':')[2]}")
            findings.append(f"{found} {kind}: expected at most {limit.most}, what {limit.whose} gives to {scope}")
    return findings


def _asked(site: Site, request: Request) -> dict[str, int]:
    asked = {"node": request.nodes, "cpu": request.nodes * cpus_per_task(site, request)}
    if (memory := memory_mb(site, request)) is not None:
        asked["mem"] = request.nodes * memory
    if request.gpus and site.gpus.ask != "none":
        asked["gres/gpu"] = request.world_size
        if site.gpus.type is not None:
            asked[f"gres/gpu:{site.gpus.type}"] = request.world_size
    return asked
