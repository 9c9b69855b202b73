"""Is this request possible on that cluster? Asked of a real SLURM, and of what other clusters would answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.slurm import SlurmLab
from voxscale.config.load import check_section
from voxscale.config.site import Gpus, Site, seconds_of
from voxscale.errors import InfrastructureError
from voxscale.launch.cluster import Cluster, cautions, check_request, read_cluster
from voxscale.launch.detect import detect_site, make_site
from voxscale.launch.limits import Qos, make_qos, read_limits
from voxscale.launch.partitions import Accounting, make_accounting, make_partitions, parse_gres, render_time
from voxscale.launch.placing import within_limit
from voxscale.launch.sbatch import Planned, Request
from voxscale.launch.slurm import cancel, states_of, submit

NODES = """\
NodeName=g1 Arch=x86_64 CPUTot=64 AvailableFeatures=a100,ib ActiveFeatures=a100,ib Gres=gpu:a100:4(S:0-1),mps:400 \
OS=Linux 5 RealMemory=500000 State=MIXED Partitions=gpu,all NewField=x y
NodeName=g2 CPUTot=64 AvailableFeatures=a100 Gres=gpu:a100:4 RealMemory=500000 MemSpecLimit=4000 State=IDLE+DRAIN \
Partitions=gpu Reason=bad State=IDLE Gres=gpu:a100:9 [root@x]
NodeName=v1 CPUEfctv=30 CPUTot=32 AvailableFeatures=v100 Gres=gpu:v100:2 RealMemory=190000 State=ALLOCATED \
Partitions=gpu,all
NodeName=c1 CPUTot=128 AvailableFeatures=(null) Gres=(null) RealMemory=250000 State=DOWN* Partitions=cpu,all,closed
"""
PARTITIONS = """\
PartitionName=cpu AllowAccounts=ALL AllowQos=ALL Default=YES MaxTime=UNLIMITED MaxNodes=UNLIMITED MinNodes=0 State=UP
PartitionName=gpu AllowAccounts=brain,heart AllowQos=normal Default=NO MaxTime=2-00:00:00 MaxNodes=2 State=UP
PartitionName=all DenyAccounts=guest Default=NO MaxTime=01:00:00 MaxNodes=UNLIMITED MaxCPUsPerNode=16 State=UP
PartitionName=closed Default=NO MaxTime=01:00:00 State=DOWN Hidden=YES
"""
CLUSTER = Cluster(
    make_partitions(PARTITIONS, NODES),
    reservations=("workshop",),
    accounting=Accounting({"brain": frozenset({"normal", "long"})}, "brain", enforces_accounts=True, enforces_qos=True),
)
A100 = {"partition": "gpu", "gpus": {"ask": "gres", "type": "a100"}}
EIGHT = Request(2, 8, gpus=True)


def findings(content: dict[str, Any], request: Request = Request(), cluster: Cluster = CLUSTER) -> list[str]:  # noqa: B008
    return check_request(cluster, check_section(Site, content, "site"), request)


def test_what_fits_is_not_complained_of() -> None:
    assert not findings({})
    assert not findings({**A100, "cpus_per_device": 16, "memory": {"per_device": "120G"}}, Request(2, 4, gpus=True))
    assert not findings({"partition": "gpu", "constraint": "a100&ib", "time": "2-0"})
    assert not findings({"partition": "gpu", "constraint": "[a100*1&v100*1]", "reservation": "workshop"}, Request(2))
    assert not findings({**A100, "qos": "normal", "account": "brain"}, Request(2, 4, gpus=True))
    assert not findings({"partition": "all,gpu", "time": "1-0"}), "one of several is enough"


@pytest.mark.parametrize(
    ("content", "request_", "words"),
    [
        ({"partition": "gpuu"}, Request(), ["partition gpuu", "all, closed, cpu, gpu", "did you mean gpu?"]),
        ({"partition": "closed"}, Request(), ["partition closed: it is DOWN", "all, cpu, gpu"]),
        ({"account": "brian"}, Request(), ["account brian: not one of yours", "did you mean brain?"]),
        ({"qos": "longer"}, Request(), ["qos longer: account brain has no such QOS", "did you mean long?"]),
        ({"partition": "gpu", "qos": "long"}, Request(), ["qos long: partition gpu does not admit it", "normal"]),
        ({"reservation": "ours"}, Request(), ["reservation ours", "found workshop"]),
        ({}, Request(9), ["--nodes 9: partition cpu has 1 node, expected at most 1"]),
        ({"partition": "gpu"}, Request(3), ["partition gpu has 3 nodes, of which a job may have 2", "partition all"]),
        (A100, Request(1, 8, gpus=True), ["--devices 8, gpus.type a100", "found per node a100: 4, v100: 2"]),
        ({**A100, "partition": "cpu"}, Request(1, 4, gpus=True), ["found per node none", "gpu or all would do"]),
        ({"cpus_per_device": 40, "partition": "gpu"}, Request(1, 4), ["40 × --devices 4 = 160 CPUs", "at most 16"]),
        ({"partition": "all", "cpus_per_device": 17}, Request(), ["found at most 16 per node", "gpu would do"]),
        ({"memory": {"per_device": "200G"}}, Request(1, 2), ["409600 MB", "memory.per_device of at most 125000M"]),
        ({"memory": {"per_node": "1T"}}, Request(1, 2), ["memory.per_node of at most 250000M"]),
        ({"partition": "gpu", "memory": {"per_node": "3G"}, "constraint": "ib"}, Request(2), ["only 1 of the 3 nodes"]),
        ({"partition": "gpu", "constraint": "a100&iib"}, Request(), ["has iib", "did you mean ib?"]),
        ({"partition": "gpu", "constraint": "a100&v100"}, Request(), ["constraint a100&v100: no node"]),
        ({"partition": "gpu", "time": "3-0"}, Request(), ["time 3-0: expected at most 2-00:00:00", "partition cpu"]),
    ],
)  # fmt: skip
def test_a_finding_says_what_is_there(content: dict[str, Any], request_: Request, words: list[str]) -> None:
    (finding,) = findings(content, request_)
    assert all(word in finding for word in words), finding


def test_everything_is_said_at_once() -> None:
    content = {**A100, "account": "guest", "qos": "x", "reservation": "r", "time": "9-0", "cpus_per_device": 99}
    found = findings({**content, "memory": {"per_node": "9T"}, "constraint": "fast"}, EIGHT)
    starts = [
        "account guest",
        "reservation r",
        "account guest",
        "qos x",
        "time 9-0",
        "constraint",
        "--devices 8",
        "cpus",
        "memory",
    ]
    assert [finding.startswith(start) for finding, start in zip(found, starts, strict=True)] == [True] * 9


def test_unknown_accounting_is_not_held_against_anyone() -> None:
    for accounting in (None, Accounting({"brain": frozenset()}, "brain")):
        assert not findings({"account": "any", "qos": "any"}, cluster=Cluster(CLUSTER.partitions, None, accounting))


def test_no_default_partition_and_no_account() -> None:
    own = Accounting({}, None, enforces_accounts=True)
    partition, account = findings({}, cluster=Cluster(CLUSTER.partitions[1:], None, own))
    assert partition == "partition: none given and the cluster has no default; expected one of all, closed, gpu"
    assert account.startswith("account: SLURM's accounting knows none of yours")


def test_nodes_out_of_service_are_a_caution() -> None:
    site = check_section(Site, A100, "site")
    (caution,) = cautions(CLUSTER, site, Request(2, 4, gpus=True))
    assert "only 1 such node in service" in caution
    assert "g2 (IDLE+DRAIN)" in caution
    assert not cautions(CLUSTER, site, Request(1, 4, gpus=True))


def test_closed_partitions_are_known_as_such() -> None:
    assert {partition.name for partition in CLUSTER.partitions if not partition.is_open} == {"closed"}


def test_accounting_is_read_as_sacctmgr_prints_it() -> None:
    known = make_accounting("AccountingStorageEnforce = associations,limits\n", "a|normal,long|b\nb|normal|b\n")
    assert known.accounts == {"a": frozenset({"normal", "long"}), "b": frozenset({"normal"})}
    assert (known.default, known.enforces_accounts, known.enforces_qos) == ("b", True, False)
    assert make_accounting("AccountingStorageEnforce = none\n", "") == Accounting({})


ASSOCIATIONS = """\
brain|normal,long|brain|||2-00:00:00|cpu=96,node=3|
brain|normal,long|brain||cpu|00:01:00|cpu=1|
heart|normal|brain|tiny||||cpu=4
"""
QOS = """\
normal|||gres/gpu=8,mem=900G||
long|5-00:00:00|node=2,gres/gpu:a100=4|||DenyOnLimit,OverPartQOS
tiny|00:10:00||cpu=2||
gpus|1-00:00:00|node=1|||
"""


def limited(site: dict[str, Any], request: Request = Request(), *, enforce: str = "limits") -> list[str]:  # noqa: B008
    """On a cluster with limits; its partition gpu has a QOS of its own."""
    text = PARTITIONS.replace("PartitionName=gpu ", "PartitionName=gpu QoS=gpus ").replace("QoS=N/A", "")
    text = text.replace("AllowAccounts=brain,heart AllowQos=normal", "")
    accounting = make_accounting(f"AccountingStorageEnforce = {enforce}\n", ASSOCIATIONS, QOS)
    return findings(site, request, Cluster(make_partitions(text, NODES), None, accounting))


@pytest.mark.parametrize(
    ("content", "request_", "expected"),
    [
        ({"time": "3-0"}, Request(), ["time 3-0: expected at most 2-00:00:00, the limit of account brain"]),
        ({"qos": "long", "time": "3-0"}, Request(), []),
        ({"qos": "long", "time": "6-0"}, Request(), ["time 6-0: expected at most 5-00:00:00, the limit of qos long"]),
        (
            {"partition": "gpu", "time": "1-1"},
            Request(),
            ["time 1-1: expected at most 1-00:00:00, the limit of qos gpus"],
        ),
        ({"partition": "gpu", "time": "1-1", "qos": "long"}, Request(), []),
        ({"partition": "gpu"}, Request(2), ["2 nodes: expected at most 1, what qos gpus gives to a job"]),
        ({"partition": "gpu", "qos": "long"}, Request(2), []),
        ({"account": "heart"}, Request(1, 1), ["4 CPUs: expected at most 2, what qos tiny gives to a user"]),
        (
            {"account": "heart", "qos": "normal", "cpus_per_device": 5},
            Request(),
            ["5 CPUs: expected at most 4, what account heart gives to all its jobs"],
        ),
        (
            {**A100, "partition": "all", "cpus_per_device": 1, "qos": "long"},
            Request(2, 4, gpus=True),
            ["8 GPUs a100: expected at most 4, what qos long gives to a job"],
        ),
        (
            {"memory": {"per_node": "950G"}, "cpus_per_device": 1},
            Request(),
            ["972800 MB of memory: expected at most 921600, what qos normal gives to a user"],
        ),
    ],
)
def test_limits_of_accounting_are_told_with_whose_they_are(
    content: dict[str, Any], request_: Request, expected: list[str]
) -> None:
    found = [line for line in limited(content, request_) if "what " in line or "the limit of" in line]
    assert found == expected
    kept = [line for line in limited(content, request_, enforce="associations") if line in expected]
    assert not kept, "what SLURM does not insist on"


def test_limits_that_cannot_be_read_are_left_out() -> None:
    assert make_qos("a|x|cpu=,node=N,bb/cray=2,cpu=-1|||\nnothing\n") == {
        "a": Qos(read_limits("qos a", job="bb/cray=2"))
    }


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:2", {"": 2}),
        ("gpu", {"": 1}),
        ("gpu:a100:4(S:0,2),gpu:v100:1(IDX:0-3)", {"a100": 4, "v100": 1}),
        ("gpu:a100:no_consume:2,shard:8", {"a100": 2}),
        ("(null)", {}),
        ("craynetwork:4", {}),
    ],
)
def test_gres(text: str, gpus: dict[str, int]) -> None:
    assert parse_gres(text) == gpus


@given(st.integers(0, 10**7))
def test_times_read_back(seconds: int) -> None:
    assert seconds_of(render_time(seconds)) == seconds


@pytest.fixture(scope="module")
def environ(slurm: SlurmLab) -> dict[str, str]:
    return {**os.environ, **slurm.environ}


def test_the_real_cluster_is_read(slurm: SlurmLab, environ: dict[str, str]) -> None:
    cluster = read_cluster(environ)
    assert cluster.default is not None
    assert cluster.default.name == "main"
    assert [node.name for node in cluster.default.nodes] == slurm.nodes
    assert {(node.cpus, node.memory_mb, node.num_gpus("a100")) for node in cluster.default.nodes} == {(4, 6000, 2)}
    assert {partition.name: partition.max_time_s for partition in cluster.partitions}["short"] == 120
    assert cluster.devices_per_node(Site()) == 1
    assert cluster.devices_per_node(check_section(Site, {"gpus": {"ask": "gres"}}, "site")) == 2
    assert cluster.accounting is None


def test_what_the_real_cluster_would_keep_for_ever_is_refused(slurm: SlurmLab, environ: dict[str, str]) -> None:
    """`sbatch -N9` is accepted here and waits; so is a time over the limit."""
    (finding,) = check_request(read_cluster(environ), Site(cpus_per_device=1), Request(9))
    assert finding == "--nodes 9: partition main has 4 nodes, expected at most 4"
    job = slurm.submit("-N9", "--output=/dev/null", "--wrap=true")
    assert slurm.state(job) == "PENDING"
    slurm.run("scancel", job)


@pytest.fixture
def works(slurm: SlurmLab) -> Iterator[str]:
    words = ["ReservationName=works", "starttime=now+1hour", "duration=10", "users=root", "nodes=node1"]
    slurm.run("scontrol", "create", "reservation", *words)
    yield "works"
    slurm.run("scontrol", "delete", "reservationname=works")


def test_real_reservations_and_drained_nodes(slurm: SlurmLab, environ: dict[str, str], works: str) -> None:
    assert not check_request(read_cluster(environ), Site(reservation=works), Request())
    assert check_request(read_cluster(environ), Site(reservation="work"), Request()) == [
        "reservation work: no such reservation; found works; did you mean works?"
    ]
    slurm.run("scontrol", "update", "nodename=node2", "state=drain", "reason=State=UP and well")
    try:
        without_gpus, caution = cautions(read_cluster(environ), Site(), Request(4))
    finally:
        slurm.run("scontrol", "update", "nodename=node2", "state=resume")
    assert "node2 (IDLE+DRAIN)" in caution
    assert "gpus.ask is none though nodes have GPUs" in without_gpus
    asked = cautions(read_cluster(environ), Site(gpus=Gpus(ask="gres")), Request(4, gpus=True))
    assert not [each for each in asked if "gpus.ask" in each]


def test_a_site_is_detected_that_its_cluster_takes(slurm: SlurmLab, environ: dict[str, str], tmp_path: Path) -> None:
    site, notes = detect_site({**environ, "SCRATCH": str(tmp_path)})
    assert site == check_section(
        Site,
        {
            "partition": "main", "gpus": {"ask": "gres", "type": "a100", "per_node": 2}, "cpus_per_device": 2,
            "memory": {"per_device": "2850M"}, "time": "01:00:00", "scratch": "$SCRATCH",
        },
        "expected",
    )  # fmt: skip
    assert not check_request(read_cluster(environ), site, Request(4, 2, gpus=True))
    assert "found partition main (the default), up, at most 01:00:00: 4 × 4 CPUs, 6000 MB, 2 GPUs a100" in notes


def test_a_site_is_guessed_and_the_guesses_are_said() -> None:
    site, notes = make_site(CLUSTER, {})
    assert site == check_section(
        Site,
        {
            "partition": "gpu", "account": "brain", "gpus": {"ask": "gres", "type": "a100", "per_node": 4},
            "cpus_per_device": 16, "memory": {"per_device": "117800M"}, "time": "1-00:00:00",
        },
        "expected",
    )  # fmt: skip
    assert "chosen: partition gpu, which has GPUs" in notes
    assert [note.partition(":")[0] for note in notes].count("guessed") == 2, notes
    assert not check_request(CLUSTER, site, Request(2, 4, gpus=True))


def test_a_cluster_that_says_little_still_gives_a_site() -> None:
    nodes = "NodeName=n1 CPUTot=2 Gres=(null) RealMemory=1 State=IDLE Partitions=p\n"
    cluster = Cluster(make_partitions("PartitionName=p MaxTime=00:02:00 State=UP\n", nodes))
    site, notes = make_site(cluster, {})
    assert site == Site(partition="p", cpus_per_device=2, time="00:02:00", signal_s=30)
    assert "memory: SLURM does not say how much nodes have; left to the cluster" in notes
    with pytest.raises(InfrastructureError, match="no partition that is UP"):
        make_site(Cluster(()), {})


def test_a_job_that_asks_for_no_time_is_told_to_save_within_what_it_gets() -> None:
    """SLURM gives it the partition's default time, not the longest."""
    text = "PartitionName=brief Default=YES DefaultTime=00:02:00 MaxTime=02:00:00\nPartitionName=p DefaultTime=NONE\n"
    cluster = Cluster(make_partitions(text + "PartitionName=q DefaultTime=NONE MaxTime=00:08:00\n", ""))
    site, planned = Site(), Request(planned=Planned(None, "01:00:00", "steps"))
    assert within_limit(site, Request(), cluster).signal_s == 60
    assert within_limit(site, planned, cluster).signal_s == 300, "a planned time is asked for"
    assert within_limit(Site(time="1:00:00"), Request(), cluster).signal_s == 300
    assert within_limit(Site(partition="p"), Request(), cluster).signal_s == 300
    assert within_limit(Site(partition="q"), Request(), cluster).signal_s == 240


def test_no_slurm_is_said(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="no SLURM on this machine"):
        read_cluster({"PATH": str(tmp_path)})


@pytest.mark.cluster
def test_real_accounts() -> None:
    with SlurmLab(accounting=True) as lab:
        cluster = read_cluster({**os.environ, **lab.environ})
        assert cluster.accounting is not None
        assert cluster.accounting.default == "lab"
        assert check_request(cluster, Site(account="lab", qos="normal"), Request()) == []
        assert check_request(cluster, Site(account="labb"), Request())[0].endswith("did you mean lab?")
        assert check_request(cluster, Site(qos="high"), Request())[0].startswith(
            "qos high: account lab has no such QOS"
        )
        assert lab.run("sbatch", "--account=labb", "--wrap=true", check=False).returncode != 0
        assert detect_site({**os.environ, **lab.environ})[0].account == "lab"


@pytest.mark.cluster
def test_the_cluster_that_a_shell_has_chosen_is_meant_by_all_programs(tmp_path: Path) -> None:
    """Where several share an accounting, SLURM_CLUSTERS says which; what a surrounding job is like says nothing."""
    file = tmp_path / "job.sbatch"
    file.write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nsleep 60\n")
    with SlurmLab(accounting=True) as lab:
        environ = {**os.environ, **lab.environ, "SLURM_CLUSTERS": "lab", "SLURM_JOB_PARTITION": "nosuch"}
        assert check_request(read_cluster(environ), Site(cpus_per_device=1), Request(4)) == []
        number = submit(file, environ)
        assert states_of([number], environ)[number].file == str(file)
        cancel([number], environ)
        lab.await_state(number, "CANCELLED")
        programs: list[Callable[[dict[str, str]], Any]] = [
            partial(submit, file),
            read_cluster,
            partial(cancel, [number]),
        ]
        for program in programs:
            with pytest.raises(InfrastructureError, match="'elsewhere' can't be reached"):
                program({**environ, "SLURM_CLUSTERS": "elsewhere"})
