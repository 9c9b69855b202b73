"""Where a job is to run: how many nodes and devices, and whether the cluster or the allocation can give them."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template
from typing import Literal

from voxscale.config.losses import OwnLossOptions
from voxscale.config.models import OwnOptions
from voxscale.config.schema import Config, PerDevice
from voxscale.config.site import Site
from voxscale.errors import ConfigError
from voxscale.launch.allocation import Allocation
from voxscale.launch.cluster import Cluster, cautions, check_request, read_cluster
from voxscale.launch.container import check_container
from voxscale.launch.sbatch import Placement, Request, time_limit
from voxscale.launch.slurm import GONE, states_of
from voxscale.plan.resources import Machine, choose_devices


def look_at_nodes(place: Placement, environ: Mapping[str, str]) -> Cluster | Allocation:
    """The nodes to choose from: those of the job this shell belongs to, else all that the cluster has.

    Raises what makes no sense there: waiting in an allocation, or for a job that does not exist.
    """
    if (allocation := Allocation.from_env(environ)) is not None:
        allocation.refuse_later(after=place.after, detach=place.detach)
        return allocation
    cluster = read_cluster(environ)
    states = states_of(place.after, environ)
    if unknown := [number for number in place.after if states[number] is GONE]:
        raise ConfigError(
            f"--after {unknown[0]}: SLURM does not know this job",
            fix="see `squeue --me`; leave --after out if it has ended well",
        )
    return cluster


def make_request(
    place: Placement,
    batch: int | PerDevice,
    nodes_of: Cluster | Allocation,
    *,
    preferred: Literal["auto"] | int = "auto",
) -> Request:
    """How many nodes and devices: as asked for, or as many as the allocation or the partition's nodes have."""
    site, gpus_there = place.site, 0
    if isinstance(nodes_of, Allocation):
        gpus_there = nodes_of.gpus
        nodes = place.nodes or len(nodes_of.nodes)
        nodes_of.refuse_more_than(nodes)
        gpus, most = gpus_there > 0, gpus_there or max(1, nodes_of.cpus // site.cpus_per_device)
        cpus: int | None = nodes_of.cpus
    else:
        nodes, gpus, cpus = place.nodes or 1, site.gpus.ask != "none", None
        most = site.gpus.per_node or nodes_of.devices_per_node(site)
        if gpus and place.devices.isdigit():
            most = max(most, int(place.devices))  # whether a node has so many is checked with all else
    machine = Machine(gpus=most if gpus else 0, cpus=most)
    devices, _ = choose_devices(place.devices, machine, batch, nodes=nodes, preferred=preferred)
    return Request(
        nodes, devices, gpus=gpus, cpus=cpus, gpus_there=gpus_there, restarts=place.restarts, profile=place.profile
    )


def check_place(site: Site, request: Request, binds: Sequence[Path], nodes_of: Cluster | Allocation) -> None:
    """Refuse what the cluster would refuse, or take and never run; everything at once."""
    findings = check_container(site.container, binds) if site.container is not None else []
    if request.restarts and not site.requeue:
        findings.append(f"--restarts {request.restarts}: the site's profile has requeue: false; expected true")
    if isinstance(nodes_of, Cluster):
        findings += check_request(nodes_of, site, request)
        for caution in cautions(nodes_of, site, request):
            print(f"warning: {caution}", file=sys.stderr)
    if findings:
        raise ConfigError.from_findings(findings, fix="change the request or the site's profile")


def own_code(config: Config) -> list[Path]:
    """The folders that hold a user's own network and loss, if the config names them."""
    found = [file.parent.parent if file.name == "__init__.py" else file.parent for file in _own_files(config)]
    return list(dict.fromkeys(found))


def own_code_sha256(config: Config) -> list[str]:
    """Of each file of a user's own network and loss: of the module, or of all of its package."""
    files = [
        each
        for file in _own_files(config)
        for each in (sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file])
    ]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in dict.fromkeys(files)]


def _own_files(config: Config) -> list[Path]:
    """Of each package or module that the config names; what is not found is said when the run is opened."""
    names = [config.model.name] if isinstance(config.model, OwnOptions) else []
    if isinstance(config.loss, OwnLossOptions):
        names += [name for name in (config.loss.name, config.loss.reduce) if name is not None]
    packages = dict.fromkeys(name.partition(":")[0].partition(".")[0] for name in names)
    found = [PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) for package in packages]
    return [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]


def with_code(site: Site, folders: Sequence[Path]) -> Site:
    """The site with further folders to import from, where the ranks begin elsewhere than the user does: in an image."""
    if site.container is None or not folders:
        return site
    path = ":".join([*map(str, folders), *([site.env["PYTHONPATH"]] if "PYTHONPATH" in site.env else [])])
    return site.model_copy(update={"env": {**site.env, "PYTHONPATH": path}})


def within_limit(site: Site, request: Request, nodes_of: Cluster | Allocation) -> Site:
    """The site with its signal within the time that the partition gives to a job that asks for none."""
    if time_limit(site, request) is not None or isinstance(nodes_of, Allocation):
        return site
    partitions = nodes_of.chosen(site)
    limits = [limit for each in partitions if (limit := each.unstated_time_s) is not None]
    limits += [limit for each in partitions if (limit := nodes_of.max_time_s(site, each)) is not None]
    return site.model_copy(update={"signal_s": max(10, min([site.signal_s, *(limit // 2 for limit in limits)]))})


def is_of_one_node(folder: Path) -> bool:
    """Whether a folder lies where each node usually has a disk or memory of its own."""
    return any(folder.is_relative_to(place) for place in ("/tmp", "/var/tmp", "/dev/shm", "/run"))  # noqa: S108


def with_scratch(config: Config, site: Site, environ: Mapping[str, str]) -> Config:
    """The config with its store in the site's scratch, unless it says itself where the store is."""
    if config.data.store is not None or (store := site_store(site, environ)) is None:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"store": str(store)})})


def site_store(site: Site, environ: Mapping[str, str]) -> Path | None:
    """Where stores are kept in the site's scratch, if it states one."""
    scratch = scratch_of(site, environ)
    return None if scratch is None else scratch / "voxscale"


def scratch_of(site: Site, environ: Mapping[str, str]) -> Path | None:
    """The site's scratch with variables and ~ filled in, if it states one."""
    if site.scratch is None:
        return None
    try:
        scratch = Template(site.scratch).substitute(environ)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"site scratch {site.scratch}: {error} is not set", fix="set the variable, or state the folder"
        ) from None
    return Path(os.path.expanduser(scratch))  # noqa: PTH111 raises nothing
