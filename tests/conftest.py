"""What tests share: a small dataset, a private cache, and the command line as users run it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from voxscale.cli import main
from voxscale.config.data import Synthetic
from voxscale.data.synthetic import ensure_synthetic

pytest_plugins = ["skips", "spread", "lab.fixtures", "lab.trained", "lab.ray", "pages", "syncs"]

_MARK = "VOXSCALE_TEST_SESSION"
REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = REPOSITORY / "recipes"


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Finished]


@pytest.fixture(scope="session", autouse=True)
def session_environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of commands under test: a store of their own, no colours, a fixed width."""
    own = {
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        _MARK: str(os.getpid()),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        yield {**os.environ}


@pytest.fixture(scope="session")
def run_python(session_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """Run `python ARGUMENTS` and wait for it."""
    of_torchrun = {"TMPDIR": str(tmp_path_factory.mktemp("torchrun"))}  # it leaves a folder there each time

    def run(*arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Finished:
        own = of_torchrun if "torch.distributed.run" in arguments else {}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**session_environ, **own, **(env or {})},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def cli(run_python: Callable[..., Finished]) -> Cli:
    """Run `voxscale ARGUMENTS` as a user does, in a process of its own."""

    def run(*arguments: object, **options: Any) -> Finished:
        return run_python("-m", "voxscale", *arguments, **options)

    return run


@pytest.fixture(scope="session")
def cli_here() -> Cli:
    """Run `voxscale ARGUMENTS` in this process, which has torch loaded already; ranks get their own processes."""

    def run(*arguments: object) -> Finished:
        out, err = io.StringIO(), io.StringIO()
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        handlers = {number: signal.getsignal(number) for number in numbers}
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as exit,
        ):
            patch.setattr(sys, "argv", ["voxscale", *map(str, arguments)])
            main()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return Finished(int(exit.value.code or 0), out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pairs of 24×24×16 voxels."""
    folder = tmp_path_factory.mktemp("data") / "pairs"
    ensure_synthetic(folder, Synthetic(cases=12, size=(24, 24, 16), seed=3))
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk with room for 120 kB."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def tiny_config(dataset: Path, **fields: Any) -> dict[str, Any]:
    """A config that trains in seconds; `section__field` sets a field of a section."""
    content: dict[str, Any] = {
        "data": {"source": str(dataset), "split": {"val": 0.25, "test": 0.0}, "regions": {"ball": [1]}},
        "patches": {"size": [16, 16, 16], "per_case": 2, "foreground": 0.5},
        "model": {"name": "unet", "channels": [4, 8], "residual_units": 0},
        "optimizer": {"name": "adam", "lr": 2e-3},
        "train": {"epochs": 2, "batch": 4, "threads": 1},
        "validate": {"every": 1},
        "track": "none",
    }
    for path, value in fields.items():
        *sections, last = path.split("__")
        node = content
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return content


@pytest.fixture
def write_config(tmp_path: Path, dataset: Path) -> Callable[..., Path]:
    """Write a tiny config, with fields changed, to a file."""

    def write(name: str = "tiny.yaml", **fields: Any) -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(tiny_config(dataset, **fields)))
        return path

    return write


@pytest.fixture(autouse=True, scope="session")
def _leaves_no_process(session_environ: dict[str, str]) -> Iterator[None]:
    """No test may leave a process behind; those of another session do not count."""
    yield
    mark = f"{_MARK}={session_environ[_MARK]}".encode()
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                left.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    assert not [command for command in left if "voxscale" in command], f"processes left behind: {left}"
