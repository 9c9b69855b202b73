"""Training on a real SLURM: the same model as anywhere else, whatever happens to the job on the way."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli, Finished
from lab.faults import poison_one, stop_one
from lab.ray import kill, ranks_in
from lab.slurm import SlurmLab, until
from lab.terminal import CTRL_C, Terminal
from lab.trained import LONG, NUM_STEPS, SLOW
from voxscale.config.site import Site
from voxscale.errors import InfrastructureError
from voxscale.files import locked, write_json
from voxscale.launch import cluster_run
from voxscale.launch.allocation import Allocation, least_gpus
from voxscale.launch.batch import EVALUATE, Submitted, ranks_job
from voxscale.launch.cluster import Cluster
from voxscale.launch.sbatch import Placement, Request
from voxscale.launch.slurm import GONE
from voxscale.runs import RunFolder
from voxscale.train.events import read_events

pytestmark = pytest.mark.slurm

SHORT: dict[str, Any] = {"train__epochs": 1, "model": {"name": "networks:build_slow"}}
BAR = rf"steps [^\r\n]* (\d+)/{NUM_STEPS} "
NODES = [f"node{number}" for number in range(1, 5)]


@pytest.fixture(scope="module", autouse=True)
def networks(networks_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(networks_folder))
        patch.syspath_prepend(networks_folder)
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("site") / "lab.yaml"
    path.write_text("cpus_per_device: 1\nsignal_s: 40\n")
    return path


@pytest.fixture
def environ(idle_slurm: SlurmLab, networks_folder: Path) -> dict[str, str]:
    return {**idle_slurm.environ, "PYTHONPATH": str(networks_folder)}


@pytest.fixture
def on_slurm(cli: Cli, site: Path, environ: dict[str, str]) -> Callable[..., Finished]:
    """Run a verb with `--on slurm`."""

    def run(verb: str, *words: object, env: dict[str, str] | None = None) -> Finished:
        return cli(verb, *words, "--on", "slurm", "--site", site, env={**environ, **(env or {})})

    return run


@pytest.fixture
def on_terminal(
    site: Path, environ: dict[str, str], session_environ: dict[str, str]
) -> Callable[..., AbstractContextManager[Terminal]]:
    """Run `voxscale VERB` with `--on slurm` on a terminal."""

    def run(verb: str, *words: object, env: dict[str, str] | None = None) -> Terminal:
        command = [sys.executable, "-m", "voxscale", verb, *words, "--on", "slurm", "--site", site]
        return Terminal(*command, env={**session_environ, **environ, **(env or {})})

    return run


def metrics(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "metrics.json").read_text())
    return content


def last_job(run: Path) -> int:
    return int(json.loads((run / "launch" / "jobs.json").read_text())["jobs"][-1]["id"])


def stream(run: Path) -> list[Any]:
    return [(event["step"], sorted(event["cases"])) for event in read_events(run / "events.jsonl") if "cases" in event]


def await_step(run: Path, step: int) -> None:
    def reached() -> bool:
        events = run / "events.jsonl"
        return events.exists() and any(row.get("step", 0) >= step for row in read_events(events))

    until(reached, 60, lambda: f"{run} did not reach step {step}")


def assert_same_model(run: Path, reference: Path) -> None:
    assert metrics(run)["weights_sha256"] == metrics(reference)["weights_sha256"]
    assert (run / "cases.csv").read_bytes() == (reference / "cases.csv").read_bytes()
    assert stream(run) == stream(reference)


@contextmanager
def meanwhile(work: Callable[..., Finished], *words: object) -> Iterator[Future[Finished]]:
    """Do the work beside the block's own; it is done when the block ends."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(work, *words)


WORLDS = [
    (2, 2),
    *(pytest.param(*world, marks=pytest.mark.cluster) for world in ((1, 1), (1, 2), (2, 1), (4, 1))),
]


@pytest.mark.parametrize(("nodes", "devices"), WORLDS)
def test_the_same_model_as_on_one_machine(
    on_slurm: Callable[..., Finished],
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    tmp_path: Path,
    nodes: int,
    devices: int,
) -> None:
    run = tmp_path / "run"
    words = ["train", write_config(**LONG), "--nodes", nodes, "--devices", devices, "--run", run, "--json"]
    with meanwhile(on_slurm, *words) as there:
        here = undisturbed(nodes * devices)
    done = there.result()
    assert done.code == 0, done.err
    assert done.json["world_size"] == nodes * devices
    assert_same_model(run, here)
    assert f"job {last_job(run)} (train): running on node" in done.err
    assert "epoch 4/4" in done.err, "the log is followed"
    hosts = {json.loads(path.read_text())["host"] for path in run.glob("logs/*-0/node-000?.json")}
    assert len(hosts) == nodes
    assert len(list(run.glob("logs/*-0/rank-*.log"))) == nodes * devices


def test_the_stream_does_not_depend_on_the_world(undisturbed: Callable[[int], Path]) -> None:
    assert stream(undisturbed(1)) == stream(undisturbed(2)) == stream(undisturbed(4))


def test_requeued_by_hand_equals_undisturbed(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    cli: Cli,
    tmp_path: Path,
) -> None:
    run, config = tmp_path / "run", write_config(**LONG)
    place = ["--nodes", 2, "--devices", 1, "--run", run]
    started = on_slurm("train", config, *place, "--detach", "--json", env=SLOW)
    assert started.json["state"] == "submitted"
    again = on_slurm("train", config, *place)
    assert again.code == 4, "a run that is queued or trains is not submitted twice"
    assert f"job {last_job(run)}" in again.err
    await_step(run, 3)
    listed = {row["run"]: row for row in cli("runs", tmp_path, "--json", env=idle_slurm.environ).json["runs"]}
    assert (listed[str(run)]["state"], listed[str(run)]["job"]) == ("running", last_job(run))
    idle_slurm.run("scontrol", "requeue", last_job(run))
    idle_slurm.await_state(last_job(run), "PENDING")
    here = undisturbed(2)  # while it waits
    idle_slurm.await_state(last_job(run), "COMPLETED", timeout=150)
    assert_same_model(run, here)
    assert {path.name for path in run.glob(f"logs/{last_job(run)}-*")} == {f"{last_job(run)}-{n}" for n in (0, 1)}
    assert "resume" in (run / "events.jsonl").read_text()


def test_a_job_is_watched_from_outside(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    write_config: Callable[..., Path],
    cli: Cli,
    tmp_path: Path,
) -> None:
    """While it waits for nodes, and to its end; what its ranks use is known from the folder that they share."""
    run = tmp_path / "run"
    with idle_slurm.occupy(NODES):
        words = ["--nodes", 2, "--devices", 1, "--run", run, "--detach"]
        assert on_slurm("train", write_config(**SHORT), *words).code == 0
        view = cli("watch", run, "--json", env=idle_slurm.environ).json
        assert (view["state"], view["job"]) == ("queued", last_job(run))
        assert re.fullmatch(r"the job is pending \((Resources|Priority|None)\)|the job is pending", view["why"])
    done = cli("watch", run, env=idle_slurm.environ)
    assert done.code == 0, done.err
    first, *_, last = done.out.splitlines()
    assert f"queued, job {last_job(run)}: the job is pending" in first or "running" in first
    assert re.search(r"done, job \d+  step 5/5  epoch 1/1", last)
    ranks = cli("watch", run, "--json").json["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert len({rank["host"] for rank in ranks} & set(NODES)) == 2


@pytest.mark.cluster
def test_the_time_limit_is_only_a_pause(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """SLURM looks every 30 s, and signals a job of 2 minutes 50 to 80 s after its start: the steps take longer."""
    run = tmp_path / "run"
    words = ["site.time=2", "site.signal_s=40", "--nodes", 2, "--devices", 1, "--run", run, "--detach"]
    assert on_slurm("train", write_config(**LONG), *words, env={"SLOW_FIRST": "5"}).code == 0
    job = last_job(run)
    assert idle_slurm.await_state(job, "COMPLETED", "FAILED", "TIMEOUT", timeout=240) == "COMPLETED"
    assert idle_slurm.show(job)["Restarts"] == "1"
    assert {path.name for path in run.glob("logs/*-*")} == {f"{job}-{attempt}" for attempt in (0, 1)}
    assert_same_model(run, undisturbed(2))


@pytest.mark.cluster
@pytest.mark.parametrize("index", [0, 1], ids=["that of the job's shell and rank 0", "another"])
def test_a_lost_node_costs_nothing(
    index: int,
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    on_slurm("train", write_config(**LONG), "--nodes", 2, "--devices", 1, "--run", run, "--detach", env=SLOW)
    await_step(run, 3)
    lost = json.loads((next(run.glob("logs/*-0")) / f"node-000{index}.json").read_text())["node"]
    idle_slurm.kill_node(lost)
    idle_slurm.await_state(last_job(run), "COMPLETED", timeout=150)
    idle_slurm.revive_node(lost)
    assert_same_model(run, undisturbed(2))


@pytest.mark.cluster
def test_a_lost_rank_costs_nothing_where_the_job_may_start_again(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    run, config = tmp_path / "run", write_config(**LONG, checkpoint={"every_steps": 2})
    words = ["--nodes", 2, "--devices", 1, "--run", run, "--restarts", 1]
    refused = on_slurm("train", config, *words, "site.requeue=false")
    assert (refused.code, run.exists()) == (2, False)
    assert "--restarts 1: the site's profile has requeue: false; expected true" in refused.err
    assert on_slurm("train", config, *words, "--detach", env=SLOW).code == 0
    await_step(run, 3)
    kill(ranks_in(run)[1])
    assert idle_slurm.await_state(last_job(run), "COMPLETED", "FAILED", timeout=150) == "COMPLETED"
    assert idle_slurm.show(last_job(run))["Restarts"] == "1"
    assert [path.parent.name for path in run.glob("logs/*/lost")] == [f"{last_job(run)}-0"]
    assert_same_model(run, undisturbed(2))


@pytest.mark.cluster
def test_a_rank_that_hangs_is_named_in_time(
    on_slurm: Callable[..., Finished], idle_slurm: SlurmLab, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    run, timeout_s = tmp_path / "run", 8
    config = write_config(**LONG, train__timeout_s=timeout_s)
    words = ["train", config, "--nodes", 2, "--devices", 1, "--run", run, "--detach"]
    assert on_slurm(*words, env=SLOW).code == 0
    await_step(run, 3)
    took_s, said = stop_one(run, timeout_s)
    assert took_s < 2
    assert re.search(r"did not answer within 8 s", said)
    job = last_job(run)
    assert idle_slurm.await_state(job, "FAILED", timeout=60) == "FAILED"
    told = (run / "launch" / "jobs.json").parent.glob(f"*{job}*")
    assert any(
        re.search(r"error: rank 1 did not answer within 8 s at step \d+, with cases \S+", file.read_text())
        for file in told
    )
    assert not ranks_in(run)
    assert not any(idle_slurm.shared_memory(name) for name in idle_slurm.nodes)


@pytest.mark.cluster
def test_a_case_that_one_node_cannot_read_ends_the_job_with_its_name(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], cli_here: Cli, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", write_config(**LONG, data__store=str(tmp_path / "store"), train__timeout_s=60)
    case = poison_one(cli_here, config, run)
    done = on_slurm("train", config, "--nodes", 2, "--devices", 1, "--run", run)
    assert done.code == 3, done.err
    assert re.search(rf"error: rank \d: store: case {case}: image.b2nd is damaged", done.err)
    assert not ranks_in(run)


@pytest.mark.cluster
def test_preempted_equals_undisturbed(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    words = ["site.partition=preempt", "--nodes", 2, "--devices", 1, "--run", run, "--detach"]
    on_slurm("train", write_config(**LONG), *words, env=SLOW)
    await_step(run, 3)
    with idle_slurm.occupy(NODES):
        idle_slurm.await_state(last_job(run), "PENDING", timeout=30)
    idle_slurm.await_state(last_job(run), "COMPLETED", timeout=90)
    assert_same_model(run, undisturbed(2))


def test_a_failing_rank_is_on_the_screen_at_once(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    write_config: Callable[..., Path],
    cli: Cli,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    config = write_config(model={"name": "networks:build_broken"})
    done = on_slurm("train", config, "--nodes", 2, "--devices", 1, "--run", run)
    seen = time.time()
    assert done.code == 1
    assert done.err.rstrip().splitlines()[-2].startswith("error: rank 1: ValueError: rank one has had enough")
    assert idle_slurm.state(last_job(run)) == "FAILED"
    assert idle_slurm.show(last_job(run))["ExitCode"] == "1:0", "the job's exit code is the training's"
    ended = datetime.fromisoformat(idle_slurm.show(last_job(run))["EndTime"]).timestamp()
    assert seen - ended < 5
    listed = cli("runs", run, env=idle_slurm.environ)
    assert "failed" in listed.out
    assert "rank one has had enough" in listed.out


@pytest.mark.cluster
def test_left_with_ctrl_c_then_cancelled_it_saves_and_goes_on(
    on_slurm: Callable[..., Finished],
    on_terminal: Callable[..., AbstractContextManager[Terminal]],
    idle_slurm: SlurmLab,
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    cli: Cli,
    tmp_path: Path,
) -> None:
    run, config = tmp_path / "run", write_config(**LONG)
    words = ["train", config, "--nodes", 1, "--devices", 2, "--run", run]
    with on_terminal(*words, env=SLOW) as screen:
        first = int(screen.until(BAR)[1])
        screen.until(BAR.replace(r"(\d+)", rf"(?!{first}/)([1-9]\d*)"))
        job = last_job(run)
        screen.type(CTRL_C)
        screen.until(rf"leave job {job} running, or cancel it\? \[L/c\] ")
        assert idle_slurm.state(job) == "RUNNING", "nothing happens to it before there is an answer"
        screen.type("\n")
        assert screen.wait() == 75
    assert f"job {job} goes on without being followed" in screen.text
    shown = [int(step) for step in re.findall(BAR, screen.text)]
    assert shown == sorted(shown), "the bar goes forward"
    assert idle_slurm.state(job) == "RUNNING"
    done = cli("cancel", run, env=idle_slurm.environ)
    assert (done.code, done.out.strip()) == (0, f"cancelled job {job} (train)")
    idle_slurm.await_state(job, "CANCELLED")
    until(lambda: (run / "metrics.json").exists(), 15, lambda: "the state was not saved")
    assert metrics(run)["state"] == "stopped"
    assert 0 < metrics(run)["steps"] < NUM_STEPS
    assert cli("cancel", run, env=idle_slurm.environ).code == 2, "nothing is left to cancel"
    assert on_slurm(*words).code == 0
    assert_same_model(run, undisturbed(2))


def test_a_job_of_another_cluster_is_not_taken_for_the_one_of_its_number_here(
    idle_slurm: SlurmLab, cli: Cli, tmp_path: Path
) -> None:
    """A folder that two clusters see: its job 7 is not this cluster's job 7, and neither is that of its owner."""
    run = RunFolder(tmp_path / "run")
    run.launch.mkdir(parents=True)
    (run.launch / "job.sbatch").write_text("#!/bin/bash\nsleep 600\n")
    with idle_slurm.occupy(["node1"]) as other:
        job = {"kind": "train", "id": other, "file": str(run.launch / "job.sbatch"), "logs": ["out"]}
        write_json(run.jobs, {"jobs": [job]})
        (row,) = cli("runs", tmp_path, "--json", env=idle_slurm.environ).json["runs"]
        assert (row["state"], row["job"]) == ("new", other)
        done = cli("cancel", run.root, env=idle_slurm.environ)
        assert (done.code, "nothing is queued or running" in done.err) == (2, True), done.err
        run.logs.joinpath(f"{other}-0").mkdir(parents=True)
        run.logs.joinpath(f"{other}-0", "step").write_text("0")
        write_json(run.owner, {"host": "node1-elsewhere", "pid": 1, "since": "now", "job": str(other)})
        with locked(run.owner_lock):
            done = cli("cancel", run.root, env=idle_slurm.environ)
        assert (done.code, "stop it there" in done.err) == (4, True), done.err
        assert idle_slurm.state(other) == "RUNNING"
    own = idle_slurm.submit("--output=/dev/null", run.launch / "job.sbatch")
    write_json(run.jobs, {"jobs": [{**job, "id": own}]})
    assert cli("cancel", run.root, env=idle_slurm.environ).out.strip() == f"cancelled job {own} (train)"


def test_a_job_that_ends_before_its_ranks_can_say_why_is_listed_with_its_reason(
    idle_slurm: SlurmLab, cli: Cli, tmp_path: Path
) -> None:
    def listed(state: str, *options: str) -> dict[str, Any]:
        run = RunFolder(tmp_path / state)
        run.launch.mkdir(parents=True)
        (run.launch / "job.sbatch").write_text("#!/bin/bash\nexit 4\n")
        number = idle_slurm.submit(*options, run.launch / "job.sbatch")
        if state == "CANCELLED":
            idle_slurm.run("scancel", number)
        idle_slurm.await_state(number, state)
        job = {"kind": "train", "id": number, "file": str(run.launch / "job.sbatch"), "logs": ["out"]}
        write_json(run.jobs, {"jobs": [job]})
        (row,) = cli("runs", run.root, "--json", env=idle_slurm.environ).json["runs"]
        return dict(row)

    failed = listed("FAILED", "--output=/nowhere/out")
    assert (failed["state"], failed["why"][:26]) == ("failed", "the job has ended, failed "), failed
    view = cli("watch", tmp_path / "FAILED", "--json", env=idle_slurm.environ).json
    assert (view["state"], view["why"]) == ("failed", failed["why"])
    cancelled = listed("CANCELLED", "--hold", "--output=/dev/null")
    assert (cancelled["state"], cancelled["why"][:28]) == ("stopped", "the job has ended, cancelled"), cancelled


def test_ctrl_c_cancels_what_waits(
    on_terminal: Callable[..., AbstractContextManager[Terminal]],
    idle_slurm: SlurmLab,
    write_config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    with (
        idle_slurm.occupy(NODES),
        on_terminal("train", write_config(**LONG), "--devices", 1, "--run", run) as screen,
    ):
        screen.until(r"job \d+ \(train\): pending \(")
        job = last_job(run)
        screen.type(CTRL_C)
        screen.until(rf"leave job {job} running, or cancel it\? \[L/c\] ")
        screen.type("c\n")
        assert screen.wait() == 75
        assert f"job {job} was cancelled" in screen.text
        assert "Traceback" not in screen.text
        for submitted in json.loads((run / "launch" / "jobs.json").read_text())["jobs"]:
            assert idle_slurm.state(submitted["id"]) == "CANCELLED"


def test_prepare_train_and_evaluate_hang_together(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    write_config: Callable[..., Path],
    cli: Cli,
    tmp_path: Path,
) -> None:
    """Nothing is prepared: one job opens the run, the training waits for it, the evaluation for both."""
    store = tmp_path / "store"
    run, config = tmp_path / "run", write_config(data__store=str(store), **SHORT)
    with idle_slurm.occupy(NODES):
        prepared = on_slurm("prepare", config, "--run", run, "--detach", "--json")
        assert prepared.json["state"] == "submitted"
        assert run.stat().st_mode & 0o777 == 0o700
        started = on_slurm("train", config, "--devices", 1, "--run", run, "--detach", "--json")
        assert [job["kind"] for job in started.json["jobs"]] == ["open", "train"]
        opening = started.json["jobs"][0]["id"]
        assert f"afterok:{prepared.json['jobs'][0]['id']}" in idle_slurm.show(opening)["Dependency"]
        assert cli("train", config, "--devices", 1, "--run", run, env=idle_slurm.environ).code == 4, "it is queued"
        evaluated = on_slurm("evaluate", run, "--split", "train", "--detach", "--json")
        assert evaluated.code == 0, evaluated.err
        listed = cli("runs", tmp_path, "--json", env=idle_slurm.environ).json["runs"]
        assert [row["state"] for row in listed] == ["queued"]
        assert not store.exists()
    for job in json.loads((run / "launch" / "jobs.json").read_text())["jobs"]:
        idle_slurm.await_state(job["id"], "COMPLETED", timeout=90)
    assert metrics(run)["state"] == "done"
    rows = list(csv.DictReader((run / "evaluations" / "train" / "cases.csv").open()))
    assert len(rows) == 9


@pytest.mark.parametrize(
    "is_new",
    [pytest.param(True, id="a-new-run"), pytest.param(False, id="a-stopped-run", marks=pytest.mark.cluster)],
)
def test_commands_at_the_same_moment_submit_one_job(
    is_new: bool,
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    write_config: Callable[..., Path],
    cli: Cli,
    tmp_path: Path,
) -> None:
    run, config = tmp_path / "run", write_config(**SHORT)
    submit = ("train", config, "--devices", 1, "--run", run, "--detach")
    with idle_slurm.occupy(NODES):
        if not is_new:
            assert on_slurm(*submit).code == 0
            assert cli("cancel", run, env=idle_slurm.environ).code == 0
        with ThreadPoolExecutor(3) as several:
            ends = [each.result() for each in [several.submit(on_slurm, *submit) for _ in range(3)]]
        assert sorted(end.code for end in ends) == [0, 4, 4], [end.err for end in ends]
        assert len(json.loads((run / "launch" / "jobs.json").read_text())["jobs"]) == (1 if is_new else 2)
        assert cli("cancel", run, env=idle_slurm.environ).code == 0


def test_a_job_that_cannot_open_its_data_says_so(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    shutil.copytree(dataset, tmp_path / "bad")
    broken = next((tmp_path / "bad").glob("*img*"))
    broken.write_bytes(broken.read_bytes()[:-50])
    run = tmp_path / "run"
    config = write_config(data__source=str(tmp_path / "bad"), data__store=str(tmp_path / "store"))
    done = on_slurm("train", config, "--devices", 1, "--run", run)
    assert done.code == 3
    assert broken.name in done.err.rstrip().splitlines()[-2]
    assert "cancelled" in done.err, "the training job does not wait for ever"


def test_folds_are_an_array(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], cli_here: Cli, tmp_path: Path
) -> None:
    run = tmp_path / "folds"
    config = write_config(data__split={"folds": 2, "test": 0.2}, **SHORT)
    words = ["train", config, "--devices", 1, "--folds", "all", "--json", "--run"]
    with meanwhile(on_slurm, *words, run) as there:
        here = cli_here(*words, tmp_path / "here")
    done = there.result()
    assert done.code == 0, done.err
    text = (run / "launch" / "job.sbatch").read_text()
    assert "#SBATCH --array=1-2" in text
    assert run.stat().st_mode & 0o777 == 0o700
    assert here.code == 0, here.err
    assert done.json["summary"] == here.json["summary"]
    assert done.json["test"] == here.json["test"]


@pytest.mark.cluster
def test_folds_that_wait_are_evaluated_when_they_are_trained(
    on_slurm: Callable[..., Finished], idle_slurm: SlurmLab, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Nothing is prepared: the folds' folders are still to come."""
    run, store = tmp_path / "folds", str(tmp_path / "store")
    config = write_config(data__store=store, data__split={"folds": 2, "test": 0.2}, **SHORT)
    with idle_slurm.occupy(NODES):
        started = on_slurm("train", config, "--devices", 1, "--folds", "all", "--run", run, "--detach")
        assert started.code == 0, started.err
        assert not list(run.glob("fold-*"))
        queued = on_slurm("evaluate", run, "--split", "test", "--name", "later", "--devices", 1, "--detach")
        assert queued.code == 0, queued.err
    for job in json.loads((run / "launch" / "jobs.json").read_text())["jobs"]:
        idle_slurm.await_state(job["id"], "COMPLETED", timeout=120)
    summary = json.loads((run / "evaluations" / "later" / "metrics.json").read_text())["summary"]
    assert summary == metrics(run)["test"]


def test_inside_an_allocation(
    idle_slurm: SlurmLab,
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    site: Path,
    tmp_path: Path,
) -> None:
    """`salloc` on a login node, and one task of `srun` on a node: the job's nodes are used, nothing is submitted."""
    config, run = write_config(**LONG), tmp_path / "run"
    voxscale = [sys.executable, "-m", "voxscale"]
    words = [*voxscale, "train", config, "--on", "slurm", "--site", site, "--devices", 1, "--run", run]
    done = idle_slurm.run("salloc", "-N2", "-c2", *words, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "submitted" not in done.stderr
    assert_same_model(run, undisturbed(2))
    too_many = idle_slurm.run("salloc", "-N1", *words[:-1], tmp_path / "other", "--nodes", 3, timeout=60, check=False)
    assert too_many.returncode == 4
    assert "has 1 (node" in too_many.stderr


@pytest.mark.cluster
def test_in_a_shell_of_srun_the_nodes_of_its_job_are_used(
    idle_slurm: SlurmLab,
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    environ: dict[str, str],
    session_environ: dict[str, str],
    site: Path,
    tmp_path: Path,
) -> None:
    """`srun --pty bash`: SLURM's variables are those of the shell's own task, and of its step."""
    run = tmp_path / "run"
    train = [sys.executable, "-m", "voxscale", "train", write_config(**LONG), "--on", "slurm", "--site", site]
    shell = ["srun", "-N2", "-c2", "--pty", "bash", "--norc"]
    with Terminal(*shell, env={**session_environ, **environ}) as screen:
        screen.type(shlex.join(map(str, [*train, "--devices", 1, "--run", run])) + "; exit $?\n")
        assert screen.wait(timeout=120) == 0, screen.text
    assert "submitted" not in screen.text
    assert_same_model(run, undisturbed(2))


GPUS = [
    (["-N2", "--gpus=4"], 2),
    (["-N2", "--gpus=3"], 1),
    (["-N1", "-n2", "--gpus-per-task=1"], 2),
    (["-N2", "--gpus-per-node=a100:1"], 1),
    (["-N2", "--gres=gpu"], 1),
    (["-N2"], 0),
]


@pytest.mark.parametrize(("options", "gpus"), GPUS)
def test_the_gpus_of_an_allocation_are_known_however_it_asked(
    idle_slurm: SlurmLab, options: list[str], gpus: int
) -> None:
    """In a shell of `salloc` on a login node, which has no variable for them."""
    allocated = allocate(idle_slurm, *options)
    assert allocated is not None
    assert (allocated.gpus, len(allocated.nodes)) == (gpus, int(options[0][2:]))


def test_a_shell_on_a_node_asks_for_the_gpus_of_the_others(idle_slurm: SlurmLab) -> None:
    """SLURM's variable there is of that node alone."""
    allocated = allocate(idle_slurm, "-N2", "--gpus=3", SLURM_GPUS_ON_NODE="2")
    assert allocated is not None
    assert allocated.gpus == 1


@pytest.mark.parametrize(
    ("options", "nodes"),
    [(["-N2", "-c2", "--gpus=4"], 2), pytest.param(["-n2", "-c1", "--gpus-per-task=1"], 1, marks=pytest.mark.cluster)],
)
def test_ranks_see_all_gpus_that_an_allocation_has_on_their_node(
    idle_slurm: SlurmLab, tmp_path: Path, options: list[str], nodes: int
) -> None:
    """Of these ways to ask, SLURM by itself gives a step of one task per node one GPU of a node's two."""
    (tmp_path / "tell.py").write_text(
        "import os, socket\nprint('TELL', socket.gethostname(), os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
    )
    words = [sys.executable, "-m", "voxscale", "launch", tmp_path / "tell.py", "--on", "slurm"]
    done = idle_slurm.run("salloc", *options, *words, "--run", tmp_path / "run", timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split()[1:] for line in (done.stdout + done.stderr).splitlines() if line.startswith("TELL")]
    assert len(told) == 2 * nodes, "a rank for each GPU"
    assert len({host for host, _ in told}) == nodes
    assert {visible for _, visible in told} == {"0,1"}


def test_an_allocation_of_one_cpu_prepares(
    idle_slurm: SlurmLab, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """A site gives a device four CPUs unless it says otherwise; this shell's job has one."""
    store = tmp_path / "store"
    config = write_config(data__store=str(store))
    words = [sys.executable, "-m", "voxscale", "prepare", config, "--on", "slurm", "--run", tmp_path / "run"]
    done = idle_slurm.run("salloc", "-N1", "-c1", *words, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert list(store.iterdir())


def test_gpus_that_not_all_nodes_have_are_not_taken_for_none() -> None:
    asked, of_one = "JobId=7 TresPerJob=gres:gpu:2", "CPU_IDs=0 Mem=1 GRES=gpu:a100:2(IDX:0-1)"
    assert least_gpus("7", f"{asked} Nodes=node[1-2] {of_one} Nodes=node3 {of_one.replace(':2', ':1')} Command=x") == 1
    with pytest.raises(InfrastructureError, match="expected GPUs on each of its nodes; found 2, 2, 0"):
        least_gpus("7", f"{asked} Nodes=node[1-2] {of_one} Nodes=node3 CPU_IDs=0 Mem=1 GRES= Command=x")
    with pytest.raises(InfrastructureError, match="SLURM does not say how many"):
        least_gpus("7", f"{asked} Command=x")


def allocate(slurm: SlurmLab, *options: str, **of_shell: str) -> Allocation | None:
    """What is seen of an allocation in its shell, which may have variables of its own."""
    job = slurm.run("salloc", "--no-shell", "-p", "main", *options).stderr.partition("job allocation ")[2].split()[0]
    nodes = slurm.show(int(job))["NodeList"]
    variables = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_CPUS_PER_NODE": "1"}
    try:
        return Allocation.from_env({**os.environ, **slurm.environ, **variables, **of_shell})
    finally:
        slurm.run("scancel", job)


def test_what_only_waiting_jobs_have_is_refused_where_nothing_waits(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    write_config: Callable[..., Path],
    site: Path,
    networks_folder: Path,
    tmp_path: Path,
) -> None:
    config, run = write_config(), tmp_path / "run"
    voxscale = [sys.executable, "-m", "voxscale"]
    train = ["train", config, "--run", run]
    for verb in (train, ["launch", networks_folder / "networks.py", "--run", run]):
        words = [*voxscale, *verb, "--on", "slurm", "--site", site, "--devices", 1, "--detach", "--after", 1]
        done = idle_slurm.run("salloc", "-N1", "-c1", *words, timeout=60, check=False)
        assert done.returncode == 2, done.stderr
        assert "--after, --detach: this shell belongs to job" in done.stderr
    done = on_slurm(*train, "--devices", 1, "--after", 99999)
    assert (done.code, "--after 99999: SLURM does not know this job" in done.err) == (2, True), done.err
    done = on_slurm(*train, "--devices", 1, "--no-start")
    assert (done.code, "--no-start: not for --on slurm" in done.err) == (2, True), done.err
    assert not run.exists()
    assert not idle_slurm.run("squeue", "-h").stdout


def test_a_shell_of_one_task_does_not_change_the_world(
    idle_slurm: SlurmLab, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    words = [
        sys.executable,
        "-m",
        "voxscale",
        "train",
        write_config(**SHORT, train__threads="auto", train__stop_after={"steps": 1}),
        "--run",
        tmp_path / "run",
    ]
    done = idle_slurm.run(
        "srun", "-n1", "-c2", "env", "SLURM_NTASKS=7", "SLURM_PROCID=3", *words, timeout=120, check=False
    )
    assert done.returncode == 75, done.stderr
    assert metrics(tmp_path / "run")["steps"] == 1
    assert metrics(tmp_path / "run")["world_size"] == 2, "one process for each CPU of the job"


def test_a_folder_that_nodes_do_not_share(
    on_slurm: Callable[..., Finished], idle_slurm: SlurmLab, write_config: Callable[..., Path]
) -> None:
    run = idle_slurm.local / "run"  # each node has a disk of its own there
    done = on_slurm("train", write_config(), "--nodes", 2, "--devices", 1, "--run", run)
    assert done.code == 4, done.err
    assert f"its node may not see {run}" in done.err
    assert "--run" in done.err


def test_an_interpreter_that_nodes_do_not_see(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    words = ["site.python=/nowhere/python", "--nodes", 2, "--devices", 1, "--run", tmp_path / "run"]
    done = on_slurm("train", write_config(), *words)
    assert done.code == 4
    assert re.search(r"error: node\d does not see /nowhere/python\n  fix: see .*\.out$", done.err.rstrip())


def test_errors_in_a_file_of_their_own_are_shown_and_told(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], cli_here: Cli, tmp_path: Path
) -> None:
    config = write_config()
    assert cli_here("prepare", config).code == 0
    words = ["site.python=/nowhere/python", "site.error=said/%x-%j.err", "--devices", 1, "--run", tmp_path / "run"]
    done = on_slurm("train", config, *words)
    assert done.code == 4, done.err
    *shown, told, fix = done.err.rstrip().splitlines()
    assert re.fullmatch(r"error: node\d does not see /nowhere/python", told)
    assert re.search(r"see .*/run/said/run-\d+\.err$", fix)
    assert told in shown, "the file is followed"


@pytest.mark.cluster
def test_a_start_is_judged_by_itself_not_by_the_one_before(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    write_config: Callable[..., Path],
    cli: Cli,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    words = ["train", write_config(**LONG), "--devices", 1, "--run", run]
    assert on_slurm(*words, "train.stop_after={steps: 1}").code == 75
    failed = on_slurm(*words, "site.python=/nowhere/python")
    assert (failed.code, "does not see /nowhere/python" in failed.err.splitlines()[-2]) == (4, True), failed.err
    (row,) = cli("runs", run, "--json", env=idle_slurm.environ).json["runs"]
    assert (row["state"], row["why"]) == ("failed", "the job has ended, failed (NonZeroExitCode)")


@pytest.mark.cluster
def test_folds_that_fail_anew_are_not_covered_by_an_old_summary(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    folds = {"data__split": {"folds": 2}}
    words = ["--devices", 2, "--folds", "all", "--run", tmp_path / "folds"]
    assert on_slurm("train", write_config(**folds, **SHORT), *words).code == 0
    broken = write_config(**folds, train__epochs=1, model={"name": "networks:build_broken"})
    done = on_slurm("train", broken, *words, "--fresh")
    assert (done.code, "rank one has had enough" in done.err.splitlines()[-2]) == (1, True), done.err
    assert not (tmp_path / "folds" / "metrics.json").exists()


@pytest.mark.cluster
def test_what_several_jobs_write_to_one_file_is_shown_once(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(data__store=str(tmp_path / "store"), **SHORT)
    done = on_slurm("train", config, "site.output=launch/log.txt", "--devices", 1, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    assert done.err.count("epoch 1/1") == 1


@pytest.mark.cluster
def test_a_job_that_saves_nothing_is_not_queued_for_ever(
    on_slurm: Callable[..., Finished], idle_slurm: SlurmLab, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """A step takes longer than the job has."""
    words = ["site.time=1", "site.signal_s=30", "--devices", 1, "--run", tmp_path / "run"]
    done = on_slurm("train", write_config(**LONG), *words, env={"SLOW_STEPS": "100"})
    assert done.code == 75
    assert "nothing new was saved before the time limit, so the job is not queued again" in done.err
    assert idle_slurm.show(last_job(tmp_path / "run"))["Restarts"] == "0"


def test_a_job_that_slurm_has_forgotten_is_judged_by_its_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who follows it may sleep for longer than SLURM remembers."""
    run, request = RunFolder(tmp_path / "run"), Request()
    job = ranks_job(run.root, Site(), request, [], ["module"], kind=EVALUATE, purpose="evaluate")
    submitted = Submitted(EVALUATE, 7, "evaluate.sbatch", [str(tmp_path / "out")])
    monkeypatch.setattr(cluster_run, "submit_jobs", lambda *_, **__: [submitted])
    monkeypatch.setattr(cluster_run, "follow", lambda *_, **__: GONE)

    def evaluate() -> None:
        cluster_run.run_on_slurm({EVALUATE: job}, request, {}, Placement(Site()), Cluster(()))

    reports = run.logs / "7-0"
    reports.mkdir(parents=True)
    write_json(reports / "node-0000.json", {"node": "node1", "host": "node1"})
    with pytest.raises(InfrastructureError, match="gone"):
        evaluate()
    write_json(reports / "node-0000.end.json", {"times": [], "failures": [], "stopped": False})
    evaluate()


@pytest.fixture
def no_slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    yield {"PATH": str(tmp_path)}


def test_no_slurm_on_this_machine(
    cli: Cli, write_config: Callable[..., Path], no_slurm: dict[str, str], tmp_path: Path
) -> None:
    done = cli("train", write_config(), "--on", "slurm", "--run", tmp_path / "run", env=no_slurm)
    assert done.code == 4
    assert "no SLURM on this machine" in done.err
    assert not (tmp_path / "run").exists()


def test_no_cluster_answers(cli: Cli, write_config: Callable[..., Path], tmp_path: Path) -> None:
    """SLURM's programs are here, but nobody told them of a cluster."""
    if "SLURM_CONF" in os.environ or Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine belongs to a cluster")
    done = cli("train", write_config(), "--on", "slurm", "--run", tmp_path / "run")
    assert done.code == 4
    assert "no SLURM cluster answers" in done.err
    assert "or work here with --on local" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.cluster
def test_the_job_file_runs_by_hand(
    on_slurm: Callable[..., Finished],
    idle_slurm: SlurmLab,
    undisturbed: Callable[[int], Path],
    write_config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    config = write_config(**LONG, train__stop_after={"steps": 3})
    stopped = on_slurm("train", config, "--nodes", 2, "--devices", 1, "--run", run)
    assert stopped.code == 75, "what stops by itself is not queued again"
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("stop_after: {steps: 3, minutes: null}", "stop_after: null")
    )
    job = idle_slurm.submit(run / "launch" / "job.sbatch")
    idle_slurm.await_state(job, "COMPLETED", timeout=90)
    assert_same_model(run, undisturbed(2))


def test_dry_run_prints_the_job_and_writes_nothing(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    done = on_slurm("train", write_config(), "--nodes", 2, "--devices", 1, "--run", tmp_path / "run", "--dry-run")
    assert done.code == 0
    assert done.out.count("#!/bin/bash") in (1, 2)
    assert subprocess.run(["bash", "-n"], input=done.out, text=True, check=False).returncode == 0
    assert not (tmp_path / "run").exists()


def test_the_default_time_of_a_partition_is_the_limit_where_none_is_stated(
    on_slurm: Callable[..., Finished], idle_slurm: SlurmLab, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    brief = ["PartitionName=brief", "Nodes=node1", "DefaultTime=1", "MaxTime=1:00:00"]
    idle_slurm.run("scontrol", "create", *brief)
    words = ["site.partition=brief", "--devices", 1, "--run", tmp_path / "run", "--dry-run"]
    try:
        done = on_slurm("train", write_config(), *words)
    finally:
        idle_slurm.run("scontrol", "delete", "PartitionName=brief")
    assert "--time" not in done.out
    assert "--signal=B:USR1@30\n" in done.out, done.err


def test_a_site_is_detected_and_checked(idle_slurm: SlurmLab, cli: Cli, tmp_path: Path) -> None:
    """The lab's GPUs are device files and no more: that is what the check has to find."""
    path, environ = tmp_path / "lab.yaml", idle_slurm.environ
    done = cli("site", "detect", "--out", path, env=environ)
    assert done.code == 0, done.err
    bare = cli("site", "detect", "--out", "lab", env=environ, cwd=tmp_path)
    assert bare.out.rstrip().endswith("voxscale site check --site ./lab"), bare.err
    assert "partition: main" in path.read_text()
    assert cli("site", "detect", "--out", path, env=environ).code == 2, "nothing is overwritten"
    words = ["site", "check", "--site", path, "--nodes", 2, "--devices", 1, "--run", tmp_path / "check", "--json"]
    checked = cli(*words, env=environ)
    assert checked.code == 4
    (finding,) = checked.json["findings"]
    assert "ranks 0, 1 see no GPU" in finding
    assert len({rank["host"] for rank in checked.json["ranks"]}) == 2
    assert checked.json["all_reduce_gb_s"] > 0.01
    assert "#SBATCH --gres=gpu:a100:1" in (tmp_path / "check" / "launch" / "check.sbatch").read_text()


def test_a_profile_is_checked_as_it_is_written(idle_slurm: SlurmLab, cli: Cli, site: Path, tmp_path: Path) -> None:
    words = ["site.time=2:00:00", "site.scratch=/nowhere/at/all", "--devices", 1, "--run", tmp_path / "check"]
    done = cli("site", "check", *words, "--site", site, "--json", env=idle_slurm.environ)
    assert done.code == 4, done.err
    time_, scratch = done.json["findings"]
    assert time_.startswith("time 2:00:00: expected at most 01:00:00, the limit of partition main")
    assert re.fullmatch(r"scratch /nowhere/at/all: node\d cannot write there: No such file or directory", scratch)
    words[:2] = [f"site.scratch={tmp_path}"]
    assert not cli("site", "check", *words, "--site", site, "--json", env=idle_slurm.environ).json["findings"]


@pytest.mark.cluster
def test_folds_inside_an_allocation_come_one_by_one(
    idle_slurm: SlurmLab, write_config: Callable[..., Path], cli: Cli, site: Path, tmp_path: Path
) -> None:
    store = {"data__store": str(tmp_path / "store")}
    config = write_config(data__split={"folds": 2, "test": 0.2}, train__epochs=1, **store)
    words = [sys.executable, "-m", "voxscale", "train", config, "--folds", "all", "--on", "slurm", "--site", site]
    words += ["--devices", 1, "--run", tmp_path / "there", "--json"]
    done = idle_slurm.run("salloc", "-N1", "-c1", *words, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    here = cli("train", config, "--devices", 1, "--folds", "all", "--run", tmp_path / "here", "--json")
    there = json.loads(done.stdout)
    assert there["summary"] == here.json["summary"]
    assert there["test"] == here.json["test"]


@pytest.mark.cluster
def test_an_interrupt_in_a_batch_job_saves_and_leaves_that_job_alone(
    idle_slurm: SlurmLab, write_config: Callable[..., Path], site: Path, tmp_path: Path
) -> None:
    """As in a notebook's job: the allocation is the user's, and nothing of it is queued again."""
    run = tmp_path / "run"
    words = [sys.executable, "-m", "voxscale", "train", write_config(**LONG), "--on", "slurm", "--site", site]
    train = " ".join(map(str, [*words, "--devices", 1, "--run", run]))
    (tmp_path / "notebook.sh").write_text(
        f"#!/bin/bash\nSLOW_STEPS=0.6 {train} &\necho $! > pid\nwait $!\necho $? > code\n"
    )
    job = idle_slurm.submit("-c1", "--requeue", f"--chdir={tmp_path}", tmp_path / "notebook.sh")
    await_step(run, 3)
    idle_slurm.run("srun", f"--jobid={job}", "--overlap", "kill", "-INT", (tmp_path / "pid").read_text().strip())
    idle_slurm.await_state(job, "COMPLETED", timeout=60)
    assert (tmp_path / "code").read_text().strip() == "75"
    assert metrics(run)["state"] == "stopped"
    assert idle_slurm.show(job)["Restarts"] == "0"


@pytest.mark.cluster
def test_a_job_asks_for_what_was_planned_with_its_site(
    cli: Cli, environ: dict[str, str], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Measured figures are kept in the site's scratch, and a job looks there."""
    place, config, run = tmp_path / "scratched.yaml", write_config(), tmp_path / "run"
    place.write_text("cpus_per_device: 1\nscratch: $SCRATCH\n")
    env = {**environ, "SCRATCH": str(tmp_path / "scratch"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    planned = cli("plan", config, "--site", place, "--devices", 2, "--json", env=env)
    assert planned.code == 0, planned.err
    assert planned.json["confidence"] == "medium", "its nodes may have other CPUs"
    words = ["train", config, "--on", "slurm", "--site", place, "--run", run, "--dry-run"]
    done = cli(*words, env=env)
    assert done.code == 0, done.err
    assert re.search(r"^# .*--mem=\d+M --time=[\d:]+ as planned from measured steps, confidence ", done.out, re.M)
    devices = planned.json["request"]["devices"]
    assert f"1 node × {devices} process" in done.out
    stated = cli(*words, "--devices", 2, env=env)
    assert "1 node × 2 processes" in stated.out
    assert not (tmp_path / "cache" / "voxscale").exists()
