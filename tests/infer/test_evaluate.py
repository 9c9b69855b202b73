"""Evaluating whole volumes: every case once, on any number of ranks, and what becomes of failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from nibabel.affines import voxel_sizes
from numpy.typing import NDArray

from conftest import Finished, tiny_config
from voxscale.config.load import make_config
from voxscale.data.build import prepare
from voxscale.data.cases import Case
from voxscale.data.formats import find_cases
from voxscale.data.store import Store, open_store
from voxscale.errors import DataError, StoppedEarly
from voxscale.files import read_csv
from voxscale.infer.baseline import threshold_dice
from voxscale.infer.ensemble import Ensemble
from voxscale.infer.evaluate import Keep, evaluate_cases, of_volumes, share_cases, write_cases
from voxscale.infer.windows import Windows, predict_volume
from voxscale.parallel import World
from voxscale.tasks import VolumeTask, build_task
from voxscale.tasks.summary import Row, summarise
from voxscale.train.stop import StopRequest

CPU = torch.device("cpu")
WINDOWS = Windows((16, 16, 8), overlap=0.25)


def network(image: torch.Tensor) -> torch.Tensor:
    """Bright is foreground: right enough for surfaces to be near each other."""
    return image[:, :1] - 0.5


@pytest.fixture(scope="module")
def store(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Voxels of 1 × 1.5 × 2 mm."""
    config = make_config(tiny_config(dataset, data__spacing=[1, 1.5, 2]), name="tiny", base=Path())
    root = tmp_path_factory.mktemp("store")
    return prepare(find_cases(config.data, root), config.data, root, patch=None)


@pytest.fixture(scope="module")
def task(dataset: Path, store: Store) -> VolumeTask:
    return build_task(make_config(tiny_config(dataset), name="tiny", base=Path()), store)


@pytest.fixture(scope="module")
def cases(store: Store) -> list[Case]:
    return [Case(store.id(row), (Path(),), None, f"p{row}", "val") for row in range(len(store))]


def evaluate(
    task: VolumeTask, store: Store, cases: list[Case], *, full: bool = True, keep: Keep | None = None, **options: Any
) -> list[Row]:
    measure = of_volumes(Ensemble.of_one(network, WINDOWS, CPU), task, store, full=full, keep=keep)
    return evaluate_cases(measure, store, cases, world=World(), device=CPU, **options)


def test_a_row_holds_the_metrics_of_the_whole_volume(task: VolumeTask, store: Store, cases: list[Case]) -> None:
    kept: dict[str, NDArray[Any]] = {}
    rows = evaluate(task, store, cases[::-1], keep=lambda case, codes: kept.update({case.id: codes}))
    assert [row["case"] for row in rows] == [case.id for case in cases[::-1]], "in the order asked for"
    for row in rows:
        at = store.row(row["case"])
        image, label = torch.from_numpy(store.read_image(at)), store.read_label(at)
        codes = task.decide(predict_volume(network, image.float(), WINDOWS))
        assert np.array_equal(kept[row["case"]], codes)
        spacing = voxel_sizes(store.geometry(at).prepared_affine)
        assert np.allclose(spacing, [1, 1.5, 2])
        expected = task.measure(codes, label, tuple(spacing), full=True)
        assert {name: row[name] for name in expected} == expected
        assert row["volume_label/ball"] == pytest.approx((label == 1).sum() * 3e-3, rel=1e-5)
        assert (row["patient"], row["split"]) == (f"p{at}", "val")
    assert {0 < row["dice/ball"] < 1 for row in rows} == {True}, "or nothing was compared"


def test_surfaces_are_left_out_where_not_asked_for(task: VolumeTask, store: Store, cases: list[Case]) -> None:
    (row,) = evaluate(task, store, cases[:1], full=False)
    assert set(row) == {"case", "patient", "split", *task.metrics(full=False)}


def test_a_signal_is_heard_between_windows(task: VolumeTask, store: Store, cases: list[Case]) -> None:
    stop, seen = StopRequest(None), 0

    def signalled(image: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return network(image)

    before = signal.getsignal(signal.SIGTERM)
    measure = of_volumes(Ensemble.of_one(stop.heeded(signalled), WINDOWS, CPU), task, store, full=True)
    with stop.on_signals(), pytest.raises(StoppedEarly, match="stopped while evaluating .signal SIGTERM"):
        evaluate_cases(measure, store, cases, world=World(), device=CPU)
    signal.signal(signal.SIGTERM, before)
    assert seen == 2, "a case has more windows than that"


def test_half_precision_needs_no_copy_of_the_image(task: VolumeTask) -> None:
    image = torch.randn(1, 20, 9, 30, generator=torch.Generator().manual_seed(0)).half()
    seen: list[torch.Size] = []

    def remember(patch: torch.Tensor) -> torch.Tensor:
        seen.append(patch.shape)
        return network(patch)

    codes = Ensemble.of_one(remember, WINDOWS, CPU).decide(task, image.numpy())
    assert np.array_equal(codes, (image[0].float() > 0.5).numpy())
    assert {shape[2:] for shape in seen} == {torch.Size(WINDOWS.size)}


def test_tables_hold_every_digit(task: VolumeTask, store: Store, cases: list[Case], tmp_path: Path) -> None:
    rows = evaluate(task, store, cases)
    write_cases(tmp_path / "cases.csv", rows, task.metrics(full=True))
    for row, written in zip(rows, read_csv(tmp_path / "cases.csv"), strict=True):
        assert {name: float(written[name]) for name in task.metrics(full=True)} == {
            name: row[name] for name in task.metrics(full=True)
        }


RANKS = """
import json, os, sys, time, torch
from pathlib import Path
from voxscale.config.load import make_config
from voxscale.data.cases import Case
from voxscale.data.store import open_store
from voxscale.errors import StoppedEarly, VoxscaleError
from voxscale.infer.ensemble import Ensemble
from voxscale.infer.evaluate import evaluate_cases, of_volumes
from voxscale.infer.windows import Windows
from voxscale.parallel import World, joined, leave
from voxscale.tasks import build_task

given = json.loads(Path(sys.argv[1]).read_text())
world, device = World.from_env(os.environ), torch.device("cpu")
task = build_task(make_config(given["config"], name="tiny", base=Path()), open_store(Path(given["store"])))
windows = Windows(tuple(given["window"]), overlap=given["overlap"])

def network(image):
    return image[:, :1] - 0.5

windows_seen = 0

def stopped(image):
    global windows_seen
    windows_seen += 1
    if world.rank == 1:
        raise StoppedEarly("stopped by a signal")
    time.sleep(0.01)  # rank 1 hears it meanwhile
    return network(image)

def failing(image):
    if world.rank == 1:
        raise RuntimeError("no such kernel")
    return network(image)

def attempt(network, store, ids):
    cases = [Case(id, (Path(),), None, f"p{number}", "val") for number, id in enumerate(ids)]
    try:
        opened, ensemble = open_store(Path(store)), Ensemble.of_one(network, windows, device)
        measure = of_volumes(ensemble, task, opened, full=True)
        return evaluate_cases(measure, opened, cases, world=world, device=device)
    except (VoxscaleError, RuntimeError) as error:
        return [type(error).__name__, str(error)]

with joined(world, backend="gloo", device=device, timeout_s=60):
    found = {
        "rows": attempt(network, given["store"], given["cases"]),
        "one": attempt(network, given["store"], given["cases"][:1]),
        "damaged": attempt(network, given["damaged"], given["cases"]),
        "failing": attempt(failing, given["store"], given["cases"]),
        "stopped": attempt(stopped, given["store"], given["cases"]),
        "windows seen": windows_seen,
    }
    Path(sys.argv[2], f"{world.rank}.json").write_text(json.dumps(found))
leave(0)
"""


@pytest.fixture(scope="module")
def damaged(store: Store, cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two cases of it cannot be read."""
    folder = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(store.folder, folder)
    for case in (cases[2], cases[7]):
        path = folder / "cases" / case.id / "image.b2nd"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(content)
    return open_store(folder)


def windows_of(cases: Sequence[Case], store: Store) -> int:
    """How many windows are looked through in all."""
    seen = 0

    def counting(image: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        return network(image)

    for case in cases:
        image = torch.from_numpy(store.read_image(store.row(case.id))).float()
        predict_volume(counting, image, WINDOWS)
    return seen


def test_a_damaged_case_is_named(task: VolumeTask, damaged: Store, cases: list[Case]) -> None:
    with pytest.raises(DataError, match=f"case {cases[2].id}: image.b2nd is damaged|case {cases[7].id}"):
        evaluate(task, damaged, cases)


@pytest.mark.ranks
def test_ranks_agree_on_rows_and_failures(
    task: VolumeTask,
    store: Store,
    damaged: Store,
    cases: list[Case],
    dataset: Path,
    tmp_path: Path,
    run_python: Callable[..., Finished],
) -> None:
    """Two ranks give the rows of one; where one of them fails, all go on to the end and say why."""
    script, given = tmp_path / "ranks.py", tmp_path / "given.json"
    script.write_text(RANKS)
    folders = {"store": str(store.folder), "damaged": str(damaged.folder)}
    window = {"window": WINDOWS.size, "overlap": WINDOWS.overlap}
    ids = [case.id for case in cases]
    given.write_text(json.dumps({"config": tiny_config(dataset), "cases": ids, **folders, **window}))
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = run_python(*ranks, script, given, tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done.err
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    alone = evaluate(task, store, cases)
    for each in found:
        assert each["rows"] == alone, "to the last digit"
        assert each["one"] == alone[:1], "with one case, one rank has none"
        kind, message = each["damaged"]
        assert kind == "DataError"
        assert all(f"case {case.id}: image.b2nd is damaged" in message for case in (cases[2], cases[7]))
    assert found[1]["failing"] == ["RuntimeError", "no such kernel"]
    kind, message = found[0]["failing"]
    assert kind == "TrainingError"
    assert "failed on rank 1: RuntimeError: no such kernel" in message
    assert [each["stopped"] for each in found] == 2 * [["StoppedEarly", "stopped by a signal"]]
    a_case, its_share = windows_of(cases[:1], store), windows_of(share_cases(cases, store, 2)[0], store)
    assert found[1]["windows seen"] == 1
    assert found[0]["windows seen"] <= 2 * a_case < its_share, "the one that heard nothing is told"


@given(some.lists(some.integers(1, 50), max_size=30), some.integers(1, 9))
def test_each_case_goes_to_one_rank_and_the_load_is_even(sizes: list[int], num_ranks: int) -> None:
    cases = [Case(f"{n:02d}", (Path(),), None, "p") for n in range(len(sizes))]
    store = SimpleNamespace(row=int, shape=lambda row: (sizes[row], 1, 1))
    shares = share_cases(cases, store, num_ranks)  # type: ignore[arg-type]
    assert sorted(case.id for share in shares for case in share) == [case.id for case in cases]
    loads = [sum(sizes[int(case.id)] for case in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_absent_values_do_not_count() -> None:
    rows = [{"dice/a": 0.5}, {"dice/a": 1.0, "dice/b": 0.25}, {}]
    summary = summarise(rows, ["dice/a", "dice/b", "dice/c"])
    assert summary["dice/a"]["mean"] == 0.75
    assert summary["dice/a"]["median"] == 0.75
    assert np.isclose(summary["dice/a"]["std"], np.std([0.5, 1.0], ddof=1))
    assert summary["dice/b"] == {"mean": 0.25, "median": 0.25, "std": 0.0, "ci95": [0.25, 0.25]}
    assert "dice/c" not in summary


def test_interval_holds_the_mean() -> None:
    values = np.random.default_rng(1).beta(8, 2, 40)
    summary = summarise([{"d": float(value)} for value in values], ["d"])["d"]
    low, high = summary["ci95"]
    assert low < summary["mean"] < high
    assert high - low < 4 * values.std() / np.sqrt(40) * 1.2


def test_the_yardstick_is_the_best_of_all_channels_and_thresholds() -> None:
    """Only the second channel tells; what is best for the cases chosen on is scored on the others."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (3, 6, 6, 6)).astype(np.uint8)
    images = rng.standard_normal((3, 2, 6, 6, 6)).astype(np.float16)
    images[:, 1] += 1.5 * (labels == 2)
    store: Any = SimpleNamespace(row=int, read_image=lambda row: images[row], read_label=lambda row: labels[row])
    cases = [Case(str(n), (Path(),), None, "p") for n in range(3)]

    def dice(case: int, channel: int, threshold: float) -> float:
        mask, truth = images[case, channel].astype(float) > threshold, labels[case] == 2
        return 2 * float((mask & truth).sum()) / float(mask.sum() + truth.sum())

    choices = [(channel, threshold) for channel in range(2) for threshold in np.linspace(-3, 3, 61)]
    best = max(choices, key=lambda choice: dice(0, *choice) + dice(1, *choice))
    assert best[0] == 1
    assert threshold_dice(store, cases[:2], cases[2:], labels=[2]) == pytest.approx(dice(2, *best))
    assert threshold_dice(store, cases, cases, labels=[1, 2]) == threshold_dice(store, cases, cases)
