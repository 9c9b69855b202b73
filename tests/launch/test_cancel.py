"""`voxscale cancel` of a run on this machine, and on none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from conftest import Cli
from lab.slurm import until


def test_a_run_on_this_machine_saves_and_ends(
    cli_here: Cli, write_config: Callable[..., Path], session_environ: dict[str, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = write_config(train__epochs=4000, validate__every=4000)
    words = [sys.executable, "-m", "voxscale", "train", config, "--devices", "1", "--run", run]
    with subprocess.Popen(words, env={**os.environ, **session_environ}, stderr=subprocess.PIPE) as training:
        try:
            until((run / "events.jsonl").exists, 60, lambda: "it did not begin")
            done = cli_here("cancel", run)
            assert done.code == 0, done.err
            assert done.out.strip() == f"told pid {training.pid} to save and end"
            assert training.wait(timeout=60) == 75
            assert training.stderr is not None
            assert b"the state is saved" in training.stderr.read()
        finally:
            training.terminate()  # or a test that fails waits for 4000 epochs
    assert json.loads((run / "metrics.json").read_text())["state"] == "stopped"
    again = cli_here("cancel", run)
    assert again.code == 2
    assert "nothing is queued or running" in again.err


def test_what_is_no_run(cli_here: Cli, tmp_path: Path) -> None:
    done = cli_here("cancel", tmp_path)
    assert done.code == 2
    assert "not a run folder" in done.err
