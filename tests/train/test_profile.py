"""A trace of some steps: whole, of every rank, and without a trace in the result."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Cli
from voxscale.config.site import Site
from voxscale.launch.batch import TRAIN, train_jobs
from voxscale.launch.ray_run import worker_words
from voxscale.launch.sbatch import Request, render_sbatch
from voxscale.runs import RunFolder

Write = Callable[..., Path]


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_each_rank_traces_some_steps_and_the_weights_stay_the_same(
    cli_here: Cli, write_config: Write, tmp_path: Path, devices: int, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config()
    plain = cli_here("train", config, "--devices", devices, "--run", tmp_path / "plain", "--json")
    assert plain.code == 0, plain.err
    words = ["train", config, "--devices", devices, "--run", tmp_path / "traced", "--profile"]
    traced = cli_here(*words, "--json")
    assert traced.code == 0, traced.err
    assert "profiler_start" not in "".join(capfd.readouterr()), "the library says nothing beside us"
    assert traced.json["weights_sha256"] == plain.json["weights_sha256"]
    run = RunFolder(tmp_path / "traced")
    assert traced.json["profile"] == [str(run.root / "profile")]
    assert "profile" not in plain.json
    assert not (tmp_path / "plain" / "profile").exists()
    assert sorted(path.name for path in (run.root / "profile").iterdir()) == [
        *(f"rank-{rank:04d}.pt.trace.json.gz" for rank in range(devices)),
        "top.txt",
    ]
    for rank in range(devices):
        names = [event.get("name", "") for event in _events(run.trace(rank))]
        assert sorted(name for name in set(names) if name.startswith("ProfilerStep")) == [
            f"ProfilerStep#{step}" for step in (2, 3, 4, 5)
        ]
        assert any("convolution_backward" in name for name in names)
        assert any(name.startswith("gloo:") for name in names) == (devices > 1)
    text = run.top_costs.read_text()
    assert text.startswith("4 steps of rank 0")
    assert "waiting for data" in text
    assert "aten::convolution_backward" in text
    again = cli_here(*words)
    assert "aten::convolution_backward" in again.out, "what cost most is printed, also when it was traced before"


def test_a_run_with_few_steps_left_is_traced_all_the_same(cli_here: Cli, write_config: Write, tmp_path: Path) -> None:
    config = write_config(train__batch=18, train__epochs=1)  # one step
    done = cli_here("train", config, "--devices", 1, "--run", tmp_path / "run", "--profile")
    assert done.code == 0, done.err
    assert "1 steps of rank 0" not in done.out
    assert "1 step of rank 0" in done.out
    assert any(event.get("name") == "ProfilerStep#0" for event in _events(RunFolder(tmp_path / "run").trace(0)))


@pytest.mark.parametrize(("batch", "epochs", "traced"), [(18, 2, 1), (3, 1, 4)])
def test_a_trace_holds_the_steps_that_it_counts(
    cli_here: Cli, write_config: Write, tmp_path: Path, batch: int, epochs: int, traced: int
) -> None:
    """Of two steps, and of six: the last is over when the last is traced."""
    config = write_config(train__batch=batch, train__epochs=epochs, validate__every=epochs)
    done = cli_here("train", config, "--devices", 1, "--run", tmp_path / "run", "--profile")
    assert done.code == 0, done.err
    names = [str(event.get("name", "")) for event in _events(RunFolder(tmp_path / "run").trace(0))]
    assert any("convolution_backward" in name for name in names)
    assert sum(name.startswith("Optimizer.step#") for name in names) == traced
    assert f"{traced} step{'s' if traced > 1 else ''} of rank 0" in done.out


def test_jobs_and_ray_pass_the_wish_on_to_their_ranks(tmp_path: Path) -> None:
    for wanted in (False, True):
        request = Request(2, 2, profile=wanted)
        job = train_jobs(tmp_path, Site(), request, [], opened=True, debug_comm=False)[TRAIN]
        (line,) = [each for each in render_sbatch(job, Site()).splitlines() if "voxscale.train.worker" in each]
        assert line.endswith("--world-size 4 --profile)" if wanted else "--world-size 4)")
        assert ("--profile" in worker_words(RunFolder(tmp_path), request, tmp_path)) == wanted


def _events(path: Path) -> list[dict[str, object]]:
    with gzip.open(path) as stream:
        events: list[dict[str, object]] = json.load(stream)["traceEvents"]
    return events
