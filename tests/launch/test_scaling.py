"""`scale` on real clusters: worlds of several nodes measured by their own jobs and ranks, and what is refused first."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli, Finished
from lab.ray import RayLab, Seat
from lab.slurm import SlurmLab
from lab.terminal import CTRL_C, Terminal

SCRIPT = """
import os, pathlib, socket, sys
came = f"{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}-{socket.gethostname()}"
pathlib.Path(sys.argv[1], came).touch()
"""


def measured(folder: Path, name: str) -> dict[str, Any]:
    """What the ranks of a world wrote down."""
    (file,) = folder.glob(f"measured-{name}-*.json")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def submitted(done: Finished) -> list[str]:
    """The kinds of the jobs that a command has submitted."""
    return re.findall(r"^submitted job \d+ \((\w+)\)", done.err, re.M)


def assert_only_results_stay(folder: Path) -> None:
    assert not list(folder.glob("run-*")), "what was measured in is gone"
    assert {"scale.json", "speedup.svg"} <= {path.name for path in folder.iterdir()}


def assert_two_worlds_compared(done: Finished, first: Finished) -> None:
    """With the first world's row as it was measured before."""
    assert [(row["kind"], row["world"], row["global_batch"]) for row in done.json["rows"]] == [
        ("strong", "1x1", 4),
        ("strong", "2x1", 4),
        ("weak", "1x1", 4),
        ("weak", "2x1", 8),
    ]
    assert done.json["rows"][0] == first.json["rows"][0]


@pytest.fixture
def environ(idle_slurm: SlurmLab, networks_folder: Path) -> dict[str, str]:
    return {**idle_slurm.environ, "PYTHONPATH": str(networks_folder)}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "lab.yaml"
    path.write_text("cpus_per_device: 1\n")
    return path


@pytest.fixture
def on_slurm(cli: Cli, site: Path, environ: dict[str, str]) -> Callable[..., Finished]:
    """Run `voxscale scale` with `--on slurm`."""

    def run(*words: object, env: Mapping[str, str] | None = None) -> Finished:
        return cli("scale", *words, "--on", "slurm", "--site", site, env={**environ, **(env or {})})

    return run


def test_a_world_of_two_nodes_is_measured_by_a_job(
    on_slurm: Callable[..., Finished], cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    folder, config = tmp_path / "scaling", write_config()
    assert cli_here("prepare", config).code == 0
    done = on_slurm(config, "--worlds", "2x1", "--seconds", 1, "--run", folder, "--json")
    assert done.code == 0, done.err
    assert [(row["kind"], row["world"], row["global_batch"]) for row in done.json["rows"]] == [
        ("strong", "2x1", 4),
        ("weak", "2x1", 4),
    ]
    assert submitted(done) == ["measure"]
    costs = measured(folder, "slurm-2x1")
    assert (costs["world_size"], costs["nodes"], costs["threads"]) == (2, 2, 1)
    assert costs["all_reduce_gb_s"] > 0
    assert_only_results_stay(folder)


@pytest.mark.cluster
def test_worlds_on_slurm_are_compared_and_those_that_are_there_kept(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """The data are prepared by the first job: there is no store yet."""
    folder, config, own = tmp_path / "scaling", write_config(), {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [config, "--seconds", 1, "--run", folder, "--json"]
    first = on_slurm(*words, "--worlds", "1x1", env=own)
    assert first.code == 0, first.err
    assert submitted(first) == ["open", "measure"]
    done = on_slurm(*words, "--worlds", "2x1,1x1", env=own)
    assert done.code == 0, done.err
    assert submitted(done) == ["measure", "measure"]
    assert_two_worlds_compared(done, first)
    assert measured(folder, "slurm-2x1-8")["nodes"] == 2
    assert_only_results_stay(folder)


def test_a_world_that_cannot_be_had_is_refused_before_any_is_measured(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, folder = write_config(train__batch=18), tmp_path / "scaling"
    done = on_slurm(config, "--worlds", "1x1,9x1", "--run", folder)
    assert done.code == 2
    assert "--nodes 9: partition main has 4 nodes" in done.err
    assert "measuring" not in done.err
    assert not folder.exists()


@pytest.mark.cluster
def test_a_rank_that_fails_while_it_is_measured_is_named(
    on_slurm: Callable[..., Finished], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "scaling"
    config = write_config(model={"name": "networks:build_broken"})
    done = on_slurm(config, "--worlds", "2x1", "--seconds", 1, "--run", folder)
    assert done.code == 1
    assert "rank one has had enough" in done.err
    assert list(folder.iterdir()) == []


@pytest.mark.cluster
def test_a_second_command_leaves_the_job_alone_and_ctrl_c_cancels_it(
    idle_slurm: SlurmLab,
    cli: Cli,
    write_config: Callable[..., Path],
    tmp_path: Path,
    site: Path,
    environ: dict[str, str],
    session_environ: dict[str, str],
) -> None:
    folder = tmp_path / "scaling"
    words = ["scale", write_config(), "--worlds", "1x1", "--seconds", "600", "--run", folder, "--on", "slurm"]
    command = [sys.executable, "-m", "voxscale", *words, "--site", site]
    with Terminal(*command, env={**session_environ, **environ}) as screen:
        job = int(screen.until(r"job (\d+) \(measure\): running")[1])
        second = cli(*words, "--site", site, env=environ)
        assert second.code == 4
        assert f"job {job} is running for it already" in second.err
        screen.type(CTRL_C)
        assert screen.wait() == 75
    assert "was cancelled" in screen.text
    idle_slurm.await_state(job, "CANCELLED")
    assert list(folder.iterdir()) == []


@pytest.mark.cluster
def test_a_script_on_slurm_is_compared_by_its_wall_time(on_slurm: Callable[..., Finished], tmp_path: Path) -> None:
    script, came = tmp_path / "mine.py", tmp_path / "came"
    script.write_text(SCRIPT)
    came.mkdir()
    words = ["--script", script, came, "--worlds", "1x1,2x2", "--run", tmp_path / "times"]
    done = on_slurm(*words, "--json")
    assert done.code == 0, done.err
    first, second = done.json["rows"]
    assert (first["world"], first["speedup"], second["world"]) == ("1x1", 1.0, "2x2")
    assert second["speedup"] == pytest.approx(first["wall_s"] / second["wall_s"])
    assert second["efficiency"] == pytest.approx(second["speedup"] / 4)
    ranks = sorted(path.name.rpartition("-")[0] for path in came.iterdir())
    assert ranks == ["0-of-1", "0-of-4", "1-of-4", "2-of-4", "3-of-4"]
    assert len({path.name.rpartition("-")[2] for path in came.glob("*-of-4-*")}) == 2, "two nodes"
    again = on_slurm(*words)
    assert again.code == 0, again.err
    assert "submitted" not in again.err
    many = on_slurm("--script", script, came, "--worlds", "1x2,9x1", "--run", tmp_path / "many")
    assert many.code == 2
    assert "--nodes 9: partition main has 4 nodes" in many.err
    assert not (tmp_path / "many").exists()


@pytest.mark.cluster
def test_a_world_on_a_ray_that_is_started_here_is_measured(seat: Seat) -> None:
    folder, config = seat.folder / "embedded", seat.write("c.yaml")
    words = ["scale", config, "--on", "ray", "--seconds", "1", "--run", folder]
    done = seat.run(*words, "--worlds", "1x2", "--json")
    assert done.code == 0, done.err
    assert [(row["kind"], row["world"]) for row in done.json["rows"]] == [("strong", "1x2"), ("weak", "1x2")]
    assert measured(folder, "ray-1x2")["world_size"] == 2
    assert_only_results_stay(folder)
    alone = seat.run(*words, "--worlds", "2x1")
    assert alone.code == 2
    assert "this machine is one node" in alone.err


@pytest.mark.cluster
def test_worlds_on_a_users_raylets_are_compared(ray_cluster: RayLab, seat: Seat) -> None:
    """Nodes have two CPUs, so that a single rank on each has two threads."""
    folder = seat.folder / "raylets"
    config = seat.write("auto.yaml", train__threads="auto")
    words = ["scale", config, "--on", "ray", "--seconds", "1", "--run", folder]
    first = seat.run(*words, "--worlds", "1x1", "--json", **ray_cluster.environ)
    assert first.code == 0, first.err
    done = seat.run(*words, "--worlds", "1x1,2x1", "--json", **ray_cluster.environ)
    assert done.code == 0, done.err
    assert_two_worlds_compared(done, first)
    costs = measured(folder, "ray-2x1-8")
    assert (costs["world_size"], costs["threads"]) == (2, ray_cluster.cpus)
    assert_only_results_stay(folder)
    many = seat.run(*words, "--worlds", "1x1,4x1", **ray_cluster.environ)
    assert many.code == 4
    assert "--nodes 4: the Ray cluster has 3" in many.err
    assert "measuring" not in many.err


@pytest.mark.cluster
def test_a_script_on_ray_is_compared_by_its_wall_time(ray_cluster: RayLab, seat: Seat) -> None:
    script, came = seat.folder / "mine.py", seat.folder / "came"
    script.write_text(SCRIPT)
    came.mkdir()
    words = ["--script", script, came, "--on", "ray", "--worlds", "1x1,2x1", "--run", seat.folder / "times"]
    done = seat.run("scale", *words, "--json", **ray_cluster.environ)
    assert done.code == 0, done.err
    assert [row["world"] for row in done.json["rows"]] == ["1x1", "2x1"]
    assert sorted(path.name.rpartition("-")[0] for path in came.iterdir()) == ["0-of-1", "0-of-2", "1-of-2"]


def test_options_that_are_for_elsewhere_are_refused(cli_here: Cli, write_config: Callable[..., Path]) -> None:
    config = write_config()
    for words, said in (
        (["--site", "mine"], "--site: this is for a cluster"),
        (["site.partition=short"], "site.…: this is for a cluster"),
        (["--address", "head:6379"], "--address: this is for a Ray cluster"),
        (["--on", "ray", "--site", "mine"], "--site: not for --on ray"),
    ):
        done = cli_here("scale", config, *words)
        assert done.code == 2
        assert said in done.err
