"""`voxscale search` on real Ray: what it leaves, what it survives, what it refuses, and who cannot get in.

One grid is searched undisturbed. The others vary the same fields of the same config, so that what they have to come
to, however they are disturbed, is known from it.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from conftest import Cli, Finished
from lab.ray import (
    COUNT_NODES,
    RayLab,
    Seat,
    all_pids,
    await_step,
    environ_of,
    kill,
    program_name,
    ranks_in,
    step_of,
    words_of,
)
from lab.slurm import until
from lab.terminal import Terminal
from voxscale.config.load import read_config
from voxscale.launch import ray_access
from voxscale.search.samplers import propose
from voxscale.train.events import read_events

LRS = [1e-3, 3e-2, 2e37]  # fair, good, and one that ends in NaN
GRID = {"space": {"optimizer.lr": {"grid": LRS}}, "max_concurrent": 2}
BEST = 1
METRIC = "dice/mean"


def table(folder: Path) -> list[dict[str, str]]:
    """trials.csv without what depends on the clock."""
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    return [{name: value for name, value in row.items() if name != "wall_s"} for row in rows]


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def happened(folder: Path, event: str) -> Counter[int]:
    """How often it did to each trial."""
    return Counter(row["trial"] for row in ledger(folder) if row["event"] == event)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def trial(folder: Path, index: int) -> Path:
    return folder / "trials" / f"{index:04d}"


@dataclass(frozen=True)
class Intrusion:
    """What was seen of an embedded cluster while it ran."""

    modes: dict[str, int]
    token: str
    without_token: Finished
    with_token: Finished
    tellers: list[str]
    second_driver: Finished
    raylet: list[str]  # its words


@dataclass(frozen=True)
class Reference:
    folder: Path
    done: Finished
    seen: Intrusion

    @property
    def by_lr(self) -> dict[float, dict[str, str]]:
        return {float(row["optimizer.lr"]): row for row in table(self.folder)}


@pytest.fixture(scope="module")
def config(seat: Seat) -> Path:
    return seat.write("grid.yaml", search=GRID)


@pytest.fixture(scope="module")
def reference(seat: Seat, cli_here: Cli, config: Path) -> Reference:
    """An embedded search that nobody disturbs, and somebody looks at."""
    folder = seat.folder / "reference"
    with seat.slowly() as at_full_speed, seat.started("search", config, "--run", folder, "--json") as command:
        await_step(trial(folder, 0), 1)
        seen = look_into(seat, lambda: cli_here("search", config, "--run", folder))
        at_full_speed()
        done = seat.end_of(command)
    assert done.code == 0, done.err
    return Reference(folder, done, seen)


def look_into(seat: Seat, second: Callable[[], Finished]) -> Intrusion:
    (own,) = seat.room.glob("vx-*")
    token = (own / "token").read_text().strip()
    (server,) = [pid for pid in seat.processes() if words_of(pid)[0].endswith("gcs_server")]
    options = dict(word.lstrip("-").partition("=")[::2] for word in words_of(server))
    address = f"{options['node-ip-address']}:{port_of(server, own)}"
    tellers = [" ".join(words_of(pid))[:200] for pid in all_pids() if token in f"{environ_of(pid)}{words_of(pid)}"]
    tellers += [str(path) for path in own.rglob("*") if path.is_file() and path.name != "token" and holds(path, token)]
    return Intrusion(
        {"folder": mode_of(own), "token": mode_of(own / "token")},
        token,
        ask(address, {}),
        ask(address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(own / "token")}),
        tellers,
        second(),
        next(words for pid in seat.processes() if (words := words_of(pid))[0].endswith("/raylet")),
    )


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def holds(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:  # a socket
        return False


def port_of(server: int, own: Path) -> int:
    """On which the head answers; the system has chosen it."""
    options = dict(word.lstrip("-").partition("=")[::2] for word in words_of(server))
    if int(options.get("gcs_server_port", "0")):
        return int(options["gcs_server_port"])
    (file,) = own.glob("ray/session_2*/gcs_server_port_*")
    return int(file.read_text())


def ask(address: str, variables: dict[str, str]) -> Finished:
    strangers = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_NODES, address],
        env={**strangers, "HOME": "/nonexistent", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def test_every_trial_stands_once_in_the_table(reference: Reference) -> None:
    rows = table(reference.folder)
    assert [row["trial"] for row in rows] == ["0", "1", "2"]
    assert [float(row["optimizer.lr"]) for row in rows] == LRS
    assert [row["state"] for row in rows] == ["done", "done", "nan"]
    assert [row["steps"] for row in rows[:2]] == ["15", "15"]
    assert rows[2][METRIC] == ""
    assert "the loss is inf at step 2" in rows[2]["why"]
    for event in ("trial", "start", "end"):
        assert happened(reference.folder, event) == {0: 1, 1: 1, 2: 1}, event
    answer = reference.done.json
    assert answer["search"] == str(reference.folder)
    assert answer["trials"] == {"all": 3, "done": 2, "nan": 1}
    assert answer["best"]["trial"] == BEST
    assert answer["best"]["params"] == {"optimizer.lr": LRS[BEST]}
    assert f"{answer['best']['value']}" == rows[BEST][METRIC]


def test_trials_are_ordinary_runs_of_one_split(reference: Reference, cli_here: Cli, seat: Seat) -> None:
    splits = {path.read_bytes() for path in reference.folder.glob("trials/*/split.csv")}
    assert splits == {(reference.folder / "split.csv").read_bytes()}
    run = trial(reference.folder, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(seat.folder))
        patch.syspath_prepend(seat.folder)
        done = cli_here("evaluate", run, "--json")
    assert done.code == 0, done.err
    summary = read_json(run / "metrics.json")["summary"][METRIC]
    assert done.json["summary"][METRIC]["mean"] == pytest.approx(summary["mean"], abs=1e-12)


def test_the_best_config_trains_to_the_same_numbers(reference: Reference, seat: Seat) -> None:
    done = seat.run("train", reference.folder / "best.yaml", "--run", "again", "--json")
    assert done.code == 0, done.err
    then = read_json(trial(reference.folder, BEST) / "metrics.json")
    now = read_json(seat.folder / "again" / "metrics.json")
    assert {name: now[name] for name in ("summary", "weights_sha256", "best", "steps")} == {
        name: then[name] for name in ("summary", "weights_sha256", "best", "steps")
    }
    assert (seat.folder / "again" / "cases.csv").read_bytes() == (
        trial(reference.folder, BEST) / "cases.csv"
    ).read_bytes()


def test_nobody_without_the_token_gets_into_an_embedded_cluster(reference: Reference) -> None:
    seen = reference.seen
    assert seen.with_token.out.strip() == "1", seen.with_token.err
    assert seen.without_token.code != 0
    assert "Unauthenticated" in seen.without_token.err or "AuthenticationError" in seen.without_token.err
    assert seen.modes["folder"] == 0o700
    assert seen.modes["token"] == 0o600
    assert len(seen.token) == 64
    assert not seen.tellers
    assert not [path for path in reference.folder.rglob("*") if path.is_file() and holds(path, seen.token)]


def test_no_process_of_an_embedded_cluster_has_a_port_of_its_own_choice(reference: Reference) -> None:
    ports = re.findall(r"--([a-z_-]+port)[= ](\d+)", " ".join(reference.seen.raylet).replace("_", "-"))
    assert ("listen-port", "0") in ports, "that of its agent; the others it tells to whoever asks"
    assert not [name for name, port in ports if port in ("8265", "52365", "10001")]


def test_a_second_driver_is_refused_and_told_of_the_first(reference: Reference) -> None:
    assert reference.seen.second_driver.code == 4
    assert f"{reference.folder}: in use by pid " in reference.seen.second_driver.err


@pytest.mark.cluster
def test_a_search_that_is_done_is_not_done_again(reference: Reference, seat: Seat, config: Path) -> None:
    before = (reference.folder / "trials.jsonl").read_bytes(), table(reference.folder)
    done = seat.run("search", config, "--run", reference.folder)
    assert done.code == 0, done.err
    assert ((reference.folder / "trials.jsonl").read_bytes(), table(reference.folder)) == before


@pytest.mark.cluster
def test_a_raylet_and_then_the_driver_are_lost(
    reference: Reference, ray_cluster: RayLab, seat: Seat, config: Path
) -> None:
    """On a user's cluster, to the same table as undisturbed on one machine; each trial ends once."""
    folder = seat.folder / "raylet"
    asked = ("search", config, "--run", folder)
    with seat.slowly() as at_full_speed:
        with seat.started(*asked, **ray_cluster.environ) as driver:
            for index in (0, 1):
                await_step(trial(folder, index), 6)
            places = {index: ray_cluster.node_of(*ranks_in(trial(folder, index))) for index in (0, 1)}
            lost, number = next((index, number) for index, number in places.items() if number != 0)
            ray_cluster.kill(number)
            until(lambda: happened(folder, "lost")[lost] == 1, 60, lambda: f"not noticed: {ledger(folder)}")
            until(lambda: happened(folder, "start")[lost] == 2, 60, lambda: f"not started again: {ledger(folder)}")
            kill(driver.pid)
        ray_cluster.add_node()
        at_full_speed()
        done = seat.run(*asked, **ray_cluster.environ)
    assert done.code == 0, done.err
    assert table(folder) == table(reference.folder)
    for event in ("trial", "end"):
        assert happened(folder, event) == {0: 1, 1: 1, 2: 1}, event
    assert [event["event"] for event in read_events(trial(folder, lost) / "events.jsonl")].count("resume") >= 1
    assert ray_cluster.num_alive() == 3


def test_two_ranks_in_a_trial_one_of_which_is_killed(ray_cluster: RayLab, seat: Seat) -> None:
    """The trial is tried again from its checkpoint, the other goes on; a point that cannot be trained is refused."""
    uneven = {"space": {"train.batch": {"grid": [4, 5, 6]}}, "per_trial": {"devices": 2}}
    refused = seat.run("search", seat.write("uneven.yaml", search=uneven), "--run", "uneven", **ray_cluster.environ)
    assert refused.code == 2, refused.err
    assert "train.batch 5 does not divide over 2 ranks" in refused.err
    assert not (seat.folder / "uneven").exists()
    config = seat.write("pairs.yaml", search={"space": {"train.batch": {"grid": [4, 6]}}, "per_trial": {"devices": 2}})
    folder = seat.folder / "pairs"
    with seat.slowly() as at_full_speed, seat.started("search", config, "--run", folder, **ray_cluster.environ) as one:
        await_step(trial(folder, 0), 6)
        first, second = ranks_in(trial(folder, 0))
        assert ray_cluster.node_of(first) == ray_cluster.node_of(second)
        kill(second)
        at_full_speed()
        done = seat.end_of(one)
    assert done.code == 0, done.err
    assert [row["state"] for row in table(folder)] == ["done", "done"]
    assert happened(folder, "lost") == {0: 1}
    assert happened(folder, "start") == {0: 2, 1: 1}
    assert happened(folder, "end") == {0: 1, 1: 1}
    events = read_events(trial(folder, 0) / "events.jsonl")
    assert next(event["step"] for event in events if event["event"] == "resume") >= 5
    alone = seat.write("alone.yaml")
    local = seat.run("train", alone, "--devices", "2", "--run", "alone", "--json")
    assert local.code == 0, local.err
    metrics = read_json(trial(folder, 0) / "metrics.json")
    assert metrics["world_size"] == 2
    assert metrics["weights_sha256"] == local.json["weights_sha256"]
    assert metrics["summary"] == local.json["summary"]
    assert (trial(folder, 0) / "cases.csv").read_bytes() == (seat.folder / "alone" / "cases.csv").read_bytes()


def expected_of_random(seat: Seat, config: Path, reference: Reference) -> list[tuple[float, str, str]]:
    """(lr, state, value) of each trial of a random search among the reference's values."""
    search = read_config(config).search
    assert search is not None
    lrs = [propose(search, index, ())["optimizer.lr"] for index in range(search.num_points)]
    return [(lr, reference.by_lr[lr]["state"], reference.by_lr[lr][METRIC]) for lr in lrs]


def found_in(folder: Path) -> list[tuple[float, str, str]]:
    return [(float(row["optimizer.lr"]), row["state"], row[METRIC]) for row in table(folder)]


@pytest.mark.cluster
def test_a_driver_that_is_told_to_stop_or_killed_goes_on_where_it_was(
    reference: Reference, seat: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random with a seed, on an embedded Ray that ends with its driver."""
    space = {"optimizer.lr": {"choice": LRS}}
    config = seat.write("random.yaml", search={"space": space, "trials": 4, "seed": 9, "max_concurrent": 2})
    folder = seat.folder / "random"
    asked = ("search", config, "--run", folder)
    with seat.slowly() as at_full_speed:
        with seat.started(*asked) as driver:
            await_step(trial(folder, 0), 2)
            driver.send_signal(signal.SIGTERM)
            stopped = seat.end_of(driver)
        assert stopped.code == 75, stopped.err
        assert "what the others had reached is saved" in stopped.err
        assert read_json(folder / "metrics.json")["state"] == "stopped"
        assert ledger(folder)[-1]["event"] == "stop"
        reached = step_of(trial(folder, 0))
        assert table(folder)[0]["steps"] == str(reached)
        assert not seat.processes()
        assert not list(seat.room.glob("vx-*"))
        with seat.started(*asked) as driver:
            await_step(trial(folder, 0), reached + 1)
            kill(driver.pid)
        at_full_speed()
        done = seat.run(*asked)
    assert done.code == 0, done.err
    assert found_in(folder) == expected_of_random(seat, config, reference)
    assert happened(folder, "end") == dict.fromkeys(range(4), 1)
    assert happened(folder, "trial") == dict.fromkeys(range(4), 1)
    assert not happened(folder, "lost")
    resumed = [e["step"] for e in read_events(trial(folder, 0) / "events.jsonl") if e["event"] == "resume"]
    assert resumed[0] == reached, "nothing that was trained before the signal is trained again"
    until(lambda: not seat.processes(), 30, lambda: f"left behind: {[*map(words_of, seat.processes())]}")
    assert len(list(seat.room.glob("vx-*"))) <= 1, "of the killed driver, unless the next came a minute later"
    monkeypatch.setattr(ray_access, "_NEW_S", 0.0)
    ray_access._sweep(seat.room)
    assert not list(seat.room.glob("vx-*"))


@pytest.mark.cluster
def test_who_closes_the_terminal_is_told_how_far_the_trials_have_come(seat: Seat) -> None:
    """The signal ends Ray, too: its ranks save by themselves, which the driver waits for."""
    config = seat.write("closed.yaml", search={"space": {"train.batch": {"grid": [4, 6]}}, "max_concurrent": 2})
    folder = seat.folder / "closed"
    words = (sys.executable, "-m", "voxscale", "search", config, "--run", folder)
    with seat.slowly(), Terminal(*words, env=seat.environ) as terminal:
        for index in (0, 1):
            terminal.until(rf"{index} +running +[2-9]/", 120)
        terminal.hang_up()
        assert terminal.wait(60) == 75, terminal.text
        reached = {f"{index}": step_of(trial(folder, index)) for index in (0, 1)}
    assert "stopped by signal SIGHUP" in terminal.text
    assert ledger(folder)[-1] == {"event": "stop", "reason": "signal SIGHUP", "steps": reached}
    assert {row["trial"]: int(row["steps"]) for row in table(folder)} == reached
    saved = [read_events(trial(folder, index) / "events.jsonl")[-1] for index in (0, 1)]
    assert [(event["event"], event["step"]) for event in saved] == [("stop", step) for step in reached.values()]


@pytest.mark.cluster
def test_an_embedded_raylet_that_is_killed_is_said_and_the_same_command_goes_on(
    reference: Reference, seat: Seat, config: Path
) -> None:
    """No other node will ever come, so nothing is waited for."""
    folder = seat.folder / "nodeless"
    asked = ("search", config, "--run", folder)
    with seat.slowly() as at_full_speed:
        with seat.started(*asked) as driver:
            await_step(trial(folder, 0), 6)
            (raylet,) = [pid for pid in seat.processes() if program_name(pid) == "raylet"]
            kill(raylet)
            done = seat.end_of(driver, timeout_s=60)
        assert done.code == 4, done.err
        assert "the Ray that was started here has lost its node" in done.err
        assert "Traceback" not in done.err
        assert not list(seat.room.glob("vx-*"))
        at_full_speed()
        done = seat.run(*asked)
    assert done.code == 0, done.err
    assert table(folder) == table(reference.folder)
    assert happened(folder, "end") == {0: 1, 1: 1, 2: 1}


@pytest.mark.cluster
def test_a_search_that_has_no_node_left_says_so_and_goes_on_with_one_that_joins(seat: Seat) -> None:
    search = {"space": {"train.batch": {"grid": [4]}}, "per_trial": {"devices": 2}}
    config, folder = seat.write("needs-two.yaml", search=search), seat.folder / "waits-for-a-node"
    words = (sys.executable, "-m", "voxscale", "search", config, "--run", folder)
    waiting = "warning: no node of the Ray cluster has 2 CPUs any more; waiting for one to join"
    with (
        RayLab(nodes=2) as lab,
        seat.slowly() as at_full_speed,
        Terminal(*words, env={**seat.environ, **lab.environ}) as terminal,
    ):
        terminal.until(r"0 +running +[6-9]/", 120)
        lab.kill(1)
        terminal.until(waiting)
        lab.add_node()
        at_full_speed()
        assert terminal.wait(120) == 0, terminal.text
    assert terminal.text.count(waiting) == 1
    assert [row["state"] for row in table(folder)] == ["done"]
    assert happened(folder, "lost") == happened(folder, "end") == {0: 1}


@pytest.mark.cluster
def test_a_trial_that_cannot_be_saved_is_not_called_saved(seat: Seat) -> None:
    config = seat.write("unsaved.yaml", search={"space": {"optimizer.lr": {"grid": LRS[:1]}}})
    run = trial(seat.folder / "unsaved", 0)
    with seat.slowly(), seat.started("search", config, "--run", "unsaved") as driver:
        await_step(run, 2)
        (run / "checkpoints").symlink_to("a disk that is gone")
        driver.send_signal(signal.SIGTERM)
        stopped = seat.end_of(driver)
    assert stopped.code == 75, stopped.err
    why = r"rank 0: checkpoint step-\d+ could not be written"
    assert re.search(rf"warning: trial 0 goes on from its last checkpoint: {why}", stopped.err), stopped.err
    assert "what the others had reached is saved, but for trial 0" in stopped.err


@pytest.mark.cluster
def test_a_head_that_is_killed_is_said_and_a_new_cluster_goes_on(
    reference: Reference, seat: Seat, config: Path
) -> None:
    folder = seat.folder / "headless"
    asked = ("search", config, "--run", folder)
    with seat.slowly() as at_full_speed:
        with RayLab(nodes=1) as lab, seat.started(*asked, **lab.environ) as driver:
            await_step(trial(folder, 0), 6)
            lab.kill(0)
            began = time.monotonic()
            done = seat.end_of(driver)
            assert time.monotonic() - began < 20
            assert done.code == 4, done.err
            assert f"the head of the Ray cluster at {lab.address} is gone" in done.err
            assert "start the cluster, then the same command again" in done.err
            assert "Traceback" not in done.err
        at_full_speed()
        with RayLab(nodes=1) as lab:
            done = seat.run(*asked, **lab.environ)
    assert done.code == 0, done.err
    assert table(folder) == table(reference.folder)
    assert happened(folder, "end") == {0: 1, 1: 1, 2: 1}


@pytest.mark.cluster
@pytest.mark.parametrize("devices", [1, 2])
def test_halving_stops_what_is_hopeless_and_keeps_its_verdicts(ray_cluster: RayLab, seat: Seat, devices: int) -> None:
    """Also where each trial is several ranks, whose devices the next ones get; and what was stopped can go on alone."""
    lrs = [3e-2, 1e-9, 2e-9, 3e-9]
    search = {
        "space": {"optimizer.lr": {"grid": lrs}},
        "scheduler": {"name": "asha", "reduction": 2, "grace": 1},
        "max_concurrent": 2,
        "per_trial": {"devices": devices},
    }
    config = seat.write("halving.yaml", train__epochs=6, search=search)
    folder = seat.folder / f"halving-{devices}"
    asked = ("search", config, "--run", folder)
    with seat.slowly():
        with seat.started(*asked, **ray_cluster.environ) as driver:
            until(
                lambda: folder.exists() and any(row["event"] == "end" for row in ledger_if_any(folder)),
                120,
                lambda: f"nothing was stopped: {ledger_if_any(folder)}",
            )
            kill(driver.pid)
        before = [row for row in ledger(folder) if row["event"] == "verdict"]
        done = seat.run(*asked, **ray_cluster.environ)
    assert done.code == 0, done.err
    verdicts = [row for row in ledger(folder) if row["event"] == "verdict"]
    assert verdicts[: len(before)] == before
    assert len({(row["trial"], row["rung"]) for row in verdicts}) == len(verdicts), "nobody is judged twice at a rung"
    rows = table(folder)
    states = [row["state"] for row in rows]
    assert states[0] == "done"
    assert "pruned" in states
    assert set(states) <= {"done", "pruned"}
    assert sum(int(row["steps"]) for row in rows) < 4 * 30
    assert all(int(row["steps"]) < 30 for row in rows if row["state"] == "pruned")
    assert read_json(folder / "metrics.json")["best"]["trial"] == 0
    assert happened(folder, "end") == dict.fromkeys(range(4), 1)
    run = trial(folder, states.index("pruned"))
    assert read_json(run / "metrics.json")["world_size"] == devices
    alone = seat.run("train", run / "config.yaml", "--run", run, "--devices", devices, "--json")
    assert alone.code == 0, alone.err
    assert (alone.json["state"], alone.json["steps"], alone.json["world_size"]) == ("done", 30, devices)
    resumed = [event["step"] for event in read_events(run / "events.jsonl") if event["event"] == "resume"]
    assert resumed[-1] == int(rows[states.index("pruned")]["steps"]), "it goes on where it was stopped"


def ledger_if_any(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "trials.jsonl").read_text().splitlines() if (folder / "trials.jsonl").exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.cluster
def test_seeds_are_summarised_and_more_trials_go_on(ray_cluster: RayLab, seat: Seat) -> None:
    search = {"space": {"optimizer.lr": {"loguniform": [1e-2, 5e-2]}}, "seeds": 2, "trials": 1, "max_concurrent": 2}
    config = seat.write("seeds.yaml", search=search)
    folder = seat.folder / "seeds"
    done = seat.run("search", config, "--run", folder, **ray_cluster.environ)
    assert done.code == 0, done.err
    first = table(folder)
    assert [row["seed"] for row in first] == ["0", "1"]
    assert first[0][METRIC] != first[1][METRIC]
    done = seat.run("search", config, "search.trials=2", "--run", folder, **ray_cluster.environ)
    assert done.code == 0, done.err
    assert table(folder)[:2] == first
    assert happened(folder, "start") == dict.fromkeys(range(4), 1)
    rows = list(csv.DictReader((folder / "configurations.csv").open()))
    assert [row["runs"] for row in rows] == ["2", "2"]
    for number, row in enumerate(rows):
        values = [float(each[METRIC]) for each in table(folder) if each["configuration"] == str(number)]
        assert float(row["mean"]) == pytest.approx(mean(values))
        assert float(row["std"]) == pytest.approx(stdev(values))
    best = max(range(2), key=lambda number: float(rows[number]["mean"]))
    assert read_json(folder / "metrics.json")["best"]["trial"] == 2 * best
    fewer = seat.run("search", config, "--run", folder, **ray_cluster.environ)
    assert fewer.code == 2
    assert "search.trials is 2 there, 1 here" in fewer.err
    same = seat.run("search", folder / "search.yaml", "--run", folder, **ray_cluster.environ)
    assert same.code == 0, same.err


SPACE = {"optimizer.lr": {"grid": [1e-3]}}


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"space": {"optimiser.lr": {"grid": [1.0]}}}, ["search.space: optimiser", "unknown key", "optimizer"]),
        ({"space": {"optimizer.rl": {"grid": [1.0]}, "train.bach": {"grid": [2]}}}, ["optimizer.rl", "train.bach"]),
        ({"space": {}}, ["search.space", "found no field; expected at least one"]),
        ({"space": {"optimizer.lr": {"grid": [-1.0]}}}, ["search.space: optimizer.lr"]),
        (None, ["search: missing; expected what to search", "search.space='{optimizer.lr: "]),
    ],
)
def test_a_space_that_cannot_be_searched(
    cli_here: Cli,
    write_config: Callable[..., Path],
    tmp_path: Path,
    search: dict[str, Any] | None,
    words: list[str],
) -> None:
    fields = {} if search is None else {"search": search}
    done = cli_here("search", write_config(**fields), "--run", tmp_path / "run")
    assert done.code == 2, done.err
    assert not [word for word in words if word not in done.err], done.err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_else(
    reference: Reference, cli_here: Cli, seat: Seat, config: Path, tmp_path: Path
) -> None:
    other = seat.write("other.yaml", search={**GRID, "space": {"optimizer.lr": {"grid": [1e-3, 5.0]}}}, train__epochs=4)
    before = {path: path.read_bytes() for path in reference.folder.iterdir() if path.is_file()}
    done = cli_here("search", other, "--run", reference.folder)
    assert done.code == 2, done.err
    assert f"{reference.folder} holds another search" in done.err
    assert "train.epochs" in done.err
    assert "search.space" in done.err
    done = cli_here("search", config, "--run", trial(reference.folder, 0))
    assert done.code == 2, done.err
    assert f"--run {trial(reference.folder, 0)}: not a search, and not empty" in done.err
    assert {path: path.read_bytes() for path in reference.folder.iterdir() if path.is_file()} == before


def test_what_the_cluster_or_the_task_does_not_have(reference: Reference, ray_cluster: RayLab, seat: Seat) -> None:
    """Nothing is written, and no earlier search moved aside for it."""
    large = seat.write("large.yaml", search={"space": SPACE, "per_trial": {"devices": 64}})
    unknown = seat.write("unknown.yaml", search={"space": SPACE, "metric": "volume/ball"})
    contrary = seat.write("contrary.yaml", search={"space": SPACE, "mode": "min"})
    with (
        seat.started("search", large, "--run", "large", **ray_cluster.environ) as one,
        seat.started("search", unknown, "--fresh", "--run", reference.folder, **ray_cluster.environ) as other,
        seat.started("search", contrary, "--run", "contrary", **ray_cluster.environ) as third,
    ):
        refused, missing, worst = seat.end_of(one), seat.end_of(other), seat.end_of(third)
    assert refused.code == 4, refused.err
    assert "search.per_trial.devices 64: the largest node of the Ray cluster has 2 CPUs" in refused.err
    assert missing.code == 2, missing.err
    assert "search.metric: found 'volume/ball', expected one that trials are chosen by: " in missing.err
    assert missing.err.count("volume") == 1, "it is not among those that are named"
    assert "dice/ball" in missing.err
    assert METRIC in missing.err
    assert worst.code == 2, worst.err
    assert f"search.mode: found min, but more of {METRIC} is better" in worst.err
    assert not (seat.folder / "large").exists()
    assert not (seat.folder / "contrary").exists()
    assert reference.done.json["best"] == read_json(reference.folder / "metrics.json")["best"]
    assert not list(seat.folder.glob("reference.old*"))


def test_an_address_is_checked_before_anything_is_written(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(search={"space": SPACE})
    for address, code in (("auto", 2), ("127.0.0.1:1", 4)):
        done = cli_here("search", config, "--address", address, "--run", tmp_path / "run")
        assert done.code == code, done.err
        assert not (tmp_path / "run").exists()


@pytest.mark.cluster
def test_a_search_of_which_nothing_comes_has_failed(ray_cluster: RayLab, seat: Seat) -> None:
    config = seat.write("hopeless.yaml", search={"space": {"optimizer.lr": {"grid": [LRS[-1]]}}})
    done = seat.run("search", config, "--run", "hopeless", **ray_cluster.environ)
    assert done.code == 1, (done.code, done.err)
    assert "none of 1 trials came to a value of dice/mean" in done.err
    assert read_json(seat.folder / "hopeless" / "metrics.json")["state"] == "failed"
    assert [row["state"] for row in table(seat.folder / "hopeless")] == ["nan"]
    assert happened(seat.folder / "hopeless", "start") == {0: 1}, "what is not a number is not tried again"
    assert not (seat.folder / "hopeless" / "best.yaml").exists()


DYING = """
import os
import signal
from pathlib import Path

from tiny_networks import Paced


class Dying(Paced):
    def forward(self, image):
        if self.training and Path(__file__).with_name("deadly").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(image)


def build(in_channels, out_channels):
    return Dying(in_channels, out_channels, 3, padding=1)
"""


@pytest.mark.cluster
def test_a_trial_that_is_lost_too_often_fails_alone_and_may_be_tried_again(ray_cluster: RayLab, seat: Seat) -> None:
    (seat.folder / "dying_networks.py").write_text(DYING)
    (deadly := seat.folder / "deadly").touch()
    models = [{"name": "dying_networks:build"}, {"name": "tiny_networks:build"}]
    search = {"space": {"model": {"grid": models}}, "retries": 1, "max_concurrent": 2}
    config, folder = seat.write("dying.yaml", search=search), seat.folder / "dying"
    asked = ("search", config, "--run", folder)
    done = seat.run(*asked, **ray_cluster.environ)
    assert done.code == 0, done.err
    lost, fine = table(folder)
    assert (lost["state"], fine["state"]) == ("failed", "done")
    assert "killed by signal 9" in lost["why"]
    assert happened(folder, "start") == {0: 2, 1: 1}
    assert happened(folder, "lost") == {0: 1}
    assert next(row for row in ledger(folder) if row["event"] == "end" and row["trial"] == 0)["lost"] is True
    assert seat.run(*asked, **ray_cluster.environ).code == 0
    assert happened(folder, "start") == {0: 2, 1: 1}, "nothing is left to do"
    deadly.unlink()
    done = seat.run(*asked, "search.retries=2", **ray_cluster.environ)
    assert done.code == 0, done.err
    assert happened(folder, "again") == {0: 1}
    assert happened(folder, "end") == {0: 2, 1: 1}
    assert [row["state"] for row in table(folder)] == ["done", "done"]
    assert table(folder)[0]["why"] == ""
    assert table(folder)[1] == fine
