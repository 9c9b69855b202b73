"""The ladder climbs: every rung trains, all rungs train the same, and a snapshot continues the right training."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import REPOSITORY, Finished
from lab.slurm import SlurmLab, until

LADDER = REPOSITORY / "examples" / "ladder"
SINGLE = [LADDER / "1_single.py"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
RUNGS = {
    "single": SINGLE,
    "spawn": [LADDER / "2_spawn.py", "--ranks", "2"],
    "torchrun": [*TORCHRUN, "2", LADDER / "3_torchrun.py"],
}
RunPython = Callable[..., Finished]

# Dies by the kernel's hand at byte LIMIT of a save, for each LIMIT in turn; one process imports torch for all.
DIE_WHILE_SAVING = """
import argparse, os, pathlib, resource, signal, sys
sys.path.insert(0, sys.argv[1])
import blobs, torch
options = argparse.Namespace(batch=32, lr=3e-3, seed=0, snapshot=pathlib.Path(sys.argv[2]))
model = blobs.build_model(0)
optimizer = torch.optim.Adam(model.parameters())
for limit in map(int, sys.argv[3:]):
    child = os.fork()
    if not child:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        blobs.save_snapshot(options, model, optimizer, epoch=99)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^epoch .* loss (\S+)", out, re.MULTILINE)]


def accuracies(out: str) -> list[float]:
    return [float(accuracy) for accuracy in re.findall(r"test accuracy (\S+) of 256$", out, re.MULTILINE)]


def weights(snapshot: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(snapshot, weights_only=True)["model"])


@pytest.fixture(scope="module")
def blobs() -> Any:
    spec = importlib.util.spec_from_file_location("blobs", LADDER / "blobs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Straight = tuple[str, Path]


def climb(run_python: RunPython, folder: Path, rung: str) -> Straight:
    done = run_python(*RUNGS[rung], 3, 2, "--snapshot", folder / "straight.pt")
    assert done.code == 0, done.err
    return done.out, folder / "straight.pt"


@pytest.fixture(scope="module")
def straight(run_python: RunPython, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Three epochs of rung 1 without interruption: what it printed, and its snapshot (not to be written to)."""
    return climb(run_python, tmp_path_factory.mktemp("straight"), "single")


@pytest.fixture(scope="module")
def straight_torchrun(run_python: RunPython, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """The same under torchrun with two ranks."""
    return climb(run_python, tmp_path_factory.mktemp("straight"), "torchrun")


def test_rung_one_learns(straight: Straight) -> None:
    out, snapshot = straight
    assert losses(out)[-1] < 0.5 * losses(out)[0]
    assert accuracies(out)[-1] > 0.75  # chance: 0.25
    assert re.search(r"^wall time \d+\.\d s$", out, re.MULTILINE)
    assert torch.load(snapshot, weights_only=True)["epoch"] == 3  # the last epoch is saved, whatever SAVE_EVERY is


def assert_same_training(found: Straight, expected: Straight) -> None:
    assert found[0].startswith("2 ranks on ")
    assert losses(found[0]) == pytest.approx(losses(expected[0]), abs=1e-4)
    assert accuracies(found[0]) == pytest.approx(accuracies(expected[0]), abs=2 / 256)
    assert weights(found[1]).keys() == weights(expected[1]).keys()


@pytest.mark.ranks
def test_spawned_ranks_train_the_same(run_python: RunPython, tmp_path: Path, straight: Straight) -> None:
    assert_same_training(climb(run_python, tmp_path, "spawn"), straight)


@pytest.mark.ranks
def test_ranks_under_torchrun_train_the_same(straight_torchrun: Straight, straight: Straight) -> None:
    assert_same_training(straight_torchrun, straight)


@pytest.mark.ranks
def test_four_ranks_with_a_batch_that_leaves_a_rest(run_python: RunPython, tmp_path: Path) -> None:
    """36 cases at a time leave 8 of 512 over: all world sizes must leave the same ones."""
    arguments = [2, 1, "--batch", 36, "--seed", 5, "--snapshot"]
    one = run_python(*SINGLE, *arguments, tmp_path / "one.pt")
    four = run_python(*TORCHRUN, 4, LADDER / "3_torchrun.py", *arguments, tmp_path / "four.pt")
    assert one.code == four.code == 0, one.err + four.err
    assert len(losses(one.out)) == 2
    assert losses(four.out) == pytest.approx(losses(one.out), abs=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize(("rung", "whole"), [("single", "straight"), ("torchrun", "straight_torchrun")])
def test_resumed_equals_uninterrupted(
    run_python: RunPython, tmp_path: Path, request: pytest.FixtureRequest, rung: str, whole: str
) -> None:
    out, snapshot = request.getfixturevalue(whole)
    first = run_python(*RUNGS[rung], 2, 1, "--snapshot", tmp_path / "s.pt")
    rest = run_python(*RUNGS[rung], 3, 1, "--snapshot", tmp_path / "s.pt")
    assert first.code == rest.code == 0, first.err + rest.err
    assert "after epoch 2" in rest.out
    assert losses(first.out) + losses(rest.out) == losses(out)
    expected, found = weights(snapshot), weights(tmp_path / "s.pt")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_finished_training_is_left_alone(run_python: RunPython, straight: Straight) -> None:
    before = straight[1].read_bytes()
    done = run_python(*SINGLE, 3, 1, "--snapshot", straight[1])
    assert done.code == 0
    assert "holds 3 epochs already; give more EPOCHS" in done.out
    assert not losses(done.out)
    assert straight[1].read_bytes() == before


@pytest.mark.ranks
@pytest.mark.parametrize("rung", RUNGS)
def test_a_snapshot_of_another_training_is_refused(run_python: RunPython, straight: Straight, rung: str) -> None:
    before = straight[1].read_bytes()
    done = run_python(*RUNGS[rung], 5, 1, "--lr", "0.01", "--batch", 16, "--snapshot", straight[1])
    assert done.code == (1 if rung == "torchrun" else 2)
    assert re.search(r"^error: --batch is 16, but .* was trained with 32; .*delete", done.err, re.MULTILINE), done.err
    assert re.search(r"^error: --lr is 0.01, but .* was trained with 0.003; ", done.err, re.MULTILINE)
    assert done.err.count("error: --lr") == 1  # once, not once per rank
    assert not losses(done.out)
    assert straight[1].read_bytes() == before


def test_all_bad_arguments_are_named_at_once(blobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(
        epochs=0, save_every=-1, batch=9, lr=float("nan"), seed=-4, snapshot=tmp_path / "no" / "s.pt"
    )
    with pytest.raises(SystemExit, match="2"):
        blobs.check(options, world_size=2)
    named = [line.split()[1].rstrip(":") for line in capsys.readouterr().err.splitlines()]
    assert named == ["EPOCHS", "SAVE_EVERY", "--batch", "--lr", "--seed", "--snapshot"]


def test_a_broken_snapshot_is_refused(
    blobs: Any, tmp_path: Path, straight: Straight, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = straight[1].read_bytes()
    broken = [tmp_path / "folder.pt", tmp_path / "foreign.pt"]
    broken[0].mkdir()
    torch.save({"weights": torch.zeros(3)}, broken[1])
    for length in range(0, len(whole), len(whole) // 20):
        broken.append(tmp_path / f"cut-{length}.pt")
        broken[-1].write_bytes(whole[:length])
    for snapshot in broken:
        options = argparse.Namespace(epochs=5, save_every=1, batch=32, lr=3e-3, seed=0, snapshot=snapshot)
        with pytest.raises(SystemExit, match="2"):
            blobs.check(options, world_size=1)
        said = capsys.readouterr().err
        assert re.fullmatch(r"error: --snapshot \S+ cannot be read \(.+\); delete it or name another\n", said), said


def test_killed_while_saving_leaves_the_old_snapshot(
    session_environ: dict[str, str], tmp_path: Path, straight: Straight
) -> None:
    old = straight[1].read_bytes()
    snapshot = tmp_path / "s.pt"
    snapshot.write_bytes(old)
    limits = range(0, 20_000, 1237)
    died = subprocess.run(
        [sys.executable, "-c", DIE_WHILE_SAVING, LADDER, snapshot, *map(str, limits)],
        env=session_environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert died.stdout.split() == ["-25"] * len(limits)  # SIGXFSZ
    assert snapshot.read_bytes() == old
    assert (tmp_path / ".s.pt.part").stat().st_size < len(old)


def test_a_full_disk_keeps_the_old_snapshot(run_python: RunPython, small_disk: Path, straight: Straight) -> None:
    old = straight[1].read_bytes()
    snapshot = small_disk / "s.pt"
    snapshot.write_bytes(old)
    (small_disk / "filler").write_bytes(bytes(4096 * ((120 * 1024 - len(old)) // 4096 - 1)))
    done = run_python(*SINGLE, 4, 1, "--snapshot", snapshot)
    assert done.code == 1
    assert re.fullmatch(
        r"error: --snapshot .* cannot be written \(No space left.*\); the one before is kept\n", done.err
    )
    assert snapshot.read_bytes() == old
    assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "s.pt"]


def test_rung_three_says_that_it_wants_torchrun(run_python: RunPython, tmp_path: Path) -> None:
    done = run_python(LADDER / "3_torchrun.py", 1, 1, cwd=tmp_path)
    assert done.code == 1
    assert re.fullmatch(r"error: there is no RANK .* start this with torchrun.*\n", done.err)


def test_no_test_case_is_trained_on(blobs: Any) -> None:
    """Nor is one in the test set of a seed in the training set of another."""
    sets = [blobs.make_sets(seed) for seed in range(10)]
    trained, tested = ({bytes(case.numpy().data) for pair in sets for case, _ in pair[part]} for part in (0, 1))
    assert len(trained) == 10 * 512
    assert len(tested) == 10 * 256
    assert not trained & tested


def submit(slurm: SlurmLab, rung: str, folder: Path, *arguments: object) -> int:
    """Submit a rung from `folder`, where its output and snapshot go."""
    passed = f"ALL,PYTHON={sys.executable},LADDER={LADDER},OMP_NUM_THREADS=1"
    return slurm.submit(f"--export={passed}", LADDER / rung, *arguments, cwd=folder)


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.out"))


@pytest.mark.cluster
def test_a_requeued_job_on_one_node_continues(idle_slurm: SlurmLab, run_python: RunPython, tmp_path: Path) -> None:
    job = submit(idle_slurm, "4_one_node.sbatch", tmp_path, 12, 1)
    snapshot = tmp_path / f"ladder-4.{job}.pt"
    until(snapshot.exists, 40, lambda: output(tmp_path), every_s=0.02)
    idle_slurm.run("scontrol", "requeue", job)
    reference = run_python(*SINGLE, 12, 12, "--snapshot", tmp_path / "reference")
    state = idle_slurm.await_state(job, "COMPLETED", "FAILED", "CANCELLED", timeout=60)
    out = output(tmp_path)
    assert state == "COMPLETED", out
    continued = re.search(r"^2 ranks on \w+: continuing .* after epoch (\d+)$", out, re.MULTILINE)
    assert continued is not None and int(continued[1]) < 12, out
    found = re.findall(r"^epoch (\d+)/12  loss (\S+)", out, re.MULTILINE)
    assert {int(epoch) for epoch, _ in found} == set(range(1, 13))
    expected = losses(reference.out)
    assert [float(loss) for _, loss in found] == pytest.approx(
        [expected[int(epoch) - 1] for epoch, _ in found], abs=1e-4
    )


@pytest.mark.parametrize("rung", sorted(path.name for path in LADDER.glob("*.sbatch")))
def test_slurm_takes_the_jobs(slurm: SlurmLab, tmp_path: Path, rung: str) -> None:
    """Without running them, which takes longer."""
    assert "to start at" in slurm.run("sbatch", "--test-only", LADDER / rung, 3, 2, cwd=tmp_path).stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.cluster
@pytest.mark.parametrize("rung", ["5_two_by_two.sbatch", "6_four_by_one.sbatch"])
def test_jobs_on_many_nodes_train_the_same(idle_slurm: SlurmLab, tmp_path: Path, straight: Straight, rung: str) -> None:
    job = submit(idle_slurm, rung, tmp_path, 3, 2)
    state = idle_slurm.await_state(job, "COMPLETED", "FAILED", "CANCELLED", timeout=60)
    assert state == "COMPLETED", output(tmp_path)
    assert "4 ranks on " in output(tmp_path)
    assert losses(output(tmp_path)) == pytest.approx(losses(straight[0]), abs=1e-4)
    assert [path.name for path in tmp_path.glob("*.pt")] == [f"ladder-{rung[0]}.{job}.pt"]


@pytest.mark.parametrize("path", sorted(LADDER.glob("[1-6]_*")), ids=lambda path: path.name)
def test_each_rung_fits_a_screen_or_two(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
