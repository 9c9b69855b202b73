"""Building blocks: what they give is the same on any number of ranks and after a restart. The example: test_docs.py."""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import voxscale
from conftest import Finished
from voxscale import (
    World,
    distributed_loader,
    gather_rows,
    load_checkpoint,
    open_store,
    patch_loader,
    save_checkpoint,
    survival_cases,
)
from voxscale.config.data import Data
from voxscale.data.build import prepare
from voxscale.data.formats import find_cases
from voxscale.data.store import Store
from voxscale.data.synthetic import write_cohort
from voxscale.errors import ConfigError, DataError

RunPython = Callable[..., Finished]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

CHEAP = """
import sys, voxscale
assert "gather_rows" in dir(voxscale)
assert not {"torch", "numpy", "monai", "pydantic"} & sys.modules.keys()
from voxscale import World, cox_loss, distributed_loader, gather_rows, leave, load_checkpoint, open_store
from voxscale import patch_loader, save_checkpoint, survival_cases
assert "torch" in sys.modules
"""

# Rank 0 has three rows, rank 1 none; then two and one. The loss couples all of them.
GATHERING = """
import os, torch, torch.distributed as dist
from voxscale import World, gather_rows, leave
world = World.from_env(os.environ)
dist.init_process_group("gloo")
everyone = torch.arange(6.0).reshape(3, 2) + 1
def loss_of(rows):
    return (rows.prod(0) * torch.tensor([1.0, 2.0])).sum()
whole = everyone.clone().requires_grad_()
loss_of(whole).backward()
for shares in ([range(3), range(0)], [range(2), range(2, 3)]):
    for averaged, factor in ((True, 2), (False, 1)):
        mine = list(shares[world.rank])
        rows = everyone[mine].requires_grad_()
        gathered = gather_rows(rows, world, averaged=averaged)
        assert torch.equal(gathered, everyone), gathered
        loss_of(gathered).backward()
        assert torch.equal(rows.grad, whole.grad[mine] * factor)
try:
    gather_rows(torch.zeros(1, 1 + world.rank), world)
except ValueError as error:
    assert "found [1, 2] columns" in str(error)
else:
    raise AssertionError("other columns on another rank")
leave()
"""

# What would end it otherwise, as gloo's thread does at times, comes after.
LEAVING = """
import atexit, os
from voxscale import leave
atexit.register(os.abort)
print("all its work")
leave(3)
"""


class Noisy:
    """Samples that draw from every generator that datasets use."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cohort") / "cohort"
    write_cohort(folder, cases=20, size=(16, 16, 8), seed=3, threads=2)
    return folder / "cohort.csv"


@pytest.fixture(scope="module")
def store(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    data = Data(source=str(dataset))
    root = tmp_path_factory.mktemp("store")
    return open_store(prepare(find_cases(data, root), data, root, patch=(16, 16, 16)).folder)


def test_importing_the_package_loads_next_to_nothing(run_python: RunPython) -> None:
    done = run_python("-c", CHEAP)
    assert done.code == 0, done.err


def test_every_block_is_there_and_says_what_it_does() -> None:
    for name in voxscale.__all__:
        assert len(getattr(voxscale, name).__doc__) > 60
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = voxscale.nothing


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 30), batch=st.integers(1, 12), ranks=st.integers(1, 5), seed=st.integers(0, 9), data=st.data()
)
def test_shares_make_up_the_batch_of_one_rank(size: int, batch: int, ranks: int, seed: int, data: Any) -> None:
    """Every sample once in an epoch, none twice, whatever a rank has left for it."""
    strata = data.draw(st.sampled_from([(), tuple(index % 3 for index in range(size))]))
    worlds = [World(rank, ranks) for rank in range(ranks)]
    alone = distributed_loader(Noisy(size), batch=batch, seed=seed, strata=strata)
    steps = 2 * alone.steps_per_epoch
    whole = list(alone.steps(1, steps))
    assert sorted(index for share in whole[: len(whole) // 2] for index in share.indices) == list(range(size))
    shares = [
        list(distributed_loader(Noisy(size), batch=batch, seed=seed, strata=strata, world=world).steps(1, steps))
        for world in worlds
    ]
    for step, expected in enumerate(whole):
        parts = [share[step] for share in shares]
        assert all(len(part.indices) == max(1, part.num_real) for part in parts)
        assert sum((part.indices[: part.num_real] for part in parts), ()) == expected.indices
        for column, values in enumerate(expected.batch):
            real = torch.cat([part.batch[column][: part.num_real] for part in parts])
            assert torch.equal(real, values), "a sample draws the same on any rank"


def test_strata_are_spread_over_an_epoch() -> None:
    events = [int(index < 4) for index in range(16)]
    for strata in (events, np.array(events), torch.tensor(events)[:, None]):
        shares = list(distributed_loader(Noisy(16), batch=4, strata=strata).steps(1, 8))
        assert [sum(events[index] for index in share.indices) for share in shares] == [1] * 8


def test_a_loader_goes_on_in_the_middle_and_leaves_generators_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    whole = [share.batch for share in distributed_loader(Noisy(10), batch=3).steps(1, 12)]
    assert torch.equal(torch.rand(()), expected)
    rest = [share.batch for share in distributed_loader(Noisy(10), batch=3, workers=2).steps(6, 12)]
    for found, wanted in zip(rest, whole[5:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_loaders_refuse_what_they_cannot_share() -> None:
    with pytest.raises(ConfigError, match=r"batch: found 0(.|\n)*strata: found 1, expected 2"):
        distributed_loader(Noisy(2), batch=0, strata=[1])
    with pytest.raises(ConfigError, match="strata: found 1, expected 2"):
        distributed_loader(Noisy(2), batch=1, strata=np.ones(1))
    with pytest.raises(ConfigError, match="found generator without length"):
        distributed_loader((index for index in range(3)), batch=1)  # type: ignore[arg-type]


def patches(store: Store, world: World, first: int, last: int, **options: Any) -> list[Any]:
    loader = patch_loader(
        store, size=(16, 16, 16), batch=5, seed=2, per_case=2, augment="light", world=world, **options
    )
    return [
        (batch.image.clone(), batch.target.clone(), batch.cases, batch.num_real) for batch in loader.steps(first, last)
    ]


def test_patches_are_the_same_on_any_number_of_ranks_and_after_a_restart(store: Store) -> None:
    whole = patches(store, World(), 1, 7)
    assert {len(image) for image, *_ in whole} == {5, 4}, "the last batch of an epoch is short"
    ranks = [patches(store, World(rank, 3), 3, 7, workers=2) for rank in range(3)]
    for step, (image, target, cases, _) in enumerate(whole[2:]):
        parts = [rank[step] for rank in ranks]
        assert torch.equal(torch.cat([part[0][: part[3]] for part in parts]), image)
        assert torch.equal(torch.cat([part[1][: part[3]] for part in parts]), target)
        assert sum((part[2][: part[3]] for part in parts), ()) == cases


def test_patches_come_from_the_named_cases(store: Store) -> None:
    loader = patch_loader(store, size=(8, 8, 8), batch=2, cases=[store.id(3), store.id(1), store.id(2)])
    assert loader.steps_per_epoch == 2
    assert loader.epoch_of(3) == 2
    seen = [case for batch in loader.steps(1, 2) for case in batch.cases]
    assert sorted(seen) == [store.id(1), store.id(2), store.id(3)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "batch: found 0"),
        ({"size": (16, 0, 16)}, "size: found 0"),
        ({"augment": "lots"}, "augment: found 'lots'"),
        ({"augment": [{"name": "flip", "p": 3}]}, "less than or equal to 1"),
        ({"augment": [{"name": "rotate90"}], "size": (8, 16, 16)}, "needs equal patches.size"),
        ({"cases": ["nobody"]}, "has no case nobody"),
        ({"cases": []}, "found no case"),
    ],
)
def test_patches_that_cannot_be_cut_are_refused(store: Store, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=re.escape(said)):
        patch_loader(store, **{"size": (16, 16, 16), "batch": 2, **options})


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found no prepared cases"):
        open_store(tmp_path)


def test_survival_cases_are_those_of_the_table(cohort: Path) -> None:
    rows = {row["patient"]: row for row in csv.DictReader(cohort.open())}
    found = survival_cases(cohort, fold="Fold_2", features=["age", "smoker"])
    assert found.feature_names == ("age", "smoker=former", "smoker=no", "smoker=yes")
    for part, word in ((found.train, "train"), (found.val, "val")):
        assert {case.patient for case in part} == {name for name, row in rows.items() if row["Fold_2"] == word}
    ages = np.array([float(rows[case.patient]["age"]) for case in found.train])
    for case in (*found.train, *found.val):
        row = rows[case.patient]
        assert (case.time, case.event) == (float(row["time"]), int(row["event"]))
        assert case.image == cohort.parent / row["NIFTI path"]
        assert case.features[0] == pytest.approx((float(row["age"]) - ages.mean()) / ages.std(), abs=1e-5)
        assert case.features[1:].tolist() == [row["smoker"] == name for name in ("former", "no", "yes")]
    shares = survival_cases(cohort, val=0.2, test=0.2, seed=1)
    assert [len(part) for part in (shares.train, shares.val, shares.test)] == [12, 4, 4]
    assert shares.train[0].features.shape == (0,)


def test_all_that_is_wrong_with_a_cohort_is_said_at_once(cohort: Path, tmp_path: Path) -> None:
    rows = list(csv.DictReader(cohort.open()))
    rows[0]["time"], rows[2]["event"], rows[4]["age"] = "-1", "maybe", "inf"
    (tmp_path / "images").symlink_to(cohort.parent / "images")
    with (tmp_path / "cohort.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(DataError) as refused:
        survival_cases(tmp_path / "cohort.csv", features=["age"])
    for said in ("row 2: found '-1' in 'time'", "row 4: found 'maybe' in 'event'", "row 6: found 'inf' in 'age'"):
        assert said in refused.value.message
    with pytest.raises(DataError, match="did you mean 'age'"):
        survival_cases(cohort, features=["aeg"])


def test_rows_of_one_rank_stay_as_they_are() -> None:
    rows = torch.ones(2, 3, requires_grad=True)
    assert gather_rows(rows, World()) is rows
    with pytest.raises(ValueError, match=r"found shape \(3,\)"):
        gather_rows(torch.ones(3), World())


@pytest.mark.ranks
def test_gathered_rows_have_the_gradient_of_the_whole(run_python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "gathering.py").write_text(GATHERING)
    done = run_python(*TORCHRUN, tmp_path / "gathering.py")
    assert done.code == 0, done.err


def test_a_rank_leaves_with_all_it_has_said_and_no_teardown(run_python: RunPython) -> None:
    done = run_python("-c", LEAVING)
    assert (done.code, done.out) == (3, "all its work\n")


def make_trained(steps: int, rate: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_checkpoint_continues_model_and_optimizer(tmp_path: Path) -> None:
    model, optimizer = make_trained(3)
    optimizer.param_groups[0]["lr"] = 0.02  # as a schedule would
    published = save_checkpoint(tmp_path, model, optimizer, step=3, state={"epoch": 1})
    assert published == tmp_path / "checkpoints" / "step-00000003"
    other, others = make_trained(0)
    assert load_checkpoint(tmp_path, other, others) == (3, {"epoch": 1})
    assert others.param_groups[0]["lr"] == 0.02
    for each, stepper in ((model, optimizer), (other, others)):
        stepper.zero_grad()
        each(torch.ones(1, 3)).square().sum().backward()
        stepper.step()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_a_state_that_json_cannot_hold_is_named_before_anything_is_written(tmp_path: Path) -> None:
    state = {"epoch": 1, "scores": torch.ones(2), "best": float("nan")}
    with pytest.raises(ConfigError) as refused:
        save_checkpoint(tmp_path, torch.nn.Linear(1, 1), step=1, state=state, world=World(1, 2))
    lines = refused.value.message.splitlines()
    assert lines[0].startswith("save_checkpoint: state['scores']: Object of type Tensor")
    assert lines[1].startswith("save_checkpoint: state['best']: Out of range float")
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = make_trained(1)
    assert load_checkpoint(tmp_path, model, optimizer) is None
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, model, optimizer, step=step, is_best=step == 1)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000001", "step-00000002", "step-00000003"], "the newest two, and the best"
    weights = tmp_path / "checkpoints" / "step-00000003" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert load_checkpoint(tmp_path, model, optimizer) == (2, {})
    assert "model.safetensors is damaged" in capsys.readouterr().err
    assert load_checkpoint(tmp_path, model, best=True) == (1, {})


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = make_trained(1)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    with pytest.raises(ConfigError, match="of another model or optimizer"):
        load_checkpoint(tmp_path, torch.nn.Linear(4, 2))
