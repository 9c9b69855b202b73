"""The guide is true: its commands run, what it names is there, and it is built without anything from elsewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from conftest import REPOSITORY, Cli, Finished
from lab.conf import Shape
from lab.slurm import SlurmLab
from pages import DOCS, PAGES, blocks, follow, followed_lines, make_brats, write_files
from voxscale.config.data import Synthetic
from voxscale.config.load import make_config
from voxscale.config.schema import Config
from voxscale.data.synthetic import ensure_like, write_cohort

GUIDED = ("brats", "btcv", "mace")
TINY = ["train.epochs=1", "track=none", "train.precision=fp32", "train.compile=false", "train.channels_last=false"]
SMALL = {
    "brats": [
        *("patches.size=[16,16,16]", "validate.window=[16,16,16]"),
        "model={name: segresnet, channels: [8,16], blocks_down: [1,1], blocks_up: [1]}",
    ],
    "btcv": [
        *("patches.size=[16,16,16]", "validate.window=[16,16,16]", "data.spacing=null"),
        "model={name: unetr, feature_size: 4, hidden: 24, mlp: 48, heads: 2}",
    ],
    "mace": ["data.size=[16,16,8]", "model.width=4", "model.stem=small", "model.groups=2", "train.batch=8"],
}


def test_the_first_minutes_can_be_followed(checkout: Path, cli_here: Cli, run_python: Callable[..., Finished]) -> None:
    """README's lines, which are followed with it, those of the page of own data, and one that is refused."""
    page = DOCS / "first-minutes.md"
    lines = "".join(blocks(page, "bash")).splitlines()
    (refused,) = [line for line in lines if "||" in line]
    elsewhere = followed_lines(REPOSITORY / "README.md") | followed_lines(DOCS / "own-data.md")
    assert {*lines} - elsewhere == {refused}
    (said,) = follow(refused, cli_here, run_python)
    assert blocks(page, "text")[0].strip() in said


def test_the_page_of_own_data_can_be_followed(
    checkout: Path, cli_here: Cli, run_python: Callable[..., Finished]
) -> None:
    page = DOCS / "own-data.md"
    small = ["--devices", "1", "train.epochs=1", "model.channels=[4,8]", "track=none"]
    first, *_ = follow("".join(blocks(page, "bash")), cli_here, run_python, *small)
    said, damaged = blocks(page, "text")
    assert said in first
    assert len(list(Path("predictions").glob("*.nii.gz"))) == len(list(Path("MY_DATA").glob("img*")))
    file = Path("MY_DATA/img3.nii.gz")
    file.write_bytes(file.read_bytes()[:2000])
    done = cli_here("doctor", "my.yaml")
    assert (done.code, damaged.strip() in done.out) == (3, True), done.out
    content = yaml.safe_load(blocks(page, "yml")[0])
    assert make_config(content, name=page.name, base=Path()).data.pattern is not None


def _losses(run: str) -> list[float]:
    events = [json.loads(line) for line in Path(f"runs/{run}/events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "train"]


@pytest.mark.ranks
def test_the_page_of_own_parts_can_be_followed(
    checkout: Path, dataset: Path, cli_here: Cli, run_python: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = DOCS / "own-parts.md"
    write_files(page, "py", checkout)
    monkeypatch.setattr(sys, "path", list(sys.path))
    follow("".join(blocks(page, "bash")), cli_here, run_python)
    one, two = _losses("own-batch-loss"), _losses("own-batch-loss-2")
    assert one == pytest.approx(two, abs=1e-4)
    assert one[-1] < one[0] - 0.01, "it learns"
    assert _losses("own-loss")[-1] < _losses("own-loss")[0]
    assert Path("runs/own-loss/config.yaml").read_text().count("my_parts:tversky") == 1

    prepare, alone, together = blocks(page, "sh")[0].splitlines()
    store = cli_here(*shlex.split(prepare.replace("MY_DATA", str(dataset)))[1:]).json["store"]
    example = REPOSITORY / "examples" / "own_task.py"
    lines = [line.replace("STORE", store).replace("examples/own_task.py", str(example)) for line in (alone, together)]
    said = [re.findall(r"^epoch.*", text, re.MULTILINE) for text in follow("\n".join(lines), cli_here, run_python)]
    assert len(said[0]) == 3
    numbers = [[float(number) for line in lines for number in re.findall(r"[\d.]+", line)] for lines in said]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-5)
    named = re.findall(r"^def (\w+\([^)]*\))", blocks(page, "python")[0], re.MULTILINE)
    text = re.sub(r": [\w.]+", "", example.read_text())
    assert [name for name in named if f"def {name}" in text] == named


@pytest.mark.cluster
def test_the_page_of_plans_can_be_followed(
    cohort_checkout: Path, checkout: Path, cli_here: Cli, run_python: Callable[..., Finished]
) -> None:
    recipe = checkout / "recipes" / "quick.yaml"
    content = yaml.safe_load(recipe.read_text())
    content["data"]["split"] = {"val": 0.4}  # of the few cases here, one for each of four devices
    recipe.write_text(yaml.safe_dump(content))
    follow("".join(blocks(DOCS / "plan.md", "bash")), cli_here, run_python)
    assert Path("curve.svg").is_file()
    assert Path("runs/scaling/scale.json").is_file()


def test_what_other_pages_run_is_run_elsewhere() -> None:
    """Pages that only repeat commands: each line stands in a page that is followed."""
    followed = followed_lines(DOCS / "plan.md") | followed_lines(DOCS / "slurm.md")
    for name in ("performance", "troubleshooting", "coming-from"):
        lines = "".join(blocks(DOCS / f"{name}.md", "bash")).splitlines()
        assert lines
        assert set(lines) <= followed, name


@pytest.fixture(params=GUIDED)
def guided(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder with the recipes and small data where the page expects them; yields the name of the page."""
    make_brats(tmp_path, under="data", cases=10)
    made = tmp_path / "data" / "btcv"
    ensure_like(made, "btcv", Synthetic(cases=6, size=(16, 16, 16)))
    write_cohort(tmp_path / "made", cases=30, size=(16, 16, 8), seed=3, threads=2)
    for path in (tmp_path / "made").iterdir():
        path.rename(tmp_path / path.name)
    sites = tmp_path / "config" / "voxscale" / "sites"
    sites.mkdir(parents=True)
    (sites / "mine.yaml").write_text("cpus_per_device: 1\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return request.param


def _of_page(name: str) -> tuple[list[str], list[str]]:
    """The lines of a page that submit trainings, and the others."""
    lines = "".join(blocks(DOCS / f"{name}.md", "bash")).splitlines()
    submitted = [line for line in lines if " --on slurm" in line and line.startswith("voxscale train")]
    assert submitted
    return submitted, [line for line in lines if line not in submitted]


def test_data_of_a_guided_page_are_looked_at(guided: str, cli_here: Cli, run_python: Callable[..., Finished]) -> None:
    """What does not wait for a run: doctor, show, init."""
    _, others = _of_page(guided)
    here = [line for line in others if re.match("voxscale (doctor|show|init)", line)]
    assert here
    follow("\n".join(here), cli_here, run_python)


@pytest.mark.slurm
def test_the_cluster_takes_what_a_guided_page_submits(
    guided: str, wide_slurm: SlurmLab, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", wide_slurm.environ["SLURM_CONF"])
    for line in _of_page(guided)[0]:
        done = cli_here(*shlex.split(line)[1:], "--dry-run")
        assert (done.code, done.out.startswith("#!/bin/bash")) == (0, True), f"{line}\n{done.out}\n{done.err}"


@pytest.fixture(scope="module")
def wide_slurm() -> Iterator[SlurmLab]:
    """Nodes with eight devices each, to hold requests against."""
    with SlurmLab(shape=Shape(nodes=4, cpu_nodes=0, cpus=16, memory_mb=64000, gpus=8)) as lab:
        yield lab


@pytest.mark.cluster
def test_a_guided_page_can_be_followed(
    guided: str, idle_slurm: SlurmLab, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two devices in place of eight, with small networks and one epoch; the last of a fine-tuning too."""
    monkeypatch.setenv("SLURM_CONF", idle_slurm.environ["SLURM_CONF"])
    page = DOCS / f"{guided}.md"
    tuned = [line for block in blocks(page, "console") for line in block.splitlines() if "train.init_from" in line]
    for line in [*"".join(blocks(page, "bash")).splitlines(), *tuned]:
        words = re.sub(r"--devices [48]", "--devices 2", line).replace("encoder: 5", "encoder: 1")
        verb, *rest = shlex.split(words)[1:]
        small = [*SMALL[guided], *TINY] if verb == "train" else SMALL[guided] if verb == "prepare" else []
        two_epochs = ["train.epochs=2"] if "train.freeze" in line else []
        done = cli_here(verb, rest[0], *small, *rest[1:], *two_epochs) if small else cli_here(verb, *rest)
        assert done.code == 0, f"{line}\n{done.err}"
    runs = {path.parent.name for path in Path("runs").glob("*/metrics.json")}
    assert {f"{guided}"} <= runs
    if guided == "mace":
        assert Path("risks.csv").read_text().startswith("case,patient,risk,survival/1y")
        assert {"mace-pretrain", "mace-tuned", "mace-folds"} <= runs


def _commands(page: Path) -> Iterator[list[str]]:
    """Every command of ours on a page, in blocks and in words."""
    text = page.read_text()
    for block in re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield from (shlex.split(line, comments=True) for line in block.splitlines() if "voxscale " in line)
    for span in re.findall(r"(?<!`)`(voxscale [^`]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.M)):
        yield shlex.split(span.replace("\\|", "|"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_have_the_verbs_and_flags_that_there_are(page: Path) -> None:
    for words in _commands(page):
        if not words[0].endswith("voxscale") or len(words) == 1 or words[1] == "--help":
            continue
        verb = words[1]
        golden = REPOSITORY / "tests" / "golden"
        files = [golden / f"help-{verb}.txt", *([golden / f"help-{verb}-{words[2]}.txt"] if len(words) > 2 else [])]
        texts = [path.read_text() for path in files if path.exists()]
        assert texts or verb in ("VERB", "…"), words
        if verb in ("launch", "VERB", "scale"):
            continue  # flags may be the script's
        for flag in [word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][a-z-]+.*", word)]:
            assert any(re.search(rf"{flag}\b", text) for text in texts), words


@pytest.mark.parametrize("name", ["coming-from", "performance", "troubleshooting", "brats", "btcv", "mace"])
def test_fields_have_the_names_and_values_that_there_are(name: str) -> None:
    """Words of code that are nothing but `key=value` are overrides of a config."""
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", (DOCS / f"{name}.md").read_text())
    sections = "|".join(Config.model_fields)
    tried = 0
    for span in [span for span in spans if re.match(rf"({sections})(\.[a-z_]+)*=", span)]:
        given = [word for word in shlex.split(span) if not word.startswith("--") and "=" in word]
        task = ["task=survival"] if ("size" in given[0] and "data" in given[0]) or name == "mace" else []
        make_config({"data": {"source": "PATH"}}, [*task, *given], name=name, base=Path())
        tried += 1
    assert tried


def test_troubleshooting_quotes_what_is_said() -> None:
    said = " ".join(path.read_text() for path in (REPOSITORY / "src").rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", said)
    quoted = [
        text
        for name in ("troubleshooting", "ray")
        for text in re.findall(r'\*"([^"]+)"\*', (DOCS / f"{name}.md").read_text())
    ]
    assert len(quoted) > 8
    assert not [text for text in quoted for part in text.split("…") if part.strip() not in said]


def test_the_drawing_has_the_rooms_of_the_check() -> None:
    contract = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [[room.strip().removeprefix("voxscale.") for room in layer.split("|")] for layer in contract["layers"]]
    drawing = ElementTree.parse(DOCS / "assets" / "architecture.svg").getroot()  # noqa: S314 our own file
    svg = "{http://www.w3.org/2000/svg}"
    drawn = [
        [text.text for text in group.iter(f"{svg}text") if text.get("class") == "room"]
        for group in drawing.iter(f"{svg}g")
        if group.get("class") == "layer"
    ]
    assert drawn == layers
    package = REPOSITORY / "src" / "voxscale"
    rooms = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {room for layer in layers for room in layer} == {room for room in rooms if not room.startswith("__")}
    chain = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert " → ".join(f"`{' | '.join(layer)}`" for layer in layers) in re.sub(r"\s+", " ", chain)


def test_the_page_of_architecture_names_what_is_there() -> None:
    for name in re.findall(r"`((?:tests|src)/[\w/.]+)`", (DOCS / "architecture.md").read_text()):
        assert (REPOSITORY / name).exists(), name
    for row in re.findall(r"^\| [^|]+ \| ([^|]+) \|", (DOCS / "architecture.md").read_text(), re.MULTILINE)[2:]:
        folder = Path()
        for name in re.findall(r"`([\w/.]+)`", row):
            folder = Path(name).parent if "/" in name else folder
            path = REPOSITORY / "src" / "voxscale" / (name if "/" in name else folder / name)
            assert path.exists(), name


class _Assets(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.found.append(str(given["src"]))
        if tag == "link" and given.get("href"):
            self.found.append(str(given["href"]))


def test_the_site_is_built_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        assets = _Assets()
        assets.feed(page.read_text())
        assert assets.found
        assert not [asset for asset in assets.found if re.match("(https?:)?//", asset)], page
    styles = "".join(path.read_text() for path in (tmp_path / "site").rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", styles)
