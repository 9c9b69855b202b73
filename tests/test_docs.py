"""What the documentation says is true: commands run, the config listing is complete, links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conftest import RECIPES, REPOSITORY, Cli, Finished
from lab.slurm import SlurmLab
from voxscale.config.load import make_config, parse_yaml, plain
from voxscale.config.schema import Synthetic
from voxscale.data.synthetic import ensure_like

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


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


def follow(block: str, cli_here: Cli, run_python: Callable[..., Finished], *extra: str) -> None:
    """Run the lines of a block: `voxscale` in this process, `torchrun` in its own."""
    for line in block.splitlines():
        for command in line.partition("#")[0].split("&&"):
            command, _, expected = command.partition("|| test $? -eq")
            program, *words = shlex.split(command) or ("", "")
            if program.endswith("voxscale"):
                done = cli_here(*words, *(extra if words[0] == "train" else ()))
            elif program == "torchrun":
                done = run_python("-m", "torch.distributed.run", *words)
            else:
                assert not program, f"cannot follow: {line}"
                continue
            assert done.code == int(expected or 0), f"{command}\n{done.out}\n{done.err}"


def make_brats(folder: Path) -> None:
    shutil.copytree(RECIPES, folder / "recipes", dirs_exist_ok=True)
    ensure_like(folder / "brats", "brats", Synthetic(cases=2, size=(16, 16, 16)))
    shutil.move(folder / "brats" / "Task01_BrainTumour", folder)


@pytest.mark.ranks
def test_the_ladder_can_be_climbed(checkout: Path, cli_here: Cli, run_python: Callable[..., Finished]) -> None:
    for block in blocks(REPOSITORY / "docs" / "ladder.md", "bash"):
        follow(block, cli_here, run_python)
    runs = {Path(row["run"]).name: row for row in cli_here("runs", "--json").json["runs"]}
    assert {name: row["state"] for name, row in runs.items()} == dict.fromkeys(("one", "two", "hand", "stop"), "done")
    assert runs["one"]["best"] == pytest.approx(runs["two"]["best"], abs=0.02)


def test_the_readme_can_be_followed(checkout: Path, cli_here: Cli, run_python: Callable[..., Finished]) -> None:
    first_screen, first_minutes, own_folder, published, override = blocks(REPOSITORY / "README.md", "bash")
    targets = re.findall(r"^make (\w+)", first_screen, flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=REPOSITORY, check=True, capture_output=True)
    demo, _, rest = first_minutes.partition("\n")
    assert demo.startswith(".venv/bin/voxscale demo"), "the demo itself is run by test_promises.py"
    alone = ["--devices", "1"]
    follow(rest, cli_here, run_python, *alone)
    follow(own_folder, cli_here, run_python, *alone, "train.epochs=1", "model.channels=[4,8]")
    follow(override, cli_here, run_python, *alone)
    demo, train = published.splitlines()
    assert demo.startswith("voxscale demo --like brats --out"), "demos are run by launch/test_demo.py"
    make_brats(checkout)
    follow(train, cli_here, run_python, *alone, "--dry-run")
    listed = re.findall(r"^\| `(\w+)", (REPOSITORY / "README.md").read_text().partition("## Verbs")[2], re.MULTILINE)
    assert listed == [
        *[
            "demo",
            "init",
            "doctor",
            "show",
            "prepare",
            "train",
            "evaluate",
            "predict",
            "launch",
            "runs",
            "cancel",
            "site",
            "image",
        ]
    ]


@pytest.mark.slurm
def test_the_cluster_page_can_be_followed(
    checkout: Path,
    idle_slurm: SlurmLab,
    cli_here: Cli,
    run_python: Callable[..., Finished],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in idle_slurm.environ.items():
        monkeypatch.setenv(name, value)
    (checkout / "site.yaml").write_text("cpus_per_device: 1\n")
    ladder = REPOSITORY / "examples" / "ladder"
    for name, copy in {"3_torchrun.py": "train.py", "1_single.py": "single.py", "blobs.py": "blobs.py"}.items():
        shutil.copy(ladder / name, checkout / copy)
    for block in blocks(REPOSITORY / "docs" / "slurm.md", "bash"):
        follow(block, cli_here, run_python)
    for job in (
        job for run in ("later",) for job in json.loads(Path(f"runs/{run}/launch/jobs.json").read_text())["jobs"]
    ):
        idle_slurm.await_state(job["id"], "COMPLETED", timeout=60)
    states = {Path(row["run"]).name: row["state"] for row in cli_here("runs", "--json").json["runs"]}
    assert states == dict.fromkeys(("two-nodes", "later", "train", "train-2", "single"), "done")
    assert Path("runs/later/evaluations/test/cases.csv").exists()


def test_the_config_page_lists_every_field_with_its_default() -> None:
    (block,) = blocks(REPOSITORY / "docs" / "config.md", "yaml")
    written = parse_yaml(block, "docs/config.md")
    defaults = plain(make_config({"data": {"source": "PATH"}}, name="defaults", base=Path()))
    defaults["data"]["source"] = "PATH"
    assert written == defaults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_config_examples_are_valid(page: Path) -> None:
    for block in blocks(page, "yaml"):
        content = parse_yaml(block, page.name)
        assert make_config(content, name=page.name, base=Path()).patches.size == tuple(content["patches"]["size"])
