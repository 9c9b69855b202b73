"""`voxscale search --on slurm` on a real SLURM: one job, a Ray of its own over two nodes, the table of one machine.

What a search has to come to, whatever happens to its job, is known from trainings of the same configs on this machine.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Cli, Finished
from golden import assert_golden
from lab.ray import Seat, step_of, words_of
from lab.slurm import SlurmLab, until
from voxscale.config.site import Site, read_site
from voxscale.launch.sbatch import Request, render_sbatch
from voxscale.search.job import search_job

METRIC = "dice/mean"
LRS = [1e-3, 3e-2, 1e-2]
BEST = 1
LONG = {"train__epochs": 50, "validate__every": 25}  # slowed down, a trial takes 100 s
ENDLESS = """
import time
import torch
class Endless(torch.nn.Conv3d):
    def forward(self, image):
        time.sleep(1000 if self.training else 0)
        return super().forward(image)
def build(in_channels, out_channels):
    return Endless(in_channels, out_channels, 1)
"""


def table(folder: Path) -> list[dict[str, str]]:
    """trials.csv without what depends on the clock."""
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    return [{name: value for name, value in row.items() if name != "wall_s"} for row in rows]


def ledger(folder: Path, event: str) -> list[dict[str, Any]]:
    path = folder / "trials.jsonl"
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [row for row in rows if row["event"] == event]


def metrics(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return content


def last_job(folder: Path) -> int:
    return int(json.loads((folder / "launch" / "jobs.json").read_text())["jobs"][-1]["id"])


def attempts(folder: Path) -> set[str]:
    """Those of its last job."""
    return {path.name.partition("-")[2] for path in folder.glob(f"logs/{last_job(folder)}-*")}


def trial(folder: Path, index: int) -> Path:
    return folder / "trials" / f"{index:04d}"


def node_of(reports: Path, index: int = 0) -> str:
    return str(json.loads((reports / f"node-{index:04d}.json").read_text())["node"])


def nodes_of_trials(folder: Path) -> set[str]:
    return {node_of(reports) for reports in folder.glob("trials/*/logs/*-*")}


@dataclass(frozen=True)
class Desk:
    """A user with a cluster."""

    seat: Seat
    slurm: SlurmLab

    @property
    def environ(self) -> dict[str, str]:
        return {**self.seat.environ, **self.slurm.environ}

    def words(self, config: Path, folder: Path, *more: object) -> list[object]:
        place = ["--on", "slurm", "--nodes", 2, "--devices", 1, "site.cpus_per_device=1"]
        return ["search", config, "--run", folder, *place, *more]

    def run(self, *words: object) -> Finished:
        return self.seat.run(*words, **self.slurm.environ)

    def search(self, config: Path, folder: Path, *more: object) -> Finished:
        return self.run(*self.words(config, folder, *more))

    def submit(self, config: Path, folder: Path, *more: object) -> int:
        done = self.search(config, folder, "--detach", "--json", *more)
        assert done.code == 0, done.err
        assert done.json["state"] == "submitted"
        return last_job(folder)

    def listed(self, folder: Path) -> dict[str, dict[str, Any]]:
        """What `voxscale runs` says of the searches and runs in a folder, or of the trials of a search."""
        return {row["run"]: row for row in self.run("runs", folder, "--json").json["runs"]}

    def await_trials(self, folder: Path, job: int, step: int = 3) -> None:
        """Until both nodes train."""
        until(
            lambda: all(step_of(trial(folder, index)) >= step for index in (0, 1)),
            120,
            lambda: f"job {job} is {self.slurm.state(job)}, steps {[step_of(trial(folder, n)) for n in (0, 1)]}",
        )


@pytest.fixture
def desk(idle_slurm: SlurmLab, seat: Seat) -> Iterator[Desk]:
    """In the end no node has a process, a folder or a token of Ray's left."""
    yield Desk(seat, idle_slurm)
    idle_slurm.reset()  # ends the job of a test that failed
    until(lambda: not seat.processes(), 30, lambda: f"left behind: {[*map(words_of, seat.processes())]}")
    assert not list(seat.room.glob("vx*")), "temporary folders are left behind"
    assert not list(seat.folder.rglob("ray-token"))


def grid(num_trials: int) -> dict[str, Any]:
    return {"space": {"optimizer.lr": {"grid": LRS[:num_trials]}}}


@pytest.fixture(scope="module")
def config(seat: Seat) -> Path:
    return seat.write("grid.yaml", search=grid(3))


@pytest.fixture(scope="module")
def long_config(seat: Seat) -> Path:
    return seat.write("long.yaml", search=grid(3), **LONG)


@pytest.fixture(scope="module")
def undisturbed(seat: Seat, cli_here: Cli) -> Callable[[Path], list[Path]]:
    """The trainings of a search's configs on this machine, each alone."""

    def train(content: dict[str, Any], lr: float) -> Path:
        run = seat.folder / f"{content['train']['epochs']}-epochs-{lr:g}"
        if not run.exists():
            alone = seat.folder / f"{run.name}.yaml"
            alone.write_text(yaml.safe_dump({**content, "optimizer": {**content["optimizer"], "lr": lr}}))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", str(seat.folder))
                patch.syspath_prepend(seat.folder)
                done = cli_here("train", alone, "--devices", 1, "--run", run)
            assert done.code == 0, done.err
        return run

    def train_each(config: Path) -> list[Path]:
        content = yaml.safe_load(config.read_text())
        lrs = content.pop("search")["space"]["optimizer.lr"]["grid"]
        return [train(content, lr) for lr in lrs]

    return train_each


def assert_same(folder: Path, runs: list[Path]) -> None:
    """The table is that of the trainings, of which each trial has the very weights; each has ended once."""
    expected = [
        {
            "trial": str(index),
            "state": "done",
            "optimizer.lr": str(LRS[index]),
            METRIC: str(metrics(run)["best"]["value"]),
            "steps": str(metrics(run)["steps"]),
            "configuration": str(index),
            "seed": "0",
            "run": f"trials/{index:04d}",
            "why": "",
        }
        for index, run in enumerate(runs)
    ]
    assert table(folder) == expected
    for index, run in enumerate(runs):
        assert metrics(trial(folder, index))["weights_sha256"] == metrics(run)["weights_sha256"]
        assert (trial(folder, index) / "cases.csv").read_bytes() == (run / "cases.csv").read_bytes()
    assert sorted(row["trial"] for row in ledger(folder, "end")) == list(range(len(runs)))
    assert metrics(folder)["state"] == "done"


def test_two_nodes_of_a_job_search_to_the_table_of_one_machine(
    desk: Desk, undisturbed: Callable[[Path], list[Path]]
) -> None:
    config, folder = desk.seat.write("pair.yaml", search=grid(2)), desk.seat.folder / "two-nodes"
    words = desk.words(config, folder, "--json")
    with desk.seat.started(*words, **desk.slurm.environ) as command:
        runs = undisturbed(config)
        done = desk.seat.end_of(command)
    assert done.code == 0, done.err
    assert_same(folder, runs)
    assert done.json["best"]["params"] == {"optimizer.lr": LRS[BEST]}
    assert done.json["trials"] == {"all": 2, "done": 2}
    assert f"submitted job {last_job(folder)} (search)" in done.err
    assert "2 trials, 2 at once, each with 1 CPU" in done.err, "the log is followed"
    assert nodes_of_trials(folder) == {"node1", "node2"}
    assert (folder / "logs" / f"{last_job(folder)}-0" / "ray.json").exists(), "there was a cluster"
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert (best["optimizer"]["lr"], best.get("search")) == (LRS[BEST], None)
    before, job = metrics(folder), last_job(folder)
    again = desk.search(config, folder, "--json")
    assert again.code == 0, again.err
    assert f"{folder}: done already; --fresh searches anew" in again.err
    assert "submitted" not in again.err
    assert (metrics(folder), last_job(folder)) == (before, job), "no job waits to do nothing"
    assert again.json["best"] == done.json["best"]


def test_the_job_as_text() -> None:
    site = read_site("cte_power", {"HOME": "/home/me"})
    job = search_job(Path("/shared/runs/grid"), site, Request(2, 4, gpus=True), [])
    text = render_sbatch(job, site)
    assert_golden("job-search.txt", text)
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=20, check=False).returncode == 0
    alone = render_sbatch(search_job(Path("/shared/it's"), Site(), Request(), []), Site())
    assert "search with Ray on 1 node;" in alone
    assert """run='/shared/it'"'"'s'\n""" in alone


ON_SLURM = ("--on", "slurm", "site.cpus_per_device=1")
REFUSED = {
    (*ON_SLURM, "--address", "10.0.0.1:6379"): (2, ["--address: a job on SLURM starts a Ray of its own"]),
    ("--nodes", "2", "--devices", "1", "--detach"): (2, ["--nodes, --devices, --detach: not for --on ray"]),
    (*ON_SLURM, "--devices", "1", "search.per_trial.devices=2"): (
        4,
        ["search.per_trial.devices 2: ", "has 1 CPUs", "--devices"],
    ),
    (*ON_SLURM, "--devices", "2", "search.per_trial.cpus=3"): (4, ["has 3 CPUs", "has 2 CPUs", "--devices"]),
    (*ON_SLURM, "--devices", "1", "--nodes", "9"): (2, ["--nodes 9: partition main has 4 nodes"]),
    (*ON_SLURM, "search.space={optimizer.rate: {grid: [1]}}"): (2, ["optimizer.rate"]),
    (*ON_SLURM, "data.source=/nonexistent"): (3, ["data.source /nonexistent"]),
    (*ON_SLURM, "--devices", "2", "search.per_trial.devices=2", "search.space={train.batch: {grid: [4, 5]}}"): (
        2,
        ["search.space: train.batch 5 does not divide over 2 ranks"],
    ),
}
OF_PREPARED = {
    ("search.metric=dice/foo",): ["search.metric: found 'dice/foo', expected one that trials are chosen by: "],
    ("search.mode=min",): [f"search.mode: found min, but more of {METRIC} is better"],
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_is_refused_without_a_job(
    slurm: SlurmLab, cli_here: Cli, config: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    code, said = REFUSED[words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
        done = cli_here("search", config, "--run", tmp_path / "run", *words)
    assert done.code == code, done.err
    for text in said:
        assert text in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", OF_PREPARED, ids=" ".join)
def test_what_is_refused_without_a_job_where_the_data_are_prepared(
    slurm: SlurmLab, cli_here: Cli, config: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    prepared = cli_here("prepare", config)
    assert prepared.code == 0, prepared.err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
        done = cli_here("search", config, "--run", tmp_path / "run", *ON_SLURM, *words)
    assert done.code == 2, done.err
    for text in OF_PREPARED[words]:
        assert text in done.err
    assert not (tmp_path / "run").exists()


def test_no_slurm_on_this_machine(cli_here: Cli, config: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        done = cli_here("search", config, "--on", "slurm", "--run", tmp_path / "run")
    assert done.code == 4
    assert "no SLURM on this machine" in done.err
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_the_job_and_writes_nothing(
    slurm: SlurmLab, cli_here: Cli, config: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
        patch.setenv("RAY_ADDRESS", "192.0.2.9:1")  # of a cluster that a job has nothing to do with
        words = ("--on", "slurm", "--nodes", "2", "--devices", "1", "--dry-run")
        done = cli_here("search", config, "--run", tmp_path / "run", *words)
    assert done.code == 0, done.err
    assert done.out.count("#!/bin/bash") == 1
    assert "#SBATCH --nodes=2" in done.out
    assert f"run={tmp_path / 'run'}\n" in done.out
    assert not (tmp_path / "run").exists()


@pytest.mark.cluster
def test_the_time_limit_is_only_a_pause(
    desk: Desk, undisturbed: Callable[[Path], list[Path]], long_config: Path
) -> None:
    """SLURM looks every 30 s, and signals a job of 2 minutes 50 to 80 s after its start."""
    folder = desk.seat.folder / "limit"
    with desk.seat.slowly():
        job = desk.submit(long_config, folder, "site.time=2", "site.signal_s=40")
        until(lambda: attempts(folder) == {"0", "1"}, 150, lambda: f"{desk.slurm.show(job)}")
        assert metrics(folder)["state"] == "stopped"
        (stop,) = ledger(folder, "stop")
        assert "SIGUSR1" in stop["reason"]
        assert (folder / "launch" / "steps").read_text() != "0\n"
    assert desk.slurm.await_state(job, "COMPLETED", "FAILED", timeout=120) == "COMPLETED"
    assert desk.slurm.show(job)["Restarts"] == "1"
    assert not ledger(folder, "lost"), "a trial that saves when it is told to has not been lost"
    assert_same(folder, undisturbed(long_config))


@pytest.mark.cluster
def test_a_job_that_adds_no_step_is_not_queued_again(desk: Desk) -> None:
    """A step takes longer than the job has."""
    (desk.seat.folder / "endless.py").write_text(ENDLESS)
    config = desk.seat.write("endless.yaml", search=grid(2), model={"name": "endless:build"})
    folder = desk.seat.folder / "no-step"
    job = desk.submit(config, folder, "site.signal_s=25")
    until(lambda: len(ledger(folder, "start")) == 2, 90, lambda: desk.slurm.state(job))
    desk.slurm.run("scancel", "--batch", "--signal=USR1", job)  # as SLURM does before the limit
    assert desk.slurm.await_state(job, "COMPLETED", "FAILED", timeout=90) == "FAILED"
    said = next(folder.glob("launch/*.out")).read_text()
    assert "nothing new was saved before the time limit, so the job is not queued again" in said
    assert desk.slurm.show(job)["Restarts"] == "0"


@pytest.mark.cluster
def test_requeued_by_hand_it_goes_on(desk: Desk, undisturbed: Callable[[Path], list[Path]], long_config: Path) -> None:
    folder = desk.seat.folder / "requeued"
    with desk.seat.slowly():
        job = desk.submit(long_config, folder)
        desk.await_trials(folder, job)
        again = desk.search(long_config, folder)
        assert again.code == 4, "a search that runs is not submitted twice"
        desk.slurm.run("scontrol", "requeue", job)
        desk.slurm.await_state(job, "PENDING")
    desk.slurm.await_state(job, "COMPLETED", timeout=150)
    assert attempts(folder) == {"0", "1"}
    assert not ledger(folder, "lost")
    assert_same(folder, undisturbed(long_config))


@pytest.mark.cluster
@pytest.mark.parametrize("index", [0, 1], ids=["the-head", "another"])
def test_a_lost_node_costs_nothing(
    desk: Desk, undisturbed: Callable[[Path], list[Path]], long_config: Path, index: int
) -> None:
    """SLURM takes the whole job from its nodes, and queues it again."""
    folder = desk.seat.folder / f"lost-{index}"
    with desk.seat.slowly():
        job = desk.submit(long_config, folder)
        desk.await_trials(folder, job)
        lost = node_of(folder / "logs" / f"{job}-0", index)
        desk.slurm.kill_node(lost)
        until(lambda: attempts(folder) == {"0", "1"}, 120, lambda: f"{desk.slurm.show(job)}")
    desk.slurm.await_state(job, "COMPLETED", timeout=120)
    desk.slurm.revive_node(lost)
    assert_same(folder, undisturbed(long_config))


@pytest.mark.cluster
def test_cancelled_it_saves_and_the_same_command_goes_on(
    desk: Desk, undisturbed: Callable[[Path], list[Path]], long_config: Path
) -> None:
    folder = desk.seat.folder / "cancelled"
    with desk.seat.slowly():
        job = desk.submit(long_config, folder)
        desk.await_trials(folder, job)
        row = desk.listed(folder.parent)[str(folder)]
        assert (row["kind"], row["state"], row["step"], row["steps"]) == ("search", "running", 0, 3)
        assert row["job"] == job
        assert [row["state"] for row in desk.listed(folder).values()] == ["running", "running"]
        done = desk.run("cancel", folder)
        assert (done.code, done.out.strip()) == (0, f"cancelled job {job} (search)")
        desk.slurm.await_state(job, "CANCELLED", timeout=60)
        until(lambda: (folder / "metrics.json").exists(), 30, lambda: "the search did not say its end")
    assert metrics(folder)["state"] == "stopped"
    saved = [step_of(trial(folder, index)) for index in (0, 1)]
    assert min(saved) >= 3
    assert desk.listed(folder.parent)[str(folder)]["state"] == "stopped"
    assert desk.run("cancel", folder).code == 2, "nothing is left to cancel"
    done = desk.search(long_config, folder)
    assert done.code == 0, done.err
    assert not ledger(folder, "lost")
    assert_same(folder, undisturbed(long_config))


@pytest.mark.cluster
def test_the_job_file_goes_on_by_hand(desk: Desk, undisturbed: Callable[[Path], list[Path]], long_config: Path) -> None:
    folder = desk.seat.folder / "by-hand"
    with desk.seat.slowly():
        job = desk.submit(long_config, folder)
        desk.await_trials(folder, job)
        desk.slurm.run("scancel", job)
        desk.slurm.await_state(job, "CANCELLED", timeout=60)
    until(lambda: (folder / "metrics.json").exists(), 30, lambda: "the search did not say its end")
    sbatch = ["sbatch", "--parsable", str(folder / "launch" / "search.sbatch")]
    again = int(subprocess.run(sbatch, env=desk.environ, capture_output=True, timeout=30, check=True).stdout)
    assert desk.slurm.await_state(again, "COMPLETED", "FAILED", timeout=150) == "COMPLETED"
    assert_same(folder, undisturbed(long_config))


@pytest.mark.cluster
def test_inside_an_allocation(desk: Desk, undisturbed: Callable[[Path], list[Path]], config: Path) -> None:
    folder = desk.seat.folder / "inside"
    words = [sys.executable, "-m", "voxscale", "search", config, "--on", "slurm", "--run", folder, "--json"]
    salloc = ["salloc", "-N2", "-c1", *map(str, words)]
    done = subprocess.run(salloc, env=desk.environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trials"] == {"all": 3, "done": 3}
    assert "submitted" not in done.stderr
    assert nodes_of_trials(folder) == {"node1", "node2"}
    assert_same(folder, undisturbed(config))
