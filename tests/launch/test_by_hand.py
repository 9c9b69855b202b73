"""The same worker, started by hand in every way that torchrun knows: one result."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from yaml import safe_dump

from conftest import Cli, Finished, tiny_config
from voxscale.train.worker import main

TORCHRUN = ["-m", "torch.distributed.run"]
WORKER = ["-m", "voxscale.train.worker"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    path = tmp_path_factory.mktemp("by-hand") / "tiny.yaml"
    path.write_text(safe_dump(tiny_config(dataset, train__epochs=1)))
    return path


@pytest.fixture
def run(cli_here: Cli, config: Path, tmp_path: Path) -> Path:
    done = cli_here("train", config, "--run", tmp_path / "run", "--devices", 2, "--no-start")
    assert done.code == 0, done.err
    return tmp_path / "run"


def test_a_folder_that_jobs_have_left_becomes_its_owners_alone(cli_here: Cli, config: Path, tmp_path: Path) -> None:
    """Of a job that prepared the data, say; who has a run may open it to others, and so it stays."""
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    run.chmod(0o755)
    words = ["train", config, "--run", run, "--devices", 1, "--no-start"]
    assert cli_here(*words).code == 0
    assert run.stat().st_mode & 0o777 == 0o700
    run.chmod(0o750)
    assert cli_here(*words).code == 0
    assert run.stat().st_mode & 0o777 == 0o750


@pytest.fixture(scope="module")
def expected(cli_here: Cli, config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The weights that `voxscale train` gives on one and on two ranks."""
    digests = {}
    for devices in (1, 2):
        run = tmp_path_factory.mktemp("expected") / "run"
        assert cli_here("train", config, "--run", run, "--devices", devices).code == 0
        digests[devices] = weights(run)
    return digests


def weights(run: Path) -> str:
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["state"] == "done"
    return str(metrics["weights_sha256"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(arguments: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_folder_is_written_and_the_lines_are_printed(cli_here: Cli, config: Path, tmp_path: Path) -> None:
    done = cli_here("train", config, "--run", tmp_path / "a run", "--devices", 2, "--no-start")
    lines = done.out.splitlines()
    quoted = f"'{tmp_path / 'a run'}'"
    assert lines[1] == f"python -m voxscale.train.worker {quoted}"
    assert lines[3] == f"torchrun --standalone --nproc-per-node 2 -m voxscale.train.worker {quoted}"
    assert "--node-rank 0 --master-addr HOST" in lines[5]
    assert "--rdzv-backend c10d" in lines[7]
    assert {path.name for path in (tmp_path / "a run").iterdir()} >= {"config.yaml", "plan.json", "split.csv"}
    assert not (tmp_path / "a run" / "events.jsonl").exists()


def test_plain_python_is_a_world_of_one(
    run_python: Callable[..., Finished], run: Path, expected: dict[int, str]
) -> None:
    done = run_python(*WORKER, run, env={"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
    assert done.code == 0, done.err
    assert weights(run) == expected[1]


@pytest.mark.ranks
def test_torchrun_standalone(run_python: Callable[..., Finished], run: Path, expected: dict[int, str]) -> None:
    done = run_python(*TORCHRUN, "--standalone", "--nproc-per-node", 2, *WORKER, run)
    assert done.code == 0, done.err
    assert weights(run) == expected[2]


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["node ranks", "c10d rendezvous"])
def test_two_agents(session_environ: dict[str, str], run: Path, expected: dict[int, str], way: str) -> None:
    port = free_port()
    if way == "node ranks":
        places = [["--node-rank", str(n), "--master-addr", "127.0.0.1", "--master-port", str(port)] for n in (0, 1)]
    else:
        places = [["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]] * 2
    environ = {**session_environ, "TMPDIR": str(run.parent)}  # agents leave folders there
    agents = [
        start([*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *place, *WORKER, str(run)], environ)
        for place in places
    ]
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert weights(run) == expected[2]


def test_not_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: not a run folder\n  fix: write one: voxscale train CONFIG --run DIR --no-start\n"
    )


def test_a_world_of_another_size_does_not_take_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--world-size", "2"]) == 4
    assert "found a world of 1 ranks, expected 2" in capsys.readouterr().err
    assert not (run / "events.jsonl").exists()
