"""Make a search's folder, or take up the one that is there. Everything is checked before a trial starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from voxscale.config.load import differences, plain, read_config, render_config
from voxscale.config.schema import Config
from voxscale.config.search import PerTrial, Search
from voxscale.data.build import store_root
from voxscale.data.cases import Case
from voxscale.data.formats import check_source
from voxscale.data.outcomes import Outcomes, make_outcomes, target_strata
from voxscale.data.split import split_cases, write_split
from voxscale.data.store import Store
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.files import write_text
from voxscale.launch.folder import check_start, check_task, is_prepared, load_cases, prepare_cases, split_prepared
from voxscale.launch.machine import look_at_machine
from voxscale.launch.ray import RayNode, Share
from voxscale.plan.plan import split_batch
from voxscale.plan.resources import Machine, resolve, with_threads
from voxscale.runs import RunFolder, SearchFolder
from voxscale.search.ledger import read_ledger
from voxscale.search.samplers import propose
from voxscale.search.space import MAX_CHECKED, check_space, with_params
from voxscale.train.ownership import refuse_if_live

if TYPE_CHECKING:
    from voxscale.tasks import Task

_FREE_TO_CHANGE = ("retries", "max_concurrent", "trials")
_SETTLED = ("per_trial", "metric", "mode")  # what is asked for may be another word for it


@dataclass(frozen=True)
class OpenedSearch:
    """A search that is ready to be driven: its trials, what each holds of a node, and its base config."""

    folder: SearchFolder
    asked: Config
    config: Config  # what it was settled to
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
    search = continued_search(config, folder, fresh=fresh)
    share, ranks = share_of_trial(search.per_trial, nodes)
    if folder.exists and not fresh:
        free = {"search": search, **{name: getattr(config, name) for name in ("log", "track")}}
        held = read_config(folder.config).model_copy(update=free)
        return OpenedSearch(folder, config, held, search, share, ranks, held=True)
    store, cases, outcomes = _prepared(config, environ)
    settled = _settled(config, _task_of(config, store, outcomes), environ, share, ranks)
    opened = OpenedSearch(folder, config, settled, section_of(settled), share, ranks, cases=cases)
    for point in _refuse_indivisible(opened):
        check_start(point)
        check_task(point, store, cases, outcomes)
    return opened


def continued_search(config: Config, folder: SearchFolder, *, fresh: bool) -> Search:
    """The search that is asked for; of one that is there, as it was settled, with what may change in it."""
    asked = section_of(config)
    return asked if fresh or not folder.exists else _changed(section_of(read_config(folder.config)), asked)


def _changed(held: Search, asked: Search) -> Search:
    """A search with what may change in it, such as more trials, as it is asked for now."""
    room = held.per_trial.model_copy(update={"cpus": asked.per_trial.cpus})
    return held.model_copy(update={"per_trial": room, **{name: getattr(asked, name) for name in _FREE_TO_CHANGE}})


def check_unprepared(
    config: Config, folder: SearchFolder, share: Share, ranks: int, environ: Mapping[str, str]
) -> None:
    """Check a new search as far as it can be told now, the data being prepared by its job if need be."""
    if config.data.synthetic is None:
        check_source(config.data)
    _refuse_indivisible(OpenedSearch(folder, config, config, section_of(config), share, ranks))
    if is_prepared(config, environ):
        store, _, outcomes = _prepared(config, environ)
        _settled(config, _task_of(config, store, outcomes), environ, share, ranks)
    elif (task := _task_unprepared(config, environ)) is not None:
        _settled(config, task, environ, share, ranks)


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
    write_text(folder.asked, render_config(opened.asked))
    write_split(folder.split, opened.cases)
    write_text(folder.config, render_config(opened.config))


def _write_changed(opened: OpenedSearch) -> None:
    """What may change in a search that is continued is from now on what it asks for."""
    for file in (opened.folder.asked, opened.folder.config):
        config = read_config(file)
        search = _changed(section_of(config), opened.search)
        if config.search != search:
            write_text(file, render_config(config.model_copy(update={"search": search})))


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


def section_of(config: Config) -> Search:
    if config.search is None:
        raise ConfigError("search: missing; expected what to search", fix="add a `search:` section with a `space`")
    return config.search


def _task_of(config: Config, store: Store, outcomes: Outcomes | None) -> Task:
    from voxscale.tasks import build_outcome_task, build_task

    return build_task(config, store) if outcomes is None else build_outcome_task(config, outcomes)


def _task_unprepared(config: Config, environ: Mapping[str, str]) -> Task | None:
    """The task, where the config and its table tell it without a look into the volumes."""
    from voxscale.tasks import build_outcome_task, build_task

    if config.predicts_outcomes and config.data.synthetic is None:
        manifest = load_cases(config, environ, threads=1)
        cases = split_cases(manifest.cases, config.data.split, target_strata(config, manifest.cases))
        return build_outcome_task(config, make_outcomes(config, cases))
    regions = None if config.predicts_outcomes else config.data.regions
    return build_task(config, _Declared(regions)) if regions else None


@dataclass(frozen=True)
class _Declared:
    """Labels as a config's regions name them, before the data can say which there are."""

    regions: Mapping[str, Sequence[int]]

    @property
    def labels(self) -> tuple[int, ...]:
        return tuple(sorted({label for labels in self.regions.values() for label in labels}))


def _settled(config: Config, task: Task, environ: Mapping[str, str], share: Share, ranks: int) -> Config:
    """What trials share, also those of a later start on other nodes: one place for the store, the metric that chooses
    each one's best model, how many ranks a trial has, and how many threads each of them."""
    search = section_of(config)
    metric = search.metric or config.validation.metric
    mode = _direction_of(metric, search, task)
    devices = ranks if search.per_trial.devices == "all" else search.per_trial.devices
    per_trial = search.per_trial.model_copy(update={"devices": devices})
    config = with_threads(config, max(1, int(share.cpus)), devices=ranks)
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"store": str(store_root(config.data, environ))}),
            "validation": config.validation.model_copy(update={"metric": metric}),
            "search": search.model_copy(update={"metric": metric, "mode": mode, "per_trial": per_trial}),
        }
    )


def _direction_of(metric: str, search: Search, task: Task) -> str:
    """Whether more or less of a metric is better, as its task says. Refuses one that it does not report."""
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
    asked, then, held = config, read_config(folder.asked), read_config(folder.config)
    found = differences(_without_search(asked), _without_search(then))
    if not differences(_without_search(asked), _without_search(held)):
        found = []  # as it was settled
    here, there = plain(section_of(asked)), plain(section_of(then))
    names = [name for name in here if name not in (*_FREE_TO_CHANGE, *_SETTLED)]
    found += [f"search.{name} is {there[name]} there, {here[name]} here" for name in names if here[name] != there[name]]
    now, *before = (section_of(each).per_trial.devices for each in (asked, then, held))
    if now not in before:
        found.append(f"search.per_trial.devices is {before[1]} there, {now} here")
    metric, settled = (section_of(each).metric or each.validation.metric for each in (asked, held))
    if metric != settled:
        found.append(f"search.metric is {settled} there, {metric} here")
    if section_of(asked).mode not in ("auto", section_of(held).mode):
        found.append(f"search.mode is {section_of(held).mode} there, {section_of(asked).mode} here")
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
