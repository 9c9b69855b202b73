"""Following jobs to their end, also one that SLURM forgets on the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab.conf import Shape
from lab.slurm import SlurmLab
from voxscale.launch.batch import OPEN, TRAIN, Submitted
from voxscale.launch.follow import _remembered, follow
from voxscale.launch.slurm import GONE, JobState, states_of, submit
from voxscale.runs import RunFolder


def test_how_a_job_ended_is_remembered_unless_it_was_queued_again() -> None:
    ends: dict[int, JobState] = {}
    running, lost, done = JobState("RUNNING"), JobState("NODE_FAIL"), JobState("COMPLETED")
    seen = [running, lost, running, GONE, done, GONE]
    assert [_remembered(1, state, ends) for state in seen] == [running, lost, running, GONE, done, done]
    assert _remembered(2, GONE, ends) is GONE


@pytest.mark.cluster
def test_a_first_job_that_slurm_forgets_does_not_hide_how_the_second_ended(tmp_path: Path) -> None:
    """As the job that opens a run, while the training goes on for hours."""
    with SlurmLab(shape=Shape(nodes=1, cpu_nodes=0, min_job_age_s=2)) as lab:
        environ = {**os.environ, **lab.environ}
        jobs: list[Submitted] = []
        for kind, script in ((OPEN, "true"), (TRAIN, "while scontrol show job FIRST; do sleep 1; done; exit 3")):
            file, out = tmp_path / f"{kind}.sbatch", str(tmp_path / f"{kind}.out")
            file.write_text(
                f"#!/bin/bash\n#SBATCH --output={out}\n{script.replace('FIRST', str(jobs[0].id)) if jobs else script}\n"
            )
            number = submit(file, environ, after=[job.id for job in jobs])
            jobs.append(Submitted(kind, number, str(file), [out]))
        state = follow(RunFolder(tmp_path), jobs, environ)
        assert states_of([jobs[0].id], environ)[jobs[0].id] is GONE
    assert (state.state, state.reason) == ("FAILED", "NonZeroExitCode")
