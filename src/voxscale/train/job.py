"""A job: everything one rank needs to train or evaluate a run, put together from the run folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.checkpoint import digest_of
from voxscale.config.load import identity, read_config
from voxscale.config.schema import Config
from voxscale.data.build import prepare, store_root
from voxscale.data.cache import FromDevice, FromHost, FromStore, Source
from voxscale.data.cases import TRAIN, VAL, Case
from voxscale.data.formats import find_cases
from voxscale.data.loader import PatchLoader
from voxscale.data.outcomes import Outcomes, read_outcomes
from voxscale.data.sampler import PatchSampler, Stream
from voxscale.data.shelf import stage_store
from voxscale.data.split import ROLES, recorded_cases, recorded_roles
from voxscale.data.store import Store, describe_store, open_store
from voxscale.errors import ConfigError, DataError, InfrastructureError
from voxscale.infer.ensemble import Ensemble
from voxscale.infer.evaluate import Keep, Measure, evaluate_cases, of_outcomes, of_volumes
from voxscale.infer.outcome import OutcomeMember
from voxscale.infer.previews import Previews
from voxscale.infer.windows import Windows
from voxscale.models import build_model
from voxscale.models.outcome import build_outcome_model
from voxscale.parallel import World, share_buffers
from voxscale.plan.plan import Plan, make_plan, make_stream
from voxscale.plan.resources import loader_threads, prefetch_depth
from voxscale.runs import RunFolder
from voxscale.tasks import OutcomeTask, Task, VolumeTask, build_outcome_task, build_task
from voxscale.tasks.summary import Row
from voxscale.train.compute import Compute, keep_freed_memory
from voxscale.train.exact import refuse_batch_norms
from voxscale.train.ownership import refuse_other_origin, refuse_other_world
from voxscale.train.stop import StopRequest


@dataclass(frozen=True)
class OfVolumes:
    """The target is a volume of labels, in the store."""

    task: VolumeTask


@dataclass(frozen=True)
class OfOutcomes:
    """The target is a few numbers, in the run folder."""

    task: OutcomeTask
    outcomes: Outcomes

    @classmethod
    def open(cls, run: RunFolder, config: Config, store: Store) -> OfOutcomes:
        outcomes = read_outcomes(run.outcomes, run.encoding)
        if outcomes.cases != tuple(store.ids()):
            raise DataError(
                f"{run.outcomes}: holds other cases than the store", fix="restore it, or start anew with --fresh"
            )
        return cls(build_outcome_task(config, outcomes), outcomes)


@dataclass(frozen=True)
class Job:
    """One rank's view of a run. Nothing in it is shared with other ranks but what the files say."""

    run: RunFolder
    config: Config
    world: World
    device: torch.device
    training: NDArray[np.int32]  # rows of the store
    store: Store
    target: OfVolumes | OfOutcomes
    plan: Plan
    model: torch.nn.Module

    @property
    def task(self) -> Task:
        return self.target.task

    def cases_of(self, split: str) -> list[Case]:
        return recorded_cases(self.run.split, split)

    @property
    def backend(self) -> str:
        return choose_backend(self.config, self.device)

    @property
    def compute(self) -> Compute:
        return Compute.of(self.config.train, self.device)

    @property
    def windows(self) -> Windows:
        options = self.config.validation
        return Windows(options.window or self.plan.patch, options.overlap, options.weights, options.mirror)

    def settled(self, choice: Mapping[str, Any]) -> Job:
        """The same job with fields of `config.train` settled."""
        train = self.config.train.model_copy(update=choice)
        job = replace(self, config=self.config.model_copy(update={"train": train}))
        job.compute.lay_out(job.model)
        return replace(job, plan=replace(job.plan, config_sha256=identity(job.config)))

    def evaluate(
        self,
        cases: Sequence[Case],
        *,
        full: bool = False,
        stop: StopRequest | None = None,
        previews: Previews | None = None,
    ) -> list[Row]:
        """A row for each of `cases`, seen as a whole; all ranks call it, all get all rows. `previews` looks on.

        After a signal all raise StoppedEarly: who hears it before its next window, the others after their case.
        """
        share_buffers(self.model, self.world)  # the model that is saved is rank 0's
        self.model.eval()
        measure = self._measure(full=full, keep=previews.keep if previews is not None else None, stop=stop)
        rows = evaluate_cases(
            previews.of(measure) if previews is not None else measure,
            self.store,
            cases,
            world=self.world,
            device=self.device,
        )
        self.model.train()
        return rows

    @property
    def learns(self) -> bool:
        """Whether a full evaluation looks at the training cases first."""
        return isinstance(self.target, OfOutcomes) and self.target.task.learns_from

    def learn(self, stop: StopRequest | None = None) -> dict[str, Any]:
        """Give the task what a full evaluation of the model needs of the training cases, and return it for a file.

        All ranks call it.
        """
        if not self.learns or not isinstance(self.target, OfOutcomes):
            return {}
        task = self.target.task
        task.learn(self.evaluate(self.cases_of(TRAIN), stop=stop))
        return {"weights_sha256": digest_of(self.model.state_dict()), **task.learnt()}

    def previews(self) -> Previews:
        """Keeps pictures of what is evaluated, as many as the config wants."""
        of_volumes = self.target.task if isinstance(self.target, OfVolumes) else None
        return Previews(self.task, self.store, count=self.config.validation.previews, of_volumes=of_volumes)

    def _measure(self, *, full: bool, keep: Keep | None, stop: StopRequest | None) -> Measure:
        run: Callable[..., torch.Tensor] = partial(self.compute.run, self.model)
        if stop is not None:
            run = stop.heeded(run)
        if isinstance(self.target, OfVolumes):
            ensemble = Ensemble.of_one(run, self.windows, self.device)
            return of_volumes(ensemble, self.target.task, self.store, full=full, keep=keep)
        member = OutcomeMember(run, self.target.task, self.plan.patch, self.device)
        return of_outcomes([member], self.store, [self.target.outcomes])

    def make_sampler(self) -> PatchSampler:
        stream = make_stream(self.config, len(self.training), self.world.size)
        if self.config.train.balance and isinstance(self.target, OfOutcomes):
            stream = replace(stream, strata=self.target.outcomes.strata_of(self.training))
        return PatchSampler(stream, self.store, self.training, self.plan.patch, self.config.patches.foreground)

    def make_loader(self, sampler: PatchSampler) -> PatchLoader:
        options, on_gpu = self.config.loader, self.device.type == "cuda"
        workers, most = loader_threads(self.config, on_gpu=on_gpu)
        prefetch, deepest = prefetch_depth(self.config)
        return PatchLoader(
            sampler=sampler,
            store=self.store,
            source=self._make_source(sampler.stream),
            size=self.plan.patch,
            transforms=self.config.augment,
            rank=self.world.rank,
            world_size=self.world.size,
            micro_batch=self.plan.micro_batch,
            device=self.device,
            workers=workers,
            most_workers=most,
            prefetch=prefetch,
            most_prefetch=deepest,
            pin_memory=on_gpu if options.pin_memory == "auto" else options.pin_memory and on_gpu,
            outcomes=self.target.outcomes if isinstance(self.target, OfOutcomes) else None,
        )

    def _make_source(self, stream: Stream) -> Source:
        where = self.config.data.cache.where
        if where == "store":
            return FromStore(self.store)

        def held(epoch: int) -> NDArray[np.int32]:
            return self.training[stream.held(epoch, self.world.rank)]

        if where == "device":
            return FromDevice(self.store, held, self.device)
        name = hashlib.sha256(str(self.run.root).encode()).hexdigest()[:16]
        return FromHost(self.store, held, name)


def open_job(run: RunFolder, world: World, environ: Mapping[str, str]) -> Job:
    """Read the run folder, prepare the data if that is still to be done, build task and model."""
    config = read_config(run.config)
    device = choose_device(world)
    if device.type == "cpu":
        keep_freed_memory()
    torch.set_num_threads(1 if config.train.threads == "auto" else config.train.threads)
    torch.use_deterministic_algorithms(
        bool(config.train.deterministic), warn_only=config.train.deterministic != "exact"
    )
    torch.backends.cudnn.benchmark = not config.train.deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    store = open_run_store(run, config, world, environ)
    refuse_other_origin(run, config, store)
    refuse_other_world(run, config, world.size)
    roles = recorded_roles(run.split, store.ids)
    training = np.flatnonzero(roles == ROLES.index(TRAIN)).astype(np.int32)
    if not len(training):
        raise DataError(f"{run.split}: no case is for training", fix="lower data.split.val")
    num_val = int(np.count_nonzero(roles == ROLES.index(VAL)))
    plan = make_plan(config, num_train=len(training), num_val=num_val, world_size=world.size, **describe_store(store))
    target: OfVolumes | OfOutcomes
    if config.predicts_outcomes:
        target = OfOutcomes.open(run, config, store)
        model = build_network(config, plan, target.task, target.outcomes)
    else:
        target = OfVolumes(build_task(config, store))
        model = build_network(config, plan, target.task)
    if config.train.deterministic == "exact":
        refuse_batch_norms(model)
    job = Job(run, config, world, device, training, store, target, plan, model.to(device))
    job.compute.lay_out(model)
    return job


def build_network(config: Config, plan: Plan, task: Task, outcomes: Outcomes | None = None) -> torch.nn.Module:
    """The network as the run begins with it, but for what it takes over from another."""
    if outcomes is None:
        build = partial(build_model, config.model, plan.channels)
    else:
        build = partial(build_outcome_model, config.model, plan.channels, outcomes.features.shape[1])
    return build(task.out_channels, patch=plan.patch, seed=config.train.seed)


def open_run_store(run: RunFolder, config: Config, world: World, environ: Mapping[str, str]) -> Store:
    """The store that the launcher has left; a node that does not have it builds it, or copies it to its own disk.

    One of its ranks builds, with the threads of all: the others wait, those of other nodes for `train.timeout_s`.
    """
    root = store_root(config.data, environ)
    folder = root / Plan.read(run.plan).store
    if (folder / "index.json").exists():
        store = open_store(folder, check="files" if world.local_rank == 0 else "header")
    else:
        patch = None if config.patches.size == "full" else config.patches.size
        manifest = find_cases(config.data, root)
        store = prepare(manifest, config.data, root, patch=patch, threads=threads_of_node(config, world))
    if config.data.stage is not None:
        store = stage_store(store, _stage_folder(config.data.stage, environ))
    return store


def threads_of_node(config: Config, world: World) -> int:
    """Those of all ranks of this node, for what one of them does while the others wait."""
    return world.local_size * (1 if config.train.threads == "auto" else config.train.threads)


def _stage_folder(stage: str, environ: Mapping[str, str]) -> Path:
    try:
        folder = Path(Template(stage).substitute(environ))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"data.stage {stage}: this node does not set {error}", fix="name a folder, or a variable that is set"
        ) from error
    if not folder.is_absolute():
        raise ConfigError(f"data.stage {stage}: found {folder}, expected an absolute path", fix="e.g. /tmp/stage")
    return folder


def choose_backend(config: Config, device: torch.device) -> str:
    asked = config.train.backend
    return asked if asked != "auto" else "nccl" if device.type == "cuda" else "gloo"


def choose_device(world: World) -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible:
        return torch.device("cpu")
    if world.local_size > visible:
        raise InfrastructureError(
            f"{world.local_size} ranks on this node, but {visible} GPUs are visible",
            fix=f"start {visible} ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs",
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device
