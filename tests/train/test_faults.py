"""When things go wrong in training: named, saved, and never half-written."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Cli
from voxscale.data.cases import TRAIN
from voxscale.data.split import recorded_cases
from voxscale.launch.outcome import last_reports
from voxscale.runs import RunFolder
from voxscale.train.events import read_events
from voxscale.train.stop import StopRequest
from voxscale.train.worker import main

WriteConfig = Callable[..., Path]


def start(environ: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "voxscale", *map(str, arguments)], env=environ, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while not any(row.get("step", 0) >= step for row in read_events(run / "events.jsonl")):
        assert time.monotonic() < deadline, "the run does not get there"
        time.sleep(0.02)


@pytest.mark.ranks
@pytest.mark.parametrize(("devices", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signal_saves_and_exits_75(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path, devices: int, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    with start(session_environ, "train", write_config(train__epochs=500), "--run", run, "--devices", devices) as job:
        wait_for_step(run, 3)
        for _ in range(20):  # some schedulers and terminals repeat themselves
            job.send_signal(number)
            time.sleep(0.02)
        _, err = job.communicate(timeout=30)
    assert job.returncode == 75, err
    assert re.search(r"error: stopped at step (\d+) of 2500 \((signal SIG|asked by another rank)", err), err
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["state"] == "stopped"
    last = (run / "checkpoints" / "last").resolve().name
    assert last == f"step-{metrics['steps']:08d}"
    assert read_events(run / "events.jsonl")[-1]["event"] == "stop"


@pytest.mark.ranks
def test_a_step_that_takes_longer_than_saving_may_is_ended_first(
    session_environ: dict[str, str], write_config: WriteConfig, networks_folder: Path, tmp_path: Path
) -> None:
    """Of minutes, on a laptop; here of 4 s, and ranks get one to save."""
    plain = {"train__precision": "fp32", "train__compile": False, "train__channels_last": False}  # nothing to try first
    run, config = tmp_path / "run", write_config(model={"name": "networks:build_slow"}, train__epochs=20, **plain)
    code = "import voxscale.launch.local as local; local.SAVE_TIME_S = 1; from voxscale.cli import main; main()"
    command = [sys.executable, "-c", code, "train", config, "--run", run, "--devices", "2"]
    slow = {**session_environ, "SLOW_STEPS": "4"}
    with subprocess.Popen(command, env=slow, cwd=networks_folder, stderr=subprocess.PIPE, text=True) as job:
        wait_for_step(run, 1)
        job.terminate()
        _, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    assert re.search(r"error: stopped at step \d+ of 100", err), err
    assert (run / "checkpoints" / "last").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_end_is_too_late_to_stop_anything(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "voxscale", "train", write_config(), "--run", tmp_path / "run", "--devices", "1"]
    with subprocess.Popen(
        command, env=session_environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline().startswith("done: ")
        while job.poll() is None:
            job.send_signal(number)
            time.sleep(0.001)
        _, err = job.communicate()
    assert job.returncode == 0, err
    assert "error" not in err
    assert "Traceback" not in err


@pytest.mark.ranks
def test_a_terminal_that_is_closed_is_a_signal_to_save(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path
) -> None:
    """Nothing can be written to it any more, by the launcher or by a rank, and that must not be the end before."""
    run, config = tmp_path / "run", write_config(train__epochs=500, log="step")
    screen, its_side = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, "-m", "voxscale", "train", config, "--run", run, "--devices", "2"]
    with subprocess.Popen(
        command,
        env=session_environ,
        stdin=its_side,
        stdout=its_side,
        stderr=its_side,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored where tests run under nohup
    ) as job:
        os.close(its_side)
        closed = threading.Event()
        threading.Thread(target=_read_until, args=(screen, closed), daemon=True).start()
        wait_for_step(run, 3)
        closed.set()
        assert job.wait(60) == 75
    assert read_events(run / "events.jsonl")[-1]["event"] == "stop"
    assert json.loads((run / "metrics.json").read_text())["state"] == "stopped"
    assert not _workers(run)


def _read_until(screen: int, closed: threading.Event) -> None:
    while not closed.is_set():
        if select.select([screen], [], [], 0.05)[0]:
            os.read(screen, 65536)
    os.close(screen)


def test_nohup_outlives_its_terminal() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        for ignored in (True, False):
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
            stop = StopRequest(None)
            with stop.on_signals():
                os.kill(os.getpid(), signal.SIGHUP)
                assert stop.wanted(0) is not ignored
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("delay_s", [0.6, 1.5, 2.2])
def test_a_signal_to_one_process_during_the_start_is_no_failure(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path, delay_s: float
) -> None:
    config = write_config(train__epochs=500)
    with start(session_environ, "train", config, "--run", tmp_path / "run", "--devices", 1) as job:
        time.sleep(delay_s)
        job.terminate()
        _, err = job.communicate(timeout=30)
    assert job.returncode == 75, err
    assert "Traceback" not in err


@pytest.mark.ranks
def test_a_signal_during_the_start_is_no_failure(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with start(session_environ, "train", write_config(), "--run", run, "--devices", 2) as job:
        deadline = time.monotonic() + 60
        while not _workers(run):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)
        job.terminate()
        _, err = job.communicate(timeout=30)
    assert job.returncode == 75, err
    assert "error: stopped by SIGTERM" in err
    assert "death signal" not in err
    assert not (run / "metrics.json").exists()


def test_changed_data_is_not_continued_on(
    cli_here: Cli, write_config: WriteConfig, dataset: Path, tmp_path: Path
) -> None:
    shutil.copytree(dataset, tmp_path / "data")
    config = write_config(data__source=str(tmp_path / "data"))
    alone = ["--run", tmp_path / "run", "--devices", "1"]
    assert cli_here("train", config, "train.stop_after={steps: 2}", *alone).code == 75
    for path in (tmp_path / "data").iterdir():
        path.touch()
    again = cli_here("train", config, "train.stop_after={steps: 2}", *alone)
    assert again.code == 75, "the same files, touched, are the same data"
    shutil.copy(tmp_path / "data" / "seg1.nii.gz", tmp_path / "data" / "seg2.nii.gz")
    changed = cli_here("train", config, *alone)
    assert changed.code == 3
    assert "have changed since it began" in changed.err


def test_a_config_edited_by_hand_is_not_continued_with(
    cli_here: Cli, write_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli_here("train", write_config(), "train.stop_after={steps: 2}", "--run", run, "--devices", "1").code == 75
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("channels: [4, 8]", "channels: [8, 8]"))
    before = {path: path.read_bytes() for path in run.glob("*.*")}
    assert main([str(run)]) == 2
    assert {path: path.read_bytes() for path in run.glob("*.*")} == before, "a refused start left its mark"
    assert "config.yaml: changed since the run was made" in capsys.readouterr().err


def test_a_run_killed_before_its_first_checkpoint_tells_its_story_once(
    session_environ: dict[str, str], cli_here: Cli, write_config: WriteConfig, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", write_config(validate__every=50, train__epochs=50)
    with start(session_environ, "train", config, "--run", run, "--devices", 1) as job:
        wait_for_step(run, 3)
        job.kill()
    assert cli_here("train", config, "train.stop_after={steps: 6}", "--run", run, "--devices", 1).code == 75
    steps = [event["step"] for event in read_events(run / "events.jsonl") if event["event"] == "train"]
    assert steps == list(range(1, 7))


@pytest.mark.ranks
def test_a_killed_rank_is_named_and_the_run_can_go_on(
    session_environ: dict[str, str], cli_here: Cli, write_config: WriteConfig, tmp_path: Path
) -> None:
    """Here while it validates, which takes a second."""
    run, config = tmp_path / "run", write_config(validate={"every": 1, "window": [8, 8, 8], "overlap": 0.9})
    with start(session_environ, "train", config, "--run", run, "--devices", 2) as job:
        wait_for_step(run, 5)
        os.kill(_worker(run, 1), signal.SIGKILL)
        killed = time.monotonic()
        _, err = job.communicate(timeout=30)
    assert time.monotonic() - killed < 5
    assert job.returncode == 1
    assert re.search(r"rank 1 was killed by signal 9 while evaluating at step 5, with cases \S+", err), err
    assert "had too little memory" in err
    assert "Traceback" not in err
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["state"] == "failed"
    assert metrics["steps"] == 5
    assert not _workers(run)
    done = cli_here("train", config, "--run", run, "--devices", 1)
    assert done.code == 0, done.err


@pytest.mark.ranks
def test_a_rank_that_hangs_is_named_and_the_run_goes_on_where_it_may(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", write_config(train__epochs=30, validate__every=30, train__timeout_s=3)
    with start(session_environ, "train", config, "--run", run, "--devices", 2, "--restarts", 1) as job:
        wait_for_step(run, 8)
        os.kill(_worker(run, 1), signal.SIGSTOP)
        stopped = time.monotonic()
        for line in job.stderr or ():
            if "did not answer" in line:
                break
        assert time.monotonic() - stopped < 3 + 5, "2 s on an idle machine"
        pattern = (
            r"warning: rank 1 did not answer within 3 s at step \d+, with cases \S+.*; starting again from the last"
        )
        assert re.search(pattern, line), line
        _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "Traceback" not in err
    assert not _workers(run)
    assert [event["event"] for event in read_events(run / "events.jsonl")].count("resume") == 1


@pytest.mark.ranks
def test_a_lone_rank_that_is_killed_starts_again_where_it_may(
    session_environ: dict[str, str], write_config: WriteConfig, cli_here: Cli, tmp_path: Path
) -> None:
    """To the end that a run comes to in the launcher's own process."""
    config = write_config(train__epochs=20, validate__every=20, checkpoint={"every_steps": 2, "keep": 2})
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    with start(session_environ, "train", config, "--run", run, "--devices", 1, "--restarts", 1) as job:
        wait_for_step(run, 8)
        os.kill(_worker(run, 0), signal.SIGKILL)
        _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert re.search(r"warning: rank 0 was killed by signal 9 after step \d+; starting again from the last", err), err
    assert "Traceback" not in err
    assert not _workers(run)
    assert [event["event"] for event in read_events(run / "events.jsonl")].count("resume") == 1
    assert cli_here("train", config, "--run", undisturbed, "--devices", 1).code == 0
    digests = {json.loads((each / "metrics.json").read_text())["weights_sha256"] for each in (run, undisturbed)}
    assert len(digests) == 1


@pytest.mark.ranks
def test_a_rank_that_hangs_as_it_starts_is_named(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", write_config(train__timeout_s=2)
    with start(session_environ, "train", config, "--run", run, "--devices", 2) as job:
        deadline = time.monotonic() + 60
        while len(_workers(run)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(_worker(run, 1), signal.SIGSTOP)
        _, err = job.communicate(timeout=60)
    assert job.returncode == 1, err
    assert "error: rank 1 did not answer within 2 s while starting\n" in err
    assert "too little memory" not in err, "it was the launcher that killed it"
    assert not _workers(run)


@pytest.mark.ranks
@pytest.mark.parametrize("words", [("--devices", 2), ("--devices", 1, "--restarts", 1)])
def test_a_killed_launcher_leaves_no_orphans(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path, words: tuple[object, ...]
) -> None:
    run = tmp_path / "run"
    with start(session_environ, "train", write_config(train__epochs=500), "--run", run, *words) as job:
        wait_for_step(run, 2)
        job.kill()
        job.wait(10)
        deadline = time.monotonic() + 10
        while _workers(run):
            assert time.monotonic() < deadline, "ranks live on without their launcher"
            time.sleep(0.05)
    assert json.loads((run / "metrics.json").read_text())["state"] == "stopped", "they saved before they left"


def test_a_loss_that_is_not_finite_stops_before_the_optimizer(
    cli_here: Cli, write_config: WriteConfig, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = write_config(optimizer={"name": "sgd", "lr": 1e18, "momentum": 0.0, "nesterov": False}, train__epochs=20)
    done = cli_here("train", config, "--run", run, "--devices", 1)
    assert done.code == 1
    assert re.search(r"error: .*the (loss|norm of the gradient) is (nan|inf) at step \d+, with cases \S+", done.err)
    assert json.loads((run / "metrics.json").read_text())["state"] == "failed"
    assert read_events(run / "events.jsonl")[-1]["event"] == "error"


@pytest.mark.ranks
def test_a_case_that_cannot_be_read_ends_all_ranks_with_its_name(
    cli_here: Cli, write_config: WriteConfig, tmp_path: Path, dataset: Path
) -> None:
    """One rank reads it; the other, which is well, may not wait for it until `timeout_s`."""
    config = write_config(data__store=str(tmp_path / "store"), train__epochs=2, train__timeout_s=60)
    folder, run = Path(cli_here("prepare", config, "--json").json["store"]), tmp_path / "run"
    assert cli_here("train", config, "--run", run, "--devices", 2, "--no-start").code == 0
    case = recorded_cases(run / "split.csv", TRAIN)[4].id
    path = folder / "cases" / case / "image.b2nd"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)
    done = cli_here("train", config, "--run", run, "--devices", 2)
    ended = time.time()
    assert done.code == 3, done.err
    assert re.search(rf"error: rank \d: store: case {case}: image.b2nd is damaged", done.err)
    reports = {json.loads(path.read_text())["code"]: path for path in (run / "logs").glob("*/error-rank-*.json")}
    assert "timed_out" not in reports
    assert ended - reports["data"].stat().st_mtime < 30, "a rank that hangs is killed after a minute"
    assert not _workers(run)
    told = [file.read_text() for file in (run / "logs").rglob("*") if file.is_file()]
    assert any(case in text for text in told)
    assert not any(str(dataset) in text for text in told), "of the data, logs hold ids of cases alone"


@pytest.mark.cluster
@pytest.mark.ranks
def test_who_is_refused_leaves_no_word_for_who_is_not(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path
) -> None:
    """Two that start at once both find the folder free; one's ranks are refused, the other's are told of as theirs."""
    run, config = tmp_path / "run", write_config(train__epochs=500)
    code = "import os, sys; from pathlib import Path; from voxscale.launch.local import train_local; "
    code += "from voxscale.runs import RunFolder; train_local(RunFolder(Path(sys.argv[1])), 2, os.environ)"
    with start(session_environ, "train", config, "--run", run, "--devices", 2) as owner:
        wait_for_step(run, 1)
        late = subprocess.run([sys.executable, "-c", code, run], env=session_environ, capture_output=True, check=False)
        assert b"in use by pid" in late.stderr
        os.kill(_worker(run, 0), signal.SIGKILL)
        _, err = owner.communicate(timeout=60)
    assert owner.returncode == 1, err
    assert "error: rank 0 was killed by signal 9" in err
    assert last_reports(RunFolder(run)).name == "local-0"


def test_what_does_not_fit_is_named(session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path) -> None:
    model = {"name": "unet", "channels": [512, 512], "residual_units": 0}
    config = write_config(model=model, patches__size=[96, 96, 96], train__batch=4, train__micro_batch=2)
    words = ["train", str(config), "--run", str(tmp_path / "run"), "--devices", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "voxscale", *words],
        env=session_environ,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (15 * 10**8, 15 * 10**8)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    what = r"error: this process ran out of memory at step 1, with 2 patches of 96 × 96 × 96 at once, cases \S+"
    assert re.search(what, done.stderr), done.stderr
    assert "fix: set train.micro_batch lower" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_runs_in_one_folder(
    session_environ: dict[str, str], cli_here: Cli, write_config: WriteConfig, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", write_config(train__epochs=500)
    with start(session_environ, "train", config, "--run", run, "--devices", 1) as first:
        wait_for_step(run, 1)
        second = cli_here("train", config, "--run", run, "--devices", 1)
        assert second.code == 4
        assert f"in use by pid {first.pid} on " in second.err
        fresh = cli_here("train", config, "--run", run, "--devices", 1, "--fresh")
        assert fresh.code == 4, "a living run must not be moved aside"
        assert cli_here("runs", run, "--json").json["runs"][0]["state"] == "running"
        first.kill()
        first.communicate()
    assert cli_here("runs", run, "--json").json["runs"][0]["state"] == "interrupted"
    third = cli_here("train", config, "train.stop_after={steps: 1}", "--run", run, "--devices", 1)
    assert third.code == 75, "a dead owner's claim is taken over"


@pytest.mark.ranks
def test_a_disk_without_any_room_is_named_though_ranks_cannot_write_why(
    session_environ: dict[str, str], write_config: WriteConfig, tmp_path: Path, small_disk: Path
) -> None:
    """Nothing is saved meanwhile: a save that fails gives room back, in which a rank could say why."""
    run, config = small_disk / "run", write_config(train__epochs=500, validate__every=500)
    with start(session_environ, "train", config, "--run", run, "--devices", 2, "--restarts", 1) as job:
        wait_for_step(run, 3)
        with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        _, err = job.communicate(timeout=60)
    assert job.returncode == 4, err
    assert "No space left on device" in err
    assert re.search(r"error: rank 0 ended with exit code 4; .*[\d,]+ bytes are free in \S+logs", err), err
    assert "starting again" not in err, "it would come to the same end"
    assert "Traceback" not in err


def test_damaged_checkpoint_falls_back_and_still_ends_the_same(
    cli_here: Cli, write_config: WriteConfig, tmp_path: Path
) -> None:
    config = write_config(train__epochs=3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    alone = ["--devices", 1]
    assert cli_here("train", config, *alone, "--run", whole).code == 0
    assert cli_here("train", config, "train.stop_after={steps: 12}", *alone, "--run", parts).code == 75
    model = parts / "checkpoints" / "last" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-7])
    done = cli_here("train", config, *alone, "--run", parts)
    assert done.code == 0
    assert "warning: " in done.err
    assert "model.safetensors is damaged; falling back" in done.err
    digests = {json.loads((run / "metrics.json").read_text())["weights_sha256"] for run in (whole, parts)}
    assert len(digests) == 1


def _workers(run: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"voxscale.train.worker" in words and str(run).encode() in words:
            found.append(int(entry.name))
    return found


def _worker(run: Path, rank: int) -> int:
    return next(pid for pid in _workers(run) if f"RANK={rank}".encode() in _environment(pid))


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
