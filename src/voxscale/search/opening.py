"""Make a search's folder, or take up the one that is there. Everything is checked before a trial starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from voxscale.config.load import differences, plain, read_config, render_config
from voxscale.config.schema import Config
from voxscale.config.search import PerTrial, Search
from voxscale.data.build import store_root
from voxscale.data.cases import Case
from voxscale.data.formats import check_source
from voxscale.data.outcomes import Outcomes, make_outcomes
from voxscale.data.split import write_split
from voxscale.data.store import Store
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.files import write_text
from voxscale.launch.folder import check_task, is_prepared, load_cases, prepare_cases, split_prepared
from voxscale.launch.machine import look_at_machine
from voxscale.launch.ray import RayNode, Share
from voxscale.plan.plan import split_batch
from voxscale.plan.resources import Machine, resolve
from voxscale.runs import RunFolder, SearchFolder
from voxscale.search.ledger import read_ledger
from voxscale.search.samplers import propose
from voxscale.search.space import MAX_CHECKED, check_space, with_params
from voxscale.train.ownership import refuse_if_live

_FREE_TO_CHANGE = ("retries", "max_concurrent", "per_trial", "trials", "metric", "mode")


@dataclass(frozen=True)
class OpenedSearch:
    """A search that is ready to be driven: its trials, what each holds of a node, and its base config."""

    folder: SearchFolder
    config: Config
    search: Search
    share: Share
    ranks: int
    cases: list[Case] = field(default_factory=list)  # of a new search, split
    held: bool = False

    @property
    def machine(self) -> Machine:
        """What a trial has."""
        return Machine(gpus=self.ranks if self.share.gpus else 0, cpus=max(1, int(self.share.cpus)))

    @property
    def metric(self) -> str:
        return self.search.metric or self.config.validation.metric

    @property
    def num_trials(self) -> int:
        return self.search.num_points * self.search.seeds


def draft_search(config: Config, root: Path, *, fresh: bool = False) -> SearchFolder:
    """Check what can be checked without touching the data or Ray: the space, and the folder."""
    check_space(config)
    folder = SearchFolder(root)
    refuse_if_live(RunFolder(root))
    if not folder.exists and root.exists() and not _is_free(root):
        raise ConfigError(f"--run {root}: not a search, and not empty", fix="choose a new folder with --run")
    if folder.exists and not fresh:
        _refuse_other(folder, config)
    return folder


def prepare_search(
    config: Config, folder: SearchFolder, nodes: Sequence[RayNode], environ: Mapping[str, str], *, fresh: bool = False
) -> OpenedSearch:
    """Prepare the data once for all trials and split it once; or take up the search that is there.

    Everything is checked, and nothing written but the store.
    """
    search = section_of(config)
    share, ranks = share_of_trial(search.per_trial, nodes)
    if folder.exists and not fresh:
        held = read_config(folder.config)
        then = section_of(held)
        search = search.model_copy(update={"metric": then.metric, "mode": then.mode})
        held = held.model_copy(update={"search": search, **{name: getattr(config, name) for name in ("log", "track")}})
        return OpenedSearch(folder, held, search, share, ranks, held=True)
    store, cases, outcomes = _prepared(config, environ)
    config = _settled(config, store, outcomes, environ)
    opened = OpenedSearch(folder, config, section_of(config), share, ranks, cases=cases)
    for settled in _refuse_indivisible(opened):
        check_task(settled, store, cases, outcomes)
    return opened


def check_unprepared(config: Config, folder: SearchFolder, node: RayNode, environ: Mapping[str, str]) -> None:
    """Check a search for a Ray of such nodes as far as it can be told now, the data being prepared there if need be."""
    if config.data.synthetic is None:
        check_source(config.data)
    share, ranks = share_of_trial(section_of(config).per_trial, [node])
    _refuse_indivisible(OpenedSearch(folder, config, section_of(config), share, ranks))
    if is_prepared(config, environ):
        store, _, outcomes = _prepared(config, environ)
        _settled(config, store, outcomes, environ)


def write_search(opened: OpenedSearch) -> None:
    """Write the folder of a new search, which has been claimed, or what was changed in the search that is there.

    The config comes last: with it the folder is one.
    """
    folder = opened.folder
    if folder.exists != opened.held:
        raise InfrastructureError(
            f"search {folder.root}: was changed by another process while this one prepared its data",
            fix="start the same command again, or choose another folder with --run",
        )
    if opened.held:
        _write_changed(opened)
        return
    RunFolder(folder.root).make()
    write_text(folder.asked, render_config(opened.config))
    write_split(folder.split, opened.cases)
    write_text(folder.config, render_config(opened.config))


def _write_changed(opened: OpenedSearch) -> None:
    """What may change in a search that is continued, such as more trials, is from now on what it asks for."""
    for file in (opened.folder.asked, opened.folder.config):
        config = read_config(file)
        if config.search != opened.search:
            write_text(file, render_config(config.model_copy(update={"search": opened.search})))


def _prepared(config: Config, environ: Mapping[str, str]) -> tuple[Store, list[Case], Outcomes | None]:
    threads = look_at_machine(environ).cpus
    manifest = load_cases(config, environ, threads=threads)
    store = prepare_cases(manifest, config, environ, threads=threads)
    cases = split_prepared(manifest.cases, config, store)
    return store, cases, make_outcomes(config, cases) if config.predicts_outcomes else None


def _refuse_indivisible(opened: OpenedSearch) -> list[Config]:
    """Refuse points whose batch does not divide over the ranks of a trial.

    Returns the configs of the first point and of each that first has other regions, and so other metrics.
    """
    search, points = opened.search, dict[str, Config]()
    known = 1 if search.chosen_sampler == "tpe" else min(search.num_points, MAX_CHECKED)
    findings: dict[str, None] = {}
    for index in range(known):
        config = with_params(opened.config, propose(search, index, ()))
        settled = resolve(config, opened.machine, devices=opened.ranks)
        points.setdefault(repr(settled.data.regions), settled)
        try:
            split_batch(settled.train.global_batch, opened.ranks, settled.train.micro_batch)
        except ConfigError as error:
            findings[f"search.space: {error.message}"] = None
    if findings:
        raise ConfigError.from_findings(list(findings), fix="change search.space or search.per_trial.devices")
    return [*points.values()]


def share_of_trial(per_trial: PerTrial, nodes: Sequence[RayNode]) -> tuple[Share, int]:
    """(What a trial holds of its node, its ranks). A trial lives on one node: one that is too large is refused."""
    on_gpus = any(node.gpus for node in nodes)
    largest = max(nodes, key=lambda node: (node.gpus, node.cpus))
    most = largest.gpus if on_gpus else largest.cpus
    devices = float(int(most)) if per_trial.devices == "all" else float(per_trial.devices)
    each = largest.cpus / largest.gpus if on_gpus else 1.0
    cpus = max(devices, each * devices) if per_trial.cpus == "auto" else float(per_trial.cpus)
    share = Share(cpus=round(cpus, 4), gpus=round(devices, 4) if on_gpus else 0.0)  # Ray counts no finer
    kind = "GPUs" if on_gpus else "CPUs"
    if devices > most:
        raise InfrastructureError(
            f"search.per_trial.devices {devices:g}: the largest node of the Ray cluster has {most:g} {kind}",
            fix=f"set it to at most {most:g}; a trial lives on one node",
        )
    if not any(share.fits(node) for node in nodes):
        raise InfrastructureError(
            f"search.per_trial: no node of the Ray cluster has {share}; the largest has "
            f"{Share(largest.cpus, largest.gpus)}",
            fix="ask for fewer devices or search.per_trial.cpus",
        )
    return share, max(1, math.floor(devices))


def capacity(share: Share, nodes: Sequence[RayNode]) -> int:
    """How many trials there is room for at once."""
    return sum(share.fits(node) for node in nodes)


def section_of(config: Config) -> Search:
    if config.search is None:
        raise ConfigError("search: missing; expected what to search", fix="add a `search:` section with a `space`")
    return config.search


def _settled(config: Config, store: Store, outcomes: Outcomes | None, environ: Mapping[str, str]) -> Config:
    """What trials share: one place for the store, and the metric that chooses each one's best model."""
    search = section_of(config)
    metric = search.metric or config.validation.metric
    mode = _direction_of(metric, search, config, store, outcomes)
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"store": str(store_root(config.data, environ))}),
            "validation": config.validation.model_copy(update={"metric": metric}),
            "search": search.model_copy(update={"metric": metric, "mode": mode}),
        }
    )


def _direction_of(metric: str, search: Search, config: Config, store: Store, outcomes: Outcomes | None) -> str:
    """Whether more or less of a metric is better, as its task says. Refuses one that it does not report."""
    from voxscale.tasks import Task, build_outcome_task, build_task

    task: Task = build_task(config, store) if outcomes is None else build_outcome_task(config, outcomes)
    known = task.choosable()
    if metric not in known:
        raise ConfigError(
            f"search.metric: found {metric!r}, expected one that trials are chosen by: {', '.join(known)}",
            fix="set search.metric to one of them",
        )
    better, direction = ("less", "min") if task.prefers_low(metric) else ("more", "max")
    if search.mode not in ("auto", direction):
        raise ConfigError(
            f"search.mode: found {search.mode}, but {better} of {metric} is better",
            fix=f"set it to {direction}, or leave it out",
        )
    return direction


def _refuse_other(folder: SearchFolder, config: Config) -> None:
    """A search is continued with the config it began with; more trials, or other room for them, are no difference."""
    asked, then = config, read_config(folder.asked)
    found = differences(_without_search(asked), _without_search(then))
    if not differences(_without_search(asked), _without_search(read_config(folder.config))):
        found = []  # as it was settled
    here, there = plain(section_of(asked)), plain(section_of(then))
    names = [name for name in here if name not in _FREE_TO_CHANGE]
    found += [f"search.{name} is {there[name]} there, {here[name]} here" for name in names if here[name] != there[name]]
    devices = [section_of(each).per_trial.devices for each in (asked, then)]
    if devices[0] != devices[1]:
        found.append(f"search.per_trial.devices is {devices[1]} there, {devices[0]} here")
    metrics = [section_of(each).metric or each.validation.metric for each in (asked, then)]
    if metrics[0] != metrics[1]:
        found.append(f"search.metric is {metrics[1]} there, {metrics[0]} here")
    mode = section_of(asked).mode
    if mode not in ("auto", section_of(then).mode):
        found.append(f"search.mode is {section_of(then).mode} there, {mode} here")
    begun = math.ceil(
        len(read_ledger(folder.ledger).trials) / section_of(then).seeds
    )  # more than at first, if extended
    points = max(section_of(then).num_points, begun)
    if section_of(asked).num_points < points:
        found.append(f"search.trials is {points} there, {section_of(asked).num_points} here")
    if found:
        raise ConfigError.from_findings(
            [f"{folder.root} holds another search:", *(f"  {line}" for line in found)],
            fix="choose another folder with --run, or --fresh to move the old one aside and start anew",
        )


def _without_search(config: Config) -> Config:
    """The config without its search, and without what that sets in it."""
    validation = config.validation.model_copy(update={"metric": ""})
    return config.model_copy(update={"search": None, "validation": validation})


def _is_free(root: Path) -> bool:
    """Whether a search may be made here: nothing is there, or only what was written when its job was submitted."""
    run = RunFolder(root)
    return root.is_dir() and {path.name for path in root.iterdir()} <= {
        run.launch.name,
        run.logs.name,
        SearchFolder(root).split.name,
    }
