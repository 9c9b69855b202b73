"""Inside an allocation that the user has (`salloc`, `srun --pty`, a notebook's job): the same job files, run in it."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from voxscale.config.site import Site
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.launch.batch import write_jobs
from voxscale.launch.meeting import expand_nodes
from voxscale.launch.partitions import parse_gres
from voxscale.launch.sbatch import Job
from voxscale.launch.slurm import ask, clean, states_of
from voxscale.runs import RunFolder


@dataclass(frozen=True)
class Allocation:
    """Nodes that are ours already. What differs from node to node is taken as the least of them."""

    job: int
    nodes: tuple[str, ...]
    cpus: int
    gpus: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Allocation | None:
        """The allocation that SLURM's variables tell of, if it still stands: a shell may outlive its job."""
        number, nodes = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NODELIST", "")
        if not number.isdigit() or not nodes:
            return None
        if states_of([int(number)], environ)[int(number)].state != "RUNNING":
            return None
        names = tuple(expand_nodes(nodes))
        cpus = [int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))]
        return cls(int(number), names, min(cpus), _gpus_of(number, len(names), environ))

    def refuse_more_than(self, nodes: int) -> None:
        if nodes > len(self.nodes):
            raise InfrastructureError(
                f"--nodes {nodes}: this shell's job {self.job} has {len(self.nodes)} ({', '.join(self.nodes)})",
                fix=f"ask for at most {len(self.nodes)}, or start outside of the allocation to submit a job",
            )

    def refuse_later(self, **asked: object) -> None:
        """Refuse options of jobs that wait: what is started in an allocation runs there and then."""
        if given := [f"--{name}" for name, value in asked.items() if value]:
            raise ConfigError(
                f"{', '.join(given)}: this shell belongs to job {self.job}, where it would run there and then",
                fix="leave it out, or start outside of the allocation to submit a job",
            )


def _gpus_of(job: str, nodes: int, environ: Mapping[str, str]) -> int:
    """GPUs that a job has on each node, however it asked for them. A shell of `salloc` has no variable for them, and
    that of a shell on a node tells of this node alone."""
    told = environ.get("SLURM_GPUS_ON_NODE", "")
    if told.isdigit() and nodes == 1:
        return int(told)
    return least_gpus(job, ask("scontrol", "-d", "-o", "show", "job", job, environ=environ))


def least_gpus(job: str, described: str) -> int:
    """GPUs that each node of a job has, from what `scontrol -d show job` says of it: alike nodes in one place.

    Raises where it has some, but not on every node.
    """
    told = re.findall(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", described)
    counts = [sum(parse_gres(gres).values()) for nodes, gres in told for _ in expand_nodes(nodes)]
    has_gpus = re.search(r"\b(?:TRES|AllocTRES|TresPer\w+)=\S*gpu", described) is not None
    if has_gpus and (not counts or min(counts) == 0):
        found = f"found {', '.join(map(str, counts))}" if counts else "SLURM does not say how many"
        raise InfrastructureError(
            f"job {job}: expected GPUs on each of its nodes; {found}",
            fix="ask for as many on every node: salloc --gpus-per-node=N; or start outside of it to submit a job",
        )
    return min(counts, default=0)


def run_in_allocation(
    jobs: Mapping[str, Job], site: Site, environ: Mapping[str, str], allocation: Allocation, *, stdout: int | None = 2
) -> tuple[int, int]:
    """Run the jobs' files one after another in the allocation. Returns the attempt's number in the
    run's logs, and the exit code of the last that ran.

    A signal to this process tells the ranks to save and end. What the jobs print goes where `stdout` leads; standard
    output is for the verb's own answer.
    """
    run = RunFolder(next(iter(jobs.values())).folder)
    attempt = _next_attempt(run, allocation.job)
    own = {"SLURM_JOB_ID": str(allocation.job), "VOXSCALE_ATTEMPT": str(attempt)}
    code = 0
    for file in write_jobs(jobs, site).values():
        step = subprocess.Popen(
            ["/bin/bash", str(file)], env={**clean(environ), **own}, stdout=stdout, start_new_session=True
        )

        def pass_on(number: int, frame: FrameType | None, step: subprocess.Popen[bytes] = step) -> None:
            step.send_signal(signal.SIGUSR1)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        try:
            code = step.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if code != 0:
            break
    return attempt, code


def _next_attempt(run: RunFolder, job: int) -> int:
    numbers = [int(path.name.rpartition("-")[2]) for path in run.logs.glob(f"{job}-*") if path.name[-1].isdigit()]
    return max(numbers, default=-1) + 1
