"""Know before you submit: what is planned comes true, and what cannot work is refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY, Cli
from measured import COSTS
from report.looking import content_of, headings_of
from voxscale.config.load import read_config
from voxscale.config.schema import Config
from voxscale.config.site import Site
from voxscale.files import write_json
from voxscale.launch.asking import plan_request
from voxscale.launch.machine import look_at_machine
from voxscale.launch.measuring import kept_costs, measure_local, opened_aside
from voxscale.launch.partitions import Cluster, Node, Partition
from voxscale.launch.placing import with_scratch
from voxscale.launch.sbatch import Placement, Planned, Request, memory_of
from voxscale.launch.scaling import scale_config
from voxscale.plan.costs import Costs
from voxscale.plan.links import Link, Links
from voxscale.plan.predict import Layout
from voxscale.plan.resources import Machine
from voxscale.plan.simulate import Work, simulate_step
from voxscale.report.forecast import duration, size

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


def names_in(content: Any) -> set[str]:
    """Of all fields of what a verb prints; of devices, and of what a plan rests on, no more than that."""
    if isinstance(content, list):
        return set().union(*map(names_in, content))
    if not isinstance(content, dict):
        return set()
    inner = (value for name, value in content.items() if name not in ("rests_on", "links"))
    return {name for name in content if not name.isdigit()}.union(*map(names_in, inner))


def documented(of: str) -> set[str]:
    (row,) = re.findall(rf"^\| {of} \| (.*) \|$", (REPOSITORY / "docs" / "plan.md").read_text(), re.M)
    return set(re.findall(r"`(\w+)`", row))


@pytest.mark.ranks
def test_a_plan_says_what_a_run_takes(cli_here: Cli, config: Path, tmp_path: Path) -> None:
    done = cli_here("plan", config, "--devices", 2, "--json")
    assert done.code == 0, done.err
    assert done.err.count("measuring steps") == 2
    found = done.json
    assert names_in(found) == documented("plan")
    assert set(found["step_s"]) == {"data", "compute", "communication"}
    assert [row["world"] for row in found["curve"]] == ["1x1", "1x2"]
    assert [found["curve"][-1][name] for name in ("step_s", "total_s")] == [found["step_s"], found["total_s"]]
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

    def asked(config: Config = settled, **site: Any) -> Planned | None:
        place = Placement(Site(**site), devices="2")
        return plan_request(config, tmp_path / "run", os.environ, place, Request(1, 2), CLUSTER).planned

    planned = asked()
    assert planned is not None
    assert planned.memory_mb == round(memory_of(found["as_asked"]["memory"]))
    assert planned.time == found["as_asked"]["time"]
    assert planned.basis == "measured steps, confidence high"
    within = asked(partition="short")
    assert within is not None
    assert (within.memory_mb, within.time) == (500, "00:02:00"), "no more than the partition has"
    assert asked(time="30", exclusive=True) is None, "what is stated counts"
    no_requeue = asked(requeue=False)
    assert no_requeue is not None
    assert no_requeue.time is None, "a job that is not queued again may take what it needs"
    unknown = settled.model_copy(update={"patches": settled.patches.model_copy(update={"per_case": 3})})
    assert asked(unknown) is None, "nothing is measured for it"

    run = tmp_path / "planned"
    assert cli_here("train", config, "--devices", 2, "--run", run).code == 0
    (table,) = [
        block
        for section in content_of(run / "report.html")["sections"]
        for block in section["blocks"]
        if block.get("title") == "Plan against measured"
    ]
    rows = {name: (said, came) for name, said, came in table["rows"]}
    step_s = found["step_s"]
    assert rows["a step, computing"][0] == duration(step_s["compute"])
    assert rows["a step, communication"][0] == duration(step_s["communication"])
    assert rows["a step"][0] == duration(sum(step_s.values()))
    assert rows["memory of the node"][0] == size(found["memory"]["node_bytes"])
    assert "–" not in rows["training and validating"]
    assert "–" not in {came for name, (_, came) in rows.items() if name != "a step, communication"}
    assert table["note"] == ""


def test_a_job_looks_where_the_plan_of_its_site_was_kept_and_asks_for_what_it_recommends(
    cli_here: Cli, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the site's scratch. The network is so small that a second device would be used by half."""
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    site = Site.model_validate({"gpus": {"ask": "gres", "type": "a100"}, "scratch": "$SCRATCH"})
    done = cli_here(
        "plan", config, "--devices", 2, "site.gpus={ask: gres, type: a100}", "site.scratch=$SCRATCH", "--json"
    )
    assert done.code == 0, done.err
    assert done.json["recommended"] == "1x1"
    assert not (tmp_path / "cache" / "voxscale").exists(), "no second store"
    settled = with_scratch(read_config(config), site, os.environ)

    def asked(settled: Config = settled, devices: str = "auto", of_node: int = 2) -> Request:
        place = Placement(site, devices=devices)
        return plan_request(settled, tmp_path / "run", os.environ, place, Request(1, of_node, gpus=True), CLUSTER)

    chosen = asked()
    assert (chosen.nodes, chosen.devices, chosen.gpus) == (1, 1, True)
    assert chosen.planned is not None
    assert chosen.planned.time == done.json["request"]["time"]
    assert chosen.planned.as_text(1).startswith("--devices 1 of 2, as the plan recommends no more (published")
    assert asked(of_node=4).devices == 1, "four would be more than there are validation cases"
    assert asked(devices="4", of_node=4) == Request(1, 4, gpus=True), "that is warned of, where it is stated"
    stated = asked(devices="2")
    assert stated.devices == 2, "what is stated counts"
    assert stated.planned is not None
    assert stated.planned.time == done.json["as_asked"]["time"]
    of_ranks = settled.data.cache.model_copy(update={"share": "rank"})
    data = settled.data.model_copy(update={"cache": of_ranks})
    assert asked(settled.model_copy(update={"data": data})).devices == 2, "where the result depends on it"


def test_gpus_that_are_here_and_were_not_measured_are_looked_up(
    cli_here: Cli, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("voxscale.launch.planning.look_at_machine", lambda _: Machine(gpus=2, cpus=8))
    for module in ("target", "measuring"):
        monkeypatch.setattr(f"voxscale.launch.{module}.gpu_name", lambda: "NVIDIA A100-SXM4-40GB")
    for words in ([], ["--device", "a100"]):
        done = cli_here("plan", config, "--devices", 2, "--no-probe", "--json", *words)
        assert done.code == 0, done.err
        assert (done.json["basis"], done.json["confidence"]) == ("table", "low")
        assert done.json["rests_on"]["device"] == "A100 SXM4 40 GB"


def test_what_was_measured_otherwise_is_not_passed_off_as_current(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def build(a, b): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    machine, folder = Machine(gpus=0, cpus=2), tmp_path / "scaling"
    taken: list[str] = []
    said: list[str] = []

    def measure(config: Config, root: Path, layout: Layout) -> Callable[[Sequence[str]], None]:
        def run(words: Sequence[str]) -> None:
            taken.append(str(layout))
            write_json(Path(words[words.index("--out") + 1]), COSTS.as_json())

        return run

    def costs_of(*where: str, data: str = "1", **fields: Any) -> tuple[Path, int]:
        """Where costs are looked for, and how many worlds are measured for a table of scaling."""
        config = read_config(write_config(model={"name": "mine:build"}, **fields))
        before = len(taken)
        scale_config(
            config, [Layout(1, 1)], folder, measure,
            on="local", where=where, environ=os.environ, cpus=2, seconds=1, say=said.append,
        )  # fmt: skip
        return kept_costs(config, machine, os.environ, data=data, world_size=1), len(taken) - before

    first, measured = costs_of("site A")
    assert measured == 1, "strong and weak scaling of one device are one"
    assert said == ["measuring 1x1, batch 4"], "nothing is kept that was never measured"
    assert costs_of("site A", log="quiet") == (first, 0)
    assert said[-1].startswith("1 of 1 measurements: kept from earlier")
    changes: list[dict[str, Any]] = [{"loader": {"workers": 2}}, {"data__stage": "$TMPDIR"}, {"train__backend": "gloo"}]
    for change in changes:
        path, measured = costs_of("site A", **change)
        assert (path != first, measured) == (True, 1), change
    assert costs_of("site A", data="2")[0] != first
    assert costs_of("site B")[1] == 1
    (tmp_path / "mine.py").write_text("def build(a, b): return None\n")
    path, measured = costs_of("site A")
    assert (path != first, measured) == (True, 1), "a network that was edited is another one"


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
    for words, said in (
        (("--simulate", "nodes=3"), "expected devices=FIRST..LAST"),
        (("--plot", "curve.svg"), "there is nothing to draw without --simulate"),
        (("--simulate", "devices=8", "--plot", "curve.png"), "found 'curve.png', expected a name that ends in .svg"),
    ):
        wrong = cli_here("plan", config, *words)
        assert wrong.code == 2
        assert said in wrong.err


@pytest.mark.ranks
def test_what_no_memory_would_hold_is_refused_before_it_is_computed(cli_here: Cli, config: Path) -> None:
    large = cli_here("plan", config, "--devices", 1, "patches.size=[128,128,128]", "train.batch=65536")
    assert large.code == 2, large.err
    assert re.search(r"needs [\d.]+ GB for 65536 patches of 128 × 128 × 128 at once and more", large.err)
    assert re.search(r"set train.micro_batch=\d+ or less", large.err)


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
    assert names_in(done.json) == documented("scale")
    assert done.json["bottleneck"] in ("none", "data", "communication", "compute")
    assert "</svg>" in (tmp_path / "scaling" / "speedup.svg").read_text()
    page = headings_of(tmp_path / "scaling" / "report.html")
    assert page >= {"Speed-up over devices", "What a step is spent on", "All figures"}
    assert sorted(path.name for path in (tmp_path / "scaling").glob("run-*")) == []
    (tmp_path / "scaling" / ".scale.json.0123abcd.tmp").touch()  # killed while it was written
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
    for name in ("run-1", "script-new", "measured-by-hand"):
        own = tmp_path / f"of-{name}" / name / "metrics.json"
        own.parent.mkdir(parents=True)
        own.write_text("mine")
        runs = cli_here("scale", config, "--run", own.parent.parent, "--fresh")
        assert (runs.code, own.read_text()) == (2, "mine")
        assert f"found {name}, expected a folder for what is measured alone" in runs.err
    for path, kind in (("nosuch.py", "no such file"), (precious, "a folder")):
        no_script = cli_here("scale", "--script", path, "--run", tmp_path / "none")
        assert no_script.code == 2
        assert f"SCRIPT {path}: {kind}, expected a Python file" in no_script.err


@pytest.mark.ranks
def test_a_script_of_ones_own_is_compared_by_its_wall_time(cli_here: Cli, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    came = "{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}"
    script.write_text(f'import os, pathlib, sys\npathlib.Path(sys.argv[1], f"{came}").touch()\n')
    done = cli_here("scale", "--script", script, tmp_path, "--worlds", "1x1,1x2", "--run", tmp_path / "times", "--json")
    assert done.code == 0, done.err
    assert "the script sets its own batch" in done.err
    assert names_in(done.json) == documented("scale, a script")
    first, second = done.json["rows"]
    assert (first["world"], first["speedup"]) == ("1x1", 1.0)
    assert sorted(path.name for path in tmp_path.glob("*-of-*")) == ["0-of-1", "0-of-2", "1-of-2"]
    assert second["speedup"] == pytest.approx(first["wall_s"] / second["wall_s"])
    script.write_text(script.read_text() + "# changed\n")
    changed = cli_here("scale", "--script", script, tmp_path, "--worlds", "1x1", "--run", tmp_path / "times")
    assert "running on 1x1" in changed.err, "times of what it was before are not those of what it is now"
    script.write_text("import pathlib, sys\npathlib.Path(sys.argv[1], 'told').write_text(' '.join(sys.argv[2:]))\n")
    words = ["--worlds", "1x1", "--run", tmp_path / "times", "--", script, tmp_path, "--run", "own", "--seconds", "x"]
    apart = cli_here("scale", "--script", *words)
    assert apart.code == 0, apart.err
    assert (tmp_path / "told").read_text() == "--run own --seconds x", "what follows -- is the script's alone"


@pytest.mark.ranks
def test_worlds_and_searches_are_simulated_beside_what_others_published(
    cli_here: Cli, config: Path, tmp_path: Path
) -> None:
    plot = tmp_path / "curve.svg"
    space = "search={trials: 6, scheduler: none, space: {optimizer.lr: {loguniform: [1e-4, 1e-2]}}}"
    words = ["plan", config, space, "train.threads=1", "--json"]
    done = cli_here(*words, "--devices", 2, "--simulate", "devices=1..64", "--plot", plot)
    assert done.code == 0, done.err
    assert names_in(done.json) == documented("plan, simulated")
    assert [row["devices"] for row in done.json["rows"]] == [1, 2, 4, 8, 16, 32, 64]
    efficiencies = [row["efficiency"] for row in done.json["rows"]]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert any("trial" in assumed for assumed in done.json["assumptions"])
    assert any(point["devices"] == 32 for point in done.json["published"])
    assert "</svg>" in plot.read_text()
    alone = cli_here(*words, "--devices", 1, "--no-probe").json
    one, *_, many = done.json["search"]
    assert one["seconds"] == pytest.approx(6 * alone["total_s"]), "a trial is a run on its one device"
    assert (one["trials"], many["speedup"]) == (6, pytest.approx(6.0))
    words.append("search.per_trial.devices=2")
    pairs = cli_here(*words, "--devices", 1, "--simulate", "devices=2..4")
    both = cli_here(*words, "--devices", 2, "--no-probe").json
    assert pairs.json["search"][0]["seconds"] == pytest.approx(6 * both["total_s"]), "or on its two"


STEADY = """
import os, random, time
import torch

class Steady(torch.nn.Conv3d):
    # Takes its time without a processor, so that it takes it on a busy machine too: now more, now less.
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.heavy = torch.nn.Parameter(torch.zeros(1 << 20))
        self.random = random.Random(os.environ.get("RANK"))

    def forward(self, image):
        if self.training:
            time.sleep(max(0.005, self.random.gauss(0.04, 0.014)))
        return super().forward(image) + self.heavy.sum()

def build(in_channels, out_channels):
    return Steady(in_channels, out_channels, 1)
"""


@pytest.mark.alone
@pytest.mark.ranks
def test_the_simulation_agrees_with_measured_ranks(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one measured rank the step of two is simulated, who wait for each other; it is what two take."""
    (tmp_path / "steady.py").write_text(STEADY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def measured(ranks: int) -> Costs:
        config = read_config(write_config(model={"name": "steady:build"}, train__batch=2 * ranks))
        with opened_aside(config, look_at_machine(), os.environ, devices=ranks) as opened:
            return Costs.from_record(measure_local(opened, os.environ, seconds=5))

    alone, two = measured(1), measured(2)
    assert (alone.patches, two.patches) == (2, 2)
    link = Link(two.all_reduce_gb_s or 1.0, 10.0, "measured")
    work = Work(alone.compute_s, alone.data_s, alone.gradient_bytes, alone.spread)
    simulated = simulate_step(work, Links(link, link), nodes=1, devices=2)
    assert simulated.step_s == pytest.approx(two.step_s, rel=0.15)
    assert simulated.communication_s > 0.1 * alone.compute_s, "mostly waiting for the slower of both"
