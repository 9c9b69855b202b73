"""What must not get lost: the best model, a validation that a stop came before, a run that another process made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli, Finished
from voxscale.checkpoint import digest_of, load_checkpoint
from voxscale.config.load import read_config
from voxscale.errors import InfrastructureError
from voxscale.files import point, read_json
from voxscale.launch.folder import draft_run, open_run
from voxscale.launch.machine import look_at_machine
from voxscale.runs import RunFolder, runs_of
from voxscale.train.events import read_events

WriteConfig = Callable[..., Path]

OWN_MODELS = """
import os, signal
from pathlib import Path

import torch

class Tied(torch.nn.Module):
    '''Shares a layer under two names, never uses another, and keeps running statistics.'''

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = torch.nn.Conv3d(in_channels, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm3d(4)
        self.middle = torch.nn.Conv3d(4, 4, 3, padding=1)
        self.again = self.middle
        self.unused = torch.nn.Conv3d(4, 4, 1)
        self.last = torch.nn.Conv3d(4, out_channels, 1)

    def forward(self, image):
        return self.last(self.again(torch.relu(self.middle(self.norm(self.first(image))))))

class Told(Tied):
    '''Its process is told to stop at the first window that it is evaluated on.'''

    def forward(self, image):
        if not self.training:
            windows = Path(os.environ["PYTHONPATH"], "windows")
            with windows.open("a") as seen:
                seen.write(".")
            if windows.read_text() == ".":
                os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(image)

class Steep(Tied):
    '''The loss is finite, the gradient is not.'''

    def forward(self, image):
        output = super().forward(image)
        return output + (output * 0).sqrt()

class Wider(Tied):
    '''Says more when it is evaluated.'''

    def forward(self, image):
        output = super().forward(image)
        return output if self.training else torch.cat([output, output], 1)
"""


@pytest.fixture
def train(write_config: WriteConfig, tmp_path: Path, cli_here: Cli) -> Callable[..., Finished]:
    def start(name: str, *words: object, devices: int = 1, **fields: Any) -> Finished:
        config = write_config(f"{name}.yaml", **{"log": "epoch", **fields})
        return cli_here("train", config, *words, "--devices", devices, "--run", tmp_path / name)

    return start


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.ranks
def test_any_network_is_saved_as_it_was_scored_on_ranks(
    train: Callable[..., Finished],
    own_models: None,
    tmp_path: Path,
    cli_here: Cli,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Running statistics differ between ranks; what is scored is what is saved."""
    done = train("run", devices=2, model={"name": "own_nets:Tied"})
    assert done.code == 0, done.err
    assert "batch norm (norm): each rank has its own statistics" in capfd.readouterr().err
    again = cli_here("evaluate", tmp_path / "run")
    assert again.code == 0, again.err
    table = (tmp_path / "run" / "cases.csv").read_text()
    assert (tmp_path / "run" / "evaluations" / "val" / "cases.csv").read_text() == table


def test_a_signal_during_validation_saves_within_a_window(
    train: Callable[..., Finished], own_models: None, tmp_path: Path
) -> None:
    """Validations take minutes; what was to be validated is when the run goes on, to the same end."""
    for code in (75, 0):
        assert train("run", model={"name": "own_nets:Told"}).code == code
        if code == 75:
            assert (tmp_path / "windows").read_text() == "."
            first = load_checkpoint(tmp_path / "run" / "checkpoints" / "last")
            assert first.step == read_json(tmp_path / "run" / "plan.json")["validate_every_steps"]
    assert train("whole", model={"name": "own_nets:Tied"}).code == 0
    run, whole = (read_json(tmp_path / name / "metrics.json") for name in ("run", "whole"))
    assert run["weights_sha256"] == whole["weights_sha256"]
    assert (run["best"], run["summary"]) == (whole["best"], whole["summary"])


def test_exact_looks_at_the_network_itself(train: Callable[..., Finished], own_models: None, tmp_path: Path) -> None:
    done = train("run", model={"name": "own_nets:Tied"}, train__deterministic="exact")
    assert done.code == 2
    assert "found batch statistics in norm, which train.deterministic: exact cannot have" in done.err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_gradient_that_is_not_finite_stops_before_the_step(
    train: Callable[..., Finished], own_models: None, tmp_path: Path
) -> None:
    done = train("run", model={"name": "own_nets:Steep"})
    assert done.code == 1
    assert "the norm of the gradient is nan at step 1, with cases" in done.err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_network_that_changes_its_channels_is_refused(train: Callable[..., Finished], own_models: None) -> None:
    done = train("run", model={"name": "own_nets:Wider"})
    assert done.code == 2
    assert "found 2 channels of output, expected 1" in done.err


def test_a_stop_before_a_validation_loses_nothing(train: Callable[..., Finished], tmp_path: Path) -> None:
    assert train("whole").code == 0
    steps = read_json(tmp_path / "whole" / "plan.json")["steps_per_epoch"]
    stopped = train("parts", train__stop_after={"steps": steps})
    assert stopped.code == 75
    kinds = [event["event"] for event in read_events(tmp_path / "parts" / "events.jsonl")]
    assert "validate" not in kinds, "the state is saved first"
    assert train("parts").code == 0
    _expect_same_end(tmp_path / "whole", tmp_path / "parts")


def test_a_validation_that_the_saved_state_does_not_know_of_is_made_again(
    train: Callable[..., Finished], tmp_path: Path
) -> None:
    """Of a step that was saved before it was validated, and that the run comes back to."""
    assert train("whole").code == 0
    steps = read_json(tmp_path / "whole" / "plan.json")["steps_per_epoch"]
    assert train("parts", train__stop_after={"steps": steps}).code == 75
    assert train("parts", train__stop_after={"steps": 1}).code == 75
    run = RunFolder(tmp_path / "parts")
    assert run.best.resolve() == run.checkpoint(steps)
    assert load_checkpoint(run.best).state["validated"] < steps
    (run.last / "model.safetensors").write_bytes(b"")
    assert train("parts").code == 0
    _expect_same_end(tmp_path / "whole", tmp_path / "parts")


def _expect_same_end(one: Path, other: Path) -> None:
    metrics = [read_json(run / "metrics.json") for run in (one, other)]
    for field in ("best", "summary", "weights_sha256"):
        assert metrics[0][field] == metrics[1][field]
    assert (one / "cases.csv").read_text() == (other / "cases.csv").read_text()


def test_the_best_is_found_again_after_a_kill_before_it_was_named(
    train: Callable[..., Finished], tmp_path: Path
) -> None:
    """`best` still names an older step than the saved state does."""
    run = RunFolder(tmp_path / "run")
    assert train("run", train__stop_after={"steps": 6}, checkpoint__keep=9).code == 75
    best = load_checkpoint(run.last).state["best"]["step"]
    point(run.best, next(path.name for path in run.checkpoints.glob("step-*") if path != run.checkpoint(best)))
    assert train("run", checkpoint__keep=9).code == 0
    metrics = read_json(run.metrics)
    assert run.best.resolve() == run.checkpoint(metrics["best"]["step"])
    assert metrics["summary"]["dice/mean"]["mean"] == metrics["best"]["value"]


def test_what_killed_writers_left_goes_with_the_next_start(train: Callable[..., Finished], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert train("run", train__stop_after={"steps": 2}).code == 75
    left = [path.with_name(f".{path.name}.0123abcd.tmp") for path in run.written_whole]
    others = run.root / ".report.html.0123abcd.tmp"  # which somebody may write just now
    for path in (*left, others):
        path.write_text("part")
    assert train("run", train__stop_after={"steps": 2}).code == 75
    assert [path for path in (*left, others) if path.exists()] == [others]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(train: Callable[..., Finished], tmp_path: Path) -> None:
    """They may be on a disk that is not mounted just now."""
    run, elsewhere = RunFolder(tmp_path / "run"), tmp_path / "elsewhere"
    assert train("run", train__stop_after={"steps": 3}).code == 75
    run.checkpoints.rename(elsewhere)
    refused = train("run")
    assert refused.code == 3, refused.err
    assert "checkpoints: found no checkpoint, expected that of step 3, which was saved" in refused.err
    elsewhere.rename(run.checkpoints)
    assert train("run").code == 0
    assert [event["step"] for event in read_events(run.events) if event["event"] == "resume"] == [3]


def test_a_damaged_best_does_not_keep_a_run_from_its_end(train: Callable[..., Finished], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    fields = {"optimizer__lr": 1e-12, "train__epochs": 3}  # nothing is learnt, so the first validation stays the best
    assert train("run", train__stop_after={"steps": 7}, **fields).code == 75
    best = load_checkpoint(run.last).state["best"]
    path = run.checkpoint(best["step"]) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    done = train("run", **fields)
    assert done.code == 0, done.err
    metrics = read_json(run.metrics)
    assert metrics["state"] == "done"
    assert "the last checkpoint is measured, and called the best, in its place" in done.err
    assert metrics["best"]["step"] == metrics["steps"]
    assert run.best.resolve() == run.checkpoint(metrics["best"]["step"])
    assert metrics["summary"]["dice/mean"]["mean"] == metrics["best"]["value"]


def test_a_run_that_another_process_made_meanwhile_is_left_alone(
    train: Callable[..., Finished], write_config: WriteConfig, tmp_path: Path
) -> None:
    machine = look_at_machine()
    config = read_config(write_config("run.yaml", log="epoch"))
    draft = draft_run(config, tmp_path / "run", machine, devices="1")
    assert train("run").code == 0
    weights = digest_of(load_checkpoint(tmp_path / "run" / "checkpoints" / "last").model)
    with pytest.raises(InfrastructureError, match="made by another process"):
        open_run(draft, machine, os.environ)
    assert digest_of(load_checkpoint(tmp_path / "run" / "checkpoints" / "last").model) == weights
    assert not list(tmp_path.glob("run.old-*"))


def test_only_the_folds_of_the_last_cross_validation_count(
    train: Callable[..., Finished], tmp_path: Path, cli_here: Cli
) -> None:
    fields = {"train__epochs": 1, "log": "quiet"}
    assert train("cv", "--folds", "all", data__split={"folds": 3, "test": 0.2}, **fields).code == 0
    again = train("cv", "--folds", "all", "--fresh", data__split={"folds": 2, "test": 0.2}, **fields)
    assert again.code == 0, again.err
    assert {path.name for path in (tmp_path / "cv").glob("fold-*")} >= {"fold-1.old-1", "fold-3"}
    assert [run.name for run in runs_of(tmp_path / "cv")] == ["fold-1", "fold-2"]
    assert (tmp_path / "cv").stat().st_mode & 0o77 == 0
    listed = cli_here("train", tmp_path / "cv.yaml", "--folds", "all", "--run", tmp_path / "new", "--dry-run")
    assert [f"fold-{n}" in listed.out for n in (1, 2, 3)] == [True, True, False]
    assert not (tmp_path / "new").exists()
