"""Precision, layout and compilation: each trains, each continues where it stopped, and `auto` is settled once."""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch._inductor.runtime.cache_dir_utils import cache_dir

from conftest import Cli, Finished, tiny_config
from voxscale.checkpoint import digest_of, load_checkpoint
from voxscale.errors import InfrastructureError, StoppedEarly
from voxscale.train import probe
from voxscale.train.compute import Compute
from voxscale.train.events import read_events

STEPS = 4
# Some virtual machines announce matrix units that they do not let through; oneDNN then ends the process.
WITHOUT_MATRIX_UNITS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}


@pytest.fixture
def train(dataset: Path, tmp_path: Path, cli_here: Cli) -> Callable[..., Path]:
    """Train a few steps into a folder; how it was computed comes as fields of `train`."""

    def start(name: str, cli: Callable[..., Finished] = cli_here, steps: int = STEPS, **how: Any) -> Path:
        config = tmp_path / f"{name}.yaml"
        fields = {f"train__{field}": value for field, value in how.items()}
        content = tiny_config(dataset, **fields, train__stop_after={"steps": steps}, log="quiet", track="none")
        config.write_text(yaml.safe_dump(content))
        done = cli("train", config, "--devices", 1, "--run", tmp_path / name)
        assert done.code == 75, done.err
        return tmp_path / name

    return start


def test_compiled_code_is_kept_where_others_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler unpickles what it finds; by itself it looks in a folder that anyone can make."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "voxscale" / "compiled" / platform.node()
    folder.mkdir(mode=0o777, parents=True)
    network = torch.nn.Linear(1, 1)
    Compute(torch.device("cpu")).trainable(network)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == ""
    Compute(torch.device("cpu"), compile=True).trainable(network)
    assert cache_dir() == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/users/choice")
    Compute(torch.device("cpu"), compile=True).trainable(network)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/the/users/choice"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InfrastructureError, match="compiled code cannot be kept there"):
        Compute(torch.device("cpu"), compile=True).trainable(network)


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["event"] == "train"]


def weights(run: Path) -> str:
    """Of the last step; roundings show here before they show in a loss."""
    return digest_of(load_checkpoint(run / "checkpoints" / "last").model)


def settings(run: Path) -> list[Any]:
    config = yaml.safe_load((run / "config.yaml").read_text())["train"]
    return [config[name] for name in ("precision", "channels_last", "compile")]


@pytest.mark.parametrize(
    ("how", "tolerance"),
    [({"precision": "fp16"}, 1e-2), ({"channels_last": True}, 1e-4), ({"compile": True}, 1e-4)],
    ids=["half precision", "channels last", "compiled"],
)
def test_each_way_trains_the_same(train: Callable[..., Path], how: dict[str, Any], tolerance: float) -> None:
    plain, other = train("plain"), train("other", **how)
    assert losses(other) == pytest.approx(losses(plain), rel=tolerance)
    assert weights(other) != weights(plain), "it was computed the plain way"


def test_bf16_trains_the_same(train: Callable[..., Path], cli: Cli) -> None:
    def elsewhere(*arguments: object) -> Finished:
        return cli(*arguments, env=WITHOUT_MATRIX_UNITS)

    plain, other = train("plain"), train("other", elsewhere, precision="bf16")
    assert losses(other) == pytest.approx(losses(plain), rel=3e-2)
    assert losses(other) != losses(plain)


def test_half_precision_continues_with_its_scale(train: Callable[..., Path]) -> None:
    whole = train("whole", precision="fp16")
    for steps in (1, STEPS - 1):
        parts = train("parts", steps=steps, precision="fp16")
    first, second = (load_checkpoint(run / "checkpoints" / "last") for run in (whole, parts))
    assert digest_of(first.model) == digest_of(second.model)
    assert first.state["scaler"] == second.state["scaler"]
    assert first.state["scaler"]["_growth_tracker"] == STEPS, "no step was left out, all are counted"


def test_auto_is_settled_once(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, cli_here: Cli) -> None:
    """Measured where training is long, written into the config, and kept by a run that was killed on the way."""
    run = train("short")
    assert settings(run) == ["fp32", False, False]
    monkeypatch.setattr(probe, "_WORTH_MEASURING_S", 0.0)
    run = train("long", steps=1, channels_last=True)
    precision, channels_last, compiled = settings(run)
    assert precision in ("fp32", "bf16")
    assert (channels_last, compiled) == (True, False), "what is stated is kept; compiling is not worth it here"
    settled = (run / "config.yaml").read_text()
    asked = run.with_name("asked")
    assert cli_here("train", run.with_suffix(".yaml"), "--no-start", "--devices", 1, "--run", asked).code == 0
    assert settings(asked) == ["auto", True, "auto"]
    (run / "plan.json").write_bytes((asked / "plan.json").read_bytes())  # as if killed between the two files
    train("long", steps=1, channels_last=True)
    assert (run / "config.yaml").read_text() == settled
    changed = settled.replace(f"precision: {precision}", "precision: fp16")
    (run / "config.yaml").write_text(changed)
    done = cli_here("train", run.with_suffix(".yaml"), "--devices", 1, "--run", run)
    assert (done.code, "changed since the run was made" in done.err) == (2, True)


def test_a_step_of_many_passes_counts_as_long_as_it_takes(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a micro-batch of one patch a step of four takes four times as long as what is timed."""
    job = probe.open_job(probe.RunFolder(train("run", steps=1, micro_batch=1)), probe.World(), {})
    unsettled = job.config.train.model_copy(update={"channels_last": "auto"})
    job = replace(job, config=job.config.model_copy(update={"train": unsettled}))
    assert job.plan.accumulate == 4
    monkeypatch.setattr(probe, "_measure", lambda *_, **__: 1.0)
    monkeypatch.setattr(probe, "_measure_apart", lambda *_, **__: 1.0)
    for limit, worth in ((4 * job.plan.num_steps - 1, True), (4 * job.plan.num_steps + 1, False)):
        monkeypatch.setattr(probe, "_WORTH_MEASURING_S", limit)
        _, tried = probe.choose_compute(job, {}, None, probe.Pace(job.world, job.device))
        assert bool(tried) == worth


def test_what_ends_its_process_is_not_chosen(
    train: Callable[..., Path], run_python: Callable[..., Finished], tmp_path: Path
) -> None:
    run = train("run", steps=1)
    job = probe.open_job(probe.RunFolder(run), probe.World(), {})
    way = probe.Compute(job.device)
    assert 0 < probe._measure_apart(job, way, {}) < 60
    assert probe._measure_apart(job, way, {"PYTHONPATH": str(_broken(tmp_path))}) == float("inf")
    of_another = {"VOXSCALE_PARENT": "1"}
    orphan = run_python("-m", "voxscale.train.probe", run, "--micro-batch", 1, env=of_another)
    assert orphan.code == -signal.SIGKILL, "it does not outlive the rank that it was started for"


def test_a_signal_ends_the_trying_and_nothing_is_settled(
    train: Callable[..., Path], cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = train("run", steps=1).with_name("asked")
    assert cli_here("train", tmp_path / "run.yaml", "--no-start", "--devices", 1, "--run", asked).code == 0
    before = (asked / "config.yaml").read_text()
    assert "precision: auto" in before
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(probe, "_WORTH_MEASURING_S", 0.0)
    job = probe.open_job(probe.RunFolder(asked), probe.World(), {})
    stop = probe.StopRequest(None)
    began = time.monotonic()
    with stop.on_signals(), pytest.raises(StoppedEarly, match="nothing was trained yet"):
        threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGTERM]).start()
        probe.settle(job, {"PYTHONPATH": str(tmp_path)}, stop)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert time.monotonic() - began < 20
    assert (asked / "config.yaml").read_text() == before


def _broken(folder: Path) -> Path:
    """A place from which Python starts something that dies."""
    (folder / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    return folder


FAULTS = """
import resource, sys, torch
from voxscale.train.compute import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
network = torch.nn.Sequential(*(torch.nn.Conv3d(channels, 8, 3, padding=1) for channels in (1, 8, 8)))
image = torch.zeros(1, 1, 112, 112, 112)  # layers of 45 MB, more than glibc keeps by itself
def step():
    before = faults()
    network(image).sum().backward()
    return faults() - before
print(min(step() for _ in range(9)))  # which thread frees first may spread the heap once more, in any one step
"""


def test_freed_memory_is_used_again(run_python: Callable[..., Finished]) -> None:
    """Later steps of training cost no new pages."""
    kept, plain = (int(run_python("-c", FAULTS, way).out) for way in ("kept", "plain"))
    assert kept < 1_000 < 100_000 < plain
