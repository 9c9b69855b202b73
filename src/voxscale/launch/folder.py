"""Make a run folder, or open the one that is there. Everything is checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from voxscale.config.load import differences, read_config, render_config
from voxscale.config.schema import Config
from voxscale.data.cases import TRAIN, VAL, Case, read_split, split_cases, write_split
from voxscale.data.formats import find_cases
from voxscale.data.store import Store, default_store, prepare
from voxscale.data.synthetic import ensure_synthetic
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.files import publish, read_json, write_json, write_text
from voxscale.plan.plan import Plan, make_plan, split_batch
from voxscale.plan.resources import Machine, resolve
from voxscale.runs import SCHEMA_VERSION, RunFolder
from voxscale.train.ownership import refuse_if_live


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that is ready to be trained or continued, with its data prepared."""

    run: RunFolder
    config: Config
    cases: list[Case]
    store: Store
    plan: Plan
    is_done: bool


def open_run(
    config: Config,
    root: Path,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    devices: int,
    nodes: int = 1,
    fresh: bool = False,
) -> OpenedRun:
    """The run at `root`: a new one, or the one there if it holds this very config.

    With `fresh`, a run that is there is moved aside first, never deleted.
    """
    run = RunFolder(root)
    refuse_if_live(run)
    held = None if fresh else _held_config(run, config)
    settled = _with_free_fields(held, config) if held else resolve(config, machine, devices=devices, nodes=nodes)
    split_batch(settled.train.global_batch, devices * nodes, settled.train.micro_batch)
    cases = load_cases(settled, threads=machine.cpus)
    cases = read_split(run.split, cases) if held else split_cases(cases, settled.data.split)
    store = prepare_cases(cases, settled, environ, threads=machine.cpus)
    _check_task(settled, store)
    plan = make_plan(
        settled,
        num_train=sum(case.split == TRAIN for case in cases),
        num_val=sum(case.split == VAL for case in cases),
        world_size=devices * nodes,
    )
    if held is None:
        _write_folder(run, settled, cases, plan, fresh=fresh)
    elif held != settled:
        write_text(run.config, render_config(settled))
    return OpenedRun(run, settled, cases, store, plan, is_done=_is_done(run))


def load_cases(config: Config, *, threads: int) -> list[Case]:
    """The cases that the config names; generated ones are generated first."""
    source = Path(config.data.source)
    if config.data.synthetic is not None:
        ensure_synthetic(source, config.data.synthetic, threads=threads)
    return find_cases(source, config.data.format)


def prepare_cases(cases: Sequence[Case], config: Config, environ: Mapping[str, str], *, threads: int) -> Store:
    """Build the store ahead of the ranks, with all CPUs and a bar to look at."""
    root = Path(config.data.store) if config.data.store else default_store(environ)
    return prepare(cases, config.data, root, threads=threads)


def _check_task(config: Config, store: Store) -> None:
    """What the task has to say against config and data, it says before anything is written."""
    from voxscale.tasks import build_task

    build_task(config, store)


def _held_config(run: RunFolder, asked: Config) -> Config | None:
    """The config of the run that is there, if it is the one asked for."""
    if not run.exists:
        if run.root.exists() and (run.root.is_file() or any(run.root.iterdir())):
            raise ConfigError(
                f"--run {run.root}: not a run folder, and not empty", fix="choose a new folder with --run"
            )
        return None
    version = read_json(run.plan)["schema"] if run.plan.exists() else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"run {run.root}: schema {version}, expected {SCHEMA_VERSION}",
            fix="use the version that wrote it, or --fresh",
        )
    held = read_config(run.config)
    if found := differences(asked, held):
        raise ConfigError.from_findings(
            [f"run {run.root} holds another config:", *(f"  {line}" for line in found)],
            fix="choose another folder with --run, or --fresh to move the old run aside and start anew",
        )
    return held


def _with_free_fields(held: Config, asked: Config) -> Config:
    """What cannot change the result is taken as asked for."""
    train = held.train.model_copy(update={"stop_after": asked.train.stop_after})
    data = held.data.model_copy(update={"store": asked.data.store})
    free = {name: getattr(asked, name) for name in ("loader", "checkpoint", "log", "track")}
    return held.model_copy(update={**free, "train": train, "data": data})


def _write_folder(run: RunFolder, config: Config, cases: list[Case], plan: Plan, *, fresh: bool) -> None:
    try:
        if fresh and run.root.exists():
            run.root.rename(_free_name(run.root))
        elif run.root.exists():
            run.root.rmdir()  # it is empty: that was checked
        with publish(run.root) as temporary:
            temporary.mkdir(mode=0o700)
            inside = RunFolder(temporary)
            inside.config.write_text(render_config(config))
            write_split(inside.split, cases)
            write_json(inside.plan, plan.as_json())
            inside.logs.mkdir()
            inside.launch.mkdir()
    except OSError as error:
        raise InfrastructureError(
            f"run folder {run.root}: cannot be written: {error.strerror}",
            fix="choose a writable folder with --run",
        ) from error


def _free_name(root: Path) -> Path:
    return next(path for n in range(1, 10_000) if not (path := root.with_name(f"{root.name}.old-{n}")).exists())


def _is_done(run: RunFolder) -> bool:
    return run.metrics.exists() and read_json(run.metrics).get("state") == "done"
