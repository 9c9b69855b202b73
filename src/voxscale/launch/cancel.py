"""Stop a run wherever it is: jobs in the queue or on nodes, or processes on this machine. Ranks save first."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from voxscale.errors import ConfigError, InfrastructureError
from voxscale.files import read_json
from voxscale.launch.batch import read_jobs, unfinished_jobs
from voxscale.launch.meeting import expand_nodes
from voxscale.launch.outcome import newest_reports
from voxscale.launch.slurm import ask, cancel, states_of
from voxscale.runs import RunFolder, runs_of
from voxscale.train.ownership import is_live


def cancel_run(root: Path, environ: Mapping[str, str]) -> list[str]:
    """Cancel the jobs of a folder, or tell the owners of its runs to save and end. Returns what was done, in words."""
    folder = RunFolder(root.resolve())
    if not folder.launch.is_dir() and not runs_of(root):
        raise ConfigError(f"{root}: not a run folder", fix="give a folder that `voxscale runs` lists")
    jobs = [job for job, _ in unfinished_jobs(folder, environ)]
    if jobs:
        cancel([job.id for job in jobs], environ)
        return [f"cancelled job {job.id} ({job.kind})" for job in jobs]
    stopped = _stop_owners([folder, *runs_of(root)], environ)
    if not stopped:
        states_of([job.id for job in read_jobs(folder)], environ)  # or says that there is no scheduler to ask
        raise ConfigError(f"{root}: nothing is queued or running", fix="see `voxscale runs` for what is")
    return stopped


def _stop_owners(runs: Sequence[RunFolder], environ: Mapping[str, str]) -> list[str]:
    stopped = []
    for run in {run.root: run for run in runs}.values():
        if not is_live(run):
            continue
        owner = read_json(run.owner)
        if step := _step_of(run, owner, environ):
            ask("scancel", "-s", "USR1", step, environ=environ)
            stopped.append(f"told step {step} to save and end")
            continue
        if owner["host"] != socket.gethostname():
            raise InfrastructureError(
                f"run {run.root}: pid {owner['pid']} on {owner['host']} works in it",
                fix=f"stop it there: kill {owner['pid']}",
            )
        os.kill(owner["pid"], signal.SIGTERM)
        stopped.append(f"told pid {owner['pid']} to save and end")
    return stopped


def _step_of(run: RunFolder, owner: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """The step of a job in whose allocation a run was started. One that is not on its owner's host is another's: the
    folder may be seen from a second cluster."""
    file = newest_reports(run) / "step"
    step = file.read_text() if "job" in owner and file.is_file() else ""
    if not step:
        return ""
    job = int(owner["job"])
    hosts = expand_nodes(states_of([job], environ)[job].nodes)
    return f"{job}.{step}" if owner["host"].partition(".")[0] in hosts else ""
