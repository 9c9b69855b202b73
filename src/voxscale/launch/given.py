"""What a user gives to be worked on: a config, or data that speak for themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from voxscale.config.load import absolute_path, given_fields, make_config, read_config
from voxscale.config.schema import Config
from voxscale.config.site import Site, read_site
from voxscale.data.build import default_store
from voxscale.data.guess import Guess, guess_config, is_data
from voxscale.errors import ConfigError
from voxscale.launch.batch import TRAIN, read_jobs
from voxscale.launch.placing import site_store
from voxscale.launch.ray_run import RESTARTS, RayPlacement
from voxscale.launch.sbatch import Placement
from voxscale.runs import RunFolder, runs_of


def config_or_data(
    path: Path,
    overrides: Sequence[str] | None,
    environ: Mapping[str, str],
    *,
    site: Site | None = None,
    strict: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Config:
    """Read the config, or guess one for data; not `strict`: also for data that could not be trained on.

    An archive is unpacked where the store will be, which may be in the scratch of `site`. What was found and guessed
    is told to `say`, line by line.
    """
    if is_data(path):
        of_data = [override for override in overrides or () if override.startswith("data.")]
        others = [override for override in overrides or () if override not in of_data]
        given = given_fields(of_data, "data")
        task = next((each.partition("=")[2] for each in others if each.startswith("task=")), None)
        try:
            guess = guess_config(path, _scratch(path, given, site, environ), given, task=task, strict=strict)
        except ValidationError:  # said in words by the same check of the whole
            guess = Guess({"data": {"source": str(path), **given}})
        for line in guess.said:
            say(line)
        return make_config(guess.content, others, name=str(path), base=Path())
    return read_config(path, overrides or ())


def _scratch(path: Path, given: Mapping[str, Any], site: Site | None, environ: Mapping[str, str]) -> Path:
    """Where the stores of data without a config are; a `store` that is no path is refused with all other fields."""
    if isinstance(store := given.get("store"), str):
        return Path(absolute_path(store, Path(), f"{path}: data.store"))
    return (site and site_store(site, environ)) or default_store(environ)


def apart_from_site(overrides: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The overrides of config fields, and those of the site, which begin with `site.`; those without it."""
    given = overrides or ()
    of_site = [override.removeprefix("site.") for override in given if override.startswith("site.")]
    return [override for override in given if not override.startswith("site.")], of_site


def only_of_site(overrides: Sequence[str] | None) -> list[str]:
    """Overrides of the site, where there is no config to override."""
    others, of_site = apart_from_site(overrides)
    if others:
        raise ConfigError(f"{others[0]}: expected site.KEY=VALUE", fix="e.g. site.partition=short")
    return of_site


def placed(
    on: str,
    nodes: int | None,
    devices: str,
    site: str | None,
    of_site: Sequence[str],
    environ: Mapping[str, str],
    *,
    after: Sequence[int] | None = None,
    debug_comm: bool = False,
    detach: bool = False,
    restarts: int | None = None,
    profile: bool = False,
    no_start: bool = False,
) -> Placement | None:
    """Where on a SLURM cluster to run; None is elsewhere."""
    if on == "ray":
        return None
    if on == "slurm":
        if no_start:
            raise ConfigError(
                "--no-start: not for --on slurm", fix="--dry-run prints the job, --detach submits it and returns"
            )
        of_cluster = read_site(site, environ, of_site)
        return Placement(of_cluster, nodes, devices, tuple(after or ()), debug_comm, detach, restarts or 0, profile)
    asked = {"--nodes": (nodes or 1) > 1, "--site": site, "site.…": of_site, "--after": after, "--detach": detach}
    if given := [name for name, value in asked.items() if value]:
        raise ConfigError(f"{', '.join(given)}: this is for a cluster", fix="add --on slurm, or leave it out")
    return None


def placed_on_ray(
    on: str,
    address: str | None,
    nodes: int | None,
    devices: str,
    site: object,
    *,
    debug_comm: bool,
    restarts: int | None = None,
    profile: bool = False,
    **of_jobs: object,
) -> RayPlacement | None:
    """Where on Ray to run, if that is asked for; `of_jobs` are options that only jobs have."""
    if on != "ray":
        if address is not None:
            raise ConfigError("--address: this is for a Ray cluster", fix="add --on ray, or leave it out")
        return None
    refuse_for_ray(site=site, **of_jobs)
    return RayPlacement(address, nodes, devices, debug_comm, RESTARTS if restarts is None else restarts, profile)


def refuse_for_ray(**of_jobs: object) -> None:
    """Refuse options that only jobs have."""
    if given := [f"--{name.replace('_', '-')}" for name, value in of_jobs.items() if value]:
        raise ConfigError(f"{', '.join(given)}: not for --on ray", fix="leave it out, or use --on slurm")


def default_run(config: Path) -> Path:
    """The run folder of a config or of data, where none is given."""
    return Path("runs") / (config.resolve().name if config.is_dir() else config.stem)


def given_runs(path: Path) -> list[RunFolder]:
    """The run in a folder, or those of the folds in it; also what a job is to make yet."""
    if runs := runs_of(path):
        return runs
    folder = RunFolder(path.resolve())
    training = [job for job in read_jobs(folder) if job.kind == TRAIN]
    if not training or not folder.asked.exists():
        raise ConfigError(f"{path}: not a run folder", fix="give a folder that `voxscale runs` lists")
    tasks = len(training[-1].logs) if training[-1].is_array else 0
    return [RunFolder(folder.root / f"fold-{fold}") for fold in range(1, tasks + 1)] or [folder]


def plain_name(name: str) -> str:
    """A name that can become part of a path and nothing more."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{name!r}: found characters that a name cannot have", fix="use letters, digits, . _ -")
    return name


def evaluation_name(split: str | None, data: Path | None, checkpoint: str, mirror: bool | None) -> str:
    """What an evaluation is called unless it is given a name: by its cases, and by what differs from the usual."""
    if split is not None and data is not None:
        raise ConfigError(
            f"--split {split} and --data: expected one of them", fix="leave --split out: all of --data is evaluated"
        )
    of_data = re.sub(r"[^A-Za-z0-9._-]", "_", data.resolve().name).lstrip("._-") if data is not None else ""
    parts = [of_data or (split or "val")]
    parts += [plain_name(checkpoint)] if checkpoint != "best" else []
    parts += [] if mirror is None else ["mirrored" if mirror else "unmirrored"]
    return "-".join(parts)
