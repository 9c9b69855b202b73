"""Plan a run before it is submitted: measure what a step costs here, or look it up, and say what the run will need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from voxscale.config.schema import Config
from voxscale.config.site import Interconnect, Site
from voxscale.data.cases import TRAIN, VAL
from voxscale.data.store import describe_store
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.files import write_json
from voxscale.launch.counting import count_network_of, find_network, size_of_window, windows_of_case
from voxscale.launch.folder import OpenedRun, is_prepared
from voxscale.launch.machine import look_at_machine
from voxscale.launch.measuring import find_costs, find_costs_of, measure_costs, opened_aside
from voxscale.launch.target import Target, choose_target, unknown_device
from voxscale.plan.costs import Costs
from voxscale.plan.devices import precision_warnings, table_costs
from voxscale.plan.fitting import Problem, idle_problem, raise_problems
from voxscale.plan.forecast import Forecast, make_forecast
from voxscale.plan.links import choose_links
from voxscale.plan.plan import Plan, make_plan, split_batch
from voxscale.plan.predict import Cached, Layout, predict_memory, predict_times
from voxscale.plan.resources import Machine, resolve, with_threads


@dataclass(frozen=True)
class Question:
    """A run that is asked about. Its config has a batch that divides, whatever was asked for."""

    config: Config
    target: Target
    layout: Layout
    environ: Mapping[str, str]

    def settled(self, layout: Layout) -> Config:
        """The config as it would be on a layout."""
        return resolve(self.config, self.target.node(layout.devices), devices=layout.devices, nodes=layout.nodes)


@dataclass(frozen=True)
class Found:
    """What is known of a step: costs of one world or more, and what was assumed or changed for them."""

    costs: list[Costs]
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def forecast_run(
    config: Config,
    environ: Mapping[str, str],
    site: Site,
    *,
    nodes: int = 1,
    devices: str = "auto",
    device: str | None = None,
    probe: bool = True,
    count: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Forecast:
    """What a run takes on so many nodes and devices. Raises all that cannot work, with the changes that would.

    Steps are measured on this machine, unless that was done before; without `probe` only what was counts. For GPUs that
    are not here, what was measured on such a one counts, else the table; without `count` only if the network has been
    counted before.
    """
    target = choose_target(device, site, look_at_machine(environ))
    layout = target.layout(config, nodes, devices)
    config = with_threads(config, target.node(layout.devices).cpus, devices=layout.devices)
    question, problems = _with_batch_that_divides(Question(config, target, layout, environ))
    if problems and not is_prepared(question.config, environ):
        raise_problems(problems)  # before the data are prepared, which may take hours
    with opened_aside(question.config, target.machine, environ, devices=1) as opened:
        plans = dict(_plans(question, opened))
        cached_bytes, store_bytes = _cached_bytes(question.config, opened), opened.store.disk_bytes
        problems += filter(None, [idle_problem(plans[layout], layout)])
        if not target.is_here:
            found = _known_elsewhere(question, opened, plans, count=count, say=say)
    if target.is_here:
        found = Found(list(_known_here(question, probe=probe and not problems, say=say)))
    if problems and not found.costs:
        raise_problems(problems)
    if not found.costs:
        raise InfrastructureError(
            "nothing has been measured here yet", fix="run it without --no-probe once, or name a GPU with --device"
        )
    costs = found.costs[-1]
    return make_forecast(
        question.config,
        plans,
        found.costs,
        choose_links(site.interconnect, measured_gb_s=costs.all_reduce_gb_s, device=target.device),
        target.given(layout, costs, physical_bytes=_physical_bytes(), shared_bytes=_shared_memory_bytes()),
        store_bytes=store_bytes,
        cached=Cached.of(question.config.data.cache, cached_bytes),
        assumptions=found.assumptions,
        is_here=target.is_here,
        signal_s=site.signal_s,
        problems=problems,
        warnings=(*target.warnings, *found.warnings),
    )


def write_expected(opened: OpenedRun, machine: Machine, environ: Mapping[str, str]) -> None:
    """Keep with a run on this machine what it is expected to take, where its steps were measured here before."""
    layout = Layout(1, opened.devices)
    worlds = sorted({1, opened.devices})
    found = [find_costs(opened.config, machine, environ, world_size=world) for world in worlds]
    measured = [costs for costs in found if costs is not None]
    if not measured:
        return
    links = choose_links(Interconnect(), measured_gb_s=measured[-1].all_reduce_gb_s)
    times = predict_times(opened.plan, layout, measured, links)
    cached = Cached.of(opened.config.data.cache, _cached_bytes(opened.config, opened))
    memory = predict_memory(opened.plan, layout, measured, cached=cached)
    step = {"data": times.step.data_s, "compute": times.step.compute_s, "communication": times.step.communication_s}
    expected = {"layout": str(layout), "step_s": step, "total_s": times.total_s, "memory_bytes": memory.node}
    write_json(opened.run.forecast, {**expected, "confidence": times.confidence})


def layouts_up_to(layout: Layout) -> Iterator[Layout]:
    """1, 2, 4 … devices: those of one node first, then of more nodes; the last is the layout itself."""
    devices = 1
    while devices < layout.devices:
        yield Layout(1, devices)
        devices *= 2
    nodes = 1
    while nodes < layout.nodes:
        yield Layout(nodes, layout.devices)
        nodes *= 2
    yield layout


def _with_batch_that_divides(question: Question) -> tuple[Question, list[Problem]]:
    """The question with the next larger batch that divides, so that all else can be looked at, too."""
    train, world_size = question.settled(question.layout).train, question.layout.world_size
    try:
        split_batch(train.global_batch, world_size, train.micro_batch)
    except ConfigError as error:
        batch = -(-train.global_batch // world_size) * world_size
        config = question.config
        divides = config.model_copy(update={"train": config.train.model_copy(update={"batch": batch})})
        return replace(question, config=divides), [Problem(error.message, error.fix)]
    return question, []


def _known_here(question: Question, *, probe: bool, say: Callable[[str], None]) -> Iterator[Costs]:
    """Of one rank, and of as many as the layout has, if this machine has the devices, else of two."""
    machine, world_size = question.target.machine, question.layout.world_size
    here = machine.gpus or machine.cpus
    for world in sorted({1, world_size} if world_size <= here else {1, min(2, here)}):
        settled = resolve(question.config, machine, devices=world)
        try:
            split_batch(settled.train.global_batch, world, settled.train.micro_batch)
        except ConfigError:
            continue
        costs = find_costs(settled, machine, question.environ, world_size=world)
        if costs is None and probe:
            say(f"measuring steps on {world} rank{'s' if world > 1 else ''} of this machine")
            costs = measure_costs(question.config, machine, question.environ, devices=world, say=say)
        if costs is not None:
            yield costs


def _known_elsewhere(
    question: Question,
    opened: OpenedRun,
    plans: Mapping[Layout, Plan],
    *,
    count: bool,
    say: Callable[[str], None],
) -> Found:
    """What was measured on such GPUs, kept beside the same store; else what the table has of them."""
    target, environ = question.target, question.environ
    worlds = dict.fromkeys([Layout(1, 1), question.layout])
    measured = [
        costs
        for each in worlds
        if each in plans
        and (costs := find_costs_of(question.settled(each), environ, world_size=each.world_size, such=target.is_such))
    ]
    if measured:
        return Found(measured)
    if target.device is None:
        raise unknown_device(target)
    plan = next(iter(plans.values()))
    settled = question.settled(Layout(1, 1))
    network = find_network(settled, plan, environ)
    if network is None and count:
        say("counting what the network does to a patch")
        network = count_network_of(settled, plan, opened, environ)
    if network is None:
        return Found([])
    costs, assumptions = table_costs(
        target.device,
        network,
        plan,
        precision=settled.train.precision,
        windows=windows_of_case(settled, plan, opened),
        window=size_of_window(settled, plan),
        cpus=target.node(1).cpus,
    )
    return Found([costs], assumptions, precision_warnings(settled.train.precision, target.device))


def _plans(question: Question, opened: OpenedRun) -> Iterator[tuple[Layout, Plan]]:
    counts = {split: sum(case.split == split for case in opened.cases) for split in (TRAIN, VAL)}
    for each in layouts_up_to(question.layout):
        try:
            plan = make_plan(
                question.settled(each),
                num_train=counts[TRAIN],
                num_val=counts[VAL],
                world_size=each.world_size,
                **describe_store(opened.store),
            )
        except ConfigError:
            if each == question.layout:
                raise
            continue
        yield each, plan


def _cached_bytes(config: Config, opened: OpenedRun) -> int:
    """What all cases take that a cache holds at a time."""
    rows = [opened.store.row(case.id) for case in opened.cases if case.split == TRAIN]
    return round(sum(map(opened.store.nbytes, rows)) * config.data.cache.rate)


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _shared_memory_bytes() -> int:
    return shutil.disk_usage("/dev/shm").total  # noqa: S108
