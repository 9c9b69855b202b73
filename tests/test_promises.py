"""The two promises that guard everything: ranks do not matter, and neither do interruptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from yaml import safe_dump

from conftest import RECIPES, Cli, tiny_config
from voxscale.checkpoint import digest_of, load_checkpoint
from voxscale.train.events import read_events

WORLDS = (1, 2, 4)
QUICK = [RECIPES / "quick.yaml", "train.epochs=3", "validate.every=3", "train.threads=1", "track=none"]


def train_events(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["event"] == "train"]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in train_events(run)]


@pytest.fixture(scope="module")
def quick_source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"data.source={tmp_path_factory.mktemp('quick') / 'data'}"


@pytest.fixture(scope="module")
def quick_runs(
    cli_here: Cli, tmp_path_factory: pytest.TempPathFactory, quick_source: str
) -> dict[tuple[int, bool], Path]:
    """`quick.yaml` on 1, 2 and 4 ranks, with Dice per sample and over the batch (there with accumulation)."""
    root = tmp_path_factory.mktemp("quick-runs")
    runs = {}
    for batch_dice in (False, True):
        extra = ["loss.batch=true", "train.micro_batch=1"] if batch_dice else []
        for world in WORLDS:
            runs[world, batch_dice] = root / f"{world}-{batch_dice}"
            done = cli_here("train", *QUICK, quick_source, *extra, "--devices", world, "--run", runs[world, batch_dice])
            assert done.code == 0, done.err
    return runs


@pytest.mark.ranks
@pytest.mark.parametrize("batch_dice", [False, True], ids=["dice per sample", "dice over the batch"])
@pytest.mark.parametrize("world", [2, 4])
def test_more_ranks_train_the_same(quick_runs: dict[tuple[int, bool], Path], world: int, batch_dice: bool) -> None:
    alone, together = train_events(quick_runs[1, batch_dice]), train_events(quick_runs[world, batch_dice])
    assert len(alone) >= 20
    assert [event["cases"] for event in alone] == [event["cases"] for event in together]
    assert [event["loss"] for event in alone[:20]] == pytest.approx(
        [event["loss"] for event in together[:20]], rel=1e-4
    )
    assert alone[-1]["loss"] < alone[0]["loss"] * 0.95, "nothing was learned, so nothing was compared"


@pytest.mark.ranks
def test_one_checkpoint_gives_one_table_on_any_number_of_ranks(
    cli_here: Cli, quick_runs: dict[tuple[int, bool], Path]
) -> None:
    run = quick_runs[2, False]
    tables = set()
    for world in WORLDS:
        done = cli_here("evaluate", run, "--devices", world, "--name", f"on-{world}")
        assert done.code == 0, done.err
        tables.add((run / "evaluations" / f"on-{world}" / "cases.csv").read_bytes())
    assert len(tables) == 1
    validated = [line for line in (run / "cases.csv").read_bytes().splitlines() if b",test," not in line]
    assert validated == tables.pop().splitlines(), "evaluating again differs from the run's own table"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """A config with a short last batch, accumulation, batch Dice, augmentation and dropout."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.yaml"
    config = tiny_config(dataset, train__micro_batch=1, loss__batch=True, model__dropout=0.1, patches__per_case=3)
    path.write_text(safe_dump(config))
    return path


@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_interrupted_equals_uninterrupted(cli_here: Cli, tiny: Path, tmp_path: Path, world: int) -> None:
    """Stopped in the middle of an epoch, alone also at the start of the next: all bits are the same."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--devices", world]
    assert cli_here("train", tiny, *flags, "--run", whole).code == 0
    codes = [
        cli_here("train", tiny, "train.stop_after={steps: 4}", *flags, "--run", parts).code
        for _ in range(2 if world == 1 else 1)
    ]
    assert set(codes) == {75}
    finished = cli_here("train", tiny, *flags, "--run", parts)
    assert finished.code == 0, finished.err

    assert losses(parts) == losses(whole)
    assert (parts / "cases.csv").read_bytes() == (whole / "cases.csv").read_bytes()
    metrics = [json.loads((run / "metrics.json").read_text()) for run in (whole, parts)]
    assert metrics[0]["weights_sha256"] == metrics[1]["weights_sha256"]
    assert metrics[0]["best"] == metrics[1]["best"]
    last = [load_checkpoint(run / "checkpoints" / "last") for run in (whole, parts)]
    assert digest_of(last[0].optimizer) == digest_of(last[1].optimizer)


@pytest.mark.ranks
def test_continued_on_another_world_size_keeps_the_stream(cli_here: Cli, tiny: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = ["model.dropout=0"]  # dropout draws per micro-batch, the one thing that ranks share out
    assert cli_here("train", tiny, *config, "--devices", 1, "--run", whole).code == 0
    stopped = cli_here("train", tiny, *config, "train.stop_after={steps: 5}", "--devices", 2, "--run", parts)
    assert stopped.code == 75, stopped.err
    assert cli_here("train", tiny, *config, "--devices", 4, "--run", parts).code == 0
    assert [event["cases"] for event in train_events(parts)] == [event["cases"] for event in train_events(whole)]
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-3)
