"""Which values a trial gets: grid, random and TPE, each a pure function of the search, the trial's index and, for TPE,
what was seen so far. So a search that is started again proposes what it proposed before."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from voxscale.config.search import Dimension, Search, canonical
from voxscale.errors import InfrastructureError


@dataclass(frozen=True)
class Seen:
    """An earlier trial: `value` is its metric; None while it is `running`, or where it failed."""

    index: int
    params: Mapping[str, Any]
    value: float | None
    running: bool = False


def propose(search: Search, index: int, history: Sequence[Seen]) -> dict[str, Any]:
    """The values of the trial `index`, counted from 0, by field path, as plain data that JSON gives back unchanged.

    `history` matters for TPE alone, whatever its order.
    """
    match search.chosen_sampler:
        case "grid":
            params = _grid_point(search, index)
        case "random":
            params = _random_point(search, index)
        case "tpe":
            params = _tpe_point(search, index, history)
    plain: dict[str, Any] = json.loads(json.dumps(params, allow_nan=False))
    return plain


def _grid_point(search: Search, index: int) -> dict[str, Any]:
    """In the order of itertools.product: the last field changes fastest."""
    if not 0 <= index < search.num_points:
        raise IndexError(f"point {index} of a grid with {search.num_points}")
    params: dict[str, Any] = {}
    for path, dimension in reversed(search.space.items()):
        values = dimension.values or ()
        index, position = divmod(index, len(values))
        params[path] = values[position]
    return {path: params[path] for path in search.space}


def _random_point(search: Search, index: int) -> dict[str, Any]:
    """Seeded by position: a trial's values depend neither on the trials before it nor on how many there are."""
    random = np.random.default_rng([search.seed, index])
    return {path: _draw(dimension, random) for path, dimension in search.space.items()}


def _draw(dimension: Dimension, random: np.random.Generator) -> Any:
    if dimension.uniform is not None:
        low, high = dimension.uniform
        return min(max(low + (high - low) * float(random.random()), low), high)
    if dimension.loguniform is not None:
        low, high = dimension.loguniform
        exponent = math.log(low) + (math.log(high) - math.log(low)) * float(random.random())
        return min(max(math.exp(exponent), low), high)
    values = dimension.values or ()
    return values[int(random.integers(len(values)))]


def _tpe_point(search: Search, index: int, history: Sequence[Seen]) -> dict[str, Any]:
    """Optuna's TPE over a study made anew from the history; running trials count as poor, so that no two search the
    same corner."""
    optuna = _import_optuna()
    distributions = {path: _distribution(optuna, dimension) for path, dimension in search.space.items()}
    seed = int(np.random.SeedSequence([search.seed, index]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sampler's options are marked experimental in Optuna 4
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study = optuna.create_study(
            storage=optuna.storages.InMemoryStorage(),
            sampler=sampler,
            direction="maximize" if search.direction == "max" else "minimize",
        )
        study.add_trials(list(_replay(optuna, search, distributions, history)))
        trial = study.ask(distributions)
    return {path: _from_optuna(dimension, trial.params[path]) for path, dimension in search.space.items()}


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise InfrastructureError(
            f"search.sampler tpe needs Optuna, which cannot be imported: {error}", fix="pip install 'voxscale[ray]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _replay(optuna: Any, search: Search, distributions: Mapping[str, Any], history: Sequence[Seen]) -> Iterator[Any]:
    """The history as Optuna's trials; values outside the space, and metrics that are not finite, teach nothing."""
    states = optuna.trial.TrialState
    for seen in sorted(history, key=lambda seen: seen.index):
        params = _to_optuna(search, seen.params)
        if params is None:
            continue
        has_value = seen.value is not None and math.isfinite(seen.value) and not seen.running
        state = states.RUNNING if seen.running else states.COMPLETE if has_value else states.FAIL
        yield optuna.trial.create_trial(
            state=state, value=seen.value if has_value else None, params=params, distributions=dict(distributions)
        )


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    """Optuna knows a list's values by their positions, as they may be of any kind."""
    if dimension.uniform is not None:
        return optuna.distributions.FloatDistribution(*dimension.uniform)
    if dimension.loguniform is not None:
        return optuna.distributions.FloatDistribution(*dimension.loguniform, log=True)
    if dimension.randint is not None:
        return optuna.distributions.IntDistribution(dimension.randint[0], dimension.randint[1] - 1)
    return optuna.distributions.CategoricalDistribution(range(len(dimension.values or ())))


def _from_optuna(dimension: Dimension, value: Any) -> Any:
    if dimension.uniform is not None or dimension.loguniform is not None:
        return float(value)
    return int(value) if dimension.randint is not None else (dimension.values or ())[int(value)]


def _to_optuna(search: Search, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """A trial's values as Optuna has them; None where the space does not hold them."""
    found: dict[str, Any] = {}
    for path, dimension in search.space.items():
        if path not in params:
            return None
        value = params[path]
        if ends := dimension.uniform or dimension.loguniform:
            if isinstance(value, bool) or not isinstance(value, int | float) or not ends[0] <= value <= ends[1]:
                return None
            found[path] = float(value)
        elif dimension.randint is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value not in range(*dimension.randint):
                return None
            found[path] = value
        else:
            written = [canonical(choice) for choice in dimension.values or ()]
            if canonical(value) not in written:
                return None
            found[path] = written.index(canonical(value))
    return found
