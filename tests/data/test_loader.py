"""What ranks read, put together, is what one rank reads: bit for bit, with any number of threads, from any cache."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from conftest import tiny_config
from layouts import save_volume
from voxscale.config.load import make_config
from voxscale.config.schema import Config
from voxscale.data.build import prepare
from voxscale.data.cache import FromDevice, FromHost, FromStore, Memory, Source
from voxscale.data.formats import find_cases
from voxscale.data.loader import Batch, PatchLoader
from voxscale.data.readers import Readers
from voxscale.data.sampler import PatchSampler, Stream
from voxscale.data.shared_memory import sweep_shared_memory
from voxscale.data.store import Store
from voxscale.errors import DataError, InfrastructureError
from voxscale.plan.plan import make_stream, split_batch

STEPS = (1, 20)
ROWS = np.arange(11, dtype=np.int32)  # 22 patches in batches of 8: a short last batch

Sampled = tuple[str, tuple[int, int, int], torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def store(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    config = make_config(tiny_config(dataset), name="tiny", base=Path())
    root = tmp_path_factory.mktemp("store")
    return prepare(find_cases(config.data, root), config.data, root, patch=(16, 16, 16), threads=2)


def configure(dataset: Path, **fields: Any) -> Config:
    return make_config(tiny_config(dataset, **{"train__batch": 8, **fields}), name="tiny", base=Path())


def make_source(where: str, store: Store, stream: Stream, rank: int, root: Path) -> Source:
    def held(epoch: int) -> Any:
        return ROWS[stream.held(epoch, rank)]

    if where == "host":
        return FromHost(store, held, "test", root=root)
    return FromDevice(store, held, torch.device("cpu")) if where == "device" else FromStore(store)


def make_loader(
    store: Store,
    config: Config,
    rank: int = 0,
    world_size: int = 1,
    *,
    workers: int = 1,
    most_workers: int = 0,
    most_prefetch: int = 0,
    root: Path = Path(),
) -> PatchLoader:
    stream = make_stream(config, len(ROWS), world_size)
    size: Any = config.patches.size
    return PatchLoader(
        sampler=PatchSampler(stream, store, ROWS, size, 0.5),
        store=store,
        source=make_source(config.data.cache.where, store, stream, rank, root),
        size=size,
        transforms=config.augment,
        rank=rank,
        world_size=world_size,
        micro_batch=split_batch(8, world_size, 2)[0],
        device=torch.device("cpu"),
        workers=workers,
        most_workers=most_workers,
        prefetch=workers + 1,
        most_prefetch=most_prefetch,
        pin_memory=False,
    )


def read(
    store: Store,
    config: Config,
    rank: int = 0,
    world_size: int = 1,
    *,
    steps: tuple[int, int] = STEPS,
    **options: Any,
) -> list[list[list[Sampled]]]:
    """Steps of micro-batches of samples, copied out of the memory that the loader uses again."""
    with closing(make_loader(store, config, rank, world_size, **options)) as loader:
        return [[_samples(batch) for batch in batches] for batches in loader.steps(*steps)]


def _samples(batch: Batch) -> list[Sampled]:
    assert len(batch.image) == len(batch.target) == len(batch.cases) >= max(1, batch.num_real)
    assert torch.isfinite(batch.image).all()
    return [
        (batch.cases[row], batch.starts[row], batch.image[row].clone(), batch.target[row].clone())
        for row in range(batch.num_real)
    ]


def same(first: Sampled, second: Sampled) -> bool:
    return first[:2] == second[:2] and torch.equal(first[2], second[2]) and torch.equal(first[3], second[3])


def flat(steps: list[list[list[Sampled]]]) -> list[list[Sampled]]:
    return [list(chain.from_iterable(batches)) for batches in steps]


@pytest.mark.parametrize("augment", ["light", "full"])
@pytest.mark.parametrize("size", [16, 32], ids=["patch", "larger than the case"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_together_read_what_one_reads(
    world_size: int, size: int, augment: str, store: Store, dataset: Path
) -> None:
    config = configure(dataset, patches__size=[size] * 3, augment=augment)
    alone = flat(read(store, config))
    ranks = [flat(read(store, config, rank, world_size, workers=rank % 3 + 1)) for rank in range(world_size)]
    for step, expected in enumerate(alone):
        together = [sample for rank in ranks for sample in rank[step]]
        assert len(together) == len(expected)
        assert all(same(*pair) for pair in zip(together, expected, strict=True))


def test_every_rank_takes_part_in_every_micro_step(store: Store, dataset: Path) -> None:
    config = configure(dataset, patches__size=[16] * 3)
    ranks = [read(store, config, rank, 4) for rank in range(4)]
    for batches in zip(*ranks, strict=True):
        assert len({len(rank) for rank in batches}) == 1


def test_a_start_in_the_middle_reads_on(store: Store, dataset: Path) -> None:
    config = configure(dataset, patches__size=[16] * 3, augment="full")
    whole, rest = flat(read(store, config)), flat(read(store, config, steps=(7, 20)))
    assert all(same(*pair) for step in zip(whole[6:], rest, strict=True) for pair in zip(*step, strict=True))


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_where_patches_are_cut_from_changes_nothing(
    where: str, rate: float, store: Store, dataset: Path, tmp_path: Path
) -> None:
    plain = configure(dataset, patches__size=[16] * 3, augment="full")
    cached = configure(dataset, patches__size=[16] * 3, augment="full", data__cache={"where": where, "rate": rate})
    expected, found = flat(read(store, plain)), flat(read(store, cached, workers=3, root=tmp_path))
    assert all(same(*pair) for step in zip(expected, found, strict=True) for pair in zip(*step, strict=True))
    assert not list(tmp_path.glob("voxscale-*")), "shared memory was left behind"


@pytest.mark.parametrize("size", [16, 32], ids=["patch", "larger than the case"])
def test_a_gpu_is_sent_what_a_cpu_reads(size: int, store: Store, dataset: Path) -> None:
    """By way of slots and as one batch, here on the CPU."""
    config = configure(dataset, patches__size=[size] * 3, augment="full")
    with closing(make_loader(store, config)) as loader:
        reads = [loader._read_to_slot(1, position) for position in range(8)]
        images, labels = loader._augmented(reads)
        row_image, row_label = (tensor[0] for tensor in loader._empty(1))
        for position, (image, label) in enumerate(zip(images, labels, strict=True)):
            loader._read_into(1, position, row_image, row_label)
            assert torch.allclose(image, row_image, atol=1e-3)
            assert torch.equal(label, row_label)
    assert len({read.drawn.matrix is None for read in reads}) == 2, "some rotated, some not"


@pytest.mark.parametrize("where", ["store", "host", "device"])
def test_a_rotating_cache_shows_every_case(where: str, store: Store, dataset: Path, tmp_path: Path) -> None:
    cache = {"where": where, "rate": 0.4, "replace": 0.5}
    config = configure(dataset, patches__size=[16] * 3, data__cache=cache, train__epochs=9)
    stream = make_stream(config, len(ROWS), 1)
    per_epoch = stream.steps_per_epoch
    steps = flat(read(store, config, root=tmp_path, steps=(1, per_epoch * stream.epochs_to_see_all)))
    epochs = [steps[n : n + per_epoch] for n in range(0, len(steps), per_epoch)]
    seen = [{sample[0] for step in epoch for sample in step} for epoch in epochs]
    assert all(len(cases) == 4 for cases in seen)
    assert set.union(*seen) == {store.id(row) for row in ROWS}
    assert not list(tmp_path.glob("voxscale-*"))


def test_ranks_with_cases_of_their_own(store: Store, dataset: Path, tmp_path: Path) -> None:
    config = configure(dataset, patches__size=[16] * 3, data__cache={"where": "host", "share": "rank"})
    per_epoch = make_stream(config, len(ROWS), 2).steps_per_epoch
    ranks = [flat(read(store, config, rank, 2, root=tmp_path, steps=(1, 2 * per_epoch))) for rank in range(2)]
    own = [{sample[0] for step in rank for sample in step} for rank in ranks]
    assert not own[0] & own[1]
    assert own[0] | own[1] == {store.id(row) for row in ROWS}
    for rank in ranks:
        for epoch in (rank[:per_epoch], rank[per_epoch:]):
            visits = [sample[0] for step in epoch for sample in step]
            assert all(visits.count(case) == config.patches.per_case for case in visits)


def test_host_memory_is_shared_and_swept(store: Store, tmp_path: Path) -> None:
    def held(epoch: int) -> Any:
        return ROWS

    first, second = (FromHost(store, held, "run", root=tmp_path) for _ in range(2))
    box = (slice(0, 8),) * 3
    image, _ = first.read(3, box, 1, Memory())
    (folder,) = tmp_path.glob("voxscale-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    (brought,) = folder.glob("*.raw")
    before = brought.stat().st_mtime_ns
    assert torch.equal(second.read(3, box, 1, Memory())[0], image)
    assert brought.stat().st_mtime_ns == before, "the second rank brought it again"
    sweep_shared_memory(tmp_path)
    first.close()
    second.close()
    assert not folder.exists()
    folder.mkdir()
    (folder / "in-use").touch()  # as killed ranks leave it
    sweep_shared_memory(tmp_path)
    assert not folder.exists()


def test_too_little_shared_memory_is_told_at_once(store: Store, small_disk: Path) -> None:
    with pytest.raises(InfrastructureError, match="found 0 MB of shared memory free"):
        FromHost(store, lambda epoch: ROWS, "run", root=small_disk)
    assert not list(small_disk.iterdir())


def test_a_damaged_chunk_is_named(store: Store, dataset: Path, tmp_path: Path) -> None:
    import shutil

    from voxscale.data.store import open_store

    shutil.copytree(store.folder, tmp_path / "copy")
    for path in (tmp_path / "copy").glob("cases/*/image.b2nd"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(DataError, match="store: case .* image.b2nd is damaged: chunk"):
        read(open_store(tmp_path / "copy"), configure(dataset, patches__size=[16] * 3), workers=2)


def test_threads_are_added_only_while_steps_wait_and_only_so_many() -> None:
    with Readers(1, 3) as readers:
        for _ in range(8):
            readers.note(waited_s=0.01, took_s=1.0)
        assert len(readers) == 1, "a step that hardly waits needs no more"
        counts = []
        for _ in range(20):
            readers.note(waited_s=0.5, took_s=1.0)
            counts.append(len(readers))
        assert counts[3::4] == [2, 3, 3, 3, 3]
        first, second = threading.Event(), threading.Event()

        def meet(mine: threading.Event, other: threading.Event) -> bool:
            mine.set()
            return other.wait(10)

        met = [readers.submit(meet, first, second), readers.submit(meet, second, first)]
        assert all(future.result() for future in met), "they read at the same time"
        assert isinstance(readers.submit(int, "x").exception(), ValueError)


def test_what_is_read_does_not_depend_on_threads_that_are_added(store: Store, dataset: Path) -> None:
    config = configure(dataset, patches__size=[16] * 3, augment="full")
    expected, found = flat(read(store, config)), flat(read(store, config, most_workers=3))
    assert all(same(*pair) for step in zip(expected, found, strict=True) for pair in zip(*step, strict=True))


def test_more_is_read_ahead_where_steps_wait(store: Store, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(dataset, patches__size=[16] * 3)
    read_quickly = FromStore.read_channels

    def read_slowly(*given: Any) -> Any:
        time.sleep(0.01)
        return read_quickly(*given)

    monkeypatch.setattr(FromStore, "read_channels", read_slowly)
    for most, reached in ((0, 2), (3, 3)):
        with closing(make_loader(store, config, most_workers=4, most_prefetch=most)) as loader:
            assert len(list(loader.steps(1, 16))) == 16
            assert loader.settings["workers"] == 4
            assert loader.settings["prefetch"] == reached, "with each thread that is added, as far as it may"


def test_a_loader_that_is_left_open_lets_the_program_end(tmp_path: Path) -> None:
    program = tmp_path / "left_open.py"
    program.write_text(
        "import time\nfrom voxscale.data.readers import Readers\nreaders = Readers(2, 2)\n"
        "for _ in range(50):\n    readers.submit(time.sleep, 0.01)\nprint('over')\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Cases of different sizes, most with an axis that is shorter than many a patch."""
    folder = tmp_path_factory.mktemp("uneven")
    for number, shape in enumerate([(9, 30, 17), (24, 11, 8), (16, 16, 40), (31, 24, 20)]):
        rng = np.random.default_rng(number)
        save_volume(folder / f"img{number}.nii.gz", rng.normal(100, 20, shape).astype(np.float32))
        save_volume(folder / f"seg{number}.nii.gz", rng.integers(0, 3, shape).astype(np.uint8))
    config = make_config(tiny_config(folder), name="uneven", base=Path())
    return prepare(find_cases(config.data, folder), config.data, folder / "store", patch=(16, 16, 16))


@settings(deadline=None, max_examples=40)
@given(
    some.one_of(some.tuples(*[some.integers(1, 44)] * 3), some.just("full")),
    some.integers(0, 2**32),
    some.sampled_from([0.0, 0.5, 1.0]),
    some.integers(1, 3),
)
def test_a_patch_is_a_crop_of_the_case_padded_with_zeros(
    uneven: Store, size: Any, seed: int, foreground: float, per_case: int
) -> None:
    patch = uneven.largest_shape() if size == "full" else size
    rows = np.arange(len(uneven), dtype=np.int32)
    stream = Stream(seed, len(rows), per_case, 4)
    loader = PatchLoader(
        sampler=PatchSampler(stream, uneven, rows, patch, foreground), store=uneven, source=FromStore(uneven),
        size=patch, transforms=(), rank=0, world_size=1, micro_batch=4, device=torch.device("cpu"),
        workers=2, prefetch=1, pin_memory=False,
    )  # fmt: skip
    seen = []
    for batches in loader.steps(1, stream.steps_per_epoch):
        for case, start, image, label in chain.from_iterable(map(_samples, batches)):
            row = uneven.row(case)
            for whole, edge, at in zip(uneven.shape(row), patch, start, strict=True):
                assert 0 <= at <= whole - edge or whole < edge, "inside the case, wherever it can be"
            assert image.dtype == torch.float32
            assert np.array_equal(image.numpy(), _crop(uneven.read_image(row).astype(np.float32), start, patch))
            assert np.array_equal(label.numpy(), _crop(uneven.read_label(row), start, patch))
            if size == "full":
                assert np.count_nonzero(label) == np.count_nonzero(uneven.read_label(row)), "all of the case is there"
            seen.append(case)
    assert sorted(seen) == sorted(uneven.ids() * per_case)


def _crop(volume: Any, start: tuple[int, int, int], size: tuple[int, int, int]) -> Any:
    """What NumPy makes of it: padded so far that no box leads out, then cut."""
    lead = [(0, 0)] * (volume.ndim - 3)
    padded = np.pad(volume, [*lead, *((m, m) for m in size)])
    return padded[(..., *(slice(at + m, at + 2 * m) for at, m in zip(start, size, strict=True)))]
