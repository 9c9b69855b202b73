"""Know before you submit: what is planned comes true, and what cannot work is refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from conftest import Cli
from voxscale.config.load import read_config
from voxscale.config.site import Site
from voxscale.launch.asking import plan_request
from voxscale.launch.partitions import Cluster, Node, Partition
from voxscale.launch.sbatch import Request
from voxscale.plan.costs import Costs
from voxscale.plan.links import Link, Links
from voxscale.plan.simulate import Work, simulate_step

Write = Callable[..., Path]
CLUSTER = Cluster(
    (
        Partition("main", nodes=(Node("a", cpus=8, memory_mb=64000),), is_default=True),
        Partition("short", nodes=(Node("b", cpus=8, memory_mb=500),), max_time_s=120),
    )
)


@pytest.fixture
def config(write_config: Write) -> Path:
    return write_config(train__epochs=4, train__threads="auto")


@pytest.mark.ranks
def test_a_plan_says_what_a_run_takes(cli_here: Cli, config: Path, tmp_path: Path) -> None:
    done = cli_here("plan", config, "--devices", 2, "--json")
    assert done.code == 0, done.err
    assert done.err.count("measuring steps") == 2
    found = done.json
    assert set(found["step_s"]) == {"data", "compute", "communication"}
    assert set(found["speedup"]) == {"1", "2"}
    assert found["speedup"]["1"] == 1.0
    assert (found["basis"], found["confidence"]) == ("probe", "high")
    assert found["total_s"] > found["steps"] * sum(found["step_s"].values())
    assert found["disk_bytes"]["store"] > 10_000
    assert found["memory"]["node_bytes"] >= 2 * found["memory"]["device_bytes"]
    assert found["request"]["nodes"] == 1
    assert re.fullmatch(r"\d\d:\d\d:00", found["request"]["time"])
    again = cli_here("plan", config, "--devices", 2, "--no-probe")
    assert again.code == 0, again.err
    assert "measuring" not in again.err
    for said in ("speed-up", "ask for", "rests on  steps measured on 2 ranks here", "confidence high"):
        assert said in again.out
    assert not list(tmp_path.glob("runs/*")), "a plan leaves nothing behind"
    assert found["rests_on"]["launcher_bytes"] > 50 << 20, "the process that starts the ranks was looked at"
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setattr("voxscale.launch.measuring.processor_name", lambda: "Another CPU")
        other = cli_here("plan", config, "--devices", 2, "--no-probe")
    assert other.code == 4, "what was measured on another kind of machine is not said of this one"

    settled = read_config(config)
    asked = partial(plan_request, settled, os.environ, request=Request(1, 2), cluster=CLUSTER)
    planned = asked(site=Site())
    assert planned is not None
    assert planned.memory_mb == 1024 * int(found["request"]["memory"].removesuffix("G"))
    assert planned.time == found["request"]["time"]
    assert planned.basis == "measured steps, confidence high"
    within = asked(site=Site(partition="short"))
    assert within is not None
    assert (within.memory_mb, within.time) == (500, "00:02:00"), "no more than the partition has"
    assert asked(site=Site(time="30", exclusive=True)) is None, "what is stated counts"
    no_requeue = asked(site=Site(requeue=False))
    assert no_requeue is not None
    assert no_requeue.time is None, "a job that is not queued again may take what it needs"
    unknown = settled.model_copy(update={"patches": settled.patches.model_copy(update={"per_case": 3})})
    assert plan_request(unknown, os.environ, Site(), Request(1, 2), CLUSTER) is None, "nothing is measured for it"


def test_gpus_that_are_not_here_are_looked_up_and_never_called_measured(cli_here: Cli, config: Path) -> None:
    words = ["plan", config, "--device", "a100", "--devices", 2, "--no-probe"]
    done = cli_here(*words, "--json")
    assert done.code == 0, done.err
    found = done.json
    assert (found["basis"], found["confidence"]) == ("table", "low")
    assert found["rests_on"]["device"] == "A100 SXM4 40 GB"
    assert any("of it reached" in assumed for assumed in found["assumptions"])
    assert found["links"]["within"]["basis"] == "table"
    text = cli_here(*words).out
    assert "published figures of the A100 SXM4 40 GB: nothing was measured on it; confidence low" in text
    large = cli_here(*words, "train.batch=800000", "train.micro_batch=400000")
    assert large.code == 2
    assert "expected at most the 37.3 GB that it has" in large.err
    assert "set train.micro_batch=" in large.err
    both = cli_here("plan", config, "--device", "a100", "--devices", 5, "--json")
    assert both.code == 2
    assert "does not divide over 5 ranks\nfound 3 validation cases for 5 devices" in both.json["error"]["message"]
    unknown = cli_here("plan", config, "site.gpus.ask=gres", "site.gpus.type=rtx6000")
    assert unknown.code == 2
    assert "found gpus.type rtx6000, expected a GPU of this machine or one of v100-16gb" in unknown.err


def test_without_a_measurement_nothing_is_made_up(cli_here: Cli, config: Path) -> None:
    done = cli_here("plan", config, "--devices", 1, "--no-probe", "optimizer.lr=0.00123")
    assert done.code == 4
    assert "nothing has been measured" in done.err


def test_what_cannot_work_is_refused(cli_here: Cli, config: Path) -> None:
    cut = cli_here("plan", config, "--devices", 3)
    assert cut.code == 2
    assert "train.batch 4 does not divide over 3 ranks" in cut.err
    assert "measuring" not in cut.err
    few = cli_here("plan", config, "--devices", 4, "--nodes", 1, "train.batch=8")
    assert few.code == 2
    assert "found 3 validation cases for 4 devices" in few.err
    assert "measuring" not in few.err
    wrong = cli_here("plan", config, "--simulate", "nodes=3")
    assert wrong.code == 2
    assert "expected devices=FIRST..LAST" in wrong.err


@pytest.mark.ranks
def test_worlds_are_measured_compared_and_drawn(cli_here: Cli, config: Path, tmp_path: Path) -> None:
    words = ["scale", config, "--worlds", "1x2,1x1", "--run", tmp_path / "scaling", "--seconds", "1"]
    done = cli_here(*words, "--json")
    assert done.code == 0, done.err
    rows = done.json["rows"]
    assert [(row["kind"], row["world"], row["global_batch"]) for row in rows] == [
        ("strong", "1x1", 4),
        ("strong", "1x2", 4),
        ("weak", "1x1", 4),
        ("weak", "1x2", 8),
    ]
    for row in rows:
        shares = row["data_share"] + row["compute_share"] + row["communication_share"]
        assert shares == pytest.approx(1.0)
        assert row["patches_per_s"] == pytest.approx(row["global_batch"] / row["step_s"])
    assert rows[0]["speedup"] == rows[2]["speedup"] == 1.0
    assert rows[1]["communication_share"] > 0 == rows[0]["communication_share"]
    assert done.json["bottleneck"] in ("none", "data", "communication", "compute")
    assert "</svg>" in (tmp_path / "scaling" / "speedup.svg").read_text()
    assert sorted(path.name for path in (tmp_path / "scaling").glob("run-*")) == []
    again = cli_here(*words)
    assert again.code == 0, again.err
    assert "measuring" not in again.err
    assert "what holds it back" in again.out
    assert json.loads((tmp_path / "scaling" / "scale.json").read_text())["rows"] == rows
    (weak,) = (tmp_path / "scaling").glob("measured-local-1x2-8-*.json")
    weak.write_text(weak.read_text()[:100])
    mended = cli_here(*words)
    assert mended.code == 0, mended.err
    assert re.findall("measuring .*", mended.err) == ["measuring 1x2, batch 8"], "what is damaged is measured anew"


def test_worlds_that_cannot_be_are_refused_and_other_folders_left_alone(
    cli_here: Cli, config: Path, tmp_path: Path
) -> None:
    nodes = cli_here("scale", config, "--worlds", "1x1,2x1")
    assert nodes.code == 2
    assert "--worlds 2x1: this machine is one node" in nodes.err
    wrong = cli_here("scale", config, "--worlds", "2")
    assert wrong.code == 2
    assert "expected NODESxDEVICES" in wrong.err
    cut = cli_here("scale", config, "--worlds", "1x1,1x3", "--run", tmp_path / "cut")
    assert cut.code == 2
    assert "does not divide over 3 ranks" in cut.err
    assert not (tmp_path / "cut").exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("mine")
    taken = cli_here("scale", config, "--run", precious, "--fresh")
    assert taken.code == 2
    assert "thesis.tex" in taken.err
    assert (precious / "thesis.tex").read_text() == "mine"


@pytest.mark.ranks
def test_a_script_of_ones_own_is_compared_by_its_wall_time(cli_here: Cli, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    came = "{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}"
    script.write_text(f'import os, pathlib, sys\npathlib.Path(sys.argv[1], f"{came}").touch()\n')
    done = cli_here("scale", "--script", script, tmp_path, "--worlds", "1x1,1x2", "--run", tmp_path / "times", "--json")
    assert done.code == 0, done.err
    assert "the script sets its own batch" in done.err
    first, second = done.json["rows"]
    assert (first["world"], first["speedup"]) == ("1x1", 1.0)
    assert sorted(path.name for path in tmp_path.glob("*-of-*")) == ["0-of-1", "0-of-2", "1-of-2"]
    assert second["speedup"] == pytest.approx(first["wall_s"] / second["wall_s"])


@pytest.mark.ranks
def test_the_simulation_agrees_with_measured_ranks(cli_here: Cli, config: Path, tmp_path: Path) -> None:
    """From one measured rank the step of two is simulated; it is near what two take."""
    plot = tmp_path / "curve.svg"
    space = "search={trials: 6, scheduler: asha, space: {optimizer.lr: {loguniform: [1e-4, 1e-2]}}}"
    done = cli_here("plan", config, space, "--devices", 2, "--simulate", "devices=8..64", "--plot", plot, "--json")
    assert done.code == 0, done.err
    assert [row["devices"] for row in done.json["rows"]] == [8, 16, 32, 64]
    efficiencies = [row["efficiency"] for row in done.json["rows"]]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert [row["trials"] for row in done.json["search"]] == [6, 6, 6, 6]
    assert done.json["assumptions"]
    assert any(point["devices"] == 32 for point in done.json["published"])
    assert "</svg>" in plot.read_text()
    # Whoever else uses the machine disturbs the measurement, never the other way round: one of three is enough.
    assert any(_off(cli_here, config, tmp_path / f"scaling-{turn}") < 0.35 for turn in range(3))


def _off(cli_here: Cli, config: Path, folder: Path) -> float:
    """How far two measured ranks are from what is simulated of one, relative to them."""
    words = ["scale", config, "--worlds", "1x1,1x2", "--run", folder, "--seconds", "2", "patches.size=[24,24,16]"]
    assert cli_here(*words).code == 0
    alone, two = (
        Costs.from_record(json.loads(next(folder.glob(f"measured-local-{name}-*.json")).read_text()))
        for name in ("1x1-4", "1x2-8")
    )
    link = Link(two.all_reduce_gb_s or 1.0, 10.0, "measured")
    work = Work(alone.compute_s, alone.data_s, alone.gradient_bytes, alone.spread)
    simulated = simulate_step(work, Links(link, link), nodes=1, devices=2).step_s
    return abs(simulated / two.step_s - 1)
