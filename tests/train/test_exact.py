"""`train.deterministic: exact`: one model, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from yaml import safe_dump

from conftest import Cli, tiny_config
from lab.ray import RayLab, Seat
from lab.slurm import SlurmLab
from voxscale.files import read_json

# Nine cases of two patches: the last batch of an epoch has two samples, so that of four ranks two have none.
FIELDS: dict[str, Any] = {"train__deterministic": "exact", "train__epochs": 2, "train__batch": 4, "model__dropout": 0.1}


def outcome(run: Path) -> tuple[str, Any, str]:
    """What every world has to agree on."""
    metrics = read_json(run / "metrics.json")
    return metrics["weights_sha256"], (metrics["best"], metrics["summary"]), (run / "cases.csv").read_text()


@pytest.fixture(scope="module")
def alone(cli_here: Cli, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    run, config = folder / "run", folder / "exact.yaml"
    config.write_text(safe_dump(tiny_config(dataset, **FIELDS)))
    done = cli_here("train", config, "--devices", 1, "--run", run)
    assert done.code == 0, done.err
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "what is not deterministic is refused"
    return run


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.cluster)])
def test_ranks_train_the_very_same_model(
    world: int, alone: Path, cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    done = cli_here("train", write_config(**FIELDS), "--devices", world, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    assert outcome(tmp_path / "run") == outcome(alone)


@pytest.mark.ranks
def test_a_run_may_go_on_with_other_ranks(
    alone: Path, cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, run = write_config(**FIELDS), tmp_path / "run"
    for world, until in ((2, {"steps": 3}), (1, {"steps": 4}), (4, "null")):
        done = cli_here("train", config, f"train.stop_after={until}", "--devices", world, "--run", run)
        assert done.code == (0 if world == 4 else 75), done.err
    assert outcome(run) == outcome(alone)


def test_it_is_the_model_that_is_trained_else(
    alone: Path, cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Only roundings differ from the usual step with micro-batches of one."""
    config = write_config(
        **{**FIELDS, "train__deterministic": True, "train__micro_batch": 1, "train__precision": "fp32"}
    )
    assert cli_here("train", config, "--devices", 1, "--run", tmp_path / "run").code == 0
    usual, exact = (read_json(run / "metrics.json")["best"]["value"] for run in (tmp_path / "run", alone))
    assert usual == pytest.approx(exact, rel=1e-4)


def test_what_cannot_be_exact_is_refused(cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path) -> None:
    fields = {"model__norm": "batch", "train__micro_batch": 2, "data__cache": {"share": "rank", "where": "host"}}
    done = cli_here("train", write_config(**FIELDS, **fields), "--run", tmp_path / "run")
    assert done.code == 2
    for what in ("model.norm: found batch", "train.micro_batch: found 2", "data.cache.share: found rank"):
        assert f"{what}, which train.deterministic: exact cannot have" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.cluster
def test_slurm_trains_the_very_same_model(
    alone: Path, idle_slurm: SlurmLab, cli: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    site = tmp_path / "lab.yaml"
    site.write_text("cpus_per_device: 1\n")
    where = ["--on", "slurm", "--site", site, "--nodes", 2, "--devices", 2]
    done = cli("train", write_config(**FIELDS), *where, "--run", tmp_path / "run", env=idle_slurm.environ)
    assert done.code == 0, done.err
    assert outcome(tmp_path / "run") == outcome(alone)


@pytest.mark.cluster
@pytest.mark.ray
def test_ray_trains_the_very_same_model(
    alone: Path, ray_cluster: RayLab, seat: Seat, write_config: Callable[..., Path]
) -> None:
    where = ["--on", "ray", "--nodes", "2", "--devices", "1"]
    done = seat.run("train", write_config(**FIELDS), *where, "--run", "exact-on-ray", **ray_cluster.environ)
    assert done.code == 0, done.err
    assert outcome(seat.folder / "exact-on-ray") == outcome(alone)
