"""A user's own script as a job: checked against the cluster, submitted, followed; or run in an allocation."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

from voxscale.config.schema import PerDevice
from voxscale.config.site import Site
from voxscale.errors import ConfigError, InfrastructureError, StoppedEarly, VoxscaleError, printable
from voxscale.files import read_json, remove, write_json
from voxscale.launch.allocation import Allocation, run_in_allocation
from voxscale.launch.batch import SCRIPT, Submitted, make_images_ready, submit_jobs
from voxscale.launch.cluster import Cluster
from voxscale.launch.cluster_run import announce
from voxscale.launch.container import is_of_image
from voxscale.launch.follow import failure_of, follow
from voxscale.launch.placing import check_place, look_at_nodes, make_request
from voxscale.launch.ray_job import check_ray_interpreter, interpreter_here, render_with_ray
from voxscale.launch.sbatch import (
    Job,
    Placement,
    Request,
    job_name,
    python_words,
    refuse_unspeakable,
    render_ranks,
)
from voxscale.launch.script import Script, check_interpreter, end_program, raise_outcome, shown, write_folder
from voxscale.launch.slurm import JobState, expand_output
from voxscale.runs import RunFolder


@dataclass(frozen=True)
class ScriptJob:
    """A script as a job, checked against the cluster."""

    script: Script
    job: Job
    site: Site
    nodes_of: Cluster | Allocation
    with_ray: bool = False


def draft_script_job(
    script: Script, root: Path, environ: Mapping[str, str], place: Placement, *, with_ray: bool = False
) -> ScriptJob:
    """Check everything that can be checked before a job waits for hours. Nothing is written.

    `with_ray` starts the script once, as the driver of a Ray cluster over the job's nodes.
    """
    refuse_unspeakable(root)
    site, nodes_of = place.site, look_at_nodes(place, environ)
    if script.plain:
        place = replace(place, nodes=1, devices="1" if place.devices == "auto" else place.devices)
    if script.output is not None:
        site = site.model_copy(update={"output": _checked_output(script.output), "error": None})
    request = make_request(place, PerDevice(per_device=1), nodes_of)
    binds = _binds(script, root, site, environ) if site.container is not None else []
    check_place(site, request, binds, nodes_of)
    python = python_words(binds, site, gpus=request.gpus, python=script.python, is_own=False)
    _check_interpreter(script, site, python, environ, with_ray=with_ray)
    how = _described(script, request, with_ray=with_ray)
    job = Job(
        name=job_name(root.name),
        purpose=f"voxscale: run {printable(script.path.name)} {how}; by hand: sbatch THIS_FILE",
        folder=root,
        request=request,
        lines=render_script(script, RunFolder(root), site, request, python, with_ray=with_ray),
        debug_comm=place.debug_comm,
        binds=tuple(binds),
    )
    return ScriptJob(script, job, site, nodes_of, with_ray)


def launch_on_slurm(
    draft: ScriptJob, environ: Mapping[str, str], place: Placement, *, as_json: bool = False
) -> list[Submitted]:
    """Submit the script and, unless detached, follow it to its end; inside an allocation run it there and then.

    Raises how the script failed, with its exit code.
    """
    run, jobs = RunFolder(draft.job.folder), {SCRIPT: draft.job}
    python = python_words([], draft.site, gpus=draft.job.request.gpus, python=draft.script.python, is_own=False)
    make_images_ready(jobs, draft.site, environ)
    if draft.script.output is not None:
        draft.script.output.parent.mkdir(parents=True, exist_ok=True)
    write_folder(draft.script, run, on="slurm", request=draft.job.request, python=python)
    if draft.with_ray:
        write_json(run.command, {**read_json(run.command), "with_ray": True})
    if isinstance(draft.nodes_of, Allocation):
        with shown(_output_there(draft, draft.nodes_of), as_json=as_json):
            run_in_allocation(jobs, draft.site, environ, draft.nodes_of, stdout=None)
        _raise_ended(run, None, [], environ)
        return []
    try:
        submitted = submit_jobs(jobs, draft.site, environ, after=place.after)
    except VoxscaleError:
        remove(run.root)
        raise
    announce(submitted)
    if not place.detach:
        _raise_ended(run, follow(run, submitted, environ), submitted, environ)
    return submitted


def _output_there(draft: ScriptJob, allocation: Allocation) -> Path | None:
    """The file that SLURM would have written for a job of its own."""
    output = draft.script.output
    return None if output is None else Path(expand_output(str(output), allocation.job, draft.job.name))


def quote_word(word: str) -> str:
    """A word for bash, on one line whatever it holds: sbatch refuses files with some line breaks."""
    if word.isprintable():
        return shlex.quote(word)
    plain = re.compile(rb"[A-Za-z0-9_@%+=:,./ -]")
    signs = (bytes([byte]) for byte in os.fsencode(word))
    return "$'" + "".join(sign.decode() if plain.match(sign) else f"\\{sign[0]:03o}" for sign in signs) + "'"


def render_script(
    script: Script,
    run: RunFolder,
    site: Site,
    request: Request,
    python: Sequence[str],
    *,
    with_ray: bool = False,
) -> tuple[str, ...]:
    where, command = shlex.quote(str(run.root)), " ".join(map(quote_word, script.words))
    finish = [shlex.quote(str(end_program(run))), '"$run"', '--reports "$reports"']
    here = f"--chdir {quote_word(str(Path.cwd()))}"
    if with_ray:  # which gives each of its tasks threads by the CPUs it asks for
        return render_with_ray(
            where, command, site, request, python=python, folder=run, finish=finish, node_options=(here,)
        )
    threads = max(1, request.cpus // request.devices) if request.cpus else site.cpus_per_device
    own = (
        "# Threads of each rank, unless you have set them",
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"',
    )
    return (
        *(() if script.plain else (*own, "")),
        *render_ranks(
            where,
            command,
            site,
            request,
            python=python,
            program=run.node_program,
            finish=finish,
            node_options=("--echo all", here, *(("--plain",) if script.plain else ())),
        ),
    )


def _raise_ended(run: RunFolder, state: JobState | None, jobs: Sequence[Submitted], environ: Mapping[str, str]) -> None:
    """Raise how a job's script ended, if not well: as its last line wrote it down, or as SLURM tells it."""
    if run.metrics.exists():
        raise_outcome(read_json(run.metrics))
    elif state is None:
        raise InfrastructureError("the ranks could not be started", fix=f"see the lines above and {run.logs}")
    elif state.state == "TIMEOUT":
        raise StoppedEarly("the job reached its time limit", fix="ask for more with --set site.time=H:MM:SS")
    else:
        error = failure_of(state, run, jobs, environ)
        raise (
            StoppedEarly(error.message, fix="start the same command again")
            if isinstance(error, StoppedEarly)
            else error
        )


def _check_interpreter(
    script: Script, site: Site, python: Sequence[str], environ: Mapping[str, str], *, with_ray: bool
) -> None:
    """Refuse an interpreter without torch, or Ray, where it can be seen from here."""
    if not script.plain and (chosen := interpreter_here(site, python)) is not None:
        (check_ray_interpreter if with_ray else check_interpreter)(chosen, environ)


def _checked_output(output: Path) -> str:
    """The file as SLURM takes it, its %j and %x included; other patterns of SLURM could not be followed."""
    refuse_unspeakable(output)
    if unknown := [pattern for pattern in re.findall("%.?", str(output)) if pattern not in ("%j", "%x", "%%")]:
        raise ConfigError(f"--output {output}: found {unknown[0]}, expected %j, %x or %%", fix="write a % as %%")
    return str(output)


def _binds(script: Script, root: Path, site: Site, environ: Mapping[str, str]) -> list[Path]:
    """The folders that the script's processes see in a container: its own, this one, the run's, scratch, named ones.

    What is named but belongs to a system, such as a program, is the image's own.
    """
    words = [*script.arguments, *([_filled_in(site.scratch, environ)] if site.scratch is not None else [])]
    named = [folder for word in words for folder in named_folders(word)]
    return [script.path.parent, Path.cwd(), root.parent, *(folder for folder in named if not is_of_image(folder))]


def _filled_in(folder: str, environ: Mapping[str, str]) -> str:
    """A folder of the site with variables and ~; those that only nodes have stay as they are."""
    return os.path.expanduser(Template(folder).safe_substitute(environ))  # noqa: PTH111 that raises for unknown users


def named_folders(word: str) -> list[Path]:
    """The folders that a script needs to use what a word names, as PATH or NAME=PATH; where links lead included.

    What is not there yet may be about to be made, for which the nearest folder above it is needed.
    """
    texts = [text for text in (word, word.partition("=")[2]) if "/" in text or os.path.lexists(text)]
    paths = {os.path.normpath(Path.cwd() / text) for text in texts} | {os.path.realpath(text) for text in texts}
    return sorted({_nearest_folder(Path(path)) for path in paths})


def _nearest_folder(path: Path) -> Path:
    # Path's own question raises for names that are too long, or in folders of others.
    return next(folder for folder in (path, *path.parents) if os.path.isdir(folder))  # noqa: PTH112


def _described(script: Script, request: Request, *, with_ray: bool) -> str:
    if script.plain:
        return "plainly"
    if with_ray:
        return f"once, with Ray on {request.nodes} node{'s' if request.nodes > 1 else ''}"
    plurals = ("s" if request.nodes > 1 else "", "s" if request.devices > 1 else "")
    return f"on {request.nodes} node{plurals[0]} × {request.devices} rank{plurals[1]}"
