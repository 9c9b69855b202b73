"""A user's own script, unchanged: as ranks under torchrun or plainly, on this machine or on a cluster.

The interpreter is the user's and voxscale need not be in it: what it runs of ours are copies of node.py and
script_end.py in the run folder, which need the standard library and torch alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from voxscale.config.schema import PerDevice
from voxscale.errors import ConfigError, InfrastructureError, StoppedEarly, TrainingError, VoxscaleError
from voxscale.files import write_json
from voxscale.launch.as_rank import stop_with_parent
from voxscale.launch.batch import copy_programs
from voxscale.launch.machine import look_at_machine
from voxscale.launch.sbatch import (
    DEBUG_COMMUNICATION,
    Request,
)
from voxscale.launch.script_end import finish
from voxscale.plan.resources import choose_devices
from voxscale.runs import RunFolder
from voxscale.train.ownership import claimed

_FLUSH_S = 10.0  # for a copy of the output to be complete
_HAS_TORCH = "import sys; sys.path.pop(0); import importlib.util as found; sys.exit(9 * (not found.find_spec('torch')))"
_NO_TORCH = 9
_OTHER_PYTHON = "name an interpreter with torch: --python PYTHON, or python, venv or conda in the site"


@dataclass(frozen=True)
class Script:
    """What to run, checked; it runs in the folder where it was asked for."""

    path: Path
    arguments: tuple[str, ...] = ()
    plain: bool = False
    python: str | None = None
    output: Path | None = None

    @property
    def words(self) -> list[str]:
        return [str(self.path), *self.arguments]


def make_script(
    path: str,
    arguments: Sequence[str],
    *,
    plain: bool = False,
    nodes: int | None = None,
    python: str | None = None,
    output: Path | None = None,
) -> Script:
    """Check what can be checked of a script by itself. Raises every finding."""
    findings = []
    if path.startswith("-"):
        findings.append(f"SCRIPT {path}: found an option, expected a file; the script's own options come after it")
    elif not Path(path).is_file():
        kind = "a folder" if Path(path).is_dir() else "no such file"
        findings.append(f"SCRIPT {path}: {kind}, expected a Python file")
    if plain and (nodes or 1) > 1:
        findings.append(f"--plain with --nodes {nodes}: a plain script is started once, on one node")
    if output is not None and output.expanduser().is_dir():
        findings.append(f"--output {output}: found a folder, expected a file")
    if findings:
        raise ConfigError.from_findings(findings, fix="voxscale launch [OPTIONS] SCRIPT [ARGUMENTS]")
    if python is not None and "/" in python:
        python = str(Path(python).expanduser().absolute())  # not resolved: a link is what makes a virtual environment
    whole = output.expanduser().absolute() if output is not None else None
    return Script(Path(path).resolve(), tuple(arguments), plain, python, whole)


def choose_folder(asked: Path | None, script: Script) -> Path:
    """Where the run goes: a folder that is not there yet. A script is never continued by us."""
    if asked is not None:
        root = asked.expanduser().resolve()
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise _is_there(root)
        return root
    first = (Path("runs") / script.path.stem).resolve()
    number = 1
    while os.path.lexists(root := first if number == 1 else first.with_name(f"{first.name}-{number}")):
        number += 1
    return root


def _is_there(root: Path) -> ConfigError:
    return ConfigError(f"--run {root}: is there already", fix="name another folder, or leave --run out")


@contextmanager
def claimed_folder(asked: Path | None, script: Script) -> Iterator[Path]:
    """The folder of `choose_folder`, made at once so that no other start takes it; if the body fails with nothing in
    it, it is removed."""
    while True:
        root = choose_folder(asked, script)
        made = [folder for folder in (root, *root.parents) if not folder.exists()]
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=asked is not None)
            break
        except FileExistsError:  # another start was quicker
            continue
    try:
        yield root
    except BaseException:
        with suppress(OSError):  # something is in it
            for folder in made:
                folder.rmdir()
        raise


def launch_here(
    script: Script,
    root: Path,
    environ: Mapping[str, str],
    *,
    devices: str,
    debug_comm: bool = False,
    as_json: bool = False,
) -> dict[str, Any]:
    """Run the script on this machine, showing its output; where stdout is for JSON on stderr. Returns metrics.json.

    A signal to this process is passed on to the ranks. Raises how the script failed, with its exit code.
    """
    count, words, added = command_here(script, root, environ, devices=devices, debug_comm=debug_comm)
    python = words[0]
    if not script.plain:
        check_interpreter(python, environ)
    run = RunFolder(root)
    write_folder(script, run, on="local", request=Request(devices=count), python=[python])
    reports = _reports_here(run)
    with claimed(run):
        with shown(script.output, as_json=as_json):
            _run(words, {**environ, **added})
        metrics = finish(run.root, reports)
    raise_outcome(metrics)
    return metrics


def command_here(
    script: Script, root: Path, environ: Mapping[str, str], *, devices: str, debug_comm: bool = False
) -> tuple[int, list[str], dict[str, str]]:
    """(Ranks, the words that start them here, the variables that they get in addition)."""
    run = RunFolder(root)
    python = shutil.which(script.python or sys.executable)
    if python is None:
        raise InfrastructureError(f"--python {script.python}: no such program", fix=_OTHER_PYTHON)
    machine = look_at_machine(environ)
    count = 1 if script.plain else choose_devices(devices, machine, PerDevice(per_device=1))[0]
    words = [python, str(run.node_program), "--nodes", "1", "--devices", str(count)]
    words += ["--reports", str(_reports_here(run)), "--echo", "all", *(["--plain"] if script.plain else [])]
    added = dict(DEBUG_COMMUNICATION) if debug_comm else {}
    if not script.plain and "OMP_NUM_THREADS" not in environ:
        added["OMP_NUM_THREADS"] = str(max(1, machine.cpus // count))
    return count, [*words, "--", *script.words], added


def raise_outcome(metrics: Mapping[str, Any]) -> None:
    """Raise what metrics.json says of a script that is not done, with the script's exit code."""
    if metrics["state"] == "done":
        return
    error: VoxscaleError
    what = "\n".join(metrics["failures"])
    if metrics["state"] == "stopped":
        error = StoppedEarly(f"stopped by a signal\n{what}".strip(), fix="start the same command again")
    else:
        error = TrainingError(what, fix=f"see the output of each rank in {metrics['logs']}")
    error.exit_code = metrics["exit_code"]
    raise error


def write_folder(script: Script, run: RunFolder, *, on: str, request: Request, python: Sequence[str]) -> None:
    run.make()
    try:
        run.launch.mkdir(mode=0o700)
    except FileExistsError:
        raise _is_there(run.root) from None
    copy_programs(run, end_program(run).name)
    started = {"on": on, "nodes": request.nodes, "devices": request.devices, "plain": script.plain}
    write_json(run.command, {"command": script.words, "folder": str(Path.cwd()), "python": list(python), **started})


def end_program(run: RunFolder) -> Path:
    return run.launch / "script_end.py"


def _reports_here(run: RunFolder) -> Path:
    return run.logs / "local"


def _run(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run to the end. Signals are passed on, and a session of its own keeps the terminal's from coming twice."""
    node = subprocess.Popen(words, env=environ, start_new_session=True, preexec_fn=stop_with_parent)

    def pass_on(number: int, frame: FrameType | None) -> None:
        node.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        node.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shown(output: Path | None, *, as_json: bool) -> Iterator[None]:
    """What programs print in the body goes to stderr where stdout is for JSON, and a copy of it to `output`."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = {number: os.dup(number) for number in (1, 2)}
    shown = before[2] if as_json else before[1]
    copier = None
    try:
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.touch()
            copier = subprocess.Popen(
                ["/usr/bin/env", "tee", "-a", str(output)], stdin=subprocess.PIPE, stdout=shown, start_new_session=True
            )
            assert copier.stdin is not None  # noqa: S101
            os.dup2(copier.stdin.fileno(), 1)
            os.dup2(copier.stdin.fileno(), 2)
        else:
            os.dup2(shown, 1)
        yield
    finally:
        for number, kept in before.items():
            os.dup2(kept, number)
            os.close(kept)
        if copier is not None:
            _end_copier(copier)


def _end_copier(copier: subprocess.Popen[bytes]) -> None:
    """Let it copy the last lines; a process that the script left behind may hold its end open for ever."""
    if copier.stdin is not None:
        copier.stdin.close()
    try:
        copier.wait(_FLUSH_S)
    except subprocess.TimeoutExpired:
        copier.kill()
        copier.wait()


def check_interpreter(python: str, environ: Mapping[str, str]) -> None:
    """Refuse an interpreter that cannot start ranks."""
    finding = None
    try:
        done = subprocess.run([python, "-c", _HAS_TORCH], env=environ, capture_output=True, timeout=60, check=False)
        if done.returncode:
            no_torch = done.returncode == _NO_TORCH
            finding = "has no torch, which starts the ranks" if no_torch else "is not a Python interpreter"
    except (OSError, subprocess.TimeoutExpired) as error:
        finding = f"does not start: {error}"
    if finding is not None:
        raise InfrastructureError(f"{python}: {finding}", fix=_OTHER_PYTHON)
