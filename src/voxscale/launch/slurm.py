"""Talk to SLURM: its own programs, called with argument lists and time-outs. Nothing here needs accounting."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from voxscale.errors import InfrastructureError, printable

_TIMEOUT_S = 60.0
_NOT_THERE = ("configuration source", "configuration file", "contact slurm controller")  # in what its programs say
_OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "PREEMPTED"}
)


@dataclass(frozen=True)
class JobState:
    """One job as the scheduler sees it now. `reason` says why it waits or how it ended."""

    state: str
    reason: str = ""
    nodes: str = ""
    file: str = ""  # that it was submitted with

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or did so long ago that the scheduler has forgotten it."""
        return self.state in _OVER or self is GONE

    @property
    def went_wrong(self) -> bool:
        """Whether the scheduler knows it to have ended otherwise than well."""
        return self.state in _OVER - {"COMPLETED"}

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"{self.state.lower()}{reason}"


GONE = JobState("GONE", "SLURM does not know it any more")


def ask(*words: str, environ: Mapping[str, str], timeout_s: float = _TIMEOUT_S) -> str:
    """What one of SLURM's programs prints. Raises what it complains about."""
    if shutil.which(words[0], path=environ.get("PATH")) is None:
        raise InfrastructureError(
            f"no SLURM on this machine: found no {words[0]} in PATH",
            fix="log in to the cluster, load its slurm module, or train here with --on local",
        )
    try:
        done = subprocess.run(
            words, env=clean(environ), capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise InfrastructureError(
            f"{words[0]}: no answer within {timeout_s:.0f} s", fix="see with `sinfo` whether the scheduler is up"
        ) from None
    if done.returncode != 0:
        complaint = printable(" ".join((done.stderr or done.stdout).split()))
        if any(said in complaint for said in _NOT_THERE):
            raise InfrastructureError(
                f"no SLURM cluster answers: {words[0]}: {complaint}",
                fix="log in to the cluster, see with `sinfo` whether it is up, or work here with --on local",
            )
        raise InfrastructureError(f"{words[0]}: {complaint}", fix="change what is asked for, or the site's profile")
    return done.stdout


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a surrounding job says of itself: SLURM's programs take it for options. Which
    cluster is meant stays, as all of them have to ask the same."""
    kept = ("SLURM_CONF", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SALLOC_"))
    }


def submit(file: Path, environ: Mapping[str, str], *, after: Sequence[int] = ()) -> int:
    """Hand a job to the scheduler; it waits for the jobs in `after` to end well. Returns its number."""
    options = [f"--dependency=afterok:{':'.join(map(str, after))}", "--kill-on-invalid-dep=yes"] if after else []
    answer = ask("sbatch", "--parsable", *options, str(file), environ=environ)
    number = re.search(r"^(\d+)(?:;.*)?$", answer, re.MULTILINE)
    if number is None:
        raise InfrastructureError(f"sbatch: found {answer.strip()!r}, expected a job's number", fix="see `squeue --me`")
    return int(number[1])


def states_of(jobs: Sequence[int], environ: Mapping[str, str]) -> dict[int, JobState]:
    """The states of jobs. Of an array's tasks it is that of one that goes on, else of one that did not end well."""
    if not jobs:
        return {}
    numbers = ",".join(map(str, jobs))
    try:
        answer = ask("squeue", "-h", "-r", "-t", "all", "-j", numbers, "-o", "%A|%F|%T|%r|%N|%o", environ=environ)
    except InfrastructureError as error:
        if "Invalid job id" not in error.message:
            raise
        answer = ""
    found: dict[int, list[JobState]] = {}
    for line in answer.splitlines():
        own, array, *described = line.split("|", 5)
        for number in {int(own), int(array)}:
            found.setdefault(number, []).append(JobState(*described))
    return {
        job: min(found.get(job, [GONE]), key=lambda each: (each.is_over, each.state == "COMPLETED")) for job in jobs
    }


def exit_code_of(job: int, environ: Mapping[str, str]) -> int | None:
    """The exit code of a job that has ended, as far as SLURM still knows it."""
    try:
        found = re.search(r"\bExitCode=(\d+):", ask("scontrol", "-o", "show", "job", str(job), environ=environ))
    except InfrastructureError:
        return None
    return int(found[1]) if found is not None else None


def restarts_of(job: int, environ: Mapping[str, str]) -> dict[int, int]:
    """How often a job, or each task of an array, was queued again, by number; nothing that SLURM has forgotten."""
    try:
        listed = ask("scontrol", "-o", "show", "job", str(job), environ=environ)
    except InfrastructureError:
        return {}
    found = re.findall(r"^JobId=(\d+)\b.*?\bRestarts=(\d+)", listed, re.MULTILINE)
    return {int(number): int(restarts) for number, restarts in found}


def cancel(jobs: Sequence[int], environ: Mapping[str, str]) -> None:
    """Ask the scheduler to end jobs; their ranks get its KillWait to save."""
    if jobs:
        ask("scancel", *map(str, jobs), environ=environ)


def expand_output(pattern: str, job: int, name: str, task: int | None = None) -> str:
    """The file that SLURM writes for an output pattern."""
    values = {"%%": "%", "%j": str(job), "%A": str(job), "%x": name, "%a": str(task)}
    return re.sub(r"%[%jAxa]", lambda match: values[match[0]], pattern)
