"""`--on ray`: the same training as on this machine, on real Ray clusters of several raylets, and what is refused."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import REPOSITORY, Cli, Finished
from lab.faults import poison_one, stop_one
from lab.ray import RayLab, Seat, await_step, kill, ranks_in
from lab.slurm import until
from voxscale.errors import InfrastructureError
from voxscale.launch.ray import RayNode, Share
from voxscale.launch.ray_access import refuse_silent
from voxscale.train.events import read_events

TWO_NODES = ("--on", "ray", "--nodes", "2", "--devices", "1")
SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""
HIDE_RAY = "import sys; sys.modules['ray'] = None; from voxscale.cli import main; main()"
LIST_RAY = (
    "import sys, contextlib\nfrom voxscale.cli import main\n"
    "with contextlib.suppress(SystemExit): main()\n"
    "print([name for name in sys.modules if name.split('.')[0] in ('ray', 'optuna')], file=sys.stderr)"
)


def stream(run: Path) -> dict[int, list[str]]:
    """The cases of each step; a step that was taken twice counts as it was taken last."""
    return {event["step"]: event["cases"] for event in read_events(run / "events.jsonl") if event["event"] == "train"}


def metrics(run: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((run / "metrics.json").read_text())
    return content


def assert_same_training(run: Path, other: Path) -> None:
    assert stream(run) == stream(other)
    assert (run / "cases.csv").read_bytes() == (other / "cases.csv").read_bytes()
    assert metrics(run)["weights_sha256"] == metrics(other)["weights_sha256"]
    assert metrics(run)["summary"] == metrics(other)["summary"]


@pytest.fixture(scope="module")
def config(seat: Seat) -> Path:
    return seat.write("c.yaml")


@pytest.fixture(scope="module")
def local(seat: Seat, config: Path) -> Path:
    """Two ranks on this machine."""
    done = seat.run("train", config, "--devices", "2", "--run", "local")
    assert done.code == 0, done.err
    return seat.folder / "local"


def test_two_nodes_of_a_cluster_train_as_two_devices_do(
    ray_cluster: RayLab, seat: Seat, config: Path, local: Path
) -> None:
    done = seat.run("train", config, *TWO_NODES, "--run", "on-ray", **ray_cluster.environ)
    assert done.code == 0, done.err
    assert "warning" not in done.err
    run = seat.folder / "on-ray"
    assert metrics(run)["world_size"] == 2
    assert len(stream(run)) == 15
    assert_same_training(run, local)
    assert len(list(run.glob("logs/ray-0/rank-*.log"))) == 2


@pytest.mark.cluster
def test_a_killed_rank_is_started_again_from_the_checkpoint(
    ray_cluster: RayLab, seat: Seat, config: Path, local: Path
) -> None:
    run = seat.folder / "killed"
    with seat.slowly() as at_full_speed, seat.started(
        "train", config, *TWO_NODES, "--run", run, **ray_cluster.environ
    ) as command:  # fmt: skip
        await_step(run, 6)
        first, second = ranks_in(run)
        assert ray_cluster.node_of(first) != ray_cluster.node_of(second)
        kill(second)
        at_full_speed()
        done = seat.end_of(command)
    assert done.code == 0, done.err
    assert "starting again from the last checkpoint" in done.err
    resumed = [event["step"] for event in read_events(run / "events.jsonl") if event["event"] == "resume"]
    assert len(resumed) == 1
    assert resumed[0] >= 5
    assert_same_training(run, local)
    assert ray_cluster.num_alive() == 3


@pytest.mark.cluster
def test_a_rank_that_hangs_is_named_in_time_and_the_run_goes_on(
    ray_cluster: RayLab, seat: Seat, config: Path, local: Path
) -> None:
    run, timeout_s = seat.folder / "hangs", 8
    words = ("train", config, f"train.timeout_s={timeout_s}", *TWO_NODES, "--run", run)
    with seat.slowly() as at_full_speed, seat.started(*words, **ray_cluster.environ) as command:
        await_step(run, 6)
        took_s, _ = stop_one(run, timeout_s)
        at_full_speed()
        done = seat.end_of(command)
    assert took_s < 2
    assert done.code == 0, done.err
    assert "starting again from the last checkpoint" in done.err
    assert_same_training(run, local)
    assert not ranks_in(run)


@pytest.mark.cluster
def test_a_case_that_one_node_cannot_read_ends_the_run_with_its_name(ray_cluster: RayLab, seat: Seat) -> None:
    """And is not tried again."""
    config, run = seat.write("poisoned.yaml", data__store=str(seat.folder / "poisoned")), seat.folder / "poisoned-run"
    case = poison_one(seat.run, config, run)
    done = seat.run("train", config, *TWO_NODES, "--run", run, **ray_cluster.environ)
    assert done.code == 3, done.err
    assert f"store: case {case}: image.b2nd is damaged" in done.err
    assert "starting again" not in done.err
    assert not ranks_in(run)


@pytest.mark.cluster
def test_a_signal_saves_and_the_same_command_continues(
    ray_cluster: RayLab, seat: Seat, config: Path, local: Path
) -> None:
    run = seat.folder / "signalled"
    asked = ("train", config, *TWO_NODES, "--run", run)
    with seat.slowly(), seat.started(*asked, **ray_cluster.environ) as command:
        await_step(run, 6)
        command.send_signal(signal.SIGTERM)
        stopped = seat.end_of(command)
    assert stopped.code == 75, (stopped.code, stopped.err)
    assert "stopped by signal SIGTERM; what was trained is saved" in stopped.err
    assert metrics(run)["state"] == "stopped"
    done = seat.run(*asked, **ray_cluster.environ)
    assert done.code == 0, done.err
    resumed = [event["step"] for event in read_events(run / "events.jsonl") if event["event"] == "resume"]
    assert len(resumed) == 1 and resumed[0] >= 6
    assert_same_training(run, local)


@pytest.mark.cluster
def test_a_state_that_could_not_be_saved_after_a_signal_is_not_called_saved(
    ray_cluster: RayLab, seat: Seat, config: Path
) -> None:
    run = seat.folder / "unsaved"
    with seat.slowly(), seat.started("train", config, *TWO_NODES, "--run", run, **ray_cluster.environ) as command:
        await_step(run, 6)
        (run / "checkpoints").rename(run / "elsewhere")
        (run / "checkpoints").symlink_to("a disk that is gone")
        command.send_signal(signal.SIGTERM)
        done = seat.end_of(command)
    assert done.code == 4, (done.code, done.err)
    assert re.search(r"error: rank 0: checkpoint step-\d+ could not be written", done.err)
    assert "is saved" not in done.err
    assert metrics(run)["state"] == "failed"


@pytest.mark.cluster
def test_a_signal_while_devices_are_waited_for(ray_cluster: RayLab, seat: Seat) -> None:
    (seat.folder / "long.py").write_text("import time; print('begun', flush=True); time.sleep(100)")
    held = ("launch", "long.py", "--on", "ray", "--devices", "2")
    with contextlib.ExitStack() as stack:
        for number in (1, 2):
            run = seat.folder / f"holds-{number}"
            stack.enter_context(seat.started(*held, "--run", run, **ray_cluster.environ))
            until(lambda run=run: any(run.glob("logs/ray-0/rank-0000.log")), 60, lambda: "it does not begin")
        waiting = stack.enter_context(seat.started(*held, "--run", "waits", **ray_cluster.environ))
        until(lambda: (seat.folder / "waits" / "logs" / "ray-0").exists(), 60, lambda: "it does not ask")
        time.sleep(2)
        waiting.send_signal(signal.SIGUSR1)
        stopped = seat.end_of(waiting, timeout_s=20)
    assert stopped.code == 75, (stopped.code, stopped.err)
    assert "stopped by signal SIGUSR1" in stopped.err
    assert "saved" not in stopped.err and "continue" not in stopped.err
    assert metrics(seat.folder / "waits")["state"] == "stopped"


SAVING = """
import os, signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(2)
    Path(f"saved-{os.environ['RANK']}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(100)
"""


@pytest.mark.cluster
def test_after_a_lost_node_the_other_ranks_of_a_script_may_save(seat: Seat) -> None:
    (seat.folder / "saving.py").write_text(SAVING)
    pids = [seat.folder / f"pid-{rank}" for rank in (0, 1)]
    with (
        RayLab(nodes=3) as lab,
        seat.started("launch", "saving.py", *TWO_NODES, "--run", "loses", **lab.environ) as command,
    ):
        until(lambda: all(pid.exists() and pid.read_text() for pid in pids), 60, lambda: "the ranks do not begin")
        nodes = [lab.node_of(int(pid.read_text())) for pid in pids]
        lost = 1 if nodes[1] else 0
        lab.kill(nodes[lost])
        done = seat.end_of(command, timeout_s=120)
    assert done.code == 4, (done.code, done.err)
    assert "Ray lost what ran" in done.err
    assert "continue" not in done.err and "(raylet" not in done.out + done.err
    assert (seat.folder / f"saved-{1 - lost}").exists()
    assert metrics(seat.folder / "loses")["state"] == "failed"


DRIVER = """
import ray
ray.init(log_to_driver=False)
print("cpus", ray.cluster_resources()["CPU"], ray.get(ray.remote(num_cpus=2)(lambda: 7).remote()), flush=True)
"""


@pytest.mark.parametrize("embedded", [True, False])
def test_a_plain_script_may_be_a_driver_of_the_cluster(ray_cluster: RayLab, seat: Seat, embedded: bool) -> None:
    script = seat.folder / "driver.py"
    script.write_text(DRIVER)
    environ = {"RAY_AUTH_TOKEN": "f" * 64} if embedded else ray_cluster.environ
    done = seat.run("launch", script, "--on", "ray", "--plain", "--run", f"driver-{embedded}", **environ)
    assert done.code == 0, done.err
    assert any(line.startswith("cpus") and line.endswith(" 7") for line in done.out.splitlines()), done.out


ASK_WITH_TOKEN = """
import os, subprocess, sys
from voxscale.launch.ray import connected
from voxscale.launch.ray_process import RAY_PROGRAM
from voxscale.plan.resources import Machine

with connected(None, os.environ, Machine(gpus=0, cpus=1)) as cluster:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": sys.argv[1]}
    for added in (token, {}):
        words = [sys.executable, "-c", RAY_PROGRAM, "health-check", "--address", cluster.address]
        done = subprocess.run(words, env={**os.environ, **added}, capture_output=True, text=True, timeout=30)
        print(done.returncode, "AuthToken" in done.stdout + done.stderr, flush=True)
assert os.environ["RAY_AUTH_TOKEN"] == sys.argv[1]
"""


def test_a_token_of_the_shell_does_not_open_the_cluster_that_is_started(seat: Seat) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK_WITH_TOKEN, "ab" * 32],
        env={**seat.environ, "RAY_AUTH_TOKEN": "ab" * 32},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.stdout.splitlines() == ["1 True", "0 False"], done.stdout + done.stderr


def test_a_script_runs_as_ranks_and_its_failure_is_told(ray_cluster: RayLab, seat: Seat) -> None:
    script = seat.folder / "own.py"
    script.write_text(SCRIPT)
    done = seat.run("launch", script, *TWO_NODES, "--run", "fine", "--", "0", **ray_cluster.environ)
    assert done.code == 0, done.err
    assert sorted(line for line in done.out.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2 ['0']",
        "rank 1 of 2 ['0']",
    ]
    failed = seat.run("launch", script, *TWO_NODES, "--run", "failing", "--", "7", **ray_cluster.environ)
    assert failed.code == 7, (failed.code, failed.err)
    assert "rank 1" in failed.err
    assert "Traceback" not in failed.err
    assert ray_cluster.num_alive() == 3


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("auto", 2, "found 'auto', expected HOST:PORT; `auto` could join a stranger's cluster"),
        ("ray://host:10001", 2, "expected HOST:PORT"),
        ("127.0.0.1:{free}", 4, "does not answer (Connection refused)"),
    ],
)
def test_an_address_that_is_none(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path, address: str, code: int, words: str
) -> None:
    where = address.format(free=free_port())
    done = cli_here("train", write_config(), "--on", "ray", "--address", where, "--run", tmp_path / "run")
    assert done.code == code, done.err
    assert words in " ".join(done.err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"), [(None, "does not exist"), ("", "is empty"), (" \n", "is empty"), (..., "is not a file")]
)
def test_a_token_that_cannot_be_had_is_said_first(
    cli_here: Cli, monkeypatch: pytest.MonkeyPatch, write_config: Callable[..., Path], tmp_path: Path,
    silent_port: int, content: object, words: str,
) -> None:  # fmt: skip
    file = tmp_path / "token"
    if content is ...:
        file.mkdir()
    elif isinstance(content, str):
        file.write_text(content)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    began = time.monotonic()
    address = f"127.0.0.1:{silent_port}"
    done = cli_here("train", write_config(), "--on", "ray", "--address", address, "--run", tmp_path / "run")
    assert done.code == 4, done.err
    assert f"RAY_AUTH_TOKEN_PATH={file} {words}" in done.err
    assert time.monotonic() - began < 8


@pytest.mark.parametrize(
    "words", [("train", "{config}", "site.time=1:00:00"), ("launch", "{script}", "--set", "site.time=1")]
)
def test_a_sites_fields_are_not_for_ray(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "s.py").write_text("")
    given = [word.format(config=write_config(), script=tmp_path / "s.py") for word in words]
    done = cli_here(*given, "--on", "ray", "--run", tmp_path / "run")
    assert done.code == 2 and "--site: not for --on ray" in done.err


def test_a_name_with_several_addresses_is_given_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ports that take no more connections: whoever asks is left without an answer."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        one = (socket.AF_INET, socket.SOCK_STREAM, 6, "", full.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [one, one, one])
        began = time.monotonic()
        with pytest.raises(InfrastructureError, match=r"does not answer \(timed out\)"):
            refuse_silent("many:1", "many", 1, 0.4)
    assert time.monotonic() - began < 0.8


@pytest.mark.ray
@pytest.mark.cluster
def test_a_server_that_never_answers(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path, silent_port: int
) -> None:
    began = time.monotonic()
    address = f"127.0.0.1:{silent_port}"
    done = cli_here("train", write_config(), "--on", "ray", "--address", address, "--run", tmp_path / "run")
    assert done.code == 4, done.err
    assert f"Ray at {address}: does not answer as Ray does within 10 s" in done.err
    assert time.monotonic() - began < 18
    assert not (tmp_path / "run").exists()


def test_a_wrong_token_and_none_are_refused(ray_cluster: RayLab, seat: Seat, config: Path) -> None:
    wrong = seat.folder / "wrong"
    wrong.write_text("0" * 64)
    asked = ("train", config, *TWO_NODES, "--run", "refused")
    with_wrong = {**ray_cluster.environ, "RAY_AUTH_TOKEN_PATH": str(wrong)}
    with seat.started(*asked, **with_wrong) as one, seat.started(*asked, RAY_ADDRESS=ray_cluster.address) as other:
        refused, nameless = seat.end_of(one), seat.end_of(other)
    assert refused.code == nameless.code == 4
    assert (
        f"Ray at {ray_cluster.address}: refuses our token, which is that of RAY_AUTH_TOKEN_PATH={wrong}" in refused.err
    )
    assert f"Ray at {ray_cluster.address}: asks for a token" in nameless.err
    assert "RAY_AUTH_TOKEN_PATH=FILE" in nameless.err
    assert not (seat.folder / "refused").exists()


@pytest.mark.cluster
def test_an_open_cluster_is_joined_with_one_warning(seat: Seat, config: Path) -> None:
    with RayLab(nodes=1, cpus=1, token=False) as lab:
        done = seat.run("train", config, "--on", "ray", "--nodes", "9", "--run", "none", RAY_ADDRESS=lab.address)
    assert done.code == 4
    warnings = [line for line in done.err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1, done.err
    assert "asks for no token" in warnings[0]
    assert "RAY_AUTH_MODE=token" in warnings[0]
    assert "--nodes 9: the Ray cluster has 1" in done.err
    assert not (seat.folder / "none").exists()


@pytest.mark.parametrize("verb", [("train", "--on", "ray"), ("search",)])
def test_without_ray_the_error_says_how_to_install_it(
    run_python: Callable[..., Finished], write_config: Callable[..., Path], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    config = write_config(search={"space": {"optimizer.lr": {"grid": [1e-3]}}})
    done = run_python("-c", HIDE_RAY, verb[0], config, *verb[1:], "--run", tmp_path / "run")
    assert done.code == 4, done.err
    assert "no ray in" in done.err
    assert "pip install 'voxscale[ray]'" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [("--help",), ("train", "--help"), ("train", "{config}", "--dry-run")])
def test_nothing_but_ray_itself_loads_ray(
    run_python: Callable[..., Finished], write_config: Callable[..., Path], words: tuple[str, ...]
) -> None:
    config = write_config(search={"space": {"optimizer.lr": {"grid": [1e-3]}}})
    done = run_python("-c", LIST_RAY, *(word.format(config=config) for word in words))
    assert done.err.splitlines()[-1] == "[]", done.err


def test_ray_and_optuna_are_known_in_few_places() -> None:
    sources = REPOSITORY / "src" / "voxscale"
    found = set()
    for path in sources.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if {name.split(".")[0] for name in names} & {"ray", "optuna"}:
                found.add(str(path.relative_to(sources)))
    assert found == {"launch/ray.py", "search/samplers.py"}


@pytest.mark.parametrize(
    ("share", "node", "room"),
    [
        (Share(1), RayNode("n", "h", 4, 0), 4),
        (Share(3), RayNode("n", "h", 4, 0), 1),
        (Share(5), RayNode("n", "h", 4, 0), 0),
        (Share(1, 0.1), RayNode("n", "h", 64, 1), 10),  # 1 / 0.1 is a little less in some roundings
        (Share(1, 0.3), RayNode("n", "h", 64, 1), 3),
        (Share(1, 0.3), RayNode("n", "h", 64, 4), 12),  # three on each
        (Share(8, 1), RayNode("n", "h", 16, 4), 2),
        (Share(1, 1), RayNode("n", "h", 16, 0), 0),
    ],
)
def test_how_many_shares_a_node_has_room_for(share: Share, node: RayNode, room: int) -> None:
    assert share.fits(node) == room
