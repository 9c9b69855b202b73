"""The documentation as tests read it: its blocks, and folders in which its commands run as they stand."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conftest import RECIPES, REPOSITORY, Cli, Finished
from lab.slurm import SlurmLab
from voxscale.config.data import Synthetic
from voxscale.data.synthetic import ensure_like, write_cohort

DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
DRIVER = """
import ray
ray.init(log_to_driver=False)
assert len(ray.nodes()) == 2
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def blocks_and_what_they_say(page: Path, language: str) -> list[tuple[str, list[str]]]:
    """Each block of commands, and the lines that the page shows as their output, if it does."""
    pattern = rf"^```{language}\n(.*?)^```\n(?:```text\n(.*?)^```)?"
    found = re.findall(pattern, page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [(block, [line for line in said.splitlines() if line != "…"]) for block, said in found]


def unsaid(expected: list[str], said: str) -> list[str]:
    """Lines that were expected and did not come, whatever the numbers, paths, nodes and spaces in them."""
    came = set(map(_shape, said.splitlines()))
    return [line for line in expected if _shape(line) not in came]


def _shape(line: str) -> str:
    line = re.sub(r"(?<=\s)/\S+?(?=/runs/|,|\s|$)|^/\S+?(?=/runs/)", "PATH", line)
    line = re.sub(r"(?<= on )\S+$", "NODES", line)
    line = re.sub(r"\d[\d.:]*", "N", line)
    line = re.sub(r"\b(case|CPU)s?\b", r"\1", line)
    return re.sub(r"\s+", " ", line).strip()


def followed_lines(page: Path) -> set[str]:
    """The lines of blocks that are run, without comments and without the folder of the environment."""
    lines = "".join(blocks(page, "bash")).splitlines()
    return {line.partition("#")[0].strip().removeprefix(".venv/bin/") for line in lines}


def write_files(page: Path, language: str, folder: Path) -> None:
    """Write what the page tells to write: blocks with a title are files, those with the same title one file."""
    texts: dict[str, list[str]] = {}
    for name, text in re.findall(
        rf'^```{language} title="([^"]+)"\n(.*?)^```', page.read_text(), flags=re.DOTALL | re.MULTILINE
    ):
        texts.setdefault(name, []).append(text)
    for name, parts in texts.items():
        (folder / name).write_text("\n\n".join(parts))


@pytest.fixture
def checkout(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the documented commands run as they stand, on a recipe and data that take seconds."""
    (tmp_path / "recipes").mkdir()
    content = yaml.safe_load((RECIPES / "quick.yaml").read_text())
    content["data"]["synthetic"] = {"cases": 12, "size": [16, 16, 16]}
    content["patches"] = {"size": [16, 16, 16]}
    content["model"] = {"channels": [4, 8]}
    content["train"]["epochs"] = 4
    (tmp_path / "recipes" / "quick.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(dataset, tmp_path / "MY_DATA")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def follow(block: str, cli_here: Cli, run_python: Callable[..., Finished], *extra: str) -> list[str]:
    """Run the lines of a block, `voxscale` in this process, others in their own; return what each printed."""
    printed = []
    for line in block.splitlines():
        for command in line.partition("#")[0].split("&&"):
            command, _, expected = command.partition("|| test $? -eq")
            program, *words = shlex.split(command) or ("", "")
            if program.endswith("voxscale"):
                done = cli_here(*words, *(extra if words[0] == "train" else ()))
            elif program == "torchrun":
                done = run_python("-m", "torch.distributed.run", *words)
            elif program == "python":
                done = run_python(*words)
            else:
                assert not program, f"cannot follow: {line}"
                continue
            assert done.code == int(expected or 0), f"{command}\n{done.out}\n{done.err}"
            printed.append(done.out + done.err)
    return printed


def make_brats(folder: Path, *, under: str = ".", cases: int = 2) -> None:
    shutil.copytree(RECIPES, folder / "recipes", dirs_exist_ok=True)
    ensure_like(folder / "brats", "brats", Synthetic(cases=cases, size=(16, 16, 16)))
    (folder / under).mkdir(exist_ok=True)
    shutil.move(folder / "brats" / "Task01_BrainTumour", folder / under)


@pytest.fixture
def cohort_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cohort that takes seconds, and the examples."""
    write_cohort(tmp_path / "made", cases=20, size=(16, 16, 8), seed=3, threads=2)
    for made in (tmp_path / "made").iterdir():
        made.rename(tmp_path / made.name)
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cluster_checkout(checkout: Path, idle_slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder on a login node of the lab, with scripts of a user's own."""
    for name, value in idle_slurm.environ.items():
        monkeypatch.setenv(name, value)
    (checkout / "site.yaml").write_text("cpus_per_device: 1\n")
    copy_scripts(checkout)
    return checkout


def copy_scripts(folder: Path) -> None:
    """A user's own: for ranks, for one process, and a program that uses Ray."""
    ladder = REPOSITORY / "examples" / "ladder"
    for name, copy in {"3_torchrun.py": "train.py", "1_single.py": "single.py", "blobs.py": "blobs.py"}.items():
        shutil.copy(ladder / name, folder / copy)
    (folder / "driver.py").write_text(DRIVER)
