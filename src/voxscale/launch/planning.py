"""Plan a run before it is submitted: measure what a step costs here, or look it up, and say what the run will need."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from voxscale.config.schema import Config
from voxscale.config.site import Interconnect, Site
from voxscale.data.cases import TEST, TRAIN, VAL
from voxscale.data.outcomes import make_outcomes
from voxscale.data.store import describe_store
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.files import write_json
from voxscale.launch.counting import count_network_of, find_network, size_of_window, windows_of_case
from voxscale.launch.folder import OpenedRun, is_prepared
from voxscale.launch.machine import look_at_machine
from voxscale.launch.measuring import find_costs, find_costs_of, measure_costs, opened_aside
from voxscale.launch.target import Room, Target, choose_target, unknown_device
from voxscale.memory import given_memory
from voxscale.plan.costs import Costs
from voxscale.plan.devices import Device, precision_warnings, table_costs
from voxscale.plan.fitting import Problem, idle_problem, raise_problems
from voxscale.plan.forecast import Forecast, make_forecast
from voxscale.plan.links import choose_links
from voxscale.plan.plan import Plan, make_plan, split_batch
from voxscale.plan.predict import AtEnd, Cached, Layout, predict_memory, predict_times
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
    is_kept: bool = False  # all was measured before


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
    folder: Path = Path("runs"),
    say: Callable[[str], None] = lambda _: None,
) -> Forecast:
    """What a run takes on so many nodes and devices. Raises all that cannot work, with the changes that would.

    Steps are measured on this machine, unless that was done before; without `probe` only what was counts. For GPUs that
    are not here, what was measured on such a one counts, else the table; without `count` only if the network has been
    counted before. The run is to be written to `folder`.
    """
    target = choose_target(device, site, look_at_machine(environ))
    layout = target.layout(config, nodes, devices)
    config = with_threads(config, target.node(layout.devices).cpus, devices=layout.devices)
    question, problems = _with_batch_that_divides(Question(config, target, layout, environ))
    if problems and not is_prepared(question.config, environ):
        raise_problems(problems)  # before the data are prepared, which may take hours
    with opened_aside(question.config, target.machine, environ, devices=1) as opened:
        plans = dict(_plans(question, opened))
    problems += filter(None, [idle_problem(plans[layout], layout)])
    found = _find_costs(question, opened, plans, probe=probe and not problems, count=count, say=say)
    if problems and not found.costs:
        raise_problems(problems)
    if not found.costs:
        raise InfrastructureError(
            "nothing has been measured here yet", fix="run it without --no-probe once, or name a GPU with --device"
        )
    costs = found.costs[-1]
    room = Room(given_memory(environ), _shared_memory_bytes(), _free_bytes(folder))
    return make_forecast(
        question.config,
        plans,
        found.costs,
        choose_links(site.interconnect, measured_gb_s=costs.all_reduce_gb_s, device=target.device),
        target.given(layout, costs, room),
        store_bytes=opened.store.disk_bytes,
        cached=Cached.of(question.config.data.cache, _cached_bytes(question.config, opened)),
        at_end=_at_end(question.config, opened),
        assumptions=(*found.assumptions, *_simplifications(question.config)),
        is_here=target.is_here,
        is_kept=found.is_kept,
        signal_s=site.signal_s,
        problems=problems,
        warnings=(*target.warnings, *found.warnings),
    )


def write_expected(opened: OpenedRun, machine: Machine, environ: Mapping[str, str]) -> None:
    """Keep with a run on this machine what it is expected to take, where its steps were measured here before."""
    layout = Layout(1, opened.devices)
    worlds = sorted({1, opened.devices})
    data = opened.plan.data_sha256
    found = [find_costs(opened.config, machine, environ, data=data, world_size=world) for world in worlds]
    measured = [costs for costs in found if costs is not None]
    if not measured:
        return
    links = choose_links(Interconnect(), measured_gb_s=measured[-1].all_reduce_gb_s)
    times = predict_times(opened.plan, layout, measured, links, at_end=_at_end(opened.config, opened))
    cached = Cached.of(opened.config.data.cache, _cached_bytes(opened.config, opened))
    memory = predict_memory(opened.plan, layout, measured, cached=cached)
    step = {"data": times.step.data_s, "compute": times.step.compute_s}
    if measured[-1].communication_s is not None:
        step["communication"] = times.step.communication_s
    expected = {
        "layout": str(layout),
        "step_s": step,
        "total_s": times.total_s,
        "training_s": times.total_s - times.start_s - times.end_s,
        "memory_bytes": memory.node,
        "confidence": times.confidence,
    }
    write_json(opened.run.forecast, expected)


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


def _find_costs(
    question: Question,
    opened: OpenedRun,
    plans: Mapping[Layout, Plan],
    *,
    probe: bool,
    count: bool,
    say: Callable[[str], None],
) -> Found:
    """What was measured or is so now, on these devices or such; else what the table has of them."""
    target = question.target
    found = (
        _known_here(question, opened.plan.data_sha256, probe=probe, say=say)
        if target.is_here
        else _known_elsewhere(question, opened.plan.data_sha256, plans)
    )
    if found.costs:
        return found
    if not target.is_here and target.device is None:
        raise unknown_device(target)
    return found if target.device is None else _of_table(question, target.device, opened, plans, count=count, say=say)


def _known_here(question: Question, data: str, *, probe: bool, say: Callable[[str], None]) -> Found:
    """Of one rank, and of as many as the layout has, if this machine has the devices, else of two.

    For a site's CPUs what was measured in a job there counts too, of as many ranks as there are.
    """
    machine, world_size, environ = question.target.machine, question.layout.world_size, question.environ
    here, found, is_kept = machine.gpus or machine.cpus, [], True
    worlds = {1, world_size} if world_size <= here else {1, min(2, here)}
    for world in sorted({*worlds, world_size}):
        settled = resolve(question.config, machine, devices=world)
        try:
            split_batch(settled.train.global_batch, world, settled.train.micro_batch)
        except ConfigError:
            continue
        costs = find_costs(settled, machine, environ, data=data, world_size=world)
        if costs is None and question.target.has_site and not machine.gpus:
            costs = find_costs_of(settled, environ, data=data, world_size=world, such=lambda each: not each.on_gpu)
        if costs is None and probe and world in worlds:
            is_kept = False
            say(f"measuring steps on {world} rank{'s' if world > 1 else ''} of this machine")
            costs = measure_costs(question.config, machine, environ, data=data, devices=world, say=say)
        if costs is not None:
            found.append(costs)
    return Found(found, is_kept=is_kept)


def _known_elsewhere(question: Question, data: str, plans: Mapping[Layout, Plan]) -> Found:
    """What was measured on such GPUs, and kept beside the same store."""
    found = [
        find_costs_of(
            question.settled(each),
            question.environ,
            data=data,
            world_size=each.world_size,
            such=lambda costs: costs.on_gpu and question.target.is_such(costs.device),
        )
        for each in dict.fromkeys([Layout(1, 1), question.layout])
        if each in plans
    ]
    return Found([costs for costs in found if costs is not None], is_kept=True)


def _of_table(
    question: Question,
    device: Device,
    opened: OpenedRun,
    plans: Mapping[Layout, Plan],
    *,
    count: bool,
    say: Callable[[str], None],
) -> Found:
    """What published figures say, of a network that is counted."""
    target, environ = question.target, question.environ
    plan = next(iter(plans.values()))
    settled = question.settled(Layout(1, 1))
    network = find_network(settled, plan, environ)
    if network is None and count:
        say("counting what the network does to a patch")
        network = count_network_of(settled, plan, opened, environ)
    if network is None:
        return Found([])
    costs, assumptions = table_costs(
        device,
        network,
        plan,
        precision=settled.train.precision,
        windows=windows_of_case(settled, plan, opened),
        window=size_of_window(settled, plan),
        cpus=target.node(1).cpus,
    )
    return Found([costs], assumptions, precision_warnings(settled.train.precision, device))


def _simplifications(config: Config) -> Iterator[str]:
    """Where a run is taken as simpler than it is."""
    if config.train.freeze is not None:
        yield "train.freeze: epochs in which the encoder is held, which take less, are taken as those after them"
    if config.train.deterministic == "exact":
        yield "train.deterministic exact: ranks work in turn; what was not measured is taken as if they did not"


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


def _at_end(config: Config, opened: OpenedRun) -> AtEnd:
    """What is looked at when training is over, beside the validation cases."""
    counts, learns = Counter(case.split for case in opened.cases), False
    if config.predicts_outcomes:
        from voxscale.tasks import build_outcome_task

        learns = build_outcome_task(config, make_outcomes(config, opened.cases)).learns_from
    return AtEnd(counts[TEST], counts[TRAIN] if learns else 0)


def _shared_memory_bytes() -> int:
    return shutil.disk_usage("/dev/shm").total  # noqa: S108


def _free_bytes(folder: Path) -> int:
    """On the disk where a folder is, or will be."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free
