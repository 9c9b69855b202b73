"""What the documentation says is true: commands run, the config listing is complete, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from conftest import RECIPES, REPOSITORY, Cli, Finished
from lab.conf import Shape
from lab.containers import Apptainer
from lab.ray import MARK, kill, marked, without_ray
from lab.slurm import SlurmLab, until
from pages import (
    PAGES,
    blocks,
    blocks_and_what_they_say,
    copy_scripts,
    follow,
    followed_lines,
    make_brats,
    unsaid,
    write_files,
)
from voxscale.config.load import make_config, parse_yaml, plain
from voxscale.launch.needs import describe
from voxscale.search.space import check_space


@pytest.mark.ranks
def test_the_ladder_can_be_climbed(
    checkout: Path, cli_here: Cli, run_python: Callable[..., Finished], capfd: pytest.CaptureFixture[str]
) -> None:
    for block, expected in blocks_and_what_they_say(REPOSITORY / "docs" / "ladder.md", "bash"):
        said = "\n".join([*follow(block, cli_here, run_python), *capfd.readouterr()])  # of ranks, too
        assert expected or "stop_after" in block, "each rung says what to expect"
        assert unsaid(expected, said) == [], said
    runs = {Path(row["run"]).name: row for row in cli_here("runs", "--json").json["runs"]}
    assert {name: row["state"] for name, row in runs.items()} == dict.fromkeys(("one", "two", "hand", "stop"), "done")
    assert runs["one"]["best"] == pytest.approx(runs["two"]["best"], abs=0.02)
    hashes = [json.loads(Path(f"runs/{name}/metrics.json").read_text())["weights_sha256"] for name in ("two", "hand")]
    assert hashes[0] == hashes[1]


@pytest.mark.cluster
@pytest.mark.ray
def test_the_upper_rungs_of_the_ladder_can_be_climbed(
    checkout: Path, idle_slurm: SlurmLab, apptainer: Apptainer, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the image of this machine, whose packages are bound in, on CPUs; the search with one trial."""
    page = REPOSITORY / "docs" / "ladder.md"
    write_files(page, "yml", checkout)
    site = yaml.safe_load((checkout / "boxed.yaml").read_text())
    site["container"] |= {"image": str(apptainer.sif), "packages": sysconfig.get_path("purelib")}
    (checkout / "boxed.yaml").write_text(yaml.safe_dump({"cpus_per_device": 1, **site}))
    (checkout / "site.yaml").write_text("cpus_per_device: 1\n")
    path = f"{apptainer.program.parent}:{os.environ['PATH']}"
    here = {"PATH": path, "SLURM_CONF": idle_slurm.environ["SLURM_CONF"]}
    for line in "".join(blocks(page, "console")).splitlines():
        few = ["search.trials=1"] if " search " in line else []
        done = cli(*shlex.split(line)[1:], *few, env=here)
        assert done.code == 0, f"{line}\n{done.err}"
    names = ("nodes", "boxed-one", "boxed-nodes", "ray")
    found = {name: json.loads(Path(f"runs/{name}/metrics.json").read_text()) for name in names}
    assert [found[name]["world_size"] for name in names] == [4, 1, 4, 2]
    assert found["nodes"]["weights_sha256"] == found["boxed-nodes"]["weights_sha256"]
    assert Path("runs/rates/best.yaml").is_file()


def test_the_readme_can_be_followed(checkout: Path, cli_here: Cli, run_python: Callable[..., Finished]) -> None:
    first_screen, first_minutes, own_folder, outcomes, published, override = blocks(REPOSITORY / "README.md", "bash")
    assert set(outcomes.splitlines()) < set(blocks(REPOSITORY / "docs" / "outcomes.md", "bash")[0].splitlines())
    targets = re.findall(r"^make (\w+)", first_screen, flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=REPOSITORY, check=True, capture_output=True)
    demo, _, rest = first_minutes.partition("\n")
    assert demo.startswith(".venv/bin/voxscale demo"), "the demo itself is run by test_promises.py"
    alone = ["--devices", "1"]
    follow(rest, cli_here, run_python, *alone)
    at_once, *steps = own_folder.splitlines()
    assert {step.partition("#")[0].strip() for step in steps} <= followed_lines(REPOSITORY / "docs" / "own-data.md")
    follow(at_once, cli_here, run_python, *alone, "train.epochs=1", "model.channels=[4,8]")
    follow(override, cli_here, run_python, *alone)
    demo, train = published.splitlines()
    assert demo.startswith("voxscale demo --like brats --out"), "demos are run by launch/test_demo.py"
    make_brats(checkout)
    follow(train, cli_here, run_python, *alone, "--dry-run")
    listed = re.findall(r"^\| `(\w+)", (REPOSITORY / "README.md").read_text().partition("## Verbs")[2], re.MULTILINE)
    verbs = re.findall(r"^  (\w+) ", cli_here("--help").out.partition("Commands:")[2], re.MULTILINE)
    assert sorted(dict.fromkeys(listed)) == sorted(verbs)


def test_the_page_of_exporting_can_be_followed(
    checkout: Path, cli_here: Cli, run_python: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporting, running = blocks(REPOSITORY / "docs" / "export.md", "bash")
    follow(exporting, cli_here, run_python, "--devices", "1")
    Path("images").mkdir()
    shutil.copy("data/quick/img3.nii.gz", "images")
    monkeypatch.chdir("bundle")
    follow(running, cli_here, run_python)
    assert Path("../predictions/img3.nii.gz").is_file()


def test_the_page_of_watching_can_be_followed(
    checkout: Path, cli_here: Cli, run_python: Callable[..., Finished]
) -> None:
    page = REPOSITORY / "docs" / "watch.md"
    (watching,) = blocks(page, "bash")
    *_, once, plain = follow(watching, cli_here, run_python, "--devices", "1")
    for label in ("steps (100 %)", "epoch ", "time ", "speed ", "loss ", "rate ", "validated ", "best ", "rank  host "):
        assert label in once
        assert label.replace("100 %", "60 %") in page.read_text()
    described = page.read_text().partition("## For programs")[2]
    assert set(json.loads(plain)) <= set(re.findall(r"`(\w+)`", described))


def test_the_page_of_outcomes_can_be_followed(
    cohort_checkout: Path, cli_here: Cli, run_python: Callable[..., Finished]
) -> None:
    page = REPOSITORY / "docs" / "outcomes.md"
    small = ["model.width=4", "model.stem=small", "model.groups=2", "train.epochs=2", "track=none", "--devices", "1"]
    small += ["train.precision=fp32", "train.compile=false", "train.channels_last=false"]
    started, chosen, tuned, classified = blocks(page, "bash")
    first, *_ = follow(started, cli_here, run_python, *small)
    for line in re.findall(r"^(?:images|task|guessed|features).*", blocks(page, "text")[0], re.MULTILINE):
        assert re.sub(r"\(.*", "", line) in first
    follow(chosen, cli_here, run_python, *small, "--dry-run")
    follow(tuned + classified, cli_here, run_python, *small)
    named = {*re.findall(r"`([a-z0-9_]+)[/`]", page.read_text())}
    for run in ("cohort", "pretrained", "tuned", "smokers"):
        metrics = json.loads(Path(f"runs/{run}/metrics.json").read_text())["summary"]
        assert metrics and {metric.partition("/")[0] for metric in metrics} <= named, (
            f"the page lacks a metric of {run}"
        )
    header = Path("predicted.csv").read_text().splitlines()[0]
    assert header.startswith("case,patient,risk,survival/1y")


@pytest.mark.ranks
def test_the_page_of_building_blocks_can_be_followed(
    cohort_checkout: Path, dataset: Path, cli_here: Cli, run_python: Callable[..., Finished]
) -> None:
    """Of 16 cases, five at a time, one is left over: a rank without any. All starts print the losses of one process."""
    page = REPOSITORY / "docs" / "building-blocks.md"
    (block,), (snippet,) = blocks(page, "bash"), blocks(page, "py")
    alone, together, rest = [
        [(int(step), int(cases), float(loss)) for step, cases, loss in found]
        for found in (
            re.findall(r"^step (\d+) cases (\d+) loss (\S+)$", out, re.MULTILINE)
            for out in follow(block, cli_here, run_python)
        )
    ]
    assert [cases for _, cases, _ in alone] == [5, 5, 5, 1] * 3
    assert len({loss for *_, loss in alone}) == 10, "one case alone has no loss, the others each their own"
    for found, expected in ((together, alone[:8]), (rest, alone[8:])):
        assert [row[:2] for row in found] == [row[:2] for row in expected]
        assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], abs=2e-5)

    store = cli_here("prepare", dataset, "--json").json["store"]
    Path("patches.py").write_text(snippet)
    done = run_python("patches.py", store)
    assert done.code == 0, done.err
    assert done.out.count("(4, 1, 16, 16, 16) (4, 16, 16, 16) 4\n") == 6


def test_the_page_of_the_report_can_be_followed(
    checkout: Path, cli_here: Cli, run_python: Callable[..., Finished]
) -> None:
    (block,) = blocks(REPOSITORY / "docs" / "report.md", "bash")
    printed = follow(block, cli_here, run_python, "--devices", "1", "train.epochs=1")
    assert f"report {checkout.resolve() / 'runs' / 'first' / 'report.html'}" in printed[0]
    assert Path("compared.html").read_text().count("first") > 1


@pytest.mark.slurm
def test_the_cluster_takes_what_its_page_submits(cluster_checkout: Path, cli_here: Cli) -> None:
    """Held against the real cluster, but not run; what waits for an earlier job of the page is left out."""
    pages = [REPOSITORY / "docs" / name for name in ("slurm.md", "search.md")]
    lines = "".join(block for page in pages for block in blocks(page, "bash")).splitlines()
    tried = [shlex.split(line)[1:] for line in lines if re.match("voxscale (train|launch|search) .*--on slurm", line)]
    assert tried
    for words in tried:
        done = cli_here(words[0], "--dry-run", *(word for word in words[1:] if word != "--dry-run"))
        assert (done.code, done.out.startswith("#!/bin/bash")) == (0, True), f"{words}\n{done.out}\n{done.err}"
    assert not Path("runs").exists()


@pytest.mark.cluster
def test_the_cluster_page_can_be_followed(
    cluster_checkout: Path, idle_slurm: SlurmLab, cli_here: Cli, run_python: Callable[..., Finished]
) -> None:
    for block in blocks(REPOSITORY / "docs" / "slurm.md", "bash"):
        follow(block, cli_here, run_python)
    for job in json.loads(Path("runs/later/launch/jobs.json").read_text())["jobs"]:
        idle_slurm.await_state(job["id"], "COMPLETED", timeout=60)
    states = {Path(row["run"]).name: row["state"] for row in cli_here("runs", "--json").json["runs"]}
    assert states == dict.fromkeys(("two-nodes", "later", "train", "train-2", "single", "rates", "driver"), "done")
    assert Path("runs/later/evaluations/test/cases.csv").exists()


@pytest.mark.cluster
@pytest.mark.ray
def test_the_page_of_searches_can_be_followed(checkout: Path, cli: Cli, cli_here: Cli) -> None:
    """The first search with one trial, extended by one; of the others the space is checked, or the job elsewhere."""
    first, extended, on_slurm, distmis, carried = blocks(REPOSITORY / "docs" / "search.md", "bash")
    search, listing, train = [shlex.split(line)[1:] for line in first.splitlines()]
    for words, trials in ((search, 1), (shlex.split(extended)[1:], 2)):
        done = cli(*words, f"search.trials={trials}", "train.epochs=2", "track=none")
        assert done.code == 0, done.err
        assert json.loads(Path("runs/rates/metrics.json").read_text())["trials"] == {"all": trials, "done": trials}
    assert cli_here(*listing, "--json").json["runs"][0]["state"] == "done"
    done = cli_here(*train)
    assert done.code == 0, done.err
    best, again = (json.loads(Path(f"runs/{name}/metrics.json").read_text())["best"] for name in ("rates", "best"))
    assert again["value"] == best["value"]
    assert on_slurm.startswith("voxscale search") and "--on slurm" in on_slurm

    shutil.copytree(RECIPES, "recipes", dirs_exist_ok=True)
    counts = [cli_here(*shlex.split(line)[1:], "--dry-run", "--json") for line in distmis.splitlines()]
    assert [len(done.json["trials"]) for done in counts] == [32, 32, 24]
    content = {"batch_size_per_replica": 2, "num_epochs": 20, "debug": False}
    for keys, verb in (({}, "search"), ({"num_replicas": 4}, "train")):
        Path("config.json").write_text(json.dumps({**content, **keys}))
        done = cli_here(*shlex.split(carried)[1:], "--json")
        assert (done.code, done.json["command"].split()[1]) == (0, verb), done.err
        Path("distmis.yaml").unlink()


@pytest.fixture
def own_ray() -> Iterator[dict[str, str]]:
    """The environment of a user who starts a Ray cluster on this machine; what then runs is ended."""
    room = Path(tempfile.mkdtemp(prefix="vxd-"))
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    own = {MARK: f"{room.name}/0", "HOME": str(room), "RAY_TMPDIR": str(room), "PATH": path}

    def gone() -> bool:
        left = [pid for pid, value in marked(MARK) if value == own[MARK]]
        for pid in left:
            kill(pid)
        return not left

    try:
        yield {**without_ray(os.environ), **own}
    finally:
        until(gone, 20, lambda: "processes of the page's cluster cannot be ended")
        shutil.rmtree(room, ignore_errors=True)


@pytest.mark.cluster
@pytest.mark.ray
def test_the_page_of_ray_can_be_followed(checkout: Path, cli: Cli, own_ray: dict[str, str]) -> None:
    """On Rays of voxscale's own; then on the page's cluster, both of its nodes on this machine and on a free port."""
    page = REPOSITORY / "docs" / "ray.md"
    copy_scripts(checkout)
    for line in "".join(blocks(page, "bash")).splitlines():
        done = cli(*shlex.split(line)[1:])
        assert done.code == 0, done.err
    assert json.loads(Path("runs/on-ray/metrics.json").read_text())["world_size"] == 2

    token, variables, start, use = blocks(page, "sh")
    head, join = start.splitlines()
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])

    def follow_as_shell(text: str) -> str:
        command = ["bash", "-ec", text.replace("6379", port)]
        done = subprocess.run(command, env=own_ray, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = follow_as_shell(token + variables + head)
    assert Path(own_ray["HOME"], "my-ray", "token").stat().st_mode & 0o777 == 0o600
    (host,) = re.findall(rf"--address='([^']+):{port}'", said)
    said = follow_as_shell((variables + join + "\n" + use).replace("first-node", host))
    assert "asks for no token" not in said
    for name in ("two-nodes", "on-mine"):
        assert json.loads(Path(f"runs/{name}/metrics.json").read_text())["state"] == "done"
    refused = cli("train", "recipes/quick.yaml", "--on", "ray", "--address", f"{host}:{port}", env={"HOME": "/nowhere"})
    assert (refused.code, "asks for a token" in refused.err) == (4, True), refused.err


@pytest.mark.cluster
def test_the_page_of_sites_can_be_followed(
    checkout: Path, idle_slurm: SlurmLab, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Palmetto's job is held against a cluster of its shape and not run: it wants V100s, modules and conda."""
    train, write_and_try = blocks(REPOSITORY / "docs" / "sites.md", "bash")
    make_brats(checkout, under="data")
    with SlurmLab(shape=Shape(nodes=2, cpu_nodes=0, cpus=16, memory_mb=64000, gpu_type="v100")) as palmetto:
        monkeypatch.setenv("SLURM_CONF", palmetto.environ["SLURM_CONF"])
        done = cli_here(*shlex.split(train)[1:], "--dry-run")
    assert done.code == 0, done.err
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=v100:2"} <= set(done.out.splitlines())

    monkeypatch.setenv("SLURM_CONF", idle_slurm.environ["SLURM_CONF"])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(checkout / "config"))
    detect, check = [shlex.split(line, comments=True)[1:] for line in write_and_try.splitlines()]
    done = cli_here(*detect)
    assert done.code == 0, done.err
    assert (checkout / "config" / "voxscale" / "sites" / "mine.yaml").is_file()
    done = cli_here(*check, "--json")
    assert done.code == 4, "the lab's GPUs are device files and no more"
    (finding,) = done.json["findings"]
    assert "see no GPU" in finding
    assert len({rank["host"] for rank in done.json["ranks"]}) == 2


@pytest.mark.cluster
def test_the_page_of_containers_can_be_followed(
    checkout: Path, idle_slurm: SlurmLab, apptainer: Apptainer, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the image, the archive and the packages of this machine, on small volumes, and on CPUs."""
    page = REPOSITORY / "docs" / "containers.md"
    (site,), (train,) = blocks(page, "yml"), blocks(page, "bash")
    (checkout / "archive").mkdir()
    for place, here in {"/shared/images/monai.sif": apptainer.sif, "/archive/scans:": f"{checkout}/archive:"}.items():
        assert place in site
        site = site.replace(place, str(here))
    content = parse_yaml(site, page.name)
    content["container"]["packages"] = sysconfig.get_path("purelib")
    sites = checkout / "config" / "voxscale" / "sites"
    sites.mkdir(parents=True)
    (sites / "mine.yaml").write_text(yaml.safe_dump({"cpus_per_device": 1, **content}))
    make_brats(checkout, under="data", cases=10)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(checkout / "config"))
    monkeypatch.setenv("PATH", f"{apptainer.program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", idle_slurm.environ["SLURM_CONF"])
    small = [
        "patches.size=[16,16,16]", "model.channels=[8,16]", "model.blocks_down=[1,1]", "model.blocks_up=[1]",
        "train.epochs=1", "train.threads=1", "validate.window=[16,16,16]", "track=none",
    ]  # fmt: skip
    words = shlex.split(train)[1:]
    done = cli_here(words[0], words[1], *small, *words[2:], "--run", "runs/inside")
    assert done.code == 0, done.err
    assert json.loads(Path("runs/inside/metrics.json").read_text())["world_size"] == 8
    assert str(apptainer.sif) in Path("runs/inside/launch/job.sbatch").read_text()


@pytest.mark.cluster
def test_the_images_of_the_page_of_containers_are_described(checkout: Path, image_folder: Path, cli_here: Cli) -> None:
    """Not built: that wants a registry and an index, or wheels of torch and all the rest. launch/test_container.py
    builds with a small wheel instead, and runs there the command that adds what an image lacks, which is of the
    page's form."""
    add, build = blocks(REPOSITORY / "docs" / "containers.md", "sh")
    fix = describe({"monai>=1.6.1": "not there"}, "apptainer exec --bind DIR IMAGE")["fix"]
    assert add.strip() in fix
    Path("wheels").mkdir()
    Path("wheels/voxscale_stand_in-1-py3-none-any.whl").touch()
    for number, line in enumerate(build.replace("/shared/base", str(image_folder)).splitlines()):
        words = [word for word in shlex.split(line, comments=True)[1:] if word != "--no-build"]
        done = cli_here(*words, "--no-build", "--definition", f"image-{number}")
        assert done.code == 0, f"{line}\n{done.err}"
    texts = [Path(f"image-{number}").read_text() for number in range(3)]
    assert "Bootstrap: docker\nFrom: python:" in texts[0]
    assert f"Bootstrap: localimage\nFrom: {image_folder}\n" in texts[1]
    assert "\nFROM python:" in texts[2]


def test_the_config_page_lists_every_field_with_its_default() -> None:
    (block,) = blocks(REPOSITORY / "docs" / "config.md", "yaml")
    written = parse_yaml(block, "docs/config.md")
    defaults = plain(make_config({"data": {"source": "PATH"}}, name="defaults", base=Path()))
    defaults["data"]["source"] = "PATH"
    assert written == defaults


def test_the_config_page_lists_every_option_of_a_search_with_its_default() -> None:
    (block,) = blocks(REPOSITORY / "docs" / "config.md", "yml")
    written = parse_yaml(block, "docs/config.md")
    given = {"data": {"source": "PATH"}, "search": {"space": written["search"]["space"]}}
    assert written["search"] == plain(make_config(given, name="defaults", base=Path()))["search"]


def test_the_space_of_the_page_of_searches_can_be_searched() -> None:
    (block,) = blocks(REPOSITORY / "docs" / "search.md", "yml")
    content = {"data": {"source": "PATH"}, **parse_yaml(block, "docs/search.md")}
    check_space(make_config(content, name="docs/search.md", base=Path()))


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
