"""Checkpoints: whole, verified, without pickle, with the generation before as a way back."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from syncs import DiskLog
from voxscale.checkpoint import (
    BadCheckpointError,
    Checkpoint,
    _manifest,
    digest_of,
    load_checkpoint,
    load_last,
    save_checkpoint,
    set_aside_newer,
)
from voxscale.errors import DataError, InfrastructureError
from voxscale.runs import RunFolder


def make_checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    model = {"b": torch.randn(3, 4, generator=generator), "a": torch.tensor(2.0), "empty": torch.empty(0)}
    optimizer = {"0.exp_avg": torch.randn(3, 4, generator=generator)}
    return Checkpoint(model, optimizer, {"step": step, "best": None, "wall_s": 1.25})


def _change_state(folder: Path, state: bytes) -> None:
    """Under a manifest that fits."""
    (folder / "state.json").write_bytes(state)
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    sums = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in sorted(contents.items())}
    (folder / "manifest.json").write_bytes(_manifest(sums))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_what_is_saved_is_loaded(run: RunFolder) -> None:
    saved = make_checkpoint(7)
    loaded = load_checkpoint(save_checkpoint(run, saved, keep=2, is_best=True))
    assert digest_of(loaded.model) == digest_of(saved.model)
    assert digest_of(loaded.optimizer) == digest_of(saved.optimizer)
    assert loaded.state == saved.state
    assert run.last.resolve() == run.best.resolve() == run.checkpoint(7)


def test_it_is_on_disk_before_anything_names_it(run: RunFolder, disk_log: DiskLog) -> None:
    folder = save_checkpoint(run, make_checkpoint(1), keep=1, is_best=True)
    assert len(list(folder.iterdir())) == 4
    for path in (folder, run.last, run.best):
        disk_log.expect_published(path)
    assert ("sync", run.root, ["checkpoints"]) in disk_log.entries, "the first has a folder of its own made for it"


def test_those_who_may_see_the_folder_may_read_all_of_it(run: RunFolder) -> None:
    folder = save_checkpoint(run, make_checkpoint(1), keep=1, is_best=False)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(modes.values()) == {folder.stat().st_mode & 0o666}, modes


def test_keeps_the_newest_and_the_best(run: RunFolder) -> None:
    for step in range(1, 7):
        save_checkpoint(run, make_checkpoint(step), keep=2, is_best=step == 2)
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == [
        "step-00000002",
        "step-00000005",
        "step-00000006",
    ]
    assert run.best.resolve().name == "step-00000002"


def test_every_mutation_of_every_file_is_detected(run: RunFolder, tmp_path: Path) -> None:
    folder = save_checkpoint(run, make_checkpoint(1), keep=1, is_best=False)
    rng = random.Random(0)
    for _ in range(400):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        path = rng.choice(sorted(copy.iterdir()))
        content = bytearray(path.read_bytes())
        match rng.choice(("flip", "cut", "grow", "swap")):
            case "flip":
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case "cut":
                del content[rng.randrange(len(content)) :]
            case "grow":
                content += b"\0"
            case _:
                at = rng.randrange(len(content) - 1)
                content[at : at + 2] = content[at + 1], (content[at] + 1) % 256
        path.write_bytes(content)
        with pytest.raises(BadCheckpointError):
            load_checkpoint(copy)
        shutil.rmtree(copy)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_damage_is_named_and_the_generation_before_is_used(run: RunFolder, name: str) -> None:
    save_checkpoint(run, make_checkpoint(1), keep=2, is_best=False)
    newest = save_checkpoint(run, make_checkpoint(2), keep=2, is_best=False)
    (newest / name).write_bytes(b"x" + (newest / name).read_bytes()[1:])
    warnings: list[str] = []
    loaded = load_last(run, warnings.append)
    assert loaded is not None
    assert loaded.step == 1
    assert len(warnings) == 1
    assert name in warnings[0]
    assert "falling back" in warnings[0]


def test_generations_are_told_by_step_whatever_clocks_say(run: RunFolder) -> None:
    for step in (1, 2, 3):
        folder = save_checkpoint(run, make_checkpoint(step), keep=2, is_best=step == 1)
        for path in (folder, *folder.iterdir()):
            os.utime(path, (2e9 - 1e8 * step,) * 2)  # each looks three years older than the one before
    assert [path.name for path in sorted(run.checkpoints.glob("step-*"))] == [
        f"step-0000000{step}" for step in (1, 2, 3)
    ]
    save_checkpoint(run, make_checkpoint(4), keep=2, is_best=False)
    assert {path.name[-1] for path in run.checkpoints.glob("step-*")} == {"1", "3", "4"}, "the best, and the newest two"
    (run.checkpoint(4) / "state.json").unlink()
    loaded = load_last(run, lambda text: None)
    assert loaded is not None
    assert loaded.step == 3


def test_what_was_just_saved_outlives_a_damaged_newer_one(run: RunFolder) -> None:
    damaged = save_checkpoint(run, make_checkpoint(4), keep=1, is_best=False)
    (damaged / "model.safetensors").write_bytes(b"")
    save_checkpoint(run, make_checkpoint(2), keep=1, is_best=False)
    loaded = load_last(run, pytest.fail)
    assert loaded is not None
    assert loaded.step == 2
    assert run.last.resolve().exists()
    assert not damaged.exists()


def test_where_none_is_whole_nothing_begins_anew_by_itself(run: RunFolder) -> None:
    for step in (1, 2):
        (save_checkpoint(run, make_checkpoint(step), keep=2, is_best=False) / "model.safetensors").write_bytes(b"")
    with pytest.raises(BadCheckpointError, match=r"step-00000002: .* damaged, and so are all 1 before it") as refused:
        load_last(run, lambda text: None)
    assert "--fresh" in refused.value.fix


def test_a_damaged_one_does_not_count_as_kept(run: RunFolder) -> None:
    for step in (1, 2):
        damaged = save_checkpoint(run, make_checkpoint(step), keep=2, is_best=False)
    (damaged / "state.json").write_bytes(b"{}")
    set_aside_newer(run, 1)
    assert run.last.resolve() == run.checkpoint(1)
    assert (run.checkpoints / "damaged-00000002" / "state.json").read_bytes() == b"{}", "until another is safe"
    save_checkpoint(run, make_checkpoint(3), keep=2, is_best=False)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["last", "step-00000001", "step-00000003"]


def test_what_may_be_whole_is_not_passed_over(run: RunFolder) -> None:
    """Of another version, or on a file system that does not answer."""
    for step in (1, 2):
        newest = save_checkpoint(run, make_checkpoint(step), keep=2, is_best=False)
    _change_state(newest, (newest / "state.json").read_bytes().replace(b'"schema":1', b'"schema":2'))
    with pytest.raises(DataError, match="another version of voxscale: found schema 2, expected 1"):
        load_last(run, pytest.fail)
    (newest / "state.json").unlink()
    (newest / "state.json").symlink_to("state.json")
    with pytest.raises(InfrastructureError, match="step-00000002: could not be read: Too many levels"):
        load_last(run, pytest.fail)


@pytest.mark.parametrize(
    "state", [b"[1]", b"{}", b'{"schema":1}', b'{"schema":1,"step":7}', pytest.param(b"[" * 10**5, id="deep")]
)
def test_a_state_that_is_none_is_damage(run: RunFolder, state: bytes) -> None:
    """Even under a manifest that fits: the last is of another step, a folder under a wrong name."""
    folder = save_checkpoint(run, make_checkpoint(1), keep=1, is_best=False)
    _change_state(folder, state)
    with pytest.raises(BadCheckpointError, match=r"last: (state.json does not hold|holds step-00000007)"):
        load_checkpoint(run.last)


def test_a_new_run_has_none(run: RunFolder) -> None:
    assert load_last(run, pytest.fail) is None


def test_a_folder_that_cannot_be_written_says_what_it_needs() -> None:
    run = RunFolder(Path("/proc/voxscale"))
    with pytest.raises(InfrastructureError, match=r"it needs [\d,]+ bytes, [\d,]+ are free"):
        save_checkpoint(run, make_checkpoint(1), keep=1, is_best=False)


@pytest.mark.parametrize("elements", [20_000, 40_000], ids=["not for both", "not for the model"])
def test_a_full_disk_leaves_the_one_before_and_says_what_is_free(small_disk: Path, elements: int) -> None:
    """Tensors are written by a library, which says in words alone what went wrong."""
    run = RunFolder(small_disk / "run")
    save_checkpoint(run, make_checkpoint(1), keep=2, is_best=False)
    weights = {"weight": torch.zeros(elements)}
    with pytest.raises(InfrastructureError) as caught:
        save_checkpoint(run, Checkpoint(weights, weights, {"step": 2}), keep=2, is_best=False)
    said = rf"No space left on device; it needs {8 * elements:,} bytes, [0-9,]+ are free. The checkpoint before it is"
    assert re.search(said, caught.value.message)
    found = load_last(run, pytest.fail)
    assert found is not None
    assert found.step == 1
    assert not list(run.checkpoints.glob(".*.tmp"))


def test_digest_depends_on_names_and_values_only() -> None:
    one = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(1)}
    other_layout = {"b": torch.ones(1), "a": torch.arange(6.0).reshape(2, 3).T.contiguous().T}
    assert digest_of(one) == digest_of(other_layout)
    assert digest_of(one) != digest_of({**one, "b": torch.zeros(1)})
