"""Make a run folder, or open the one that is there. Everything is checked before anything is written."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from voxscale.config.load import differences, read_config, render_config
from voxscale.config.losses import CoxOptions
from voxscale.config.models import OwnOptions
from voxscale.config.own import find_function
from voxscale.config.schema import Config
from voxscale.data.build import built_cases, prepare, store_key, store_root
from voxscale.data.cases import TRAIN, VAL, Case, Manifest
from voxscale.data.doctor import check_outcomes, examine_dataset, find_duplicates
from voxscale.data.findings import ERROR, WARNING, Finding, refuse_errors
from voxscale.data.formats import check_source, find_cases, load_manifest
from voxscale.data.outcome_changes import outcome_changes
from voxscale.data.outcomes import (
    Outcomes,
    examine_outcomes,
    make_outcomes,
    read_outcomes,
    target_strata,
    write_outcomes,
)
from voxscale.data.split import check_test_cases, label_strata, read_split, split_cases, write_split
from voxscale.data.store import Store, describe_store
from voxscale.data.synthetic import ensure_synthetic
from voxscale.errors import ConfigError, DataError, InfrastructureError
from voxscale.files import locked, publish, write_json, write_text
from voxscale.launch.outcome import read_state
from voxscale.plan.plan import Plan, fitting_patch, make_plan, split_batch
from voxscale.plan.resources import Machine, choose_devices, resolve
from voxscale.runs import RunFolder
from voxscale.train.ownership import refuse_if_live, refuse_other_origin, refuse_other_world

_MOST_CHANGES = 5  # that are named, of a table that has changed


@dataclass(frozen=True)
class Draft:
    """What a run will be: checked, nothing written yet. `held` says that its folder is there already."""

    run: RunFolder
    asked: Config
    config: Config
    devices: int
    nodes: int
    why: str
    held: bool
    fresh: bool

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that is ready to be trained or continued, with its data prepared."""

    run: RunFolder
    config: Config
    cases: list[Case]
    store: Store
    plan: Plan
    devices: int
    why: str
    is_done: bool


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def draft_run(
    config: Config, root: Path, machine: Machine, *, devices: str, nodes: int = 1, fresh: bool = False
) -> Draft:
    """Check what can be checked without touching the data: the folder, the devices, the batch.

    `machine` is what the run has of each of its nodes. A run that is there is taken up if it holds this very config;
    with `fresh` it is left out of account.
    """
    run, config = RunFolder(root), config.model_copy(update={"search": None})  # one run is no search
    refuse_if_live(run)
    if not run.exists and not _is_free(run):
        raise ConfigError(f"--run {run.root}: not a run folder, and not empty", fix="choose a new folder with --run")
    held = _held_config(run, config) if run.exists and not fresh else None
    batch, preferred = (held or config).train.batch, config.train.devices
    count, why = choose_devices(devices, machine, batch, nodes=nodes, preferred=preferred)
    settled = _with_free_fields(held, config) if held else resolve(config, machine, devices=count, nodes=nodes)
    split_batch(settled.train.global_batch, nodes * count, settled.train.micro_batch)
    _refuse_lone_cases(settled)
    if settled.data.synthetic is None:
        check_source(settled.data)
    return Draft(run, config, settled, count, nodes, why, held=held is not None, fresh=fresh)


def open_run(
    draft: Draft,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    split: Path | None = None,
    warn: Callable[[str], None] = _warn,
) -> OpenedRun:
    """Find and prepare the data, then write the run folder; one that is there is moved aside, never deleted.

    A file `split` says which cases a new run trains and validates on, rather than its config.
    """
    run, config = draft.run, draft.config
    check_start(config, run if draft.held else None)
    manifest = load_cases(config, environ, threads=machine.cpus)
    store = prepare_cases(manifest, config, environ, threads=machine.cpus)
    recorded = run.split if draft.held else split
    cases = read_split(recorded, manifest.cases) if recorded else split_prepared(manifest.cases, config, store)
    outcomes = make_outcomes(config, cases) if config.predicts_outcomes else None
    for warning in check_task(config, store, cases, outcomes):
        warn(str(warning))
    plan = make_plan(
        config,
        num_train=sum(case.split == TRAIN for case in cases),
        num_val=sum(case.split == VAL for case in cases),
        world_size=draft.world_size,
        **describe_store(store),
    )
    if draft.held:
        refuse_other_origin(run, config, store)
        _refuse_other_outcomes(run, outcomes, cases)
        if not _is_done(run):
            refuse_other_world(run, config, draft.world_size)
            write_text(run.config, render_config(config))
    else:
        _check_encoder(config, plan, store, outcomes)
        _write_folder(draft, cases, plan, outcomes)
    return OpenedRun(run, config, cases, store, plan, draft.devices, draft.why, is_done=_is_done(run))


def is_prepared(config: Config, environ: Mapping[str, str]) -> bool:
    """Whether the store of the config's cases is there, so that opening a run takes moments.

    Raises one DataError with all that is wrong with the data as far as it is told without reading a volume.
    """
    if config.data.synthetic is not None and not Path(config.data.source).exists():
        return False
    root = store_root(config.data, environ)
    manifest, findings = _list_cases(config, root)
    refuse_errors(findings)
    return (root / store_key(manifest, config.data) / "index.json").exists()


def data_key(config: Config, environ: Mapping[str, str]) -> str:
    """Changes when the data do; of those that are generated, the config says all there is to say."""
    if config.data.synthetic is not None:
        return ""
    return store_key(find_cases(config.data, store_root(config.data, environ)), config.data)


def count_prepared(config: Config, environ: Mapping[str, str]) -> int:
    """How many cases of a config are prepared and kept, also of a store that is not whole yet."""
    root = store_root(config.data, environ)
    try:
        return len(built_cases(root / store_key(find_cases(config.data, root), config.data)))
    except (OSError, DataError):  # there are none yet
        return 0


def load_cases(config: Config, environ: Mapping[str, str], *, threads: int) -> Manifest:
    """The cases that the config names; generated ones are generated first. Raises one DataError with all findings.

    Cells of a table are looked at before any volume is read; where they are at fault, so is every volume then.
    """
    if config.data.synthetic is not None:
        ensure_synthetic(Path(config.data.source), config.data.synthetic, threads=threads)
    root = store_root(config.data, environ)
    if not config.predicts_outcomes:
        return find_cases(config.data, root)
    manifest, findings = _list_cases(config, root)
    if faults := sum(finding.level == ERROR for finding in findings):
        print(f"found {faults} faults in the table; now every image is checked, so that all are told", file=sys.stderr)
        findings += examine_dataset(config, root, threads=threads, all_folds=False).findings
        refuse_errors(dict.fromkeys(findings))
    return manifest


def _list_cases(config: Config, root: Path) -> tuple[Manifest, list[Finding]]:
    """(The cases, what is wrong with what names them and tells of them.) No volume is read."""
    manifest = load_manifest(config.data, root)
    of_cells = check_outcomes(manifest.cases, [config]) if config.predicts_outcomes else []
    return manifest, [*manifest.findings, *of_cells]


def prepare_cases(manifest: Manifest, config: Config, environ: Mapping[str, str], *, threads: int) -> Store:
    """Build the store ahead of the ranks, with all CPUs and a bar to look at."""
    patch = None if config.patches.size == "full" else config.patches.size
    return prepare(manifest, config.data, store_root(config.data, environ), patch=patch, threads=threads)


def trained_patch(
    manifest: Manifest, config: Config, environ: Mapping[str, str], *, threads: int
) -> tuple[int, int, int]:
    """The size of patches in training; whole volumes are all prepared where only that tells the largest."""
    if config.patches.size != "full":
        return config.patches.size
    largest = config.data.size or prepare_cases(manifest, config, environ, threads=threads).largest_shape()
    return fitting_patch(config, largest)


def split_prepared(cases: Sequence[Case], config: Config, store: Store) -> list[Case]:
    """Split by patient, labels or outcomes of cases spread evenly; no image may stand in two parts."""
    rows = {case.id: store.row(case.id) for case in cases}
    strata = (
        target_strata(config, cases)
        if config.predicts_outcomes
        else label_strata({case: store.labels_of(row) for case, row in rows.items()})
    )
    split = split_cases(cases, config.data.split, strata)
    refuse_errors(find_duplicates(split, {case: store.image_sha256(row) for case, row in rows.items()}))
    return split


def check_start(config: Config, begun: RunFolder | None = None) -> None:
    """Refuse a `train.init_from` that is no trained run; a run that has `begun` needs it only until its first save."""
    if config.train.init_from is None or (begun is not None and begun.last.exists()):
        return
    from voxscale.train.start import find_start

    find_start(Path(config.train.init_from))


def check_task(config: Config, store: Store, cases: Sequence[Case], outcomes: Outcomes | None = None) -> list[Finding]:
    """What the task has to say against config, data and split, it says before anything is written.

    Errors are raised, warnings returned.
    """
    from voxscale.tasks import build_outcome_task, build_task
    from voxscale.tasks.own import OwnLoss

    if isinstance(config.model, OwnOptions):
        find_function("model.name", config.model.name)
    if (loss := OwnLoss.of(config.loss)) is not None:
        loss.check()
    test_cases = check_test_cases(cases, config.data.split)
    if config.predicts_outcomes:
        found, findings = examine_outcomes(config, cases)
        build_outcome_task(config, outcomes or found)
        return [*test_cases, *(finding for finding in findings if finding.level == WARNING)]
    task = build_task(config, store)
    training, validation = ([store.row(case.id) for case in cases if case.split == split] for split in (TRAIN, VAL))
    findings = task.check_classes(store, training, validation)
    refuse_errors(findings)
    return [*test_cases, *findings]


def _check_encoder(config: Config, plan: Plan, store: Store, outcomes: Outcomes | None) -> None:
    """What a run is to begin with has to fit its network, and what is held has to be there: it is built for that."""
    train = config.train
    if train.init_from is None and train.freeze is None:
        return
    from voxscale.models.transfer import freeze_encoder
    from voxscale.tasks import Task, build_outcome_task, build_task
    from voxscale.train.job import build_network
    from voxscale.train.start import start_from

    task: Task = build_task(config, store) if outcomes is None else build_outcome_task(config, outcomes)
    network = build_network(config, plan, task, outcomes)
    if train.init_from is not None:
        start_from(Path(train.init_from), network)
    if train.freeze is not None:
        freeze_encoder(network, True)


def _held_config(run: RunFolder, asked: Config) -> Config:
    """The config of the run that is there, if it is the one asked for: as it was asked then, or as it was settled."""
    Plan.read(run.plan)  # refused now if another version wrote it
    held, asked_then = read_config(run.config), read_config(run.asked)
    found = differences(asked, asked_then)
    if found and differences(asked, held):
        raise ConfigError.from_findings(
            [f"run {run.root} holds another config:", *(f"  {line}" for line in found)],
            fix="choose another folder with --run, or --fresh to move the old run aside and start anew",
        )
    return held


def _refuse_lone_cases(config: Config) -> None:
    """Of a case by itself Cox's loss is 0, whatever its risk: a run would end well without having learnt anything."""
    if isinstance(config.loss, CoxOptions) and config.train.global_batch == 1:
        raise ConfigError(
            "train.batch: found 1 over all devices, expected 2 or more, as loss cox compares the cases of a batch",
            fix="e.g. train.batch=8; where memory is short, train.micro_batch=1 with it leaves the result as it is",
        )


def _with_free_fields(held: Config, asked: Config) -> Config:
    """What cannot change the result is taken as asked for."""
    of_train = {name: getattr(asked.train, name) for name in ("devices", "stop_after", "backend", "timeout_s")}
    train = held.train.model_copy(update=of_train)
    data = held.data.model_copy(update={"store": asked.data.store, "stage": asked.data.stage})
    free = {name: getattr(asked, name) for name in ("loader", "checkpoint", "log", "track")}
    return held.model_copy(update={**free, "train": train, "data": data})


def _refuse_other_outcomes(run: RunFolder, outcomes: Outcomes | None, cases: Sequence[Case]) -> None:
    """A run that is continued trains on what it began with."""
    if outcomes is None:
        return
    held = read_outcomes(run.outcomes, run.encoding)
    same = held.encoding == outcomes.encoding and held.cases == outcomes.cases
    if not same or (held.targets != outcomes.targets).any() or (held.features != outcomes.features).any():
        lines = outcome_changes(held, outcomes, {case.id: case.where for case in cases})
        more = [f"  and {len(lines) - _MOST_CHANGES} more"] if len(lines) > _MOST_CHANGES else []
        first = f"{run.outcomes}: the table says otherwise since the run began"
        raise DataError.from_findings(
            [first, *(f"  {line}" for line in lines[:_MOST_CHANGES]), *more],
            fix="restore the table, or start anew with --fresh",
        )


def _write_folder(draft: Draft, cases: list[Case], plan: Plan, outcomes: Outcomes | None) -> None:
    run = draft.run
    try:
        if run.exists and not draft.fresh:
            raise _made_meanwhile(run)
        if run.exists:
            move_aside(run)
        if run.launch.exists():
            run.make()
            _fill(run, draft, cases, plan, outcomes)
            return
        if run.root.exists():
            run.root.rmdir()  # it is empty: that was checked
        with publish(run.root) as temporary:
            temporary.mkdir(mode=0o700)
            _fill(RunFolder(temporary), draft, cases, plan, outcomes)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and run.exists:
            raise _made_meanwhile(run) from error
        raise InfrastructureError(
            f"run folder {run.root}: cannot be written: {error.strerror}", fix="choose a writable folder with --run"
        ) from error


def _made_meanwhile(run: RunFolder) -> InfrastructureError:
    """Raises, with its name, if whoever made the run already trains it."""
    refuse_if_live(run)
    return InfrastructureError(
        f"run {run.root}: was made by another process while this one prepared its data",
        fix="start the same command again to continue it, or choose another folder with --run",
    )


def _fill(run: RunFolder, draft: Draft, cases: list[Case], plan: Plan, outcomes: Outcomes | None) -> None:
    """Write what a run begins with. The config comes last: with it the folder is a run."""
    run.logs.mkdir(exist_ok=True)
    run.launch.mkdir(exist_ok=True)
    write_text(run.asked, render_config(draft.asked))
    write_split(run.split, cases)
    if outcomes is not None:
        write_outcomes(run.outcomes, run.encoding, outcomes)
    write_json(run.plan, plan.as_json())
    write_text(run.config, render_config(draft.config))


def _is_free(run: RunFolder) -> bool:
    """Whether a run may be made here: nothing is there, or only what was written when its job was submitted."""
    if not run.root.exists():
        return True
    return run.root.is_dir() and {path.name for path in run.root.iterdir()} <= {run.launch.name, run.logs.name}


def move_aside(run: RunFolder) -> None:
    """Rename a run's folder while no one can claim it."""
    try:
        with locked(run.owner_lock, wait=False):
            run.root.rename(_free_name(run.root))
    except BlockingIOError:
        refuse_if_live(run)
        raise


def _free_name(root: Path) -> Path:
    return next(path for n in range(1, 10_000) if not (path := root.with_name(f"{root.name}.old-{n}")).exists())


def _is_done(run: RunFolder) -> bool:
    return read_state(run) == "done"
