"""The stream is a pure function of (seed, epoch, position): no rank, no world, no history enters."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from voxscale.config.data import Data
from voxscale.data.build import prepare
from voxscale.data.cases import Case, Manifest
from voxscale.data.sampler import PatchSampler, Sample, Stream
from voxscale.data.store import Store

seeds = some.integers(0, 2**63 - 1)
counts = {"num_cases": some.integers(1, 60), "per_case": some.integers(1, 5), "batch": some.integers(1, 24)}
streams = some.builds(Stream, seed=seeds, **counts)
caches = {"rate": some.floats(0.01, 0.99), "replace": some.floats(0.01, 1)}
rotating = some.builds(Stream, seed=seeds, **counts, **caches)
owned = some.builds(Stream, seed=seeds, **counts, parts=some.integers(2, 9))
rotating_owned = some.builds(Stream, seed=seeds, **counts, **caches, parts=some.integers(2, 9))
any_stream = some.one_of(streams, rotating, owned, rotating_owned)


def test_strata_are_not_hashed_at_every_sample() -> None:
    class Stratum(int):
        hashed = 0

        def __hash__(self) -> int:
            Stratum.hashed += 1
            return int(self)

    stream = Stream(0, 40, 1, 8, strata=tuple(Stratum(n % 2) for n in range(40)))
    visited = [stream.case_index(1, position) % 2 for position in range(40)]
    assert all(sum(visited[at : at + 2]) == 1 for at in range(0, 40, 2)), "one of each in turn"
    assert Stratum.hashed == 0
    other = Stream(0, 40, 1, 8, strata=(0,) * 40)
    assert other != stream
    assert not np.array_equal(other.cases(1), stream.cases(1)), "each has an order of its own"


def steps_of(stream: Stream, epoch: int) -> range:
    first = (epoch - 1) * stream.steps_per_epoch + 1
    return range(first, first + stream.steps_per_epoch)


def positions_of(stream: Stream, epoch: int) -> list[int]:
    return [
        position
        for step in steps_of(stream, epoch)
        for part in range(stream.parts)
        for position in stream.positions(step, part)
    ]


def visits_of(stream: Stream, epoch: int) -> Counter[int]:
    """Every position of an epoch, by the case it shows; part by part, since orders are remembered for few at once."""
    return Counter(stream.case_index(epoch, position) for position in sorted(positions_of(stream, epoch)))


@given(streams, some.integers(1, 3))
def test_an_epoch_visits_every_case_once_with_all_its_patches(stream: Stream, epoch: int) -> None:
    assert positions_of(stream, epoch) == list(range(stream.samples_per_epoch))
    assert {stream.epoch_of(step) for step in steps_of(stream, epoch)} == {epoch}
    assert visits_of(stream, epoch) == dict.fromkeys(range(stream.num_cases), stream.per_case)


@given(streams, some.integers(1, 200), some.integers(1, 64))
def test_ranks_share_a_step_without_gap_or_overlap(stream: Stream, step: int, world_size: int) -> None:
    shares = [stream.share(step, rank, world_size) for rank in range(world_size)]
    assert [position for share in shares for position in share] == list(stream.positions(step))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(any_stream, some.integers(1, 200), some.integers(1, 5))
def test_what_the_loader_asks_for_fits_together(stream: Stream, step: int, times: int) -> None:
    world_size = stream.parts * times
    shares = [stream.share(step, rank, world_size) for rank in range(world_size)]
    together = [position for share in shares for position in share]
    assert len(set(together)) == len(together) == stream.size(step) >= 1
    assert max(map(len, shares)) == stream.largest_share(step, world_size)
    shown = {stream.phantom(step, rank) for rank, share in enumerate(shares) if not share}
    assert shown <= {position for epoch_step in steps_of(stream, 1) for position in _all_positions(stream, epoch_step)}


def _all_positions(stream: Stream, step: int) -> list[int]:
    return [position for part in range(stream.parts) for position in stream.positions(step, part)]


@given(any_stream)
def test_epochs_differ_and_repeat_exactly(stream: Stream) -> None:
    positions = sorted(positions_of(stream, 1))
    orders = [[stream.case_index(epoch, p) for p in positions] for epoch in (1, 2, 1)]
    assert orders[0] == orders[2]
    if stream.samples_per_epoch // stream.per_case // stream.parts > 20:
        assert orders[0] != orders[1]


ORDER = [8, 7, 4, 2, 6, 5, 9, 0, 1, 3]
DRAWN = [0.1360783448500149, 0.1521586574569137]


def test_the_order_is_the_same_for_ever() -> None:
    """Written down once: a change here changes every published run."""
    stream = Stream(seed=0, num_cases=10, per_case=1, batch=2)
    assert [stream.case_index(1, position) for position in range(10)] == ORDER
    assert stream.rng(1, 0).random(2).tolist() == DRAWN


ROTATING = [[2, 6, 7, 9], [2, 1, 7, 9], [2, 3, 9, 1]]
OWNED = [2, 6, 7, 9, 1, 5, 3, 4, 0, 8]


def test_the_orders_of_the_caches_are_the_same_for_ever() -> None:
    stream = Stream(seed=0, num_cases=10, per_case=1, batch=2, rate=0.4, replace=0.25)
    assert [[stream.case_index(epoch, position) for position in range(4)] for epoch in (1, 2, 3)] == ROTATING
    stream = Stream(seed=0, num_cases=10, per_case=1, batch=3, parts=3)
    assert [stream.case_index(1, position) for position in range(10)] == OWNED


def test_positions_draw_independent_numbers() -> None:
    stream = Stream(seed=1, num_cases=4, per_case=2, batch=2)
    drawn = {(epoch, position): stream.rng(epoch, position).random() for epoch in (1, 2) for position in range(8)}
    assert len(set(drawn.values())) == len(drawn)


@given(some.one_of(rotating, rotating_owned), some.integers(1, 5))
def test_a_rotating_epoch_trains_on_what_is_held(stream: Stream, epoch: int) -> None:
    held = [case for rank in range(stream.parts) for case in stream.held(epoch, rank).tolist()]
    assert visits_of(stream, epoch) == dict.fromkeys(held, stream.per_case)
    assert stream.samples_per_epoch == len(held) * stream.per_case


@given(rotating)
def test_so_many_cases_are_held_and_so_many_exchanged(stream: Stream) -> None:
    num_held = min(stream.num_cases, max(1, round(stream.rate * stream.num_cases)))
    num_replaced = max(1, round(stream.replace * num_held))
    now, then = set(stream.held(1, 0).tolist()), set(stream.held(2, 0).tolist())
    assert len(now) == num_held
    assert len(then - now) == min(num_replaced, stream.num_cases - num_held)


@given(any_stream, some.integers(1, 4))
def test_every_case_is_seen_in_the_stated_number_of_epochs(stream: Stream, first: int) -> None:
    seen: set[int] = set()
    for epoch in range(first, first + stream.epochs_to_see_all):
        assert len(seen) < stream.num_cases, "fewer epochs would do"
        seen.update(stream.cases(epoch).tolist())
    assert seen == set(range(stream.num_cases))


@given(owned, some.integers(1, 3))
def test_each_rank_owns_its_cases_and_visits_each_once_an_epoch(stream: Stream, epoch: int) -> None:
    parts = [
        {
            stream.case_index(epoch, position)
            for step in steps_of(stream, epoch)
            for position in stream.share(step, rank, stream.parts)
        }
        for rank in range(stream.parts)
    ]
    assert sorted(case for part in parts for case in part) == list(range(stream.num_cases))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == [set(stream.held(epoch + 1, rank).tolist()) for rank in range(stream.parts)]
    assert visits_of(stream, epoch) == dict.fromkeys(range(stream.num_cases), stream.per_case)


@given(owned, some.integers(1, 200))
def test_a_rank_that_has_run_out_shows_one_of_its_own_cases(stream: Stream, step: int) -> None:
    for rank in range(min(stream.parts, stream.num_cases)):
        assert stream.case_index(1, stream.phantom(step, rank)) in stream.held(1, rank)


def test_a_part_of_the_cases_can_be_held_while_all_are_trained_on() -> None:
    stream = Stream(seed=0, num_cases=10, per_case=1, batch=2, rate=0.3)
    assert stream.held(1, 0).tolist() == stream.held(7, 0).tolist()
    assert len(stream.held(1, 0)) == 3
    assert [stream.case_index(1, position) for position in range(10)] == ORDER


def test_parts_refuse_a_world_that_they_do_not_fit() -> None:
    with pytest.raises(ValueError, match="3 parts cannot be shared by 4 ranks"):
        Stream(seed=0, num_cases=9, per_case=1, batch=12, parts=3).share(1, 0, 4)


SHAPES = [(24, 20, 16), (8, 8, 8), (5, 30, 7)]  # ids case-0 … in this order; the last has no foreground
BALL, POINT = 2, 1


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Three cases; those with foreground hold one voxel of POINT and a block of BALL."""
    folder = tmp_path_factory.mktemp("sampler")
    cases = []
    for number, shape in enumerate(SHAPES):
        label = np.zeros(shape, np.uint8)
        if number < 2:
            label[2:6, 2:6, 2:6] = BALL
            label[0, -1, -1] = POINT
        image = np.random.default_rng(number).normal(size=shape).astype(np.float32)
        paths = (folder / f"{number}_image.nii", folder / f"{number}_label.nii")
        for path, array in zip(paths, (image, label), strict=True):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)
        cases.append(Case(f"case-{number}", (paths[0],), paths[1], f"p{number}"))
    data = Data(source=str(folder))
    return prepare(Manifest(cases, {0: "none", 1: "point", 2: "ball"}), data, folder / "store", patch=(8, 8, 8))


def make_sampler(
    store: Store, size: tuple[int, int, int], foreground: float, *, seed: int = 0, rows: tuple[int, ...] = (0, 1, 2)
) -> PatchSampler:
    stream = Stream(seed=seed, num_cases=len(rows), per_case=500, batch=6)
    return PatchSampler(stream, store, np.array(rows, np.int32), size, foreground)


def drawn(sampler: PatchSampler, num: int) -> list[Sample]:
    return [sampler.sample(1, position) for position in range(num)]


def test_a_foreground_patch_is_centred_on_its_voxel_where_the_case_allows(store: Store) -> None:
    starts = {sample.start for sample in drawn(make_sampler(store, (4, 4, 4), 1.0, rows=(0,)), 500)}
    around_ball = {start for start in starts if max(start) <= 3}  # voxels 2 to 5, less half a patch
    assert starts - around_ball == {(0, 16, 12)}, "the point at (0, 19, 15), moved inside"
    assert [{start[axis] for start in around_ball} for axis in range(3)] == [{0, 1, 2, 3}] * 3


sizes = some.tuples(*[some.integers(1, 40)] * 3)


@given(sizes, some.floats(0, 1), seeds, some.integers(0, 1499))
def test_a_patch_lies_inside_the_case_or_starts_at_its_corner(
    store: Store, size: tuple[int, int, int], foreground: float, seed: int, position: int
) -> None:
    sample = make_sampler(store, size, foreground, seed=seed).sample(1, position)
    for start, length, whole in zip(sample.start, size, SHAPES[sample.row], strict=True):
        if length < whole:
            assert 0 <= start <= whole - length
        else:
            before, after = -start, length - whole + start
            assert 0 <= after - before <= 1, "a small case lies in the middle of the patch"


@settings(max_examples=15, deadline=None)
@given(some.floats(0.1, 0.9), seeds)
def test_patches_are_balanced_as_asked_for(store: Store, foreground: float, seed: int) -> None:
    """One voxel is as likely as a whole block: labels are chosen first, places after."""
    sampler = make_sampler(store, (1, 1, 1), foreground, seed=seed, rows=(0,))
    num, label_xyz = 500, store.read_label(0)
    found = Counter(int(label_xyz[sample.start]) for sample in drawn(sampler, num))
    for label, by_chance in ((POINT, 1 / label_xyz.size), (BALL, 64 / label_xyz.size)):
        expected = foreground / 2 + (1 - foreground) * by_chance
        assert abs(found[label] / num - expected) < 5 * np.sqrt(expected * (1 - expected) / num)


def test_foreground_patches_show_foreground_and_others_are_spread_evenly(store: Store) -> None:
    for sample in drawn(make_sampler(store, (4, 4, 4), 1.0, rows=(0, 1)), 200):
        x, y, z = (slice(at, at + 4) for at in sample.start)
        assert store.read_label(sample.row, (x, y, z)).any()
    starts = [sample.start for sample in drawn(make_sampler(store, (20, 20, 16), 0.0, rows=(0,)), 500)]
    frequencies = np.bincount([x for x, _, _ in starts], minlength=5)
    assert len(frequencies) == 5
    assert (np.abs(frequencies - 100) < 5 * np.sqrt(80)).all()


def test_a_case_without_foreground_is_sampled_all_the_same(store: Store) -> None:
    assert len({sample.start for sample in drawn(make_sampler(store, (2, 2, 2), 1.0, rows=(2,)), 100)}) > 20


def test_rows_choose_the_cases(store: Store) -> None:
    sampler = make_sampler(store, (4, 4, 4), 0.5, rows=(2, 0))
    visited = {(sampler.case(1, position), sampler.sample(1, position).row) for position in (0, 999)}
    assert visited == {("case-0", 0), ("case-2", 2)}


def described(sample: Sample) -> tuple[int, int, tuple[int, int, int], float]:
    return sample.position, sample.row, sample.start, sample.rng.random()


@settings(max_examples=25, deadline=None)
@given(seeds, some.integers(1, 6), some.integers(1, 4), some.integers(1, 6))
def test_the_stream_is_the_same_for_any_world_and_any_number_of_threads(
    store: Store, seed: int, world_size: int, threads: int, first_step: int
) -> None:
    steps = range(first_step, first_step + 3)
    alone = make_sampler(store, (4, 4, 4), 0.5, seed=seed)
    expected = [described(alone.sample(1, position)) for step in steps for position in alone.stream.positions(step)]
    ranks = [make_sampler(store, (4, 4, 4), 0.5, seed=seed) for _ in range(world_size)]
    asked = [
        (ranks[rank], position)
        for step in steps
        for rank in range(world_size)
        for position in ranks[rank].stream.share(step, rank, world_size)
    ]
    with ThreadPoolExecutor(threads) as pool:
        reversed_work = [pool.submit(sampler.sample, 1, position) for sampler, position in reversed(asked)]
    assert [described(work.result()) for work in reversed(reversed_work)] == expected
