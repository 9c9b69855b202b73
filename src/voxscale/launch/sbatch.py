"""Render jobs for SLURM: text that is pure, readable, and runs by hand with `sbatch`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from voxscale.config.site import Site, seconds_of
from voxscale.errors import ConfigError
from voxscale.launch.container import needs_words, render_container, render_passed_on, render_variables
from voxscale.launch.ending import PAGE_MODULE, STOP_WHEN_TOLD, WRITE_PAGE, queue_again, save_at_limit, start_again

_MEMORY_UNITS = {"": 1, "M": 1, "K": 1 / 1024, "G": 1024, "T": 1024**2}  # in MB; SLURM's default is M
DEBUG_COMMUNICATION = {
    "NCCL_DEBUG": "INFO",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}


@dataclass(frozen=True)
class Placement:
    """Where and how to run on a cluster, as the command line says it."""

    site: Site
    nodes: int | None = None
    devices: str = "auto"
    after: tuple[int, ...] = ()
    debug_comm: bool = False
    detach: bool = False
    restarts: int = 0
    profile: bool = False


@dataclass(frozen=True)
class Planned:
    """Memory of a node and time that a plan finds enough; `basis` says by what, in a line.

    `fewer_than`: so many devices a node would have given, had the plan found them worth it.
    """

    memory_mb: int | None
    time: str | None
    basis: str
    fewer_than: int | None = None

    @property
    def is_empty(self) -> bool:
        return self.memory_mb is None and self.time is None and self.fewer_than is None

    def as_text(self, devices: int) -> str:
        options = [f"--mem={self.memory_mb}M"] if self.memory_mb is not None else []
        options += [f"--time={self.time}"] if self.time is not None else []
        text = f"{' '.join(options)} as planned from {self.basis}: the site states nothing of it" if options else ""
        if self.fewer_than is None:
            return text
        fewer = f"--devices {devices} of {self.fewer_than}, as the plan recommends no more ({self.basis})"
        return f"{fewer}; {text}" if text else fewer


@dataclass(frozen=True)
class Request:
    """What a job asks of the cluster: whole nodes' shares for its devices, or one node's CPUs."""

    nodes: int = 1
    devices: int = 1
    gpus: bool = False
    cpus: int | None = None  # of each node; by the site's cpus_per_device unless stated
    gpus_there: int = 0  # that each node of an allocation has; some ways to ask would give a step fewer of them
    restarts: int = 0  # of a job that loses a rank
    profile: bool = False  # some steps of its training
    planned: Planned | None = None  # what it asks for where the site states nothing

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices


@dataclass(frozen=True)
class Job:
    """A job before it is text. `folder` is where its output goes and what all nodes have to see."""

    name: str
    purpose: str
    folder: Path
    request: Request
    lines: tuple[str, ...]
    array: int | None = None
    resumes: bool = False
    debug_comm: bool = False
    binds: tuple[Path, ...] = ()  # what a container has to show of the host
    is_own: bool = False  # its processes are voxscale's, so an image has to hold what it needs


def job_name(text: str) -> str:
    """A name for a job out of any text."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("._-")[:64] or "voxscale"


def refuse_unspeakable(path: Path) -> None:
    """A path that cannot stand behind #SBATCH, where only double quotes protect it."""
    if not str(path).isprintable() or re.search(r'["\\]', str(path)):
        raise ConfigError(
            f'{str(path)!r}: a job cannot have a path with line breaks, control characters, " or \\',
            fix="choose another folder with --run",
        )


def cpus_per_task(site: Site, request: Request) -> int:
    return request.cpus or site.cpus_per_device * request.devices


def memory_mb(site: Site, request: Request) -> int | None:
    """Memory of a node that the job asks for, in SLURM's MB; None leaves it to the cluster."""
    if site.memory is None:
        return request.planned.memory_mb if request.planned is not None else None
    text = site.memory.per_node or site.memory.per_device or ""
    return round(memory_of(text) * (1 if site.memory.per_node else request.devices))


def memory_of(text: str) -> float:
    """SLURM's way to write memory, in its MB."""
    return int(text.rstrip("KMGT")) * _MEMORY_UNITS[text.lstrip("0123456789")]


def time_limit(site: Site, request: Request) -> str | None:
    """As the site states it, else as planned; None leaves it to the cluster."""
    return site.time or (request.planned.time if request.planned is not None else None)


def signal_before_limit_s(site: Site, request: Request) -> int:
    """When a training is told to save: as stated, but not before half of its time is over."""
    limit = time_limit(site, request)
    return site.signal_s if limit is None else max(10, min(site.signal_s, seconds_of(limit) // 2))


def render_sbatch(job: Job, site: Site) -> str:
    """The whole file."""
    request = job.request
    said = [job.purpose, *([request.planned.as_text(request.devices)] if request.planned is not None else [])]
    options = [f"#SBATCH {option}" for option in render_options(job, site)]
    lines = ["#!/bin/bash", *(f"# {line}" for line in said), *options, ""]
    return "\n".join([*lines, *_environment(job, site), *job.lines, ""])


def render_options(job: Job, site: Site) -> list[str]:
    """What stands behind #SBATCH, in order."""
    request = job.request
    options = [
        f"--job-name={job.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus_per_task(site, request)}",
    ]
    if request.gpus and site.gpus.ask == "gres":
        options.append(f"--gres=gpu:{_gpus(site, request)}")
    elif request.gpus and site.gpus.ask == "gpus-per-node":
        options.append(f"--gpus-per-node={_gpus(site, request)}")
    if (memory := memory_mb(site, request)) is not None:
        options.append(f"--mem={memory}M")
    for name in ("partition", "account", "qos", "reservation"):
        if (value := getattr(site, name)) is not None:
            options.append(f"--{name}={value}")
    if site.constraint is not None:
        options.append(f'--constraint="{site.constraint}"')
    if (limit := time_limit(site, request)) is not None:
        options.append(f"--time={limit}")
    if site.exclusive:
        options.append("--exclusive")
    if site.mail is not None:
        options += [f"--mail-user={site.mail.to}", f"--mail-type={','.join(site.mail.when)}"]
    options.append(f'--output="{output_pattern(job, site.output)}"')
    if site.error is not None:
        options.append(f'--error="{output_pattern(job, site.error)}"')
    options.append("--open-mode=append")
    if job.array is not None:
        options.append(f"--array=1-{job.array}")
    options.append("--requeue" if job.resumes and site.requeue else "--no-requeue")
    if job.resumes:
        options.append(f"--signal=B:USR1@{signal_before_limit_s(site, request)}")
    return [*options, *map(_quoted, site.extra)]


def _quoted(option: str) -> str:
    name, separator, value = option.partition("=")
    return f'{name}="{value}"' if separator else name


def _gpus(site: Site, request: Request) -> str:
    return f"{site.gpus.type}:{request.devices}" if site.gpus.type else str(request.devices)


def output_pattern(job: Job, pattern: str) -> str:
    """Where SLURM writes the job's output, in its own % patterns."""
    refuse_unspeakable(job.folder)
    folder = str(job.folder).replace("%", "%%")
    if job.array is not None:
        pattern = pattern.replace("%j", "%A_%a") if "%j" in pattern else f"{pattern}.%a"
    return pattern if pattern.startswith("/") else f"{folder}/{pattern}"


def _environment(job: Job, site: Site) -> list[str]:
    """Modules, environment and variables of the site."""
    lines = [f"module load {name} || exit 4" for name in site.modules]
    if site.conda is not None:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(site.conda)} || exit 4"]
    if site.venv is not None:
        lines.append(f"source {shlex.quote(site.venv + '/bin/activate')} || exit 4")
    variables = {**(DEBUG_COMMUNICATION if job.debug_comm else {}), **site.env}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines += render_variables(site.container) if site.container is not None else []
    return ["# What this site needs", *lines, ""] if lines else []


def python_words(
    job_binds: Sequence[Path], site: Site, *, gpus: bool, python: str | None = None, is_own: bool = True
) -> list[str]:
    """The interpreter: that of the container, of the activated environment, or the one this program runs in.

    `is_own` says that it runs voxscale, which a container then has to show.
    """
    chosen = python or site.python
    if site.container is not None:
        search = site.env.get("PYTHONPATH", "")
        return render_container(
            site.container, job_binds, gpus=gpus, python=chosen or "python3", is_own=is_own, search=search
        )
    return [chosen or ("python" if site.conda or site.venv else sys.executable)]


def render_words(words: Sequence[str], *, between: str = "\n  ") -> str:
    """Words for the shell, quoted, broken into readable lines that `between` joins."""
    lines: list[str] = []
    line = ""
    for word in map(shlex.quote, words):
        if line and (len(line) + len(word) > 100 or word.startswith("--bind")):
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return between.join([*lines, line])


def render_once(
    site: Site, request: Request, python: Sequence[str], command: Sequence[str], *, page_of: Path | None = None
) -> tuple[str, ...]:
    """The lines of a job that is one process on one node; of `page_of`, a folder, the page is written at the end."""
    words = ["srun", "--nodes=1", "--ntasks=1", *_of_step(site, request), "--overlap"]

    def line(*parts: str, before: Sequence[str] = ()) -> str:
        return render_words([*before, *words, *_kept(site), *python, *parts], between=" \\\n  ")

    needs = _needs(site, render_words(python, between=" \\\n  "))
    if page_of is None:
        return (*needs, line(*command, before=["exec"]))
    return (*needs, line(*command), "code=$?", line("-m", PAGE_MODULE, str(page_of)), 'exit "$code"')


def _of_step(site: Site, request: Request) -> list[str]:
    """What a step asks for on each node: all that the job has there."""
    gpus = [f"--gres=gpu:{request.gpus_there}"] if request.gpus_there else []
    return [f"--cpus-per-task={cpus_per_task(site, request)}", *gpus]


def _kept(site: Site) -> list[str]:
    """The words before a container's own that keep variables which it would drop."""
    keep = render_passed_on(site.container, site.env) if site.container is not None else ""
    return ["bash", "-c", keep, "node"] if keep else []


def _needs(site: Site, python: str) -> list[str]:
    """Lines that end a job whose image lacks something, all of it said; `python` is shell text."""
    if site.container is None:
        return []
    words = render_words(needs_words(site.container), between=" \\\n  ")
    once = "srun --nodes=1 --ntasks=1 --overlap"
    return ["# What the image lacks is said before anything starts", f"{once} {python} {words} || exit", ""]


def render_ranks(
    run: str,
    command: str,
    site: Site,
    request: Request,
    *,
    python: Sequence[str],
    program: Path,
    finish: Sequence[str],
    node_options: Sequence[str] = (),
    resumes: bool = False,
    is_own: bool = False,
    page: bool = False,
) -> tuple[str, ...]:
    """The lines of a job that starts ranks on all its nodes. `run` and `command` are shell text, quoted already.

    `is_own` says that the ranks are voxscale's, so an image has to hold what it needs; `page` that a page is written.
    """
    each = EachNode(
        program, (f"--nodes {request.nodes} --devices {request.devices}", *node_options), _AS_TORCHRUN, STOP_WHEN_TOLD
    )
    return render_nodes(
        run, command, site, request, each, python=python, finish=finish, resumes=resumes, is_own=is_own, page=page
    )  # fmt: skip


@dataclass(frozen=True)
class EachNode:
    """What each node of a job runs: a program of ours, its options as shell text, what is said of it."""

    program: Path
    options: tuple[str, ...]
    about: tuple[str, ...]
    when_told: tuple[str, ...]  # to stop; lines of traps


def render_nodes(
    run: str,
    command: str,
    site: Site,
    request: Request,
    each: EachNode,
    *,
    python: Sequence[str],
    finish: Sequence[str],
    resumes: bool = False,
    is_own: bool = False,
    page: bool = False,
    saved: str = 'readlink "$run/checkpoints/last"',
) -> tuple[str, ...]:
    """The lines of a job that runs one program of ours on each of its nodes, which then runs the command.

    `saved` is shell text: its output changes whenever there is something new to continue from.
    """
    on_node = "".join(f"{shlex.quote(word)} " for word in _kept(site))
    resources, *others = each.options
    options = [resources, '--reports "$reports"', *others]
    if site.interface is not None:
        options.append(f"--interface {site.interface}")
    file = shlex.quote(str(each.program))
    each_node = f"--nodes={request.nodes} --ntasks={request.nodes} --ntasks-per-node=1"
    return (
        f"run={run}",
        'reports="$run/logs/$SLURM_JOB_ID-${VOXSCALE_ATTEMPT:-${SLURM_RESTART_COUNT:-0}}"',
        "python=(",
        f"  {render_words(python)}",
        ")",
        f"on_nodes=(srun {each_node} {' '.join(_of_step(site, request))} --overlap --kill-on-bad-exit=0)",
        "",
        *(_needs(site, '"${python[@]}"') if is_own else ()),
        "# Every node has to see what it is to run.",
        f"\"${{on_nodes[@]}}\" bash -c {shlex.quote(_SEES)} check {file} \"${{python[0]}}\" || exit 4",
        "",
        *each.about,
        f'node=("${{python[@]}}" {file} {" ".join(options)})',
        f"command=({command})",
        "",
        *(save_at_limit(saved) if resumes else each.when_told),
        f'"${{on_nodes[@]}}" {on_node}"${{node[@]}}" -- "${{command[@]}}" &',
        "step=$!",
        'while kill -0 "$step" 2>/dev/null; do wait "$step"; done',
        "",
        "# How it ended is read from the run folder",
        f'"${{python[@]}}" {" ".join(finish)}',
        "code=$?",
        *(WRITE_PAGE if page else ()),
        *(queue_again(saved) if resumes and site.requeue else ()),
        *(start_again(request.restarts) if resumes and request.restarts else ()),
        'exit "$code"',
    )  # fmt: skip


_AS_TORCHRUN = (
    "# One task per node. Each waits until all nodes have come, then is torchrun with a c10d rendezvous: on a free",
    "# port of the first node, under a random name. The output of each rank is kept in $reports.",
)
_SEES = (
    'for file; do command -v "$file" >/dev/null || test -r "$file" || '
    '{ echo "error: $SLURMD_NODENAME does not see $file" >&2; exit 4; }; done'
)
