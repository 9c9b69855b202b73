"""Watching: what `voxscale watch` shows of runs that train, wait, ended or were killed; from their folders alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Cli, tiny_config
from lab.slurm import until
from lab.terminal import CTRL_C, Terminal
from lab.trained import LONG, NUM_STEPS
from voxscale.report.happened import Happened
from voxscale.report.watch_text import fitted, render_line, render_view, sparkline
from voxscale.report.watched import GroupView, RunView, WatchedRun, open_watched
from voxscale.runs import RunFolder

WATCH = (sys.executable, "-m", "voxscale", "watch")
TRAIN = {"event": "train", "loss": 1.0, "lr": 1e-3, "data_s": 0.25, "step_s": 0.5, "cases": ["a", "b"], "epoch": 1}


@pytest.fixture(scope="module")
def ended(undisturbed: Callable[[int], Path]) -> Path:
    return undisturbed(2)


@pytest.mark.ranks
def test_a_run_that_is_done(ended: Path, cli_here: Cli) -> None:
    done = cli_here("watch", ended, "--json")
    assert done.code == 0, done.err
    view = done.json
    metrics = json.loads((ended / "metrics.json").read_text())
    assert (view["state"], view["step"], view["steps"]) == ("done", NUM_STEPS, NUM_STEPS)
    assert (view["epoch"], view["epochs"], view["world_size"], view["left_s"]) == (4, 4, 2, None)
    assert view["best"] == metrics["best"]
    assert view["validation"]["step"] == NUM_STEPS
    assert len(view["losses"]) == NUM_STEPS
    assert view["losses"][-1] == view["loss"]
    assert view["patches_per_s"] == pytest.approx(18 / 5 / view["step_s"]), "18 patches in the 5 steps of an epoch"
    assert [rank["rank"] for rank in view["ranks"]] == [0, 1]

    shown = cli_here("watch", ended, "--once")
    assert shown.code == 0
    for text in ("done", f"{NUM_STEPS}/{NUM_STEPS} steps (100 %)", "epoch 4/4", "patches/s", "rate ", "best "):
        assert text in shown.out
    followed = cli_here("watch", ended)
    assert (followed.code, followed.out.count("\n")) == (0, 1)


@pytest.mark.ranks
def test_a_run_on_two_ranks_is_watched_left_and_killed(
    dataset: Path, networks_folder: Path, session_environ: dict[str, str], tmp_path: Path, cli_here: Cli
) -> None:
    """Ctrl-C ends the watching and not the run. Then all of it is killed, the launcher so that it can tell nobody."""
    config, run = tmp_path / "long.yaml", RunFolder(tmp_path / "run")
    config.write_text(yaml.safe_dump(tiny_config(dataset, **LONG)))
    env = {**session_environ, "PYTHONPATH": str(networks_folder), "SLOW_STEPS": "0.7"}
    words = [sys.executable, "-m", "voxscale", "train", config, "--devices", "2", "--run", run.root]
    launcher = subprocess.Popen(list(map(str, words)), env=env, stderr=subprocess.DEVNULL)
    try:
        until(lambda: run.plan.exists(), 180, lambda: "no run folder")
        with Terminal(*WATCH, run.root, env=env, columns=160) as terminal:
            terminal.until(rf"on 2 ranks: training[^/]* \d+/{NUM_STEPS} steps .*epoch 1/4\s+time .*\d:\d\d left", 180)
            terminal.until(r"loss +\d\.\d{4}  [▁-█]+")
            terminal.until(r"rank +host +device +memory +at most")
            terminal.until(rf"0 +{socket.gethostname()} +cpu +[\d.]+ MB +[\d.]+ MB")
            terminal.until(rf"1 +{socket.gethostname()} +cpu +[\d.]+ MB +[\d.]+ MB +\d+ %")
            terminal.type(CTRL_C)
            assert terminal.wait() == 75
            assert "goes on" in terminal.text
        before = len(run.events.read_text())
        until(lambda: len(run.events.read_text()) > before, 30, lambda: "the run did not go on")
        os.kill(launcher.pid, signal.SIGSTOP)
        pids = [json.loads(path.read_text())["pid"] for path in run.usages().values()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.wait(10)
    owner = json.loads(run.owner.read_text())
    until(lambda: cli_here("watch", run.root, "--json").json["state"] == "interrupted", 10, lambda: "it lives")
    done = cli_here("watch", run.root)
    assert done.code == 1
    assert f"interrupted: its owner, pid {owner['pid']} on {owner['host']}, is gone" in done.err
    assert len(pids) == 2


def make_run(root: Path, **plan: Any) -> RunFolder:
    """A run folder with a plan of 40 steps, 10 an epoch, as another process would write it."""
    run = RunFolder(root)
    run.launch.mkdir(parents=True)
    run.config.write_text("data: {source: d}\n")
    fields = dict.fromkeys(
        ("global_batch", "micro_batch", "accumulate", "num_train", "num_val", "channels", "world_size"), 1
    )
    content = {"schema": 1, **fields, "steps_per_epoch": 10, "num_steps": 40, "validate_every_steps": 20}
    content |= {"patch": [8, 8, 8], "stream": "global", "labels": [0, 1], "store": "", "config_sha256": ""}
    run.plan.write_text(json.dumps({**content, "data_sha256": "", **plan}))
    return run


def write_events(run: RunFolder, *rows: dict[str, Any]) -> None:
    with run.events.open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def trained(first: int, last: int) -> list[dict[str, Any]]:
    return [{**TRAIN, "step": step, "loss": 1 / step, "time_s": float(step)} for step in range(first, last + 1)]


START = {"event": "start", "step": 0, "epoch": 0, "time_s": 0.0, "world_size": 1, "steps": 40}


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Another process holds the lock."""
    code = (
        "import sys, time; from pathlib import Path; from voxscale.files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print(flush=True)\n    time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        yield
    finally:
        holder.kill()
        holder.wait(10)
        holder.stdout.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[RunFolder]:
    """A run folder that another process owns."""
    run = make_run(tmp_path / "live")
    with held(run.owner_lock):
        yield run


def test_what_is_said_of_a_run_follows_from_its_events(live: RunFolder) -> None:
    watched = WatchedRun(live, {})
    assert watched.look().doing == "starting"
    write_events(live, START, *trained(1, 5))
    view = watched.look()
    assert (view.state, view.doing, view.step, view.epoch, view.epochs) == ("running", "training", 5, 1, 4)
    assert (view.elapsed_s, view.left_s) == (5.0, 35.0)
    assert (view.patches_per_s, view.step_s, view.data_share) == (4.0, 0.5, 0.5)
    assert (view.loss, view.lr, view.losses) == (0.2, 1e-3, [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert (view.validation, view.best) == (None, None)
    with live.events.open("a") as lines:
        lines.write('{"event": "train", "st')  # as far as the writer has come
    assert watched.look().step == 5
    with live.events.open("a") as lines:
        lines.write('ep": 6, "loss": null, "time_s": 6.0}\n')
    write_events(live, *trained(7, 20))
    assert watched.look().doing == "validating"
    write_events(live, {"event": "validate", "step": 20, "epoch": 2, "time_s": 25.0, "dice/mean": 0.5})
    best = {"event": "checkpoint", "step": 20, "epoch": 2, "time_s": 26.0, "best": True}
    write_events(live, {**best, "metric": "dice/mean", "value": 0.5})
    view = watched.look()
    assert view.doing == "training"
    assert view.best == view.validation == {"step": 20, "metric": "dice/mean", "value": 0.5}
    assert view.left_s == pytest.approx(26.0), "validations count"
    write_events(live, *trained(21, 30), {**START, "event": "resume", "step": 20}, {**START, "step": 20})
    view = watched.look()
    assert (view.step, len(view.losses), view.losses[-1], view.patches_per_s) == (20, 19, 1 / 20, None)
    assert (view.doing, view.left_s) == ("starting", None)
    write_events(live, *trained(21, 40))
    assert watched.look().doing == "validating"
    write_events(live, {"event": "validate", "step": 40, "epoch": 4, "time_s": 45.0})
    view = watched.look()
    assert (view.doing, view.validation) == (
        "measuring the best model", {"step": 40, "metric": "dice/mean", "value": None},
    )  # fmt: skip


def test_without_a_terminal_each_change_is_a_line(live: RunFolder, session_environ: dict[str, str]) -> None:
    write_events(live, START, *trained(1, 2))
    words = [sys.executable, "-m", "voxscale", "watch", str(live.root)]
    watching = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=session_environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run behind &
    )
    try:
        assert watching.stdout is not None
        assert "running on 1 rank: training  step 2/40  epoch 1/4  loss 0.5000  0:38 left" in watching.stdout.readline()
        write_events(live, *trained(3, 4))
        time.sleep(2.5)  # two looks, no change that is worth a line
        write_events(live, *trained(5, 11))
        assert "step 11/40  epoch 2/4" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=20)
    finally:
        watching.kill()
    assert (watching.returncode, "goes on" in err) == (75, True)


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("stopped", 75), ("failed", 1)])
def test_it_ends_as_the_run_has_ended(tmp_path: Path, cli_here: Cli, state: str, code: int) -> None:
    run = make_run(tmp_path / "run")
    write_events(run, START, *trained(1, 7), {"event": "error", "step": 7, "time_s": 8.0, "message": "it \x1b[1mbroke"})
    run.metrics.write_text(json.dumps({"state": state, "best": None}))
    run.logs.mkdir()
    done = cli_here("watch", run.root)
    assert done.code == code
    assert f"{run.root}: {state}" in (done.err or f"{run.root}: {done.out.partition('  ')[2]}")
    if state == "failed":
        assert "failed: it \\x1b[1mbroke" in done.err
    assert cli_here("watch", run.root, "--once").code == 0


def test_a_run_that_nobody_has_started_is_waited_for(tmp_path: Path, session_environ: dict[str, str]) -> None:
    run = make_run(tmp_path / "run")
    with Terminal(*WATCH, run.root, env=session_environ, columns=160) as terminal:
        terminal.until("new: waits to be started")
        write_events(run, START, *trained(1, 3))
        run.metrics.write_text(json.dumps({"state": "stopped"}))
        assert terminal.wait() == 75
        assert "3/40 steps (7 %)" in terminal.text


def test_nothing_is_cut_off_on_a_narrow_terminal(live: RunFolder, session_environ: dict[str, str]) -> None:
    """Neither the state behind a long path, nor the time that is left."""
    write_events(live, START, *trained(1, 3))
    with Terminal(*WATCH, live.root, env=session_environ, columns=60) as terminal:
        terminal.until(r"running on 1 rank:\s+training")
        terminal.until(r"time +0:03 since it was started, 0:37 left")
        assert "…" not in terminal.text
        terminal.type(CTRL_C)
        assert terminal.wait() == 75


@pytest.mark.parametrize("what", ["absent", "notes", "file"])
def test_what_is_no_run_is_refused(tmp_path: Path, cli_here: Cli, what: str) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    done = cli_here("watch", tmp_path / what)
    assert done.code == 2
    assert f"{tmp_path / what}: {'no such folder' if what == 'absent' else 'not a run folder'}" in done.err
    assert "voxscale runs" in done.err


def test_a_search_shows_the_trials_that_run(live: RunFolder, tmp_path: Path, cli_here: Cli) -> None:
    root = live.root
    for path in (live.config, live.plan):
        path.unlink()
    space = {"space": {"optimizer.lr": {"loguniform": [1e-4, 1e-2]}}, "trials": 6, "metric": "dice/mean"}
    (root / "search.yaml").write_text(yaml.safe_dump({"data": {"source": "d"}, "search": space}))
    ledger = [
        {"event": "search", "version": 1},
        *({"event": "trial", "trial": trial, "params": {}} for trial in range(3)),
        *({"event": "start", "trial": trial, "attempt": 0} for trial in range(3)),
        {"event": "end", "trial": 0, "state": "done", "value": 0.25},
        {"event": "end", "trial": 2, "state": "pruned", "value": 0.5},
    ]
    (root / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ledger))
    trial = make_run(root / "trials" / "0001")
    write_events(trial, START, *trained(1, 4))
    done = cli_here("watch", root, "--json")
    assert done.code == 0, done.err
    view = done.json
    assert (view["kind"], view["state"], view["ended"], view["all"]) == ("search", "running", 2, 6)
    assert view["best"] == {"metric": "dice/mean", "value": 0.25}, "what was stopped early is not the best"
    assert [(run["run"], run["step"]) for run in view["runs"]] == [(str(trial.root), 4)]
    shown = cli_here("watch", root, "--once").out
    assert "2 of 6 trials done, best dice/mean 0.2500" in shown
    assert "  0001  interrupted" in shown
    assert "4/40 steps" in shown


def test_folds_are_shown_together(tmp_path: Path, cli_here: Cli) -> None:
    for fold, state in ((1, "done"), (2, "stopped")):
        run = make_run(tmp_path / "cv" / f"fold-{fold}")
        write_events(run, START, *trained(1, 9 * fold))
        run.metrics.write_text(json.dumps({"state": state}))
    done = cli_here("watch", tmp_path / "cv")
    assert (done.code, "1 of 2 folds done" in done.out) == (75, True)
    (tmp_path / "cv" / "metrics.json").write_text(json.dumps({"state": "done", "folds": [{"run": "fold-1"}]}))
    assert cli_here("watch", tmp_path / "cv").code == 0


def test_folds_are_done_when_their_scores_are_brought_together(tmp_path: Path, cli_here: Cli) -> None:
    folder = RunFolder(tmp_path / "cv")
    for fold in (1, 2):
        run = make_run(folder.root / f"fold-{fold}")
        run.config.write_text(f"data: {{source: d, split: {{folds: 3, fold: {fold}}}}}\n")
        write_events(run, START, *trained(1, 40))
        run.metrics.write_text(json.dumps({"state": "done"}))
    done = cli_here("watch", folder.root, "--once")
    assert "interrupted: folds are missing: 2 of 3 folds done" in done.out
    shutil.copytree(run.root, folder.root / "fold-3")
    with held(folder.collecting):
        view = cli_here("watch", folder.root, "--json").json
        assert (view["state"], view["why"]) == ("running", "bringing the scores together")
        assert (view["ended"], view["all"]) == (3, 3)
    done = cli_here("watch", folder.root)
    assert (done.code, "interrupted: the scores are not brought together" in done.err) == (1, True)


@pytest.mark.ranks
def test_folds_are_watched_to_the_end_of_the_last_evaluation(
    dataset: Path, session_environ: dict[str, str], tmp_path: Path
) -> None:
    """The test cases are evaluated by all folds as one when the last of them is done."""
    config, root = tmp_path / "cv.yaml", tmp_path / "cv"
    split = {"folds": 2, "test": 0.25}
    config.write_text(yaml.safe_dump(tiny_config(dataset, log="quiet", data__split=split, train__epochs=1)))
    words = [sys.executable, "-m", "voxscale", "train", config, "--folds", "all", "--devices", "2", "--run", root]
    seen: list[tuple[int, int, str, str]] = []
    with subprocess.Popen(list(map(str, words)), env=session_environ, stderr=subprocess.DEVNULL) as training:
        while training.poll() is None:
            if (root / "fold-1" / "config.yaml").exists():
                view = open_watched(root, session_environ).look()
                assert isinstance(view, GroupView)
                seen.append((view.ended, view.all, view.state, view.why))
            time.sleep(0.1)
    assert training.returncode == 0
    assert {count for _, count, *_ in seen} == {2}, "both from the first on"
    assert (2, 2, "running", "bringing the scores together") in seen
    assert isinstance(ended := open_watched(root, session_environ).look(), GroupView)
    assert ended.state == "done"


def test_damaged_and_strange_files_are_borne(live: RunFolder) -> None:
    write_events(live, START, *trained(1, 3), {"event": "train"}, {"event": "train", "step": "x"})
    with live.events.open("ab") as lines:
        lines.write(b"\xff\xfe\n[1, 2]\n")
    live.usage(0).parent.mkdir(parents=True)
    live.usage(0).write_text("{")
    live.usage(1).write_text("[]")
    live.owner.write_text("nothing")
    assert WatchedRun(live, {}).look().step == 3
    live.plan.write_text("{}")
    view = WatchedRun(live, {}).look()
    assert (view.steps, view.ranks) == (0, [])
    assert render_view(view)


def test_silent_ranks_of_many_are_named_first(live: RunFolder) -> None:
    content = json.loads(live.plan.read_text())
    live.plan.write_text(json.dumps({**content, "world_size": 40}))
    live.usage(0).parent.mkdir(parents=True)
    now = time.time()
    for rank in range(41):  # one of an earlier, larger world
        memory = (rank + 1) << 30
        gpu = {"reserved_bytes": memory, "total_bytes": 80 << 30, "utilisation_percent": 93 if rank else None}
        fields = {"rank": rank, "host": "n", "device": "X100", "ended": False, "memory_bytes": memory, "gpu": gpu}
        live.usage(rank).write_text(json.dumps({**fields, "memory_peak_bytes": memory, "cpu_percent": 101.6}))
        os.utime(live.usage(rank), (now, now - (90 if rank == 38 else 0)))
    header, first, second, *rest, last = render_view(WatchedRun(live, {}).look())[1:]
    assert header.split() == ["rank", "host", "device", "memory", "at", "most", "CPU", "GPU", "memory", "GPU"]
    assert first.split()[0] == "38"
    assert first.endswith("93 %  silent for 90 s")
    assert second.split("  ")[0] == "0"
    assert "1.0 GB of 80.0 GB" in second
    assert len(rest) == 14
    assert last == "of all 40 ranks: memory 1.0 GB to 40.0 GB, 1 silent"


def test_curves_are_drawn_in_few_signs(tmp_path: Path) -> None:
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"[:3]
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps(row) + "\n" for row in trained(1, 1000)))
    happened = Happened(events)
    happened.look()
    parts = happened.losses(40)
    assert len(parts) == 40
    assert parts[0] == pytest.approx(sum(1 / step for step in range(1, 26)) / 25)


def test_what_a_job_waits_for_is_said() -> None:
    view = RunView("r", "queued", "the job is pending (Resources)", job=7, job_state="pending (Resources)")
    assert render_line(view) == "r  queued, job 7: the job is pending (Resources)"
    assert not view.is_over
    assert RunView("r", "new", "", job=7, job_state="cancelled").is_over


def test_what_a_terminal_has_no_room_for_is_said() -> None:
    lines = [f"line {number}" for number in range(30)]
    shown = fitted(lines, width=80, height=24)
    assert shown == [*lines[:22], "… 8 lines more: in a higher window, or with --once"]
    assert fitted(lines[:23], width=80, height=24) == lines[:23]
    assert fitted(["x" * 200, *lines], width=80, height=24)[-2:] == [
        "line 18",
        "… 11 lines more: in a higher window, or with --once",
    ]
