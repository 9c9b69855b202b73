"""Samplers: pure functions of the search, the index and, for TPE, the history."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from voxscale.config.load import check_section
from voxscale.config.search import Search, canonical
from voxscale.errors import InfrastructureError
from voxscale.search.samplers import Seen, propose

ALL_KINDS = {
    "a": {"loguniform": [1e-4, 1e-1]},
    "b": {"uniform": [-2, 3]},
    "c": {"randint": [2, 9]},
    "d": {"choice": [None, True, 1.5, "x", [1, [2]], {"name": "unet", "channels": [8, 16]}]},
    "e": {"grid": [[0.9, 0.99], [0.9, 0.999]]},
}


def make(space: Any = ALL_KINDS, **fields: Any) -> Search:
    return check_section(Search, {"space": space, **fields}, "search")


def is_in(value: Any, dimension: dict[str, Any]) -> bool:
    ((kind, content),) = dimension.items()
    if kind in ("grid", "choice"):
        return canonical(value) in map(canonical, content)
    if kind == "randint":
        return type(value) is int and content[0] <= value < content[1]
    return type(value) is float and content[0] <= value <= content[1]


_PLAIN = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(2**60), 2**60)
    | some.floats(allow_nan=False, allow_infinity=False)
    | some.text(max_size=3),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
_LISTS = some.lists(_PLAIN, min_size=1, max_size=4, unique_by=canonical)
_ENDS = some.tuples(some.floats(1e-300, 1e300), some.floats(1e-300, 1e300)).map(sorted).filter(lambda e: e[0] < e[1])
_INTS = some.tuples(some.integers(-(2**53), 2**53), some.integers(-(2**53), 2**53)).map(sorted)
_DIMENSIONS = some.one_of(
    some.builds(lambda values: {"choice": values}, _LISTS),
    some.builds(lambda values: {"grid": values}, _LISTS),
    some.builds(lambda ends: {"uniform": list(ends)}, _ENDS),
    some.builds(lambda ends: {"loguniform": list(ends)}, _ENDS),
    some.builds(lambda ends: {"randint": list(ends)}, _INTS.filter(lambda e: e[0] < e[1])),
)
_SPACES = some.dictionaries(some.sampled_from("abcd"), _DIMENSIONS, min_size=1)


@settings(max_examples=100, deadline=None)
@given(space=some.dictionaries(some.sampled_from("abcd"), _LISTS.map(lambda v: {"grid": v}), min_size=1))
def test_a_grid_holds_every_point_once_in_the_order_of_a_product(space: dict[str, Any]) -> None:
    search = make(space)
    expected = [
        dict(zip(space, values, strict=True)) for values in itertools.product(*(d["grid"] for d in space.values()))
    ]
    found = [propose(search, index, ()) for index in range(search.num_points)]
    assert [json.dumps(point) for point in found] == [json.dumps(point) for point in expected]


def test_a_grid_ends() -> None:
    with pytest.raises(IndexError, match="point 2 of a grid with 2"):
        propose(make({"a": {"grid": [1, 2]}}), 2, ())


def test_a_grid_over_a_long_range_takes_no_memory() -> None:
    search = make({"a": {"randint": [0, 2**40]}, "b": {"choice": ["x", "y"]}}, sampler="grid")
    assert propose(search, 2**40 + 1, ()) == {"a": 2**39, "b": "y"}


@settings(max_examples=100, deadline=None)
@given(space=_SPACES, seed=some.integers(0, 2**63 - 1), order=some.permutations(range(6)), trials=some.integers(1, 99))
def test_random_depends_on_seed_and_index_alone(space: Any, seed: int, order: list[int], trials: int) -> None:
    search = make(space, sampler="random", seed=seed)
    expected = [propose(search, index, ()) for index in range(6)]
    seen: list[Seen] = []
    for index in order:
        found = propose(make(space, sampler="random", seed=seed, trials=trials), index, seen)
        assert json.dumps(found) == json.dumps(expected[index])
        assert json.dumps(json.loads(json.dumps(found))) == json.dumps(found)
        assert list(found) == list(space)
        assert all(is_in(value, space[path]) for path, value in found.items())
        seen.append(Seen(index, found, float(index)))


def test_random_differs_by_seed_and_index() -> None:
    values = {propose(make(seed=seed), index, ())["a"] for seed in range(5) for index in range(20)}
    assert len(values) == 100


def test_random_draws_as_its_kinds_say() -> None:
    points = [propose(make(), index, ()) for index in range(4000)]
    decades = Counter(math.floor(math.log10(point["a"])) for point in points)
    assert set(decades) == {-4, -3, -2}
    assert all(abs(count / 4000 - 1 / 3) < 0.04 for count in decades.values())
    assert abs(sum(point["b"] for point in points) / 4000 - 0.5) < 0.1
    assert set(Counter(point["c"] for point in points)) == set(range(2, 9))
    choices = Counter(canonical(point["d"]) for point in points)
    assert len(choices) == 6
    assert min(choices.values()) > 4000 / 6 * 0.8


@pytest.mark.parametrize("kind", ["uniform", "loguniform"])
@pytest.mark.parametrize("low", [1e-4, 3.3e-7, 0.7, 5e-324, 1e300])
def test_rounding_does_not_leave_a_narrow_range(kind: str, low: float) -> None:
    high = math.nextafter(low, math.inf)
    search = make({"a": {kind: [low, high]}})
    assert {propose(search, index, ())["a"] for index in range(50)} <= {low, high}


def test_a_proposal_is_no_part_of_the_config() -> None:
    search = make({"a": {"grid": [[1, 2]]}})
    propose(search, 0, ())["a"].append(3)
    assert propose(search, 0, ()) == {"a": [1, 2]}


def _history(search: Search, count: int) -> list[Seen]:
    """Trials of which the best have c = 5 and a near 1e-2; each third is running or failed."""
    history: list[Seen] = []
    for index in range(count):
        params = propose(search, index, history)
        value = -abs(math.log10(params["a"]) + 2) - abs(params["c"] - 5)
        state = index % 6
        history.append(Seen(index, params, None if state in (2, 5) else value, running=state == 5))
    return history


def test_tpe_is_a_pure_function_of_the_history() -> None:
    search = make(sampler="tpe", seed=3)
    history = _history(search, 16)
    expected = propose(search, 16, history)
    assert propose(search, 16, history[::-1]) == expected
    reread = [Seen(seen.index, json.loads(json.dumps(seen.params)), seen.value, seen.running) for seen in history]
    assert propose(search, 16, reread) == expected
    assert propose(make(sampler="tpe", seed=3), 16, tuple(history)) == expected
    assert propose(make(sampler="tpe", seed=4), 16, history) != expected
    assert propose(search, 17, history) != expected
    assert propose(search, 16, history[:-4]) != expected


def test_tpe_proposes_plain_values_of_the_space() -> None:
    for seen in _history(make(sampler="tpe"), 20):
        assert json.loads(json.dumps(seen.params)) == seen.params
        assert list(seen.params) == list(ALL_KINDS)
        assert all(is_in(value, ALL_KINDS[path]) for path, value in seen.params.items())


@pytest.mark.parametrize("mode", ["max", "min"])
def test_tpe_learns_in_the_right_direction(mode: str) -> None:
    search = make({"a": {"uniform": [0, 1]}}, sampler="tpe", mode=mode)
    history: list[Seen] = []
    for index in range(40):
        params = propose(search, index, history)
        history.append(Seen(index, params, params["a"]))
    late = sum(seen.params["a"] for seen in history[20:]) / 20
    assert late > 0.8 if mode == "max" else late < 0.2


def test_tpe_leaves_running_trials_alone() -> None:
    """As if poor: with the best corner taken by trials under way, proposals spread further than without them."""
    search = make({"a": {"uniform": [0, 1]}}, sampler="tpe")
    done = [Seen(index, {"a": index / 20}, index / 20) for index in range(20)]
    under_way = [Seen(20 + index, {"a": 0.95 + index / 1000}, None, running=True) for index in range(20)]
    free = [propose(search, index, done)["a"] for index in range(100, 120)]
    taken = [propose(search, index, [*done, *under_way])["a"] for index in range(100, 120)]
    assert sum(0.93 < value < 0.99 for value in taken) < sum(0.93 < value < 0.99 for value in free)


def test_tpe_takes_what_it_cannot_use() -> None:
    search = make({"a": {"uniform": [0, 1]}, "b": {"choice": [1, 2]}, "c": {"randint": [0, 3]}}, sampler="tpe")
    odd: list[dict[str, Any]] = [
        {},
        {"a": 2.0, "b": 1, "c": 0},
        {"a": "x", "b": 1, "c": 0},
        {"a": 0.5, "b": 3, "c": 0},
        {"a": 0.5, "b": 1, "c": 3},
        {"a": 0.5, "b": 1, "c": True},
    ]
    history = [Seen(index, params, 1.0) for index, params in enumerate(odd)]
    assert propose(search, 9, history) == propose(search, 9, ())
    for value in (math.nan, math.inf, -math.inf, None):
        assert set(propose(search, 9, [Seen(0, {"a": 0, "b": 1, "c": 2}, value)])) == {"a", "b", "c"}


def test_tpe_is_silent() -> None:
    """In a process of its own: Optuna's log goes to the stream that was there when it was first imported."""
    code = (
        "from voxscale.config.search import Search; from voxscale.search.samplers import Seen, propose\n"
        "search = Search.model_validate({'sampler': 'tpe', 'space': {'a': {'uniform': [0, 1]}}})\n"
        "propose(search, 12, [Seen(k, {'a': k / 12}, k, k == 3) for k in range(12)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_tpe_without_optuna_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InfrastructureError, match="search.sampler tpe needs Optuna") as caught:
        propose(make(sampler="tpe"), 0, ())
    assert caught.value.fix == "pip install 'voxscale[ray]'"
