"""Check a site with a job of a minute, and say in words what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from voxscale.config.schema import PerDevice
from voxscale.config.site import Site
from voxscale.files import read_json, remove
from voxscale.launch.batch import CHECK, ranks_job
from voxscale.launch.cluster import Cluster, check_request
from voxscale.launch.cluster_run import run_on_slurm
from voxscale.launch.placing import check_place, look_at_nodes, make_request, scratch_of
from voxscale.launch.sbatch import Placement, Request, refuse_unspeakable
from voxscale.runs import RunFolder

_TIME = "2"  # of the job, whatever the site states
_CLOCK_S = 1.0
_SLOW_GB_S = 0.1


def check_site(folder: Path, environ: Mapping[str, str], place: Placement) -> dict[str, Any]:
    """Run the survey on the site's nodes. Returns what the ranks found, with `findings` in words."""
    refuse_unspeakable(folder)
    written, scratch = place.site, scratch_of(place.site, environ)
    place = replace(place, site=written.model_copy(update={"time": _TIME}))
    nodes_of = look_at_nodes(place, environ)
    request = make_request(place, PerDevice(per_device=1), nodes_of)
    check_place(place.site, request, [folder], nodes_of)
    of_profile = check_request(nodes_of, written, request) if isinstance(nodes_of, Cluster) else []
    run = RunFolder(folder)
    out = run.launch / "site-check.json"
    remove(out)
    words = ["voxscale.train.survey", str(folder), "--out", str(out)]
    words += ["--scratch", str(scratch)] if scratch is not None else []
    binds = [folder, *([scratch] if scratch is not None and scratch.is_dir() else [])]
    job = ranks_job(
        folder, place.site, request, binds, words,
        kind=CHECK, purpose="look at the ranks' hosts, devices, clocks and connections,", node_options=["--wait 60"],
    )  # fmt: skip
    run_on_slurm({CHECK: job}, request, environ, place, nodes_of)
    found: dict[str, Any] = read_json(out)
    return {**found, "findings": of_profile + find_faults(found, written, request)}


def find_faults(found: Mapping[str, Any], site: Site, request: Request) -> list[str]:
    """What is wrong, or likely so, in what the ranks found."""
    ranks: Sequence[Mapping[str, Any]] = found["ranks"]
    hosts = sorted({rank["host"] for rank in ranks})
    findings = []
    if len(hosts) != request.nodes:
        findings.append(f"asked for {request.nodes} nodes, found ranks on {len(hosts)}: {', '.join(hosts)}")
    if request.gpus and (blind := [rank["rank"] for rank in ranks if not rank["gpu_uuid"]]):
        findings.append(
            f"ranks {', '.join(map(str, blind))} see no GPU: check gpus.ask and gpus.type, the nodes' driver, and "
            + ("container.nv" if site.container is not None else "that torch was built for GPUs")
        )
    uuids = [rank["gpu_uuid"] for rank in ranks if rank["gpu_uuid"]]
    if len(uuids) != len(set(uuids)):
        findings.append("two ranks share one GPU: --devices is more than the job has on each node")
    for error in sorted({rank["scratch_error"] for rank in ranks} - {""}):
        where = ", ".join(sorted({rank["host"] for rank in ranks if rank["scratch_error"] == error}))
        findings.append(f"scratch {site.scratch}: {where} cannot write there: {error}")
    middle = median(rank["clock_s"] for rank in ranks)
    for host in hosts:
        ahead = median(rank["clock_s"] - middle for rank in ranks if rank["host"] == host)
        if abs(ahead) > _CLOCK_S:
            findings.append(
                f"the clock of {host} is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}: tell the admins"
            )
    speed = found["all_reduce_gb_s"]
    if speed is not None and speed < _SLOW_GB_S:
        via = f" over {ranks[0]['interface']}" if ranks[0]["interface"] else ""
        findings.append(
            f"all-reduce reaches {speed:.3f} GB/s{via}: set `interface` to the fast network (ip addr lists them)"
        )
    if len({rank["torch"] for rank in ranks}) > 1:
        findings.append("nodes have different versions of torch: use one environment or image on all")
    return findings


def render_check(found: Mapping[str, Any]) -> str:
    """A line per rank, the speed between them, and the findings."""
    lines = [
        f"rank {rank['rank']:<3} {rank['host']:<16} {rank['device']:<28} {rank['cpus']} CPUs  {rank['memory_gb']} GB"
        for rank in found["ranks"]
    ]
    if found["all_reduce_gb_s"] is not None:
        via = found["ranks"][0]["interface"]
        lines.append(f"all-reduce {found['all_reduce_gb_s']:.2f} GB/s" + (f" over {via}" if via else ""))
    lines += [f"wrong: {finding}" for finding in found["findings"]] or ["nothing is wrong"]
    return "\n".join(lines)
