"""A job: everything one rank needs to train or evaluate a run, put together from the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from voxscale.config.load import read_config
from voxscale.config.schema import Config
from voxscale.data.cases import TRAIN, VAL, Case, read_split
from voxscale.data.formats import find_cases
from voxscale.data.loader import PatchLoader
from voxscale.data.sampler import PatchSampler
from voxscale.data.store import Store, default_store, prepare
from voxscale.errors import DataError, InfrastructureError
from voxscale.infer.evaluate import Row, evaluate_cases
from voxscale.models import build_model
from voxscale.parallel import World
from voxscale.plan.plan import Plan, make_plan, make_stream
from voxscale.runs import RunFolder
from voxscale.tasks import Task, build_task
from voxscale.train.ownership import refuse_other_origin

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """One rank's view of a run. Nothing in it is shared with other ranks but what the files say."""

    run: RunFolder
    config: Config
    world: World
    device: torch.device
    cases: Sequence[Case]
    store: Store
    task: Task
    plan: Plan
    model: torch.nn.Module

    def cases_of(self, split: str) -> list[Case]:
        return [case for case in self.cases if case.split == split]

    @property
    def backend(self) -> str:
        asked = self.config.train.backend
        return asked if asked != "auto" else "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def autocast(self) -> torch.dtype | None:
        return _AUTOCAST[self.config.train.precision]

    def evaluate(self, cases: Sequence[Case], *, show_progress: bool = False) -> list[Row]:
        """Rows of whole-volume metrics for `cases`; all ranks call it, all get all rows."""

        def network(image: torch.Tensor) -> torch.Tensor:
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                output: torch.Tensor = self.model(image)
            return output

        self.model.eval()
        rows = evaluate_cases(
            network,
            self.task,
            self.store,
            cases,
            window=self.config.validation.window or self.config.patches.size,
            overlap=self.config.validation.overlap,
            world=self.world,
            device=self.device,
            show_progress=show_progress,
        )
        self.model.train()
        return rows

    def make_sampler(self) -> PatchSampler:
        training = self.cases_of(TRAIN)
        return PatchSampler(
            make_stream(self.config, len(training)),
            self.store,
            [case.id for case in training],
            self.config.patches.size,
            self.config.patches.foreground,
        )

    def make_loader(self, sampler: PatchSampler) -> PatchLoader:
        options = self.config.loader
        on_gpu = self.device.type == "cuda"
        return PatchLoader(
            sampler=sampler,
            store=self.store,
            size=self.config.patches.size,
            transforms=self.config.augment,
            rank=self.world.rank,
            world_size=self.world.size,
            micro_batch=self.plan.micro_batch,
            device=self.device,
            workers=(4 if on_gpu else 1) if options.workers == "auto" else options.workers,
            prefetch=2 if options.prefetch == "auto" else options.prefetch,
            pin_memory=on_gpu if options.pin_memory == "auto" else options.pin_memory and on_gpu,
        )


def open_job(run: RunFolder, world: World, environ: Mapping[str, str]) -> Job:
    """Read the run folder, prepare the data if that is still to be done, build task and model."""
    config = read_config(run.config)
    device = choose_device(world)
    torch.set_num_threads(1 if config.train.threads == "auto" else config.train.threads)
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=True)
    torch.backends.cudnn.benchmark = not config.train.deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    cases = read_split(run.split, find_cases(Path(config.data.source), config.data.format))
    root = Path(config.data.store) if config.data.store else default_store(environ)
    store = prepare(cases, config.data, root)
    refuse_other_origin(run, config, store)
    counts = {split: sum(case.split == split for case in cases) for split in (TRAIN, VAL)}
    if not counts[TRAIN]:
        raise DataError(f"{run.split}: no case is for training", fix="lower data.split.val")
    plan = make_plan(
        config, num_train=counts[TRAIN], num_val=counts[VAL], world_size=world.size, data_sha256=store.digest
    )
    task = build_task(config, store)
    model = build_model(config.model, store.channels, task.out_channels, seed=config.train.seed).to(device)
    return Job(run, config, world, device, cases, store, task, plan, model)


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
