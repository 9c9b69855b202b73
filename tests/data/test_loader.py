"""What ranks read, put together, is what one rank reads: bit for bit, with any number of threads."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from conftest import tiny_config
from voxscale.config.load import make_config
from voxscale.data.formats import find_cases
from voxscale.data.loader import Batch, PatchLoader
from voxscale.data.sampler import PatchSampler
from voxscale.data.store import Store, prepare
from voxscale.plan.plan import make_stream, split_batch

STEPS = (1, 20)


@pytest.fixture(scope="module")
def store(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    config = make_config(tiny_config(dataset), name="tiny", base=Path())
    return prepare(find_cases(dataset, "pairs"), config.data, tmp_path_factory.mktemp("store"), threads=2)


def read(
    store: Store, dataset: Path, rank: int, world_size: int, *, size: int, workers: int, augment: str = "light"
) -> list[list[Batch]]:
    content = tiny_config(dataset, patches__size=[size] * 3, train__batch=8, augment=augment)
    config = make_config(content, name="tiny", base=Path())
    cases = sorted(store.entries)[:11]  # 22 patches in batches of 8: a short last batch
    sampler = PatchSampler(make_stream(config, len(cases)), store, cases, config.patches.size, 0.5)
    micro_batch, _ = split_batch(8, world_size, 2)
    loader = PatchLoader(
        sampler=sampler,
        store=store,
        size=config.patches.size,
        transforms=config.augment,
        rank=rank,
        world_size=world_size,
        micro_batch=micro_batch,
        device=torch.device("cpu"),
        workers=workers,
        prefetch=workers + 1,
        pin_memory=False,
    )
    return list(loader.steps(*STEPS))


def flattened(steps: list[list[Batch]]) -> list[list[tuple[str, tuple[int, int, int], torch.Tensor, torch.Tensor]]]:
    return [
        [
            (batch.cases[row], batch.starts[row], batch.image[row], batch.label[row])
            for batch in step
            for row in range(batch.num_real)
        ]
        for step in steps
    ]


@pytest.mark.parametrize("size", [16, 32], ids=["inside the volume", "larger than the volume"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_stream_is_the_same_at_any_world_size(store: Store, dataset: Path, world_size: int, size: int) -> None:
    alone = flattened(read(store, dataset, 0, 1, size=size, workers=1))
    ranks = [read(store, dataset, rank, world_size, size=size, workers=3) for rank in range(world_size)]
    together = [list(chain(*parts)) for parts in zip(*map(flattened, ranks), strict=True)]
    assert len(alone) == len(together) == STEPS[1]
    for one, other in zip(alone, together, strict=True):
        assert [sample[:2] for sample in one] == [sample[:2] for sample in other]
        for (_, _, image, label), (_, _, other_image, other_label) in zip(one, other, strict=True):
            assert torch.equal(image, other_image)
            assert torch.equal(label, other_label)
    assert all(len({len(rank[step]) for rank in ranks}) == 1 for step in range(STEPS[1])), "ranks would wait for ever"


def test_a_rank_without_samples_gets_one_that_does_not_count(store: Store, dataset: Path) -> None:
    ranks = [read(store, dataset, rank, 8, size=16, workers=1) for rank in range(8)]
    short = [[batch.num_real for batch in rank[2]] for rank in ranks]  # step 3 has 6 patches for 8 ranks
    assert sum(map(sum, short)) == 6
    assert all(len(batch.image) == 1 for rank in ranks for batch in rank[2])


def test_patches_show_the_case_and_pad_with_zeros(store: Store, dataset: Path) -> None:
    for batch, *_ in read(store, dataset, 0, 1, size=32, workers=1, augment="none")[:2]:
        assert batch.image.shape[1:] == (1, 32, 32, 32)
        for row, case in enumerate(batch.cases):
            image_cxyz, label_xyz = store.read_whole(case)
            assert torch.equal(batch.image[row, :, :24, :24, :16], torch.from_numpy(image_cxyz))
            assert torch.equal(batch.label[row, :24, :24, :16], torch.from_numpy(label_xyz))
            assert batch.image[row].count_nonzero() == (image_cxyz != 0).sum(), "the rest is not zero"


def test_foreground_patches_show_foreground(store: Store, dataset: Path) -> None:
    config = make_config(tiny_config(dataset), name="tiny", base=Path())
    sampler = PatchSampler(make_stream(config, 12), store, sorted(store.entries), (8, 8, 8), 1.0)
    for position in range(24):
        sample = sampler.sample(1, position)
        x, y, z = sample.start
        assert store.read_label(sample.case, (slice(x, x + 8), slice(y, y + 8), slice(z, z + 8))).any()
