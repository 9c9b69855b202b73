"""What every launcher must leave behind, whatever it starts the worker with."""

from __future__ import annotations

import csv
import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from yaml import safe_dump

from conftest import Cli, tiny_config
from voxscale.checkpoint import load_checkpoint
from voxscale.config.load import read_config
from voxscale.train.events import read_events

ON_SLURM, ON_RAY = "SLURM, two nodes", "Ray, two ranks"
LAUNCHERS = {
    "local, one process": ["--devices", "1"],
    "local, two processes": ["--devices", "2"],
    ON_SLURM: ["--on", "slurm", "--nodes", "2", "--devices", "1", "site.cpus_per_device=1"],
    ON_RAY: ["--on", "ray", "--devices", "2"],
}
MARKS = {ON_SLURM: [pytest.mark.slurm], ON_RAY: [pytest.mark.ray]}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in LAUNCHERS])
def run(
    request: pytest.FixtureRequest, cli_here: Cli, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == ON_SLURM:
            for name, value in request.getfixturevalue("slurm").environ.items():
                patch.setenv(name, value)
        cli = request.getfixturevalue("seat").run if request.param == ON_RAY else cli_here
        yield train(cli, LAUNCHERS[request.param], dataset, tmp_path_factory)


def train(cli: Cli, place: list[str], dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    content = tiny_config(
        dataset, data__split={"val": 0.2, "test": 0.2}, track="tensorboard", train__batch={"per_device": 2}
    )
    (folder / "c.yaml").write_text(safe_dump(content))
    done = cli("train", folder / "c.yaml", *place, "--run", folder / "run")
    assert done.code == 0, done.err
    return folder / "run"


def test_folder_holds_what_the_design_says(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.yaml", "plan.json", "split.csv", "events.jsonl", "cases.csv", "metrics.json"}
    assert names >= {"checkpoints", "logs", "tensorboard", "launch"}
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]
    assert list(run.glob("tensorboard/events.out.tfevents.*"))


def test_only_the_config_names_folders_of_the_data(run: Path, dataset: Path) -> None:
    """Their names may be patients'; what is passed on, logs and reports, holds ids of cases alone."""
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    naming = {str(name) for name, content in files.items() if str(dataset).encode() in content}
    assert {str(name) for name in files} >= {"events.jsonl", "cases.csv", "split.csv", "report.html"}
    assert naming == {"config.yaml", "launch/asked.yaml"}


def test_config_is_resolved_and_trains_again_as_it_is(run: Path, cli_here: Cli, tmp_path: Path) -> None:
    config = read_config(run / "config.yaml")
    world = json.loads((run / "metrics.json").read_text())["world_size"]
    assert config.train.batch == 2 * world
    assert "auto" not in (config.train.precision, config.train.threads)
    if world == 1:
        again = cli_here("train", run / "config.yaml", "--devices", "1", "--run", tmp_path / "again", "--json")
        assert again.code == 0, again.err
        assert again.json["weights_sha256"] == json.loads((run / "metrics.json").read_text())["weights_sha256"]


def test_metrics_and_plan(run: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics.keys() >= {
        "task", "state", "best", "summary", "world_size", "steps", "wall_s", "weights_sha256",
    }  # fmt: skip
    assert metrics["state"] == "done"
    assert metrics["best"].keys() == {"step", "metric", "value"}
    assert metrics["summary"]["dice/mean"].keys() == {"mean", "median", "std", "ci95"}
    assert metrics["best"]["value"] == metrics["summary"]["dice/mean"]["mean"]
    plan = json.loads((run / "plan.json").read_text())
    assert plan["world_size"] == metrics["world_size"]
    assert plan["global_batch"] == plan["world_size"] * plan["micro_batch"] * plan["accumulate"]
    assert plan["num_steps"] == metrics["steps"]


def test_every_evaluated_case_stands_once(run: Path) -> None:
    roles = {row["case"]: row["split"] for row in csv.DictReader((run / "split.csv").open())}
    rows = list(csv.DictReader((run / "cases.csv").open()))
    assert list(rows[0])[:5] == ["case", "patient", "split", "dice/ball", "dice/mean"]
    assert {"iou/ball", "hd95/ball", "surface_dice/mean", "volume/ball"} <= set(rows[0])
    assert sorted(row["case"] for row in rows) == sorted(case for case, role in roles.items() if role != "train")
    assert all(row["split"] == roles[row["case"]] for row in rows)


def test_events_tell_the_story(run: Path) -> None:
    events = read_events(run / "events.jsonl")
    assert events[0]["event"] == "start"
    assert events[-1]["event"] == "end"
    trained = [event for event in events if event["event"] == "train"]
    assert [event["step"] for event in trained] == list(range(1, len(trained) + 1))
    assert all(event.keys() >= {"event", "step", "epoch", "time_s"} for event in events)
    assert trained[0].keys() >= {"event", "step", "epoch", "time_s", "loss", "lr", "data_s", "step_s", "cases"}
    assert {event["event"] for event in events} == {"start", "train", "validate", "checkpoint", "end"}


def test_checkpoints_load_without_a_prefix(run: Path) -> None:
    for name in ("last", "best"):
        checkpoint = load_checkpoint(run / "checkpoints" / name)
        assert not [key for key in checkpoint.model if key.startswith("module.")]


def test_a_finished_run_is_not_trained_again(run: Path, cli_here: Cli, write_config: Callable[..., Path]) -> None:
    before = (run / "metrics.json").stat().st_mtime_ns
    world = json.loads((run / "metrics.json").read_text())["world_size"]
    done = cli_here("train", run.parent / "c.yaml", "--devices", world, "--run", run)
    assert done.code == 0
    assert "done already" in done.err
    assert (run / "metrics.json").stat().st_mtime_ns == before


def test_fresh_moves_the_old_run_aside(run: Path, cli_here: Cli) -> None:
    old = (run / "metrics.json").read_bytes()
    done = cli_here("train", run.parent / "c.yaml", "train.epochs=1", "--devices", "1", "--fresh", "--run", run)
    assert done.code == 0, done.err
    assert (run.parent / "run.old-1" / "metrics.json").read_bytes() == old
    assert json.loads((run / "metrics.json").read_text())["steps"] < json.loads(old)["steps"] * 2
