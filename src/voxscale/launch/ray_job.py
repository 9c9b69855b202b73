"""Jobs with a Ray cluster of their own, as text: brought up on all nodes, used once by a command, torn down."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from voxscale.config.site import Site
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.launch.ray_node import STOP
from voxscale.launch.sbatch import EachNode, Request, cpus_per_task, render_nodes
from voxscale.runs import RunFolder

_HAS_RAY = "import sys; sys.path.pop(0); import importlib.util as found; sys.exit(9 * (not found.find_spec('ray')))"
_NO_RAY = 9
_OTHER_PYTHON = "pip install 'voxscale[ray]', or name an interpreter with ray: --python PYTHON, or in the site"
_WITH_RAY = (
    "# One task per node. Each waits until all nodes have come, then starts Ray: its head on the first node, ports",
    "# as the system gives them, for those alone who have this job's token. When Ray has all nodes, the first runs the",
    "# command, once and with RAY_ADDRESS set; then all of Ray is ended. What each of them says is kept in $reports.",
)

_STOP_WHEN_TOLD = (
    "# Interrupted inside an allocation: SLURM would signal all of Ray, and the command alone is meant.",
    f"""trap 'mkdir -p "$reports" && touch "$reports/{STOP}"' USR1""",
    "trap : TERM  # all are told by SLURM; wait for them",
)


def render_with_ray(
    run: str,
    command: str,
    site: Site,
    request: Request,
    *,
    python: Sequence[str],
    folder: RunFolder,
    finish: Sequence[str],
    node_options: Sequence[str] = (),
    resumes: bool = False,
    is_own: bool = False,
    page: bool = False,
    saved: str = 'readlink "$run/checkpoints/last"',
) -> tuple[str, ...]:
    """The lines of a job that runs `python COMMAND` once, on its first node, with a Ray cluster over all its nodes.

    Ray has the job's CPUs and GPUs of each node. `run`, `command` and `saved` are shell text, quoted already: what
    `saved` prints changes whenever there is something new to continue from. `folder` holds a copy of ray_node.py.
    """
    resources = f"--cpus {cpus_per_task(site, request)} --gpus {request.devices if request.gpus else 0}"
    each = EachNode(
        ray_program(folder), (f"--nodes {request.nodes} {resources}", *node_options), _WITH_RAY, _STOP_WHEN_TOLD
    )
    return render_nodes(
        run,
        command,
        site,
        request,
        each,
        python=python,
        finish=finish,
        resumes=resumes,
        is_own=is_own,
        page=page,
        saved=saved,
    )


def ray_program(run: RunFolder) -> Path:
    """A copy of launch/ray_node.py: what each node of such a job runs."""
    return run.launch / "ray_node.py"


def refuse_with_ray(*, on: str, plain: bool) -> None:
    """`--with-ray` asks for a cluster inside a job, and for a script that is Ray's driver. Raises every finding."""
    findings = []
    if on != "slurm":
        findings.append(f"--with-ray with --on {on}: the cluster is started inside a job, expected --on slurm")
    if plain:
        findings.append("--with-ray and --plain: expected one of them; with Ray the script is started once, too")
    if findings:
        raise ConfigError.from_findings(findings, fix="voxscale launch SCRIPT --on slurm --with-ray --nodes N")


def interpreter_here(site: Site, python: Sequence[str]) -> str | None:
    """The interpreter of a job, where it can be seen from here; elsewhere the job says itself what it lacks."""
    if site.container is not None or site.modules or site.conda is not None:
        return None
    chosen = f"{site.venv}/bin/python" if site.venv is not None and python[0] == "python" else python[0]
    return chosen if shutil.which(chosen) is not None else None


def check_ray_interpreter(python: str, environ: Mapping[str, str]) -> None:
    """Refuse an interpreter that has no Ray."""
    finding = None
    try:
        done = subprocess.run([python, "-c", _HAS_RAY], env=environ, capture_output=True, timeout=60, check=False)
        if done.returncode:
            finding = "no ray in it" if done.returncode == _NO_RAY else "is not a Python interpreter"
    except (OSError, subprocess.TimeoutExpired) as error:
        finding = f"does not start: {error}"
    if finding is not None:
        raise InfrastructureError(f"{python}: {finding}", fix=_OTHER_PYTHON)
