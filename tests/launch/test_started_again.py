"""A run folder that several jobs have worked in: each start is judged by what is its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.slurm import SlurmLab
from voxscale.config.load import read_config
from voxscale.config.site import Site
from voxscale.errors import ConfigError, InfrastructureError, StoppedEarly, VoxscaleError
from voxscale.files import write_json
from voxscale.launch import cluster_run
from voxscale.launch.batch import COLLECT, OPEN, TRAIN, Submitted, fold_jobs, train_jobs
from voxscale.launch.cluster_run import Submission
from voxscale.launch.folder import Draft
from voxscale.launch.given import given_runs
from voxscale.launch.outcome import newest_reports
from voxscale.launch.sbatch import Placement, Request
from voxscale.report.listing import list_runs
from voxscale.runs import RunFolder

LOST = "node1: rank 0 was killed by signal 9"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Its job 0 lost a rank: one before all others."""
    run = RunFolder(tmp_path / "run")
    run.launch.mkdir(parents=True)
    run.config.write_text("data: {source: d}\n")
    run.plan.write_text(json.dumps({"schema": 1, "num_steps": 40}))
    write_json(run.metrics, {"state": "failed", "best": None})
    write_json(run.owner, {"host": "node1", "pid": 1, "since": "then", "job": "0", "attempt": 0})
    leave_reports(run, 0)
    return run


def leave_reports(run: RunFolder, job: int) -> None:
    reports = run.logs / f"{job}-0"
    reports.mkdir(parents=True)
    end = {"failures": [LOST.partition(": ")[2]], "times": [1.0], "stopped": False}
    write_json(reports / "node-0000.end.json", end)
    write_json(reports / "node-0000.json", {"node": "node1", "host": "node1"})


def submission_of(run: RunFolder) -> Submission:
    config = read_config(run.config)
    draft = Draft(run, config, config, 1, 1, "", held=True, fresh=False)
    jobs = train_jobs(run.root, Site(), Request(), [], opened=True, debug_comm=False)
    return Submission(run.root, Placement(Site()), config, [draft], jobs, Request(), opened=True, allocation=None)


def submitted(run: RunFolder, slurm: SlurmLab, script: str, *options: str) -> Submitted:
    file = run.launch / "job.sbatch"
    file.write_text(f"#!/bin/bash\n{script}\n")
    job = Submitted(TRAIN, slurm.submit(*options, f"--output={run.root}/out", file), str(file), [f"{run.root}/out"])
    write_json(run.jobs, {"jobs": [vars(job)]})
    return job


def judged(run: RunFolder, job: Submitted, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> VoxscaleError:
    """What whoever followed the job is told; `voxscale runs` has to agree."""
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(VoxscaleError) as raised:
        cluster_run._follow_training(submission_of(run), [job], {**os.environ, **slurm.environ})
    return raised.value


@pytest.fixture(params=["never began", "was queued again"])
def cancelled(request: pytest.FixtureRequest, run: RunFolder, idle_slurm: SlurmLab) -> Submitted:
    """A job of the run that was cancelled while it waited."""
    if request.param == "never began":
        job = submitted(run, idle_slurm, "sleep 60", "--hold")
    else:
        job = submitted(run, idle_slurm, "sleep 60", "--requeue")
        idle_slurm.await_state(job.id, "RUNNING")
        leave_reports(run, job.id)
        write_json(run.owner, {"host": "node1", "pid": 1, "since": "now", "job": str(job.id), "attempt": 0})
        idle_slurm.run("scontrol", "requeue", job.id)
        idle_slurm.await_state(job.id, "PENDING")
    idle_slurm.run("scancel", job.id)
    idle_slurm.await_state(job.id, "CANCELLED")
    return job


def test_a_job_that_is_cancelled_while_it_waits_has_not_failed(
    run: RunFolder, cancelled: Submitted, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = judged(run, cancelled, slurm, monkeypatch)
    assert isinstance(error, StoppedEarly)
    assert error.message == "the job was cancelled"
    (row,) = list_runs(run.root)
    assert (row.state, row.why.partition(" (")[0]) == ("stopped", "the job has ended, cancelled")


def test_a_job_that_fails_before_its_ranks_begin_is_not_told_of_as_stopped(
    run: RunFolder, idle_slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.metrics, {"state": "stopped", "best": None})
    error = judged(run, submitted(run, idle_slurm, "echo error: no module; exit 4"), idle_slurm, monkeypatch)
    assert isinstance(error, InfrastructureError)
    assert error.message == "no module"
    (row,) = list_runs(run.root)
    assert (row.state, row.why) == ("failed", "the job has ended, failed (NonZeroExitCode)")


def test_a_job_that_lost_a_rank_is_told_of_as_such(
    run: RunFolder, idle_slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(run, idle_slurm, "exit 1")
    leave_reports(run, job.id)
    write_json(run.owner, {"host": "node1", "pid": 1, "since": "now", "job": str(job.id), "attempt": 0})
    assert judged(run, job, idle_slurm, monkeypatch).message.startswith(LOST)
    (row,) = list_runs(run.root)
    assert (row.state, row.why) == ("failed", LOST)


def test_reports_are_those_of_the_attempts_that_count(run: RunFolder) -> None:
    for name in ("7-0", "7-1", "9-0", "10-0"):
        (run.logs / name).mkdir()
    assert newest_reports(run).name == "10-0"
    assert newest_reports(run, since=11) == run.logs
    assert newest_reports(run, until=9, restarts={9: 1}).name == "7-1"
    assert newest_reports(run, since=7, until=7, restarts={7: 0}).name == "7-0"
    assert newest_reports(run, since=7, until=7, restarts={7: 2}) == run.logs


def test_folds_that_a_job_is_to_make_are_known_by_its_tasks(run: RunFolder) -> None:
    root = RunFolder(run.root.parent / "folds")
    logs = [f"{root.root}/out_{fold}" for fold in (1, 2, 3)]
    jobs = [Submitted(kind, 1, "file", logs if kind == TRAIN else logs[:1]) for kind in (OPEN, TRAIN, COLLECT)]
    write_json(root.jobs, {"jobs": [vars(job) for job in jobs]})
    with pytest.raises(ConfigError, match="not a run folder"):
        given_runs(root.root)
    root.asked.touch()
    assert [each.root for each in given_runs(root.root)] == [root.root / f"fold-{fold}" for fold in (1, 2, 3)]
    write_json(root.jobs, {"jobs": [vars(job) for job in (*jobs, Submitted(TRAIN, 4, "file", logs[:1]))]})
    assert given_runs(root.root) == [root]


def test_what_is_said_of_the_whole_is_gone_when_it_starts_again(
    run: RunFolder, write_config: Callable[..., Path]
) -> None:
    """The summary of an earlier cross-validation, and why its data could not be opened."""
    root = RunFolder(run.root.parent / "folds")
    write_json(root.metrics, {"state": "done"})
    write_json(root.open_error, {"code": "data", "message": "old", "fix": "old"})
    jobs = fold_jobs(root.root, Site(), Request(), [], folds=2, opened=False, debug_comm=False)
    assert COLLECT in jobs
    config = read_config(write_config())
    submission = Submission(root.root, Placement(Site()), config, [], jobs, Request(), opened=False, allocation=None)
    cluster_run._open(submission, {})
    assert not root.metrics.exists()
    assert not root.open_error.exists()
    cluster_run._refuse_unopened(submission)
