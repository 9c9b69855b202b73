"""Outcomes from a table and volumes: the whole path, on any number of ranks, interrupted or not."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sksurv.linear_model.coxph import BreslowEstimator
from sksurv.metrics import brier_score, concordance_index_censored, concordance_index_ipcw, cumulative_dynamic_auc
from sksurv.util import Surv
from yaml import safe_dump, safe_load

from conftest import Cli
from lab.ray import RayLab, Seat
from lab.slurm import SlurmLab
from voxscale import survival_cases
from voxscale.checkpoint import digest_of, load_checkpoint
from voxscale.config.load import read_config
from voxscale.data.synthetic import write_cohort
from voxscale.errors import DataError
from voxscale.launch.folder import is_prepared
from voxscale.train.events import read_events

SMALL = {"name": "resnet", "depth": 18, "width": 4, "stem": "small", "groups": 2}
TASKS: dict[str, dict[str, Any]] = {
    "survival": {
        "task": "survival",
        "data": {"columns": {"features": ["age", "smoker"]}},
        "validate": {"horizons": ["2y"]},
    },
    "regression": {"task": "regression", "data": {"columns": {"targets": ["age", "calcium"], "features": ["sex"]}}},
    "classification": {"task": "classification", "data": {"columns": {"classes": "smoker"}}},
}
SPOILT = (
    {"time": "-5"},
    {"time": ""},
    {"event": "2"},
    {"event": ""},
    {"age": "inf"},
    {"NIFTI path": "images/none.nii.gz"},
)
SHORT = [*(f"model.{name}={value}" for name, value in SMALL.items()), "train.epochs=2", "train.threads=1", "track=none"]
IN_ROW, ROLES = r"\S+ at cohort.csv row [23]", "'train', 'val', 'test'"
WHOLE = ["train.batch=8", "train.micro_batch=1"]  # accumulated on one rank; ranks of four have two each, some no event


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cohort") / "cohort"
    write_cohort(folder, cases=26, size=(16, 16, 8), seed=3, threads=2)
    return folder / "cohort.csv"


@pytest.fixture(scope="module")
def write(cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the config of a task; a last batch is short."""
    folder = tmp_path_factory.mktemp("configs")

    def write_task(task: str) -> Path:
        own = TASKS[task]
        data = {"source": str(cohort), "split": {"column": "Fold_1"}, "intensity": {"window": [-1000, 1000]}}
        content = {
            **own,
            "data": {**data, **own["data"]},
            "model": SMALL,
            "optimizer": {"name": "sgd", "lr": 0.01},
            "train": {"epochs": 3, "batch": 8, "threads": 1},
            "track": "none",
            "log": "quiet",
        }
        path = folder / f"{task}.yaml"
        path.write_text(safe_dump(content))
        return path

    return write_task


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["event"] == "train"]


def streams(run: Path) -> list[list[str]]:
    return [event["cases"] for event in read_events(run / "events.jsonl") if event["event"] == "train"]


@pytest.mark.ranks
@pytest.mark.parametrize("task", TASKS)
def test_ranks_and_accumulation_train_the_same(
    task: str, cli_here: Cli, write: Callable[[str], Path], tmp_path: Path
) -> None:
    """Risks are compared over the whole batch, though a rank may have no event, or no case at all."""
    worlds = (1, 2, 4) if task == "survival" else (1, 2)
    for world in worlds:
        extra = WHOLE if world == 1 else []
        done = cli_here("train", write(task), *extra, "--devices", world, "--run", tmp_path / str(world))
        assert done.code == 0, done.err
    alone = tmp_path / "1"
    for other in (tmp_path / str(world) for world in worlds[1:]):
        assert streams(other) == streams(alone)
        assert losses(other) == pytest.approx(losses(alone), rel=1e-4)
    assert len(set(losses(alone))) == len(losses(alone)) == 9


@pytest.mark.ranks
@pytest.mark.parametrize("task", TASKS)
def test_interrupted_equals_uninterrupted(
    task: str, cli_here: Cli, write: Callable[[str], Path], tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = ["train", write(task), "--devices", 2 if task == "survival" else 1]
    assert cli_here(*words, "--run", whole).code == 0
    stopped = cli_here(*words, "train.stop_after={steps: 4}", "--run", parts)
    assert stopped.code == 75, stopped.err
    assert cli_here(*words, "--run", parts).code == 0
    assert losses(whole) == losses(parts)
    first, second = (load_checkpoint(run / "checkpoints" / "last") for run in (whole, parts))
    assert digest_of(first.model) == digest_of(second.model)
    assert (whole / "cases.csv").read_bytes() == (parts / "cases.csv").read_bytes()
    metrics = [json.loads((run / "metrics.json").read_text()) for run in (whole, parts)]
    assert metrics[0]["summary"] == metrics[1]["summary"]
    shown = cli_here("evaluate", whole)
    assert shown.code == 0, shown.err
    assert all(name.partition("/")[0] in shown.out for name in metrics[0]["summary"])


def test_balance_gives_every_batch_its_share_of_events(
    cli_here: Cli, cohort: Path, write: Callable[[str], Path], tmp_path: Path
) -> None:
    done = cli_here("train", write("survival"), "train.balance=true", "--devices", 1, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    events = {row["patient"]: int(row["event"]) for row in csv.DictReader(cohort.open()) if row["Fold_1"] == "train"}
    batches, share = streams(tmp_path / "run"), sum(events.values()) / len(events)
    assert [len(batch) for batch in batches] == [8, 8, 4] * 3
    assert all(abs(sum(events[case] for case in batch) - share * len(batch)) <= 1 for batch in batches)
    assert len(set(map(tuple, batches))) == len(batches), "cases meet others in every epoch"


@pytest.fixture(scope="module")
def trained(cli_here: Cli, cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `voxscale train cohort.csv` on two ranks, which finds everything itself, in a table that is sound."""
    run = tmp_path_factory.mktemp("trained") / "run"
    diagnosed = cli_here("doctor", cohort)
    assert diagnosed.code == 0, diagnosed.out
    done = cli_here("train", cohort, *SHORT, "--devices", 2, "--run", run)
    assert done.code == 0, done.err
    for said in ("'NIFTI path'", "'time'", "'event'", "Fold_5", "'patient'", "'age', 'sex', 'smoker', 'calcium'", "1y"):
        assert said in done.err
    return run


@pytest.mark.ranks
def test_one_checkpoint_gives_one_table_and_one_summary(cli_here: Cli, trained: Path) -> None:
    found = set()
    for world in (1, 2, 4):
        done = cli_here("evaluate", trained, "--devices", world, "--name", f"on-{world}", "--json")
        assert done.code == 0, done.err
        table = (trained / "evaluations" / f"on-{world}" / "cases.csv").read_text()
        found.add((table, json.dumps(done.json["summary"])))
    assert len(found) == 1
    table, summary = found.pop()
    assert table == (trained / "cases.csv").read_text()
    assert json.loads(summary) == json.loads((trained / "metrics.json").read_text())["summary"]
    assert {"cindex/harrell", "cindex/uno", "auc/2y", "brier/2y", "brier/integrated"} <= json.loads(summary).keys()


def evaluated_and_predicted(tell: Cli, run: Path, cohort: Path, out: Path, *where: object) -> tuple[str, str]:
    """The tables that these two leave of a trained run."""
    evaluated = tell("evaluate", run, "--name", "afterwards", *where)
    assert evaluated.code == 0, evaluated.err
    predicted = tell("predict", run, cohort, "--out", out)
    assert predicted.code == 0, predicted.err
    return (run / "evaluations" / "afterwards" / "cases.csv").read_text(), out.read_text()


def test_what_is_predicted_is_what_was_evaluated(cli_here: Cli, trained: Path, cohort: Path, tmp_path: Path) -> None:
    out = tmp_path / "predicted.csv"
    evaluated, table = evaluated_and_predicted(cli_here, trained, cohort, out, "--devices", 2)
    predicted = {row["case"]: row for row in csv.DictReader(table.splitlines())}
    assert len(predicted) == 26
    assert evaluated == (trained / "cases.csv").read_text()
    for row in csv.DictReader(evaluated.splitlines()):
        for name in ("patient", "risk", "survival/1y", "survival/2y"):
            assert predicted[row["case"]][name] == row[name]
    again = cli_here("predict", trained, cohort, "--out", out)
    assert again.code == 2
    assert "is there already" in again.err


def test_what_cannot_be_predicted_or_written_is_known_at_once(
    cli_here: Cli, trained: Path, cohort: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "file").touch()
    for place in ("folder.csv", "file/p.csv"):
        done = cli_here("predict", trained, cohort, "--out", tmp_path / place, "--overwrite")
        assert (done.code, "found a place where no file can be" in done.err) == (2, True), done.err
    image = cohort.parent / "images" / "P001.nii.gz"
    done = cli_here("predict", trained, image, "--out", tmp_path / "p.csv")
    assert done.code == 2
    assert "found the image P001.nii.gz, expected a table of images" in done.err


def test_scores_of_a_run_are_those_of_scikit_survival_given_its_training_cases(
    cli_here: Cli, trained: Path, cohort: Path, tmp_path: Path
) -> None:
    """The baseline and the censoring distribution are of the cases that trained, and of no others."""
    done = cli_here("predict", trained, cohort, "--out", tmp_path / "predicted.csv")
    assert done.code == 0, done.err
    predicted = {row["case"]: row for row in csv.DictReader((tmp_path / "predicted.csv").open())}
    known = {row["patient"]: row for row in csv.DictReader(cohort.open())}
    cases, outcomes, risks = {}, {}, {}
    for part in ("train", "val"):
        split = csv.DictReader((trained / "split.csv").open())
        cases[part] = [row["case"] for row in split if row["split"] == part]
        rows = [known[case] for case in cases[part]]
        outcomes[part] = Surv.from_arrays([row["event"] == "1" for row in rows], [float(row["time"]) for row in rows])
        risks[part] = np.array([float(predicted[case]["risk"]) for case in cases[part]])
    train, val, risk = outcomes["train"], outcomes["val"], risks["val"]
    curves = BreslowEstimator().fit(risks["train"], train["event"], train["time"]).get_survival_function(risk)
    found = json.loads((trained / "metrics.json").read_text())["summary"]
    expected = {
        "cindex/harrell": concordance_index_censored(val["event"], val["time"], risk)[0],
        "cindex/uno": concordance_index_ipcw(train, val, risk, 5 * 365.25)[0],
    }
    for year in range(1, 6):
        at = year * 365.25
        survival = np.array([curve(at) for curve in curves])
        written = [float(predicted[case][f"survival/{year}y"]) for case in cases["val"]]
        assert written == pytest.approx(survival, rel=1e-6)
        expected[f"brier/{year}y"] = brier_score(train, val, survival, at)[1][0]
        expected[f"auc/{year}y"] = cumulative_dynamic_auc(train, val, risk, [at])[0][0]
    assert {name: found[name]["mean"] for name in expected} == pytest.approx(expected, rel=1e-6)


class Squares(torch.nn.Module):
    """Linear in the squares of a row's features, which overflow where a feature is huge."""

    def __init__(self, num_features: int, out_channels: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(num_features, out_channels)

    def forward(self, image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(features.square())
        return output


def build_squares(in_channels: int, num_features: int, out_channels: int) -> Squares:
    return Squares(num_features, out_channels)


@pytest.fixture(scope="module")
def overflowing(cli_here: Cli, write: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose network gives no finite number for a feature of 1e30."""
    run = tmp_path_factory.mktemp("overflowing") / "run"
    name = f"model={{name: '{__name__}:{build_squares.__name__}'}}"
    done = cli_here("train", write("survival"), name, "train.epochs=1", "--devices", 1, "--run", run)
    assert done.code == 0, done.err
    return run


def test_cases_that_cannot_be_predicted_are_listed_and_the_others_written(
    cli_here: Cli, overflowing: Path, cohort: Path, tmp_path: Path
) -> None:
    """A missing or damaged image, a bad cell, an unseen word, an output that is not finite: all alike."""

    def spoil(rows: list[dict[str, str]]) -> None:
        rows[0]["NIFTI path"] = "images/none.nii.gz"
        rows[1]["NIFTI path"] = "broken.nii.gz"
        rows[2].update(age="inf", smoker="weekly")
        rows[3]["age"] = "1e30"
        del rows[7:]

    out = tmp_path / "predicted.csv"
    table = edited(cohort, tmp_path / "bad", spoil)
    (table.parent / "broken.nii.gz").write_bytes(b"rubbish")
    done = cli_here("predict", overflowing, table, "--out", out)
    assert done.code == 3
    assert "4 of 7 cases could not be predicted; the others are written" in done.err
    for said in (
        "cohort.csv row 2: found no such file at 'images/none.nii.gz'",
        "broken.nii.gz: found",
        "cohort.csv row 4: found 'inf' in 'age', expected a finite number",
        "cohort.csv row 4: found 'weekly' in 'smoker'",
        "cohort.csv row 5: found inf as the output of the network, expected finite numbers",
    ):
        assert said in done.err
    assert "RuntimeWarning" not in done.err
    assert "data.columns.features" not in done.err, "which is settled for a trained run"
    written = list(csv.DictReader(out.open()))
    assert len(written) == 3
    assert all(math.isfinite(float(row["risk"])) for row in written)


def test_a_feature_without_its_column_refuses_the_whole_table(
    cli_here: Cli, trained: Path, cohort: Path, tmp_path: Path
) -> None:
    def spoil(rows: list[dict[str, str]]) -> None:
        for row in rows:
            row["ageing"] = row.pop("age")

    table, out = edited(cohort, tmp_path / "bad", spoil), tmp_path / "p.csv"
    done = cli_here("predict", trained, table, "--out", out)
    assert (done.code, out.exists()) == (3, False)
    assert done.err.count("found no column 'age'") == 1
    assert "did you mean 'ageing'?" in done.err
    assert "an empty cell" not in done.err


def test_images_and_features_are_enough_to_predict(cli_here: Cli, trained: Path, cohort: Path, tmp_path: Path) -> None:
    """Without ids, cases go by the names of their images; the run's config names a column of patients."""

    def strip(rows: list[dict[str, str]]) -> None:
        rows[:] = [{name: row[name] for name in ("NIFTI path", "age", "sex", "smoker", "calcium")} for row in rows[:3]]

    table, out = edited(cohort, tmp_path / "few", strip), tmp_path / "p.csv"
    done = cli_here("predict", trained, table, "--out", out)
    assert done.code == 0, done.err
    assert [row["patient"] for row in csv.DictReader(out.open())] == ["P001", "P002", "P003"]


def test_evaluating_cases_of_the_training_is_warned_of(cli_here: Cli, trained: Path, cohort: Path) -> None:
    training = [row for row in csv.DictReader((trained / "split.csv").open()) if row["split"] == "train"]
    done = cli_here("evaluate", trained, "--data", cohort, "--devices", 1, "--name", "seen")
    assert done.code == 0, done.err
    assert 0 < len(training) < 26
    assert done.err.count(f"warning: {len(training)} of 26 cases have the id of a training case, e.g. P0") == 1
    assert "have the id of a training case" not in cli_here("evaluate", trained).err


def test_evaluating_other_data_says_all_that_is_wrong_at_once(
    cli_here: Cli, trained: Path, cohort: Path, tmp_path: Path
) -> None:
    def spoil(rows: list[dict[str, str]]) -> None:
        for row, change in zip(rows, SPOILT, strict=False):
            row.update(change)

    table = edited(cohort, tmp_path / "bad", spoil)
    done = cli_here("evaluate", trained, "--data", table)
    assert done.code == 3
    for row, said in enumerate(("'-5'", "an empty cell", "'2'", "an empty cell", "'inf'", "no such file"), start=2):
        assert f"cohort.csv row {row}: found {said}" in done.err


def test_an_evaluation_with_an_output_that_is_not_finite_fails(
    cli_here: Cli, overflowing: Path, cohort: Path, tmp_path: Path
) -> None:
    table = edited(cohort, tmp_path / "bad", lambda rows: rows[3].update(age="1e30"))
    done = cli_here("evaluate", overflowing, "--data", table)
    assert done.code == 1
    spoilt = list(csv.DictReader(table.open()))[3]
    assert f"case {spoilt['patient']}: found inf as the output of the network" in done.err
    assert "RuntimeWarning" not in done.err


@pytest.mark.parametrize("held", ["test", "train"])
def test_without_validation_cases_the_last_model_predicts(
    held: str, cli_here: Cli, cohort: Path, write: Callable[[str], Path], tmp_path: Path
) -> None:
    """Warned of before anything trains; where nothing is held out at all, the baseline is kept nonetheless."""

    def rename(rows: list[dict[str, str]]) -> None:
        for row in rows:
            row["Fold_1"] = row["Fold_1"].replace("val", held)
        del rows[12:]

    table, run, out = edited(cohort, tmp_path / "own", rename), tmp_path / "run", tmp_path / "p.csv"
    words = ["train", write("survival"), f"data.source={table}", "train.epochs=1", "--devices", 1, "--run", run]
    done = cli_here(*words)
    assert done.code == 0, done.err
    assert "warning: data: found no validation cases: the last model is taken for the best" in done.err
    two = edited(cohort, tmp_path / "two", lambda rows: rows.__delitem__(slice(2, None)))
    predicted = cli_here("predict", run, two, "--out", out)
    assert predicted.code == 0, predicted.err
    assert predicted.err.count("its last, is taken") == 1
    assert {"risk", "survival/2y"} <= next(csv.DictReader(out.open())).keys()
    evaluated = cli_here("evaluate", run, "--split", held)
    assert evaluated.code == 0, evaluated.err
    assert "its last, is taken" in evaluated.err


@pytest.mark.ranks
def test_a_fold_without_an_event_to_validate_by_goes_on_with_its_last_model(
    cli_here: Cli, cohort: Path, write: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its metric is undefined throughout; the folds are brought together, evaluated and predict all the same."""

    def part(rows: list[dict[str, str]]) -> None:
        for row in rows:
            row.update(Fold_1="train", Fold_2="train")
        rows[0].update(Fold_1="test", Fold_2="test")
        rows[1].update(Fold_1="val", event="0")
        for row in rows[2:6]:
            row.update(Fold_2="val", event="1")

    table, root = edited(cohort, tmp_path / "own", part), tmp_path / "folds"
    split = "data.split={column: [Fold_1, Fold_2]}"
    words = [write("survival"), f"data.source={table}", split, "train.epochs=1", "--devices", 1]
    done = cli_here("train", *words, "--folds", "all", "--run", root, "--json")
    assert done.code == 0, done.err
    assert [fold["best"] is None for fold in done.json["folds"]] == [True, False]
    assert "fold-1: its metric was undefined whenever it validated, so none is best: step-00000003" in done.err
    predicted = cli_here("predict", root / "fold-1", table, "--out", tmp_path / "p.csv")
    assert predicted.code == 0, predicted.err
    assert len(list(csv.DictReader((tmp_path / "p.csv").open()))) == 26
    assert cli_here("evaluate", root / "fold-1").code == 0


def test_another_checkpoint_learns_its_own_baseline(cli_here: Cli, trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    (run / "learnt.json").unlink()
    done = cli_here("evaluate", run, "--devices", 1, "--json")
    assert done.code == 0, done.err
    assert done.json["summary"] == json.loads((trained / "metrics.json").read_text())["summary"]
    refused = cli_here("predict", run, tmp_path, "--out", tmp_path / "p.csv")
    assert refused.code == 2
    assert "has not kept" in refused.err


@pytest.mark.ranks
def test_an_encoder_goes_from_one_task_to_another(cli_here: Cli, write: Callable[[str], Path], tmp_path: Path) -> None:
    """Held for an epoch, it keeps its weights to the bit while the head trains; then both train."""
    source, held, freed = tmp_path / "source", tmp_path / "held", tmp_path / "freed"
    assert cli_here("train", write("regression"), "train.epochs=1", "--devices", 1, "--run", source).code == 0
    extra = [f"train.init_from={source}", "train.freeze={encoder: 1}", "log=epoch", "--devices", 1]
    stopped = cli_here("train", write("survival"), *extra, "train.stop_after={steps: 3}", "--run", held)
    assert stopped.code == 75, stopped.err
    (transfer,) = (event for event in read_events(held / "events.jsonl") if event["event"] == "transfer")
    assert (len(transfer["loaded"]), transfer["differing"], transfer["missing"]) == (60, [], [])
    start, after = (load_checkpoint(run / "checkpoints" / "last").model for run in (source, held))
    encoder = [name for name in start if name.startswith("encoder.")]
    assert all((start[name] == after[name]).all() for name in encoder)
    assert cli_here("train", write("survival"), *extra, "--run", freed).code == 0
    assert cli_here("train", write("survival"), *extra[:-1], 2, "--run", tmp_path / "of two").code == 0
    assert losses(tmp_path / "of two") == pytest.approx(losses(freed), rel=1e-4)
    other = cli_here("train", write("survival"), *extra, "model.width=8", "--run", tmp_path / "other")
    assert other.code == 2
    assert "train.init_from: found no layer that fits the encoder" in other.err
    assert not (tmp_path / "other").exists()
    source.rename(tmp_path / "moved")
    for _ in ("resumed", "done already"):
        again = cli_here("train", write("survival"), *extra, "--run", held)
        assert again.code == 0, again.err
    assert losses(held) == losses(freed), "interrupted as the freeze ended"
    end = load_checkpoint(held / "checkpoints" / "last").model
    assert any((start[name] != end[name]).any() for name in encoder)
    anew = cli_here("train", write("survival"), *extra, "--run", tmp_path / "anew")
    assert (anew.code, (tmp_path / "anew").exists()) == (2, False)
    assert f"train.init_from {source}: found nothing there" in anew.err


def edited(cohort: Path, folder: Path, change: Callable[[list[dict[str, str]]], None]) -> Path:
    """A copy of the table beside the images, changed."""
    rows = list(csv.DictReader(cohort.open()))
    change(rows)
    folder.mkdir()
    (folder / "images").symlink_to(cohort.parent / "images")
    with (folder / "cohort.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "cohort.csv"


def test_all_that_is_wrong_is_said_at_once(cli_here: Cli, cohort: Path, tmp_path: Path) -> None:
    def spoil(rows: list[dict[str, str]]) -> None:
        rows[0]["time"] = "-5"
        rows[1]["time"] = ""
        rows[2]["event"] = "2"
        rows[3]["age"] = "inf"
        rows[4]["NIFTI path"] = "images/none.nii.gz"
        rows[15]["NIFTI path"] = "cut.nii.gz"
        held_out = next(row for row in rows if row["Fold_1"] == "val")
        held_out["smoker"] = "weekly"

    table = edited(cohort, tmp_path / "bad", spoil)
    whole = (cohort.parent / "images" / "P016.nii.gz").read_bytes()
    (table.parent / "cut.nii.gz").write_bytes(whole[: len(whole) // 2])
    features = "data.columns.features=[age, sex, smoker, calcium]"
    done = cli_here("train", table, features, "--run", tmp_path / "run")
    assert done.code == 3
    for said in (
        "row 2: found '-5' in 'time', expected a time of 0 or more",
        "row 3: found an empty cell in 'time'",
        "row 4: found '2' in 'event', expected 0 (censored) or 1 (event)",
        "row 5: found 'inf' in 'age', expected a finite number",
        "row 6: found no such file at 'images/none.nii.gz'",
        "found 'weekly' in 'smoker', expected one that a training case has: 'former', 'no', 'yes'",
        "row 17: cut.nii.gz: found",
    ):
        assert done.err.count(said) == 1
    assert not (tmp_path / "run").exists()
    diagnosed = cli_here("doctor", table, features, "--json")
    assert diagnosed.code == 3
    codes = [finding["code"] for finding in diagnosed.json["findings"]]
    assert sorted(codes) == sorted(
        ["bad-outcome"] * 3 + ["bad-feature", "missing-file", "unseen-category", "unreadable"]
    )


def test_a_job_is_not_queued_for_a_table_at_fault(cohort: Path, write: Callable[[str], Path], tmp_path: Path) -> None:
    def spoil(rows: list[dict[str, str]]) -> None:
        for row, change in zip(rows, SPOILT, strict=False):
            row.update(change)

    table = edited(cohort, tmp_path / "bad", spoil)
    config = read_config(write("survival"), [f"data.source={table}"])
    with pytest.raises(DataError) as refused:
        is_prepared(config, {"HOME": str(tmp_path)})
    for row, said in enumerate(("'-5'", "an empty cell", "'2'", "an empty cell", "'inf'", "no such file"), start=2):
        assert f"cohort.csv row {row}: found {said}" in refused.value.message


def torn(rows: list[dict[str, str]]) -> None:
    rows[1].update(patient=rows[0]["patient"], Fold_1=_other(rows[0]["Fold_1"]))


def of_none(rows: list[dict[str, str]]) -> None:
    for row in rows:
        row["Fold_1"] = "holdout"


def mistyped(rows: list[dict[str, str]]) -> None:
    rows[0]["Fold_1"] = "vall"
    rows[1]["Fold_1"] = ""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (torn, [rf"patient P001: found in train \({IN_ROW}\) and val \({IN_ROW}\), expected in one split only"]),
        (of_none, [f"Fold_1: found 'holdout', expected {ROLES}: cases {IN_ROW}, .* and 5 more"]),
        (mistyped, [f"Fold_1: found {what}, expected {ROLES}: cases {IN_ROW}" for what in ("no entry", "'vall'")]),
    ],
)
def test_a_split_at_fault_hides_nothing_else(
    spoil: Callable[[list[dict[str, str]]], None], said: list[str], cli_here: Cli, cohort: Path, tmp_path: Path
) -> None:
    def spoil_more(rows: list[dict[str, str]]) -> None:
        spoil(rows)
        for row, change in zip(rows[10:], SPOILT, strict=False):
            row.update(change)

    table = edited(cohort, tmp_path / "bad", spoil_more)
    cells = ("'-5'", "an empty cell", "'2'", "an empty cell", "'inf'", "no such file")
    expected = [*said, *(f"cohort.csv row {row}: found {cell}" for row, cell in enumerate(cells, start=12))]
    features = ["age", "sex", "smoker", "calcium"]
    given = f"data.columns.features=[{', '.join(features)}]"
    done = cli_here("train", table, given, "--run", tmp_path / "run")
    with pytest.raises(DataError) as refused:
        survival_cases(table, fold="Fold_1", features=features)
    diagnosed = cli_here("doctor", table, given)
    assert (done.code, diagnosed.code) == (3, 3)
    for text in (done.err, refused.value.message, diagnosed.out):
        assert [line for line in expected if not re.search(line, text)] == []


@pytest.mark.parametrize(
    ("change", "said", "code"),
    [
        (lambda rows: [row.update(event="0") for row in rows], "no event in", 3),
        (lambda rows: [row.update(Fold_1="holdout") for row in rows], "Fold_1", 3),
        (
            lambda rows: rows[1].update(patient=rows[0]["patient"], Fold_1=_other(rows[0]["Fold_1"])),
            "expected in one split only",
            3,
        ),
    ],
    ids=["all censored", "a fold that selects nothing", "a patient in two folds"],
)
def test_cohorts_that_cannot_train(
    change: Callable[[list[dict[str, str]]], None],
    said: str,
    code: int,
    cli_here: Cli,
    cohort: Path,
    tmp_path: Path,
    write: Callable[[str], Path],
) -> None:
    table = edited(cohort, tmp_path / "bad", change)
    done = cli_here("train", write("survival"), f"data.source={table}", "--run", tmp_path / "run")
    assert (done.code, said in done.err) == (code, True), done.err
    assert not (tmp_path / "run").exists()


def _other(role: str) -> str:
    return "val" if role == "train" else "train"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("data.columns.time=tmie", "did you mean 'time'?"),
        (
            "data.columns.features=[aeg]",
            "data.columns.features: found no column 'aeg', expected one of the table; did you mean 'age'?\n",
        ),
        ("validate.horizons=[1y, 30y]", "found 30y, which is 10957.5 days"),
        ("validate.horizons=[year]", "expected a number and a unit of d, w, m or y"),
        ("validate.metric=brier/2y", "as the others are measured of the best model alone"),
        ("loss.name=mse", "loss: found mse, expected cox for survival"),
        ("train.batch=1", "train.batch: found 1 over all devices, expected 2 or more, as loss cox compares the cases"),
        ("train.batch={per_device: 1}; train.devices=1", "train.batch: found 1 over all devices"),
        ("train.init_from=nowhere", "nowhere: found nothing there, expected a run that has trained"),
        ("train.freeze={encoder: 3}", "found 3 epochs of 3; expected fewer"),
        ("data.regions={a: [1]}", "expected with segmentation alone"),
        (
            f"model={{name: '{__name__}:build_squares'}}; train.freeze={{encoder: 1}}",
            "train.freeze: found a network without a part called encoder, expected one",
        ),
    ],
)
def test_configs_that_do_not_fit(
    fields: str, said: str, cli_here: Cli, write: Callable[[str], Path], tmp_path: Path
) -> None:
    done = cli_here("train", write("survival"), *fields.split("; "), "--run", tmp_path / "run")
    assert done.code in (2, 3)
    assert said in done.err
    assert not (tmp_path / "run").exists()


def test_a_changed_table_is_not_trained_on_unnoticed(
    cli_here: Cli, cohort: Path, write: Callable[[str], Path], tmp_path: Path
) -> None:
    table = edited(cohort, tmp_path / "own", lambda rows: None)
    words = [write("survival"), f"data.source={table}", "--devices", 1, "--run", tmp_path / "run"]
    assert cli_here("train", *words, "train.stop_after={steps: 2}").code == 75
    table.write_text(table.read_text().replace(",1,", ",0,", 1))
    done = cli_here("train", *words)
    assert done.code == 3
    assert "the table says otherwise since the run began" in done.err
    assert "cohort.csv row " in done.err
    assert "found 0 in 'event', expected 1" in done.err


@pytest.fixture(scope="module")
def of_two(cli_here: Cli, write: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A survival, trained by two ranks of this machine."""
    run = tmp_path_factory.mktemp("two") / "run"
    assert cli_here("train", write("survival"), "--devices", 2, "--run", run).code == 0
    return run


def assert_same_training(run: Path, other: Path) -> None:
    assert losses(run) == losses(other)
    assert (run / "cases.csv").read_bytes() == (other / "cases.csv").read_bytes()
    found = [json.loads((each / "metrics.json").read_text()) for each in (run, other)]
    assert found[0]["summary"] == found[1]["summary"]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


def test_two_nodes_of_slurm_train_as_two_devices_do(
    idle_slurm: SlurmLab, cli: Cli, write: Callable[[str], Path], of_two: Path, tmp_path: Path
) -> None:
    site = tmp_path / "lab.yaml"
    site.write_text("cpus_per_device: 1\n")
    where = ["--on", "slurm", "--site", site, "--nodes", 2, "--devices", 1]
    done = cli("train", write("survival"), *where, "--run", tmp_path / "run", env=idle_slurm.environ)
    assert done.code == 0, done.err
    assert_same_training(tmp_path / "run", of_two)


def test_two_nodes_of_ray_train_as_two_devices_do(
    ray_cluster: RayLab, seat: Seat, write: Callable[[str], Path], of_two: Path
) -> None:
    where = ["--on", "ray", "--nodes", "2", "--devices", "1"]
    done = seat.run("train", write("survival"), *where, "--run", "cox-on-ray", **ray_cluster.environ)
    assert done.code == 0, done.err
    assert_same_training(seat.folder / "cox-on-ray", of_two)


@pytest.mark.cluster
def test_folds_of_a_cohort_are_an_array(
    idle_slurm: SlurmLab, cli: Cli, write: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each column is one fold; what a fold learns from its training rows, another does not see."""
    site = tmp_path / "lab.yaml"
    site.write_text("cpus_per_device: 1\n")
    words = ["train", write("survival"), "data.split={column: [Fold_1, Fold_2]}", "--devices", 1, "--folds", "all"]
    done = cli(*words, "--on", "slurm", "--site", site, "--run", tmp_path / "there", "--json", env=idle_slurm.environ)
    assert done.code == 0, done.err
    here = cli(*words, "--run", tmp_path / "here", "--json")
    assert here.code == 0, here.err
    for fold in ("fold-1", "fold-2"):
        assert_same_training(tmp_path / "there" / fold, tmp_path / "here" / fold)
    encodings = {(tmp_path / "there" / fold / "encoding.json").read_text() for fold in ("fold-1", "fold-2")}
    assert len(encodings) == 2
    assert done.json["summary"] == here.json["summary"]


@pytest.mark.cluster
@pytest.mark.ray
def test_a_search_goes_where_its_metric_is_better(
    ray_cluster: RayLab, seat: Seat, write: Callable[[str], Path]
) -> None:
    """TPE and ASHA on a metric of which less is better, though no mode is set."""
    space = {"optimizer.lr": {"loguniform": [1e-4, 1e-2]}}
    section = {"metric": "mae/age", "sampler": "tpe", "trials": 4, "scheduler": "asha", "space": space}
    content = safe_load(write("regression").read_text())
    config = seat.folder / "search-outcome.yaml"
    config.write_text(safe_dump({**content, "search": section}))
    done = seat.run("search", config, "--run", "of-outcome", "--json", **ray_cluster.environ)
    assert done.code == 0, done.err
    rows = list(csv.DictReader((seat.folder / "of-outcome" / "trials.csv").open()))
    assert len(rows) == 4
    values = {row["trial"]: float(row["mae/age"]) for row in rows if row["state"] == "done"}
    assert done.json["best"]["value"] == min(values.values()) < max(values.values())
    assert done.json["mode"] == "min"
    best = seat.run("train", "of-outcome/best.yaml", "--run", "best-of-outcome", "--json")
    assert best.code == 0, best.err
    assert best.json["best"]["value"] == done.json["best"]["value"]


@pytest.mark.cluster
@pytest.mark.parametrize("depth", [34, 50, 101, 152])
def test_every_depth_trains(depth: int, cli_here: Cli, write: Callable[[str], Path], tmp_path: Path) -> None:
    """At its own width, on two ranks; all cases are in every batch, so the loss falls."""
    fields = ["model.width=64", f"model.depth={depth}", "model.groups=8", "optimizer={name: adamw, lr: 1e-3}"]
    fields += ["train.epochs=5", "train.batch=20"]
    done = cli_here("train", write("survival"), *fields, "--devices", 2, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    first, *_, last = losses(tmp_path / "run")
    assert last < first
