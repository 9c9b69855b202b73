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
NUM_STEPS = 20
BATCH_DICE = ["loss.batch=true", "train.micro_batch=1"]  # coupled samples, and accumulation where ranks have several


def train_events(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["event"] == "train"]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in train_events(run)]


def assert_same_state(one: Path, other: Path) -> None:
    """Weights, optimizer and losses are the same bits."""
    assert losses(one) == losses(other)
    first, second = (load_checkpoint(run / "checkpoints" / "last") for run in (one, other))
    assert first.step == second.step
    assert digest_of(first.model) == digest_of(second.model)
    assert digest_of(first.optimizer) == digest_of(second.optimizer)


class Quick:
    """`quick.yaml`, stopped after so many steps; each kind of run is made once."""

    def __init__(self, cli_here: Cli, root: Path) -> None:
        self._cli, self._root = cli_here, root

    def start(self, run: Path, world: int, extra: list[str], steps: int = NUM_STEPS) -> Path:
        source = f"data.source={self._root / 'data'}"
        stop = f"train.stop_after={{steps: {steps}}}"
        fixed = ["train.threads=1", "track=none", "log=quiet", source, stop]
        done = self._cli("train", RECIPES / "quick.yaml", *fixed, *extra, "--devices", world, "--run", run)
        assert done.code == 75, done.err
        return run

    def run(self, world: int, extra: list[str]) -> Path:
        run = self._root / f"{world}-{len(extra)}"
        return run if run.exists() else self.start(run, world, extra)


@pytest.fixture(scope="module")
def quick(cli_here: Cli, tmp_path_factory: pytest.TempPathFactory) -> Quick:
    return Quick(cli_here, tmp_path_factory.mktemp("quick"))


@pytest.mark.ranks
@pytest.mark.parametrize("extra", [[], BATCH_DICE], ids=["dice per sample", "dice over the batch"])
@pytest.mark.parametrize("world", [2, 4])
def test_more_ranks_train_the_same(quick: Quick, world: int, extra: list[str]) -> None:
    alone, together = train_events(quick.run(1, extra)), train_events(quick.run(world, extra))
    assert len(alone) == NUM_STEPS
    assert [event["cases"] for event in alone] == [event["cases"] for event in together]
    assert [event["loss"] for event in alone] == pytest.approx([event["loss"] for event in together], rel=1e-4)
    assert alone[-1]["loss"] < alone[0]["loss"] * 0.9, "nothing was learned, so nothing was compared"


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "extra"), [(2, BATCH_DICE), (4, [])], ids=["2 ranks", "4 ranks"])
def test_interrupted_equals_uninterrupted(quick: Quick, tmp_path: Path, world: int, extra: list[str]) -> None:
    """Stopped within an epoch and continued: after as many steps, all bits are the same."""
    parts = tmp_path / "parts"
    for steps in (7, NUM_STEPS - 7):
        quick.start(parts, world, extra, steps)
    assert_same_state(quick.run(world, extra), parts)


@pytest.fixture(scope="module")
def demo(cli_here: Cli, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `voxscale demo` says, as a newcomer runs it."""
    done = cli_here("demo", "--out", tmp_path_factory.mktemp("demo") / "demo", "--devices", "2", "--json")
    assert done.code == 0, done.err
    return dict(done.json)


@pytest.mark.ranks
def test_demo_solves_what_a_threshold_cannot(demo: dict[str, Any]) -> None:
    assert demo["num_test"] >= 8
    assert demo["dice"] >= 0.90
    assert demo["threshold_dice"] <= 0.65


@pytest.mark.ranks
def test_one_checkpoint_gives_one_table_on_any_number_of_ranks(cli_here: Cli, demo: dict[str, Any]) -> None:
    run = Path(demo["run"])
    tables = set()
    for world in WORLDS:
        done = cli_here("evaluate", run, "--devices", world, "--split", "test", "--name", f"on-{world}")
        assert done.code == 0, done.err
        tables.add((run / "evaluations" / f"on-{world}" / "cases.csv").read_bytes())
    assert len(tables) == 1
    own = [line for line in (run / "cases.csv").read_bytes().splitlines() if b",val," not in line]
    assert own == tables.pop().splitlines(), "evaluating again differs from the run's own table"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """A config with a short last batch, accumulation, batch Dice, augmentation and dropout."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.yaml"
    config = tiny_config(dataset, train__micro_batch=1, loss__batch=True, model__dropout=0.1, patches__per_case=3)
    path.write_text(safe_dump(config))
    return path


@pytest.mark.parametrize("channels_last", [False, True], ids=["plain", "channels last"])
def test_interrupted_to_the_end(cli_here: Cli, tiny: Path, tmp_path: Path, channels_last: bool) -> None:
    """One rank, stopped twice: the whole of what a run leaves is the same."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    alone = [f"train.channels_last={channels_last}", "--devices", 1]
    assert cli_here("train", tiny, *alone, "--run", whole).code == 0
    codes = [cli_here("train", tiny, "train.stop_after={steps: 4}", *alone, "--run", parts).code for _ in range(2)]
    assert codes == [75, 75]
    assert cli_here("train", tiny, *alone, "--run", parts).code == 0
    assert_same_state(whole, parts)
    assert (parts / "cases.csv").read_bytes() == (whole / "cases.csv").read_bytes()
    metrics = [json.loads((run / "metrics.json").read_text()) for run in (whole, parts)]
    for name in ("best", "summary", "weights_sha256", "steps"):
        assert metrics[0][name] == metrics[1][name]


@pytest.mark.ranks
def test_continued_on_another_world_size_keeps_the_stream(cli_here: Cli, tiny: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = ["model.dropout=0"]  # dropout draws per micro-batch, the one thing that ranks share out
    assert cli_here("train", tiny, *config, "--devices", 1, "--run", whole).code == 0
    stopped = cli_here("train", tiny, *config, "train.stop_after={steps: 5}", "--devices", 2, "--run", parts)
    assert stopped.code == 75, stopped.err
    assert cli_here("train", tiny, *config, "--devices", 1, "--run", parts).code == 0
    assert [event["cases"] for event in train_events(parts)] == [event["cases"] for event in train_events(whole)]
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-3)
