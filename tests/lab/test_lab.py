"""The lab itself: it is a cluster of separate machines, it breaks like one, and it leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.conf import Shape
from lab.containers import Apptainer
from lab.owned import REGISTRY, Process, registry_lock, sweep
from lab.slurm import SlurmLab, until

NOBODY = 65534
# Named, because jobs of earlier tests may still be ending on some nodes.
FIRST_TWO = ("-N2", "--nodelist=node1,node2")
TESTS = Path(__file__).resolve().parent.parent


def links_of(name: str) -> set[str]:
    """The bridge and the cables of the lab `name`; other labs may come and go meanwhile."""
    return {entry.name for entry in Path("/sys/class/net").iterdir() if entry.name.startswith(f"vx{name}")}


def mounts_under(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if f" {folder}" in line]


def processes_of(root: Path) -> list[str]:
    """The processes of the lab in `root`, by the configuration they were given."""
    mark, found = f"SLURM_CONF={root}/etc/slurm.conf".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_nodes_are_machines_of_their_own(slurm: SlurmLab) -> None:
    script = (
        f"touch {slurm.local}/$(hostname); echo $(hostname) $(hostname -I) $CUDA_VISIBLE_DEVICES $(ls {slurm.local})"
    )
    said = slurm.run("srun", *FIRST_TWO, "--gres=gpu:a100:2", "bash", "-c", script).stdout.split("\n")[:2]
    first, second = sorted(line.split() for line in said)
    assert first == ["node1", slurm.network.address(slurm.shape, "node1"), "0,1", "node1"]
    assert second == ["node2", slurm.network.address(slurm.shape, "node2"), "0,1", "node2"]


def test_nodes_resolve_each_other_and_share_no_memory_or_process(slurm: SlurmLab) -> None:
    probe = Path(f"/dev/shm/voxscale-lab-{slurm.name}")  # noqa: S108
    script = f"getent hosts node4; touch {probe}; ps -eo comm= | grep -c slurmd"
    address, name, daemons = slurm.run("srun", "-w", "node3", "bash", "-c", script).stdout.split()
    assert (address, name) == (slurm.network.address(slurm.shape, "node4"), "node4")
    assert daemons == "1"
    assert not probe.exists()


def test_an_allocation_is_used_from_outside(slurm: SlurmLab) -> None:
    assert sorted(slurm.run("salloc", *FIRST_TWO, "srun", "hostname").stdout.split()) == ["node1", "node2"]
    assert slurm.run("srun", "-p", "cpu", "hostname").stdout.split() == ["cpu1"]


def test_an_ordinary_user_submits(slurm: SlurmLab) -> None:
    assert slurm.run("srun", "id", "-u", user=NOBODY, cwd="/").stdout.strip() == str(NOBODY)


@pytest.mark.cluster
def test_a_requeued_job_runs_again(idle_slurm: SlurmLab, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = "echo run ${SLURM_RESTART_COUNT:-0}; sleep 60"
    job = idle_slurm.submit("--requeue", "-N2", "--open-mode=append", f"--output={out}", f"--wrap={script}")
    until(lambda: out.exists() and "run 0" in out.read_text(), 10, lambda: idle_slurm.state(job))
    idle_slurm.run("scontrol", "requeue", job)
    until(lambda: "run 1" in out.read_text(), 30, lambda: f"{idle_slurm.state(job)}: {out.read_text()}")
    assert idle_slurm.show(job)["Restarts"] == "1"


def test_main_takes_the_nodes_of_preempt(idle_slurm: SlurmLab, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = "trap 'echo warned; exit 1' TERM; echo started; sleep 60 & wait"
    place = ["--partition=preempt", "--requeue", "-N4", "--exclusive"]
    job = idle_slurm.submit(*place, f"--output={out}", "--open-mode=append", f"--wrap={script}")
    until(lambda: out.exists() and "started" in out.read_text(), 10, lambda: idle_slurm.state(job))
    with idle_slurm.occupy(idle_slurm.nodes):
        assert idle_slurm.state(job) == "PENDING"
        assert idle_slurm.show(job)["Restarts"] == "1"
    assert "warned" in out.read_text()


def test_what_can_never_run_is_refused_or_waits_for_ever(idle_slurm: SlurmLab) -> None:
    unknown = idle_slurm.run("sbatch", "-p", "nosuch", "--wrap=true", check=False)
    assert unknown.returncode and "invalid partition" in unknown.stderr
    job = idle_slurm.submit("-p", "short", "--time=10", "--output=/dev/null", "--wrap=true")
    assert idle_slurm.show(job)["Reason"] in ("PartitionTimeLimit", "PartitionConfig")


def test_two_labs_at_once_and_nothing_left(slurm: SlurmLab) -> None:
    with SlurmLab(shape=Shape(nodes=1, cpu_nodes=0)) as other:
        assert other.run("srun", "hostname").stdout.split() == ["node1"]
        assert other.network.subnet != slurm.network.subnet
        assert other.network.controller_port != slurm.network.controller_port
        job = other.submit("--output=/dev/null", "--wrap=sleep 60")
        other.await_state(job, "RUNNING")
        assert processes_of(other.root)
        assert links_of(other.name) == {f"vx{other.name}", f"vx{other.name}-1"}
    assert not processes_of(other.root)
    assert not other.root.exists() and not mounts_under(other.root)
    assert not links_of(other.name)
    assert not (REGISTRY / f"{other.name}.json").exists()
    assert slurm.run("srun", "-w", "node1", "hostname").stdout.split() == ["node1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_session_takes_its_cluster_along(number: int, slurm: SlurmLab) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from lab.slurm import *; "
        "lab = SlurmLab(shape=Shape(nodes=1, cpu_nodes=0)).up(); print(lab.name, lab.root, flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(TESTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        name, root = session.stdout.readline().split()
        assert processes_of(Path(root))
        session.send_signal(number)
    until(lambda: not processes_of(Path(root)), 5, lambda: f"still there: {processes_of(Path(root))}")
    with registry_lock():
        sweep()
    assert not links_of(name)
    assert not Path(root).exists()
    assert not (REGISTRY / f"{name}.json").exists()


def test_a_later_process_with_the_same_number_is_spared() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        noted = Process.of(child.pid)
        Process(noted.pid, noted.started - 1).kill()
        assert noted.is_alive
        noted.kill()
        assert child.wait(5) == -signal.SIGKILL
    assert not noted.is_alive


@pytest.mark.cluster
def test_a_job_survives_the_loss_of_a_node(idle_slurm: SlurmLab, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = "run ${SLURM_RESTART_COUNT:-0} on"
    script = f"echo {run} $SLURM_JOB_NODELIST; srun bash -c 'echo {run} $SLURMD_NODENAME; sleep 120'"
    job = idle_slurm.submit("--requeue", "-N2", "--open-mode=append", f"--output={out}", f"--wrap={script}")
    begun = {"run 0 on node[1-2]", "run 0 on node1", "run 0 on node2"}  # a step that has not would fail, and the job
    until(lambda: out.exists() and begun <= {*out.read_text().split("\n")}, 60, lambda: idle_slurm.state(job))
    idle_slurm.kill_node("node2")
    until(lambda: idle_slurm.node_state("node2").startswith("down"), 60, lambda: idle_slurm.node_state("node2"))
    until(lambda: "run 1 on" in out.read_text(), 60, lambda: f"{idle_slurm.state(job)}: {out.read_text()}")
    idle_slurm.revive_node("node2")
    assert idle_slurm.run("srun", "-w", "node2", "hostname").stdout.split() == ["node2"]


def test_charliecloud_runs_on_two_nodes(slurm: SlurmLab, charliecloud: Path, image_folder: Path) -> None:
    code = "import socket, sys; print(socket.gethostname(), sys.executable)"
    said = slurm.run(
        "env", "USER=root", "srun", *FIRST_TWO, charliecloud, image_folder, "--", "python3", "-c", code
    ).stdout
    assert sorted(said.split("\n")[:2]) == ["node1 /usr/bin/python3", "node2 /usr/bin/python3"]


@pytest.mark.cluster
@pytest.mark.parametrize("form", ["sif", "sandbox"])
@pytest.mark.parametrize("user", [0, NOBODY])
def test_apptainer_runs_on_two_nodes(slurm: SlurmLab, apptainer: Apptainer, form: str, user: int) -> None:
    code = "import os, socket; print(socket.gethostname(), os.getuid(), os.environ['CUDA_VISIBLE_DEVICES'])"
    command = [apptainer.program, "exec", getattr(apptainer, form), "python3", "-c", code]
    said = slurm.run("srun", *FIRST_TWO, "--gres=gpu:2", *command, user=user, cwd="/").stdout
    assert sorted(said.split("\n")[:2]) == [f"node1 {user} 0,1", f"node2 {user} 0,1"]


@pytest.mark.cluster
def test_accounts_and_qos_are_enforced() -> None:
    with SlurmLab(shape=Shape(nodes=1, cpu_nodes=0), accounting=True) as lab:
        assert lab.submit("--account=lab", "--qos=normal", "--output=/dev/null", "--wrap=true") == 1
        for option, said in (("--account=nosuch", "Invalid account"), ("--qos=nosuch", "Invalid qos")):
            refused = lab.run("sbatch", option, "--wrap=true", check=False)
            assert refused.returncode and said in refused.stderr
    assert not processes_of(lab.root)
    assert not lab.root.exists()
