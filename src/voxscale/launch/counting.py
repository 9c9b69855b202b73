"""What the network of a config does to a patch: counted once, without computing anything, and kept beside the store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from voxscale.config.schema import Config
from voxscale.data.build import store_root
from voxscale.data.cases import VAL
from voxscale.data.outcomes import make_outcomes
from voxscale.files import read_json, write_json
from voxscale.launch.folder import OpenedRun
from voxscale.launch.measuring import cost_identity, hash_of
from voxscale.plan.devices import Network
from voxscale.plan.plan import Plan


def find_network(config: Config, plan: Plan, environ: Mapping[str, str]) -> Network | None:
    """What was counted before."""
    try:
        return Network(**read_json(_kept(config, plan, environ)))
    except (OSError, ValueError, TypeError):
        return None


def count_network_of(config: Config, plan: Plan, opened: OpenedRun, environ: Mapping[str, str]) -> Network:
    """Count, and keep what was found."""
    from voxscale.tasks import Task, build_outcome_task, build_task
    from voxscale.train.count import count_network

    outcomes = make_outcomes(config, opened.cases) if config.predicts_outcomes else None
    task: Task = build_task(config, opened.store) if outcomes is None else build_outcome_task(config, outcomes)
    network = count_network(config, plan, task, outcomes)
    write_json(_kept(config, plan, environ), network.as_json())
    return network


def windows_of_case(config: Config, plan: Plan, opened: OpenedRun) -> float:
    """How many patches' worth of computing a validation case of middle size takes."""
    if config.predicts_outcomes:
        return 1.0
    from voxscale.infer.windows import starts

    shapes = sorted(opened.store.shape(opened.store.row(case.id)) for case in opened.cases if case.split == VAL)
    if not shapes:
        return 0.0
    options = config.validation
    count = 8 if options.mirror else 1
    for length, size in zip(shapes[len(shapes) // 2], options.window or plan.patch, strict=True):
        count *= len(starts(length, size, options.overlap))
    return count * size_of_window(config, plan)


def size_of_window(config: Config, plan: Plan) -> float:
    """How many patches a window of a validation is as large as."""
    if config.predicts_outcomes:
        return 1.0
    return math.prod(config.validation.window or plan.patch) / math.prod(plan.patch)


def _kept(config: Config, plan: Plan, environ: Mapping[str, str]) -> Path:
    facts = ["network", cost_identity(config), plan.patch, plan.channels, plan.labels, plan.data_sha256]
    return store_root(config.data, environ) / "costs" / f"network-{hash_of(facts)}.json"
