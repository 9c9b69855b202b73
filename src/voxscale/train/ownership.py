"""Who may work in a run folder, with which config and data.

One live owner at a time: a lock that the kernel frees when its holder dies, and a note of who holds it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from voxscale.config.load import identity, read_config
from voxscale.config.schema import Config
from voxscale.data.store import Store
from voxscale.errors import ConfigError, DataError, InfrastructureError
from voxscale.files import is_locked, locked, read_json, remove_temporaries, write_json
from voxscale.plan.plan import Plan
from voxscale.runs import RunFolder


@contextmanager
def claimed(run: RunFolder) -> Iterator[None]:
    """Own the run for the length of the body. Rank 0 only."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(run.owner_lock, wait=False))
        except BlockingIOError:
            raise _in_use(run) from None
        for path in run.written_whole:
            remove_temporaries(path.parent, of=path.name)  # others write beside these while it trains, a report say
        now = datetime.now(UTC).isoformat(timespec="seconds")
        job = os.environ.get("SLURM_JOB_ID")
        of_job = {"job": job, "attempt": int(os.environ.get("SLURM_RESTART_COUNT", "0"))} if job else {}
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": now, **of_job}
        write_json(run.owner, who)
        yield


def refuse_if_live(run: RunFolder) -> None:
    """For those who are about to change a run from outside."""
    if is_live(run):
        raise _in_use(run)


def refuse_other_origin(run: RunFolder, config: Config, store: Store) -> None:
    """A run is continued with the very config and data it began with, or not at all."""
    recorded = Plan.read(run.plan)
    # What was `auto` is settled in config.yaml first and in plan.json after it: a kill may come between.
    before = _unsettled(config, read_config(run.asked))
    if recorded.config_sha256 not in (identity(config), identity(before)):
        raise ConfigError(
            f"{run.config}: changed since the run was made",
            fix="undo the change, or train it as another run: voxscale train CONFIG --run DIR",
        )
    if recorded.data_sha256 != store.digest:
        raise DataError(
            f"run {run.root}: the files in data.source have changed since it began",
            fix="restore the data, or start anew with --fresh",
        )


def refuse_other_world(run: RunFolder, config: Config, world_size: int) -> None:
    """Where each rank has cases of its own, a run that has begun goes on with as many ranks."""
    if config.data.cache.share == "rank" and run.events.exists():
        began = Plan.read(run.plan).world_size
        if began != world_size:
            raise ConfigError(
                f"run {run.root}: began on {began} ranks with cases of their own (data.cache.share), "
                f"found {world_size} ranks",
                fix=f"continue with --devices {began}, or start anew with --fresh",
            )


def is_live(run: RunFolder) -> bool:
    """Whether another process works in the folder now."""
    return is_locked(run.owner_lock)


def _unsettled(config: Config, asked: Config) -> Config:
    """The config as it was before what is `auto` in `asked` was measured."""
    names = [name for name in ("precision", "compile", "channels_last") if getattr(asked.train, name) == "auto"]
    return config.model_copy(update={"train": config.train.model_copy(update=dict.fromkeys(names, "auto"))})


def _in_use(run: RunFolder) -> InfrastructureError:
    try:
        owner = read_json(run.owner)
        job = f" of job {owner['job']}" if "job" in owner else ""
        who = f"pid {owner['pid']}{job} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return InfrastructureError(
        f"run {run.root}: in use by {who}", fix="wait for it, stop it, or choose another folder with --run"
    )
