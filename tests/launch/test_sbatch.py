"""Jobs as text: the same text every time, one that bash and sbatch take, and from which nothing hostile runs."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import voxscale
from conftest import REPOSITORY
from golden import assert_golden
from lab.slurm import SlurmLab
from voxscale.config.load import check_section
from voxscale.config.site import Site, read_site
from voxscale.errors import ConfigError
from voxscale.launch.batch import OPEN, TRAIN, fold_jobs, train_jobs, write_jobs
from voxscale.launch.sbatch import Job, Planned, Request, job_name, output_pattern, render_sbatch
from voxscale.launch.slurm import expand_output, submit

SITES = sorted(path.stem for path in (REPOSITORY / "sites").glob("*.yaml"))
RUN = Path("/shared/runs/brats")


def render(site: Site, run: Path = RUN, nodes: int = 2, devices: int | None = None) -> str:
    request = Request(nodes, devices or site.gpus.per_node or 1, gpus=site.gpus.ask != "none")
    binds = [Path("/shared/data"), run.parent]
    job = train_jobs(run, site, request, binds, opened=True, debug_comm=False)[TRAIN]
    return render_sbatch(job, site)


def parses(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, timeout=20, check=False).returncode == 0


@pytest.mark.parametrize("name", SITES)
def test_shipped_sites_render_as_before(name: str) -> None:
    text = render(read_site(name, {"HOME": "/home/me"}))
    assert_golden(f"sbatch-{name}.txt", text.replace(str(Path(voxscale.__file__).parent), "PACKAGE"))
    assert parses(text)


def test_a_job_asks_for_what_is_planned_where_its_site_states_nothing() -> None:
    planned = Planned(6144, "00:10:00", "measured steps, confidence high")
    request = Request(1, 2, planned=planned)

    def text_of(site: Site) -> str:
        return render_sbatch(train_jobs(RUN, site, request, [], opened=True, debug_comm=False)[TRAIN], site)

    text = text_of(Site(python="python3"))
    assert_golden("sbatch-planned.txt", text)
    assert parses(text)
    stated = text_of(Site.model_validate({"time": "1:00:00", "memory": {"per_node": "8G"}}))
    assert "--mem=8192M" in stated
    assert "--time=1:00:00" in stated
    jobs = fold_jobs(RUN, Site(), request, [], folds=3, opened=False, debug_comm=False)
    asking = [kind for kind, job in jobs.items() if "--time=" in render_sbatch(job, Site())]
    assert asking == [TRAIN], "other jobs are not planned"


def test_a_run_is_opened_for_the_cpus_that_its_job_has() -> None:
    """In an allocation those that are there, whatever the site gives a device."""
    job = train_jobs(RUN, Site(), Request(1, 2, cpus=3), [], opened=False, debug_comm=False)[OPEN]
    assert "--cpus 3" in render_sbatch(job, Site())
    stated = train_jobs(RUN, Site(), Request(1, 2), [], opened=False, debug_comm=False)[OPEN]
    assert "--cpus 8" in render_sbatch(stated, Site())


@pytest.mark.parametrize("name", SITES)
def test_sbatch_takes_the_shipped_sites(slurm: SlurmLab, tmp_path: Path, name: str) -> None:
    """As they are, but for what only their own clusters have."""
    site = read_site(name, {"HOME": "/home/me"})
    gpus = site.gpus.model_copy(update={"type": site.gpus.type and "a100"})
    fit = {"partition": None, "qos": None, "gpus": gpus, "cpus_per_device": 2, "time": "10", "memory": None}
    file = tmp_path / "job.sbatch"
    file.write_text(render(site.model_copy(update=fit), tmp_path / "run", devices=2))
    said = slurm.run("sbatch", "--test-only", file).stderr
    assert "to start at" in said
    assert "node[" in said


def test_every_option_is_asked_for() -> None:
    content = {
        "partition": "a,b", "account": "acc", "qos": "high", "reservation": "ours", "constraint": "a100&(ib|opa)",
        "gpus": {"ask": "gpus-per-node", "type": "a100"}, "cpus_per_device": 3, "memory": {"per_device": "2G"},
        "exclusive": True, "time": "1-0", "signal_s": 60, "mail": {"to": "me@example.org", "when": ["ALL"]},
        "extra": ["--licenses=matlab:1", "--spread-job"], "output": "out/%x-%j", "error": "/logs/%j",
    }  # fmt: skip
    lines = render(check_section(Site, content, "site"), devices=2).splitlines()
    options = [shlex.split(line)[1] for line in lines if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=brats", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--gpus-per-node=a100:2",
        "--mem=4096M", "--partition=a,b", "--account=acc", "--qos=high", "--reservation=ours",
        "--constraint=a100&(ib|opa)", "--time=1-0", "--exclusive", "--mail-user=me@example.org", "--mail-type=ALL",
        "--output=/shared/runs/brats/out/%x-%j", "--error=/logs/%j", "--open-mode=append", "--requeue",
        "--signal=B:USR1@60", "--licenses=matlab:1", "--spread-job",
    ]  # fmt: skip


# Programs that a job calls only note how they were called. Nothing else is found, and what a hostile text would run
# leaves a file called canary.
_NOTING = r"""
PATH=/nonexistent
note() { { printf '%s\0' "$@"; printf '\n\0'; } >>calls; }
canary() { : >canary; }
touch() { : >canary; }
srun() { note srun "$@"; note env "${HOSTILE-}"; }
readlink() { :; }
scontrol() { note scontrol "$@"; }
module() { note module "$@"; }
conda() { [ "$1" = activate ] && note conda "$@"; }
source() { note source "$@"; }
command_not_found_handle() { note not-found "$@"; }
"""
PIECES = [
    " ", "'", '"', "\n", "\r", "$(canary)", "`canary`", ";canary;", "\ncanary\n", "'; canary; '", '"; canary; "', "\\",
    "&& canary", "| canary", ">canary", "%", "%j", "%%", "#", "-", "--wrap=canary", "é", "№", "\u2028", "\u0085",
    "\u00a0", "$HOME", "${IFS}", "*", "~", "!", "\t", "\x00", "\x1b[31m", "(", ")", "{", "}", "[", "]", "<", ":",
    ",", "=", "a", "gpu", "../", "\ud800", "\N{RIGHT-TO-LEFT OVERRIDE}", "1",
]  # fmt: skip
PRINTABLE = [piece for piece in PIECES if piece.isprintable()]
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), min_size=1, max_size=5).map("".join),
    st.lists(st.sampled_from(PRINTABLE), min_size=1, max_size=8).map("".join),
)
PLAIN = [
    "partition", "account", "qos", "reservation", "constraint", "time", "output", "error", "conda", "venv", "python",
    "scratch", "interface",
]  # fmt: skip


def _alone(name: str, text: str) -> dict[str, str]:
    return {name: text}


FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    **{name: partial(_alone, name) for name in PLAIN},
    "gpus.type": lambda text: {"gpus": {"ask": "gres", "type": text}},
    "memory.per_node": lambda text: {"memory": {"per_node": text}},
    "memory.per_device": lambda text: {"memory": {"per_device": text}},
    "mail.to": lambda text: {"mail": {"to": text}},
    "mail.when": lambda text: {"mail": {"to": "me", "when": [text]}},
    "extra": lambda text: {"extra": [text]},
    "extra value": lambda text: {"extra": [f"--comment={text}"]},
    "modules": lambda text: {"modules": [text]},
    "env name": lambda text: {"env": {text: "1"}},
    "env value": lambda text: {"env": {"HOSTILE": text}},
    "image": lambda text: {"container": {"image": text}},
    "binds": lambda text: {"container": {"image": "i", "binds": [text]}},
    "options": lambda text: {"container": {"image": "i", "options": ["--containall", text]}},
    "packages": lambda text: {"container": {"image": "i", "runtime": "charliecloud", "packages": text}},
    "run": lambda text: {},
}  # fmt: skip
# Where an accepted text must arrive as it is: the call, and the word of it.
ARRIVES: dict[str, tuple[str, str]] = {
    "conda": ("conda", "{}"),
    "venv": ("source", "{}/bin/activate"),
    "python": ("srun", "{}"),
    "modules": ("module", "{}"),
    "env value": ("env", "{}"),
    "image": ("srun", "{}"),
    "binds": ("srun", "{}"),
    "options": ("srun", "{}"),
    "packages": ("srun", "{}"),
    "interface": ("srun", "{}"),
    "run": ("srun", "{}/launch/node.py"),
}


def calls_of(text: str, folder: Path) -> list[list[str]]:
    """What the job calls, as real bash calls it."""
    (folder / "noting").write_text(_NOTING)
    (folder / "job").write_bytes(text.encode())
    (folder / "calls").unlink(missing_ok=True)
    environ = {"BASH_ENV": str(folder / "noting"), "SLURM_JOB_ID": "7", "HOME": "/home/me"}
    bash = ["/bin/bash", "--norc", "job"]
    subprocess.run(bash, cwd=folder, env=environ, timeout=20, capture_output=True, check=False)
    calls = (folder / "calls").read_bytes().decode().split("\n\0")
    return [call.split("\0")[:-1] for call in calls if call]


@settings(max_examples=1000, deadline=None)
@given(field=st.sampled_from(sorted(FIELDS)) | st.sampled_from(sorted(ARRIVES)), text=TEXTS)
def test_a_hostile_text_is_refused_or_stays_one_word(
    tmp_path_factory: pytest.TempPathFactory, field: str, text: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    folder.mkdir(exist_ok=True)
    run = Path("/shared/runs") / (text if field == "run" else "brats")
    try:
        # With an environment the interpreter is `python`, which is not found and so noted.
        content = {"venv": "/v"} | FIELDS[field](text)
        site = check_section(Site, {**content, "venv": None} if "conda" in content else content, "site")
        rendered = render(site, run)
    except ConfigError as error:
        assert field.split()[0] in error.message or repr(str(run)) in error.message
        assert error.fix
        return
    options = [line for line in rendered.split("\n") if line.startswith("#SBATCH")]
    assert all(len(shlex.split(option, comments=False)) == 2 for option in options)
    assert len(options) == len(set(options)) == rendered.count("#SBATCH ") - text.count("#SBATCH ")
    assert parses(rendered)
    calls = calls_of(rendered, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["calls", "job", "noting"], f"{field} {text!r} ran"
    known = {"srun", "env", "module", "conda", "source", "not-found", "scontrol"}
    assert {call[0] for call in calls} <= known
    missing = {call[1] for call in calls if call[0] == "not-found"}  # what says how it ended, and what writes the page
    assert missing in (set(), {"python"}, {"apptainer"}, {"ch-run"}, {text})
    if field in ARRIVES:
        program, word = ARRIVES[field]
        given_text = str(run) if field == "run" else text
        assert word.replace("{}", given_text) in [w for call in calls if call[0] == program for w in call]


@given(text=TEXTS)
def test_any_text_makes_a_job_name(text: str) -> None:
    name = job_name(text)
    assert name.isascii()
    assert name.replace("_", "").replace(".", "").replace("-", "").isalnum()
    assert len(name) <= 64
    assert not name.startswith("-")


def test_a_folder_that_jobs_are_written_for_is_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    for name in ("open", "new"):
        folder = tmp_path / name
        write_jobs({TRAIN: Job(name="a", purpose="test", folder=folder, request=Request(), lines=("true",))}, Site())
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "name",
    ["it's a run; echo $(touch canary) `touch canary`", "50% of %j %x %%", "#SBATCH --wrap=x #", "-x é &|<>*?~!"],
)
def test_slurm_writes_where_the_run_is(slurm: SlurmLab, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    (folder / "launch").mkdir(parents=True)
    job = Job(name=job_name(name), purpose="test", folder=folder, request=Request(), lines=("echo here",))
    file = folder / "launch" / "job.sbatch"
    file.write_text(render_sbatch(job, Site()))
    number = submit(file, {**os.environ, **slurm.environ})
    assert slurm.await_state(number, "COMPLETED", "FAILED") == "COMPLETED"
    output = Path(expand_output(output_pattern(job, Site().output), number, job.name))
    assert output == folder / "launch" / f"{job_name(name)}.{number}.out"
    assert output.read_text() == "here\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
