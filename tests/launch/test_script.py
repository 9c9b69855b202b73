"""A user's own script, unchanged: its arguments, its ranks, its output, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import REPOSITORY, Cli, Finished
from lab.slurm import SlurmLab, until
from voxscale.cli import app
from voxscale.config.site import Site
from voxscale.errors import ConfigError
from voxscale.launch.sbatch import Request
from voxscale.launch.script import Script, claimed_folder, make_script
from voxscale.launch.script_end import finish
from voxscale.launch.script_job import render_script
from voxscale.runs import RunFolder

LADDER = REPOSITORY / "examples" / "ladder" / "3_torchrun.py"
ONE_CPU = ("--set", "site.cpus_per_device=1")
TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
told = {"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
sys.stdout.write(json.dumps(told) + "\\n")
"""
# Ends as it is told, or, if it is told nothing, waits; each rank says so first
END = """
import os, signal, sys, time
rank, (bad, how) = os.environ.get("RANK", "0"), sys.argv[1:3]
print(f"rank {rank} is here", flush=True)
if rank == bad:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("a wrong turn")
    sys.exit(int(how))
time.sleep(float(sys.argv[3]))
"""


def told(text: str) -> list[dict[str, object]]:
    """What TELL's ranks printed, by rank."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{") and "LOCAL_RANK" in line]
    return sorted(lines, key=lambda line: int(line["RANK"] or 0))


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def parsed(words: list[str]) -> dict[str, object]:
    """What `voxscale launch WORDS` understands."""
    verb = typer.main.get_command(app).commands["launch"]  # type: ignore[attr-defined]
    return dict(verb.make_context("launch", list(words)).params)


OURS = {name for parameter in typer.main.get_command(app).commands["launch"].params for name in parameter.opts}  # type: ignore[attr-defined]
WORDS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=12)
FLAGS = st.builds(lambda dashes, rest: dashes + rest, st.sampled_from(["-", "--", "---", "-x=", "--y="]), WORDS)


def is_ours(word: str) -> bool:
    return word == "--" or word.partition("=")[0] in {*OURS, "--help"}


@given(st.lists((WORDS | FLAGS).filter(lambda word: not is_ours(word))), st.lists(WORDS | FLAGS))
def test_what_we_do_not_know_goes_to_the_script_unchanged_and_in_order(before: list[str], after: list[str]) -> None:
    found = parsed(["--devices", "3", "train.py", *before, "--nodes", "2", "--", *after])
    assert found["script"] == "train.py"
    assert list(found["arguments"] or ()) == before + after  # type: ignore[call-overload]
    assert (found["devices"], found["nodes"]) == ("3", 2)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=())), max_size=4), WORDS)
def test_the_job_gives_bash_the_very_words(arguments: list[str], name: str) -> None:
    words = [word for word in arguments if is_speakable(word)]
    script = Script(Path("/scripts") / name.replace("/", "_"), tuple(words))
    lines = render_script(script, RunFolder(Path("/runs/$(id) 'a")), Site(), Request(2, 2), ["python"])
    assert not any("\r" in line or "\n" in line for line in lines)
    upto = next(number for number, line in enumerate(lines) if line.startswith("trap :"))
    text = "\n".join(["srun() { :; }", *lines[:upto], r"""printf '%s\0' "$run" "${command[@]}" """])
    done = subprocess.run(["/bin/bash", "-c", os.fsencode(text)], capture_output=True, check=True, timeout=20)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in ["/runs/$(id) 'a", *script.words]]
    assert not done.stderr


def is_speakable(word: str) -> bool:
    """Whether an operating system could pass it on."""
    try:
        return os.fsdecode(os.fsencode(word)) == word
    except UnicodeEncodeError:
        return False


def test_one_rank_and_two_train_the_same(cli: Cli, tmp_path: Path) -> None:
    lines = []
    for devices in (1, 2):
        arguments = ("1", "1", "--snapshot", f"{devices}.pt", "--devices", devices, "--json")
        done = cli("launch", LADDER, *arguments, cwd=tmp_path)
        assert done.code == 0, done.err
        assert (done.json["state"], done.json["world_size"], done.json["task"]) == ("done", devices, "script")
        assert 0 < done.json["wall_s"] < 120
        assert (tmp_path / f"{devices}.pt").is_file(), "a script runs where it was asked for"
        lines += [line for line in done.err.splitlines() if line.startswith("epoch")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["3_torchrun", "3_torchrun-2"]
    assert "2 ranks" in (tmp_path / "runs" / "3_torchrun-2" / "logs" / "local" / "rank-0000.log").read_text()


def test_ranks_get_their_arguments_variables_and_threads(cli: Cli, tmp_path: Path, script: Callable[..., Path]) -> None:
    arguments = ["a b", "$(touch owned)", "'\"", "line\nbreak", "ü€", "-x", "--a=b"]
    file, copy = script("tell.py", TELL), tmp_path / "out" / "all.txt"
    done = cli("launch", "--devices", 2, "--output", copy, file, *arguments, "--", "--nodes", "7", cwd=tmp_path)
    assert done.code == 0, done.err
    ranks = told(done.out)
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert all(rank["arguments"] == [*arguments, "--nodes", "7"] for rank in ranks)
    assert all(rank["WORLD_SIZE"] == "2" and rank["MASTER_ADDR"] for rank in ranks)
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert not (tmp_path / "owned").exists()
    assert told(copy.read_text()) == ranks
    run = tmp_path / "runs" / "tell"
    assert [told((run / "logs" / "local" / f"rank-{rank:04d}.log").read_text()) for rank in (0, 1)] == [
        [ranks[0]],
        [ranks[1]],
    ]
    assert json.loads((run / "launch" / "command.json").read_text())["command"][1:] == [*arguments, "--nodes", "7"]
    assert run.stat().st_mode & 0o777 == 0o700
    listed = cli("runs", tmp_path / "runs", "--json").json["runs"]
    assert [row["state"] for row in listed] == ["done"]


def test_a_plain_script_is_one_process_as_by_hand(cli: Cli, tmp_path: Path, script: Callable[..., Path]) -> None:
    """Its last lines arrive too, however many and however soon it ends; a job around it does not make it a rank."""
    file = script("tell.py", TELL + "print('x' * 1_000_000)\nprint('the end', file=sys.stderr)\n")
    strange = {"SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "OMP_NUM_THREADS": "5"}
    done = cli("launch", "--plain", file, cwd=tmp_path, env=strange)
    assert done.code == 0, done.err
    assert [line.strip("x") for line in done.out.splitlines()[1:3]] == ["", "the end"]
    *_, ended, page = done.out.splitlines()
    assert done.out.count("x") == 1_000_000 + (ended + page).count("x")
    assert "exit code" in Path(page.removeprefix("report ")).read_text()
    assert told(done.out)[0] | {"arguments": []} == {
        "arguments": [],
        **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")),
        "OMP_NUM_THREADS": "5",
    }


@pytest.mark.parametrize(("how", "code", "said"), [("3", 3, "exit code 3"), ("raise", 1, "code 1"), ("kill", 137, "9")])
def test_a_failing_rank_is_named_and_gives_the_exit_code(
    cli: Cli, tmp_path: Path, script: Callable[..., Path], how: str, code: int, said: str
) -> None:
    done = cli("launch", script("end.py", END), "1", how, "100", "--devices", 2, cwd=tmp_path)
    assert done.code == code
    last = done.err[done.err.index("error: ") :]
    assert "rank 1" in last
    assert "rank 0" not in last
    assert said in last
    log = tmp_path / "runs" / "end" / "logs" / "local" / "rank-0001.log"
    assert str(log) in last
    assert ("a wrong turn" in log.read_text()) == (how == "raise")
    assert "Traceback" not in done.err
    metrics = json.loads((tmp_path / "runs" / "end" / "metrics.json").read_text())
    assert (metrics["state"], metrics["exit_code"]) == ("failed", code)
    assert f'"label":"exit code","value":"{code}"' in (tmp_path / "runs" / "end" / "report.html").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process(
    tmp_path: Path, session_environ: dict[str, str], script: Callable[..., Path], number: signal.Signals
) -> None:
    file = script("end.py", END)
    words = [sys.executable, "-m", "voxscale", "launch", file, "9", "0", "300", "--devices", "2"]
    with subprocess.Popen(words, cwd=tmp_path, env=session_environ, stdout=subprocess.PIPE, text=True) as launched:
        assert launched.stdout is not None
        lines = [launched.stdout.readline() for _ in range(2)]
        launched.send_signal(number)
        assert sorted(lines) == ["rank 0 is here\n", "rank 1 is here\n"]
        launched.wait(30)
    until(lambda: not processes_of(file), 10, lambda: f"left behind: {processes_of(file)}")
    assert launched.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 128 + signal.SIGTERM)
    if number != signal.SIGKILL:
        assert json.loads((tmp_path / "runs" / "end" / "metrics.json").read_text())["state"] == "stopped"


def processes_of(file: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(file) in words:
            found.append(" ".join(words))
    return found


def test_a_script_that_ends_well_after_a_signal_has_stopped(tmp_path: Path) -> None:
    """So that a job that waits for it does not begin."""
    run = ended_run(tmp_path, {"failures": [], "codes": [], "ranks": [], "times": [], "stopped": True, "wall_s": 1.0})
    assert (finish(run, run / "logs")["state"], finish(run, run / "logs")["exit_code"]) == ("stopped", 75)


def test_the_rank_that_began_it_gives_the_exit_code(tmp_path: Path) -> None:
    """Not one that ended because it was left alone, nor one that came later."""
    run = ended_run(
        tmp_path,
        {"failures": ["a", "b"], "codes": [1, 7], "ranks": [0, 1], "times": [5, 5], "stopped": False, "wall_s": 1.0},
        {"failures": ["c"], "codes": [9], "ranks": [2], "times": [6], "stopped": False, "wall_s": 2.0},
    )
    metrics = finish(run, run / "logs")
    assert (metrics["exit_code"], metrics["wall_s"]) == (7, 2.0)
    assert [text.partition(",")[0] for text in metrics["failures"]] == ["node0: b", "node0: a", "node1: c"]


def test_a_node_that_does_not_tell_its_end_is_a_failure(tmp_path: Path) -> None:
    end = {"failures": [], "codes": [], "ranks": [], "times": [], "stopped": False, "wall_s": 1.0}
    run = ended_run(tmp_path, end, end)
    assert finish(run, run / "logs")["state"] == "done"
    (run / "logs" / "node-0001.end.json").unlink()
    metrics = finish(run, run / "logs")
    assert (metrics["state"], metrics["exit_code"]) == ("failed", 4)
    assert "2 of 2 nodes came (node0, node1) and 1 ended" in metrics["failures"][0]


def ended_run(root: Path, *ends: dict[str, object]) -> Path:
    (root / "launch").mkdir()
    (root / "logs").mkdir()
    command = {"command": ["x.py"], "nodes": len(ends), "devices": 1}
    (root / "launch" / "command.json").write_text(json.dumps(command))
    for index, end in enumerate(ends):
        (root / "logs" / f"node-{index:04d}.json").write_text(json.dumps({"node": f"node{index}"}))
        (root / "logs" / f"node-{index:04d}.end.json").write_text(json.dumps(end))
    return root


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has torch and what torch needs, but no voxscale."""
    root = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True, timeout=60)
    packages = root / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if path.suffix != ".pth" and "voxscale" not in path.name:
            (packages / path.name).symlink_to(path)
    (target,) = (root / "venv").glob("lib/python*/site-packages")
    (target / "packages.pth").write_text(f"{packages}\n")
    return root / "venv" / "bin" / "python"


NO_VOXSCALE = "import importlib.util\nassert importlib.util.find_spec('voxscale') is None\n"


def test_voxscale_need_not_be_in_the_interpreter(
    cli: Cli, tmp_path: Path, script: Callable[..., Path], other_python: Path
) -> None:
    file = script("tell.py", NO_VOXSCALE + TELL + "print(sys.executable)\n")
    done = cli("launch", file, "--devices", 2, "--python", other_python, cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(told(done.out)) == 2
    assert done.out.count(f"{other_python}\n") == 2


def test_every_finding_about_a_script_is_told_at_once(
    cli_here: Cli, tmp_path: Path, script: Callable[..., Path]
) -> None:
    done = cli_here("launch", tmp_path / "absent.py", "--plain", "--nodes", 2)
    assert done.code == 2
    assert f"SCRIPT {tmp_path}/absent.py: no such file, expected a Python file" in done.err
    assert "--plain with --nodes 2: a plain script is started once, on one node" in done.err
    assert "SCRIPT -m: found an option, expected a file" in cli_here("launch", "-m", "package").err
    assert "a folder, expected a Python file" in cli_here("launch", tmp_path).err
    file = script("tell.py", TELL)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    there = cli_here("launch", file, "--run", tmp_path / "run")
    assert (there.code, "is there already" in there.err) == (2, True)
    wrong = cli_here("launch", file, "--set", "train.epochs=3")
    assert (wrong.code, "--set train.epochs=3: expected site.KEY=VALUE" in wrong.err) == (2, True)
    assert "this is for a cluster" in cli_here("launch", file, "--set", "site.time=1:00:00").err
    into = cli_here("launch", file, "--output", tmp_path)
    assert (into.code, f"--output {tmp_path}: found a folder, expected a file" in into.err) == (2, True)


def test_starts_at_the_same_moment_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[..., Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = make_script(str(script("tell.py", TELL)), ())
    at_once = Barrier(8)

    def start(_: int) -> Path:
        at_once.wait()
        with claimed_folder(None, file) as root:
            return root

    with ThreadPoolExecutor(8) as several:
        assert len(set(several.map(start, range(8)))) == 8
    with pytest.raises(ConfigError), claimed_folder(tmp_path / "other" / "run", file):
        raise ConfigError("refused", fix="none")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("python", "said"),
    [("/usr/bin/env", "is not a Python interpreter"), ("/no/python", "no such program"), ("bare", "has no torch")],
)
def test_an_interpreter_that_cannot_start_ranks_is_named(
    cli_here: Cli, tmp_path: Path, script: Callable[..., Path], python: str, said: str
) -> None:
    if python == "bare":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
        python = str(tmp_path / "bare" / "bin" / "python")
    done = cli_here("launch", script("tell.py", TELL), "--python", python, "--run", tmp_path / "run")
    assert (done.code, said in done.err, python in done.err, "--python" in done.err) == (4, True, True, True)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_writes_nothing_and_runs_by_hand(cli_here: Cli, tmp_path: Path, script: Callable[..., Path]) -> None:
    run, file = tmp_path / "run", script("tell.py", TELL)
    done = cli_here("launch", file, "a b", "--devices", 2, "--run", run, "--dry-run")
    assert done.code == 0
    assert f"--devices 2 --reports {run}/logs/local --echo all -- {file} 'a b'" in done.out
    assert not run.exists()


def test_a_script_keeps_its_links(tmp_path: Path) -> None:
    """A virtual environment's interpreter is a link; what it leads to is another interpreter."""
    (tmp_path / "x.py").touch()
    (tmp_path / "python").symlink_to("/usr/bin/env")
    assert make_script(str(tmp_path / "x.py"), [], python=str(tmp_path / "python")).python == str(tmp_path / "python")


@pytest.fixture
def on_slurm(idle_slurm: SlurmLab, cli: Cli, tmp_path: Path) -> Iterator[Callable[..., Finished]]:
    def launch(*arguments: object, **options: object) -> Finished:
        return cli("launch", "--on", "slurm", *ONE_CPU, *arguments, cwd=tmp_path, env=idle_slurm.environ, **options)

    yield launch


@pytest.mark.slurm
def test_two_nodes_with_two_ranks_each(
    on_slurm: Callable[..., Finished], tmp_path: Path, other_python: Path, script: Callable[..., Path]
) -> None:
    """In an interpreter without voxscale, with arguments that a shell would take apart."""
    arguments = ["a b", "$(touch owned)", "line\r\nbreak", "ü'\""]
    file = script("tell.py", NO_VOXSCALE + TELL + "import torch.distributed as d; d.init_process_group('gloo')\n")
    placed = ("--nodes", 2, "--devices", 2, "--python", other_python, "--json")
    done = on_slurm(file, *arguments, *placed)
    assert done.code == 0, done.err
    ranks = told(done.err)
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert all(rank["arguments"] == arguments and rank["OMP_NUM_THREADS"] == "1" for rank in ranks)
    assert len({rank["MASTER_ADDR"] for rank in ranks}) == 1
    assert (done.json["state"], done.json["world_size"], done.json["nodes"]) == ("done", 4, 2)
    assert not (tmp_path / "owned").exists()
    assert len(list((tmp_path / "runs" / "tell" / "logs").glob("*-0/rank-*.log"))) == 4


@pytest.mark.cluster
def test_a_failing_rank_fails_the_job(
    on_slurm: Callable[..., Finished], slurm: SlurmLab, tmp_path: Path, script: Callable[..., Path]
) -> None:
    """Soon, also where the ranks of the other node have ended well: torchrun would wait five minutes for the failed."""
    began = time.monotonic()
    done = on_slurm(script("end.py", END), "1", "3", "1", "--nodes", 2, "--devices", 1)
    assert done.code == 3
    assert time.monotonic() - began < 60
    (job,) = json.loads((tmp_path / "runs" / "end" / "launch" / "jobs.json").read_text())["jobs"]
    assert (slurm.state(job["id"]), slurm.show(job["id"])["ExitCode"]) == ("FAILED", "3:0")
    assert "node2: rank 1 ended with exit code 3, see " in done.err[done.err.rindex("error:") :]


@pytest.mark.slurm
def test_a_plain_script_as_a_job_with_its_own_output_file(
    on_slurm: Callable[..., Finished], tmp_path: Path, script: Callable[..., Path]
) -> None:
    file = script("tell.py", TELL + "print('x' * 1_000_000)\nprint('the end', file=sys.stderr)\n")
    done = on_slurm("--plain", file, "q", "--output", "out/%x-%j.txt")
    assert done.code == 0, done.err
    (output,) = (tmp_path / "out").glob("tell-*.txt")
    lines = output.read_text().splitlines()
    assert (told(lines[0])[0]["arguments"], len(lines[1]), lines[2]) == (["q"], 1_000_000, "the end")
    assert "--output" in on_slurm("--plain", file, "--output", "%N.txt").err


@pytest.mark.slurm
def test_a_script_that_nodes_do_not_see(on_slurm: Callable[..., Finished], slurm: SlurmLab) -> None:
    slurm.local.mkdir(parents=True, exist_ok=True)
    file = slurm.local / "unseen.py"  # a node has another disk there
    file.write_text(TELL)
    try:
        done = on_slurm(file, "--nodes", 2, "--devices", 1)
    finally:
        file.unlink()
    assert done.code == 4
    assert f"no script {file}" in done.err
    assert "node1" in done.err


@pytest.mark.slurm
def test_inside_an_allocation_it_runs_there_and_then(
    idle_slurm: SlurmLab, tmp_path: Path, script: Callable[..., Path]
) -> None:
    """An interrupt reaches the ranks, which end as they like; nothing is left on the nodes."""
    text = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
    file = script("wait.py", text + "print('here', flush=True)\ntime.sleep(100)\n")
    words = [sys.executable, "-m", "voxscale", "launch", file, "--on", "slurm", "--devices", "1"]
    salloc = ["salloc", "-N2", "-c1", *words, "--output", "%x-of-%j.txt"]
    environ = {**os.environ, **idle_slurm.environ}
    with subprocess.Popen(
        salloc, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as inside:
        try:
            until(lambda: outputs_of(tmp_path).count("here") == 2, 40, lambda: "no ranks came")
        except AssertionError:
            inside.kill()
            raise
        began = time.monotonic()
        (owner,) = [pid for pid in children(inside.pid) if b"launch" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(owner, signal.SIGINT)
        said = inside.communicate(timeout=40)[0]
    assert inside.returncode == 5, said
    assert time.monotonic() - began < 20
    assert "ended with exit code 5" in said
    assert not processes_of(file)
    assert not list((tmp_path / "runs" / "wait" / "launch").glob("jobs.json")), "nothing was submitted"


def outputs_of(folder: Path) -> str:
    """What is in the files that are called as a job's output would be."""
    return "".join(path.read_text() for path in folder.glob("wait-of-[0-9]*.txt"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slurm
def test_what_the_cluster_cannot_give_is_refused(
    on_slurm: Callable[..., Finished], script: Callable[..., Path]
) -> None:
    file = script("tell.py", TELL)
    done = on_slurm(file, "--nodes", 9, "--devices", 1)
    assert (done.code, "9" in done.err) == (2, True)
    text = on_slurm(file, "--nodes", 2, "--devices", 2, "--dry-run", "--debug-comm").out
    assert "--no-requeue" in text
    assert "export TORCH_DISTRIBUTED_DEBUG=DETAIL" in text
    assert not (file.parent / "runs").exists()
