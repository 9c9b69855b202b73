"""The text of the cluster's configuration files, from the shape of the lab."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """What the cluster looks like. GPUs are device files without a GPU behind them."""

    nodes: int = 4
    cpu_nodes: int = 1
    cpus: int = 4
    memory_mb: int = 6000
    gpus: int = 2
    gpu_type: str = "a100"
    kill_wait_s: int = 10
    slurmd_timeout_s: int = 10
    min_job_age_s: int = 3600  # until a job that has ended is forgotten; by default 300, looked after every minute

    @property
    def gpu_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def cpu_names(self) -> list[str]:
        return [f"cpu{number}" for number in range(1, self.cpu_nodes + 1)]

    @property
    def names(self) -> list[str]:
        return self.gpu_names + self.cpu_names


@dataclass(frozen=True)
class Network:
    """A private /24: the controller is .254, nodes count from .1."""

    subnet: str
    controller_port: int
    accounting_port: int

    @property
    def controller(self) -> str:
        return f"{self.subnet}.254"

    def address(self, shape: Shape, node: str) -> str:
        return f"{self.subnet}.{shape.names.index(node) + 1}"


def host_name() -> str:
    return socket.gethostname().split(".")[0]


def render_hosts(shape: Shape, network: Network) -> str:
    nodes = "".join(f"{network.address(shape, name)} {name}\n" for name in shape.names)
    return f"127.0.0.1 localhost\n{network.controller} {host_name()}\n{nodes}"


def render_slurm(root: Path, shape: Shape, network: Network, *, accounting: bool) -> str:
    """`slurm.conf`: quick to schedule, to requeue and to notice a lost node."""
    node_lines = "".join(
        f"NodeName={name} NodeHostname={name} NodeAddr={network.address(shape, name)}{_gres(shape, name)}\n"
        for name in shape.names
    )
    return f"""\
ClusterName=lab
SlurmctldHost={host_name()}({network.controller})
SlurmctldPort={network.controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
{_accounting(root, network) if accounting else "AccountingStorageType=accounting_storage/none"}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge={shape.min_job_age_s}
KillWait={shape.kill_wait_s}
SlurmdTimeout={shape.slurmd_timeout_s}
MessageTimeout=5
InactiveLimit=0
JobRequeue=1
GresTypes=gpu
PropagateResourceLimits=NONE
NodeName=DEFAULT CPUs={shape.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={shape.cpus} ThreadsPerCore=1 \
RealMemory={shape.memory_mb} State=UNKNOWN
{node_lines}{_partitions(shape)}"""


def render_gres(root: Path, shape: Shape) -> str:
    # Without one device file per GPU the nodes are refused as invalid.
    files = f"{root}/gpu[0-{shape.gpus - 1}]"
    return f"NodeName={','.join(shape.gpu_names)} Name=gpu Type={shape.gpu_type} File={files}\n" if shape.gpus else ""


def render_slurmdbd(root: Path, network: Network) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
DbdHost={host_name()}
DbdAddr={network.controller}
DbdPort={network.accounting_port}
SlurmUser=root
PidFile={root}/run/slurmdbd.pid
LogFile={root}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""


def _gres(shape: Shape, name: str) -> str:
    return f" Gres=gpu:{shape.gpu_type}:{shape.gpus}" if shape.gpus and name in shape.gpu_names else ""


def _accounting(root: Path, network: Network) -> str:
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={network.controller}
AccountingStoragePort={network.accounting_port}
AccountingStoragePass={root}/munge/socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos"""


def _partitions(shape: Shape) -> str:
    """A job in any other partition takes the nodes of one in `preempt`, which is requeued."""
    gpu = f"Nodes={','.join(shape.gpu_names)} DefMemPerCPU=500 State=UP"
    text = f"""\
PartitionName=main {gpu} Default=YES MaxTime=1:00:00 PriorityTier=10 PreemptMode=OFF
PartitionName=short {gpu} MaxTime=2 PriorityTier=10 PreemptMode=OFF
PartitionName=preempt {gpu} MaxTime=1:00:00 PriorityTier=1 PreemptMode=REQUEUE
"""
    if shape.cpu_nodes:
        cpu = f"Nodes={','.join(shape.cpu_names)} DefMemPerCPU=500 State=UP"
        text += f"PartitionName=cpu {cpu} MaxTime=1:00:00 PriorityTier=10 PreemptMode=OFF\n"
    return text
