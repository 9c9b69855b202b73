"""A rank's outermost frame: find its place, do the work, and leave a failure where the launcher looks for it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from voxscale.errors import (
    ConfigError,
    InfrastructureError,
    TrainingError,
    VoxscaleError,
)
from voxscale.files import remove, write_json
from voxscale.parallel import World, lost_contact
from voxscale.runs import RunFolder, error_file, rank_log
from voxscale.train.memory import first_line, is_out_of_memory, out_of_memory

PARENT = "VOXSCALE_PARENT"  # the process that a rank, or what it tries apart, must not outlive
Work = Callable[[RunFolder, World, Mapping[str, str]], None]


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--reports", type=Path, help="where a launcher reads the error, which then is not printed")
    parser.add_argument("--world-size", type=int, help="how many ranks there have to be")


def run_as_rank(options: argparse.Namespace, work: Work) -> int:
    """Do `work` as the rank that torchrun's variables name. Returns the exit code."""
    run = RunFolder(options.run.resolve())
    reports = options.reports or run.logs
    world = World()
    if options.reports:
        stop_with_parent()
    try:
        world = World.from_env(os.environ)
        if options.world_size not in (None, world.size):
            raise InfrastructureError(
                f"rank {world.rank}: found a world of {world.size} ranks, expected {options.world_size}",
                fix="start as many ranks on each node as the job was made for",
            )
        remove(error_file(reports, world.rank))
        do_work(work, run, world, os.environ, logs=reports)
    except VoxscaleError as error:
        try:
            write_json(error_file(reports, world.rank), {**error.as_json(), "rank": world.rank})
            is_reported = bool(options.reports)
        except OSError:  # a disk that is full may be the very error
            is_reported = False
        if not is_reported:
            place = f"rank {world.rank}: " if world.size > 1 else ""
            print(place + error.as_text(), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def do_work(work: Work, run: RunFolder, world: World, environ: Mapping[str, str], *, logs: Path | None = None) -> None:
    """Do `work`; whatever goes wrong in it is raised as an error for users, its traceback kept in the rank's log."""
    log = rank_log(logs or run.logs, world.rank)
    try:
        work(run, world, environ)
    except VoxscaleError:
        raise
    except PermissionError as error:
        raise InfrastructureError(
            f"{error.filename or run.root}: {error.strerror}",
            fix="get write permission, or copy what you need elsewhere",
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise _unexpected(error, log, world) from error
        raise InfrastructureError(
            f"{error.filename or run.root}: {error.strerror}; {shutil.disk_usage(run.root).free:,} bytes are free. "
            "The last checkpoint is intact",
            fix="free disk space and start the same command again; the run continues",
        ) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(error) from error
        raise _unexpected(error, log, world) from error


def require(run: RunFolder) -> None:
    if not run.exists:
        raise ConfigError(f"{run.root}: not a run folder", fix="write one: voxscale train CONFIG --run DIR --no-start")


def _unexpected(error: Exception, log: Path, world: World) -> TrainingError:
    """The error as users see it; its traceback goes into the rank's log."""
    with contextlib.suppress(OSError), log.open("a") as lines:
        traceback.print_exc(file=lines)
    if (lost := lost_contact(error)) is not None:
        return lost.at("", [[] for _ in range(world.size)])
    return TrainingError(f"{type(error).__name__}: {first_line(error)}", fix=f"see {log}")


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """A rank whose launcher is killed gets SIGTERM from the kernel, so it saves and leaves no orphan.

    Where the launcher was killed before this rank came so far, it gets it now.
    """
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)
    if os.environ.pop(PARENT, None) not in (None, str(os.getppid())):
        os.kill(os.getpid(), number)
