"""DistMIS's JSON configs carried over, by the command line as users run it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from conftest import RECIPES, Cli
from voxscale.config.distmis import FORMS, carry_over, read_given
from voxscale.config.load import make_config, plain, read_config
from voxscale.config.schema import Config, PerDevice
from voxscale.config.training import RatePerDevice
from voxscale.errors import ConfigError
from voxscale.launch.demo import read_recipe
from voxscale.search.space import check_space

REPLICAS = {"num_replicas": 4, "batch_size_per_replica": 2, "num_epochs": 20, "debug": False}
GRID = {key: value for key, value in REPLICAS.items() if key != "num_replicas"}
WORKERS = {
    **{"lr": 3e-4, "epochs": 10, "verbose": 2, "nodes": 2, "gpus": 4},
    **{"batch_size": 3, "num_workers": 8, "use_gpu": True},
}
SAMPLES = {
    **{"epochs": 10, "verbose": 2, "batch_size": 2},
    **{"num_samples": 24, "cpu_per_trial": 10, "gpu_per_trial": 1},
}
ALL_FORMS = (REPLICAS, GRID, WORKERS, SAMPLES, {**WORKERS, **SAMPLES})


class Init:
    """`voxscale init --from-distmis` of a config, and what it wrote."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli, self.folder = cli, folder

    def __call__(self, content: Any, *arguments: object) -> Any:
        given, out = self.folder / "config.json", self.folder / "c.yaml"
        given.write_text(content if isinstance(content, str) else json.dumps(content))
        out.unlink(missing_ok=True)
        return self.cli("init", "--from-distmis", given, "--out", out, *arguments)

    def read(self, content: Any, *arguments: object) -> tuple[Config, list[str], list[str]]:
        """The config read back, the words of the command that runs it, and what was left behind."""
        done = self(content, *arguments, "--json")
        assert done.code == 0, done.out
        verb, config, *place = shlex.split(done.json["command"])[1:]
        assert config == str(self.folder / "c.yaml")
        return read_config(Path(config)), [verb, *place], done.json["not_carried_over"]


@pytest.fixture
def init(cli_here: Cli, tmp_path: Path) -> Init:
    return Init(cli_here, tmp_path)


@pytest.mark.parametrize("content", ALL_FORMS, ids=["replicas", "grid", "workers", "samples", "samples-and-workers"])
def test_every_form_has_the_recipes_data_model_and_loss(init: Init, tmp_path: Path, content: dict[str, Any]) -> None:
    config, _, _ = init.read(content)
    recipe = plain(read_config(RECIPES / "distmis_unet.yaml"))
    carried = plain(config)
    assert config.data.source == str(tmp_path / "data" / "distmis")
    for fields in (recipe, carried):
        del fields["data"]["source"]
    for section in ("data", "patches", "augment", "model", "loss", "schedule", "validate"):
        assert carried[section] == recipe[section]


def test_replicas_become_data_parallelism(init: Init) -> None:
    config, command, left = init.read(REPLICAS)
    assert command == ["train", "--on", "ray", "--nodes", "1", "--devices", "4"]
    assert (config.train.epochs, config.train.batch, config.train.devices) == (20, PerDevice(per_device=2), 4)
    assert config.optimizer.rate == RatePerDevice(per_device=1e-3)
    assert config.search is None
    (line,) = left
    assert "32 settings" in line and "recipes/distmis_data_parallel.yaml" in line


@pytest.mark.parametrize(("replicas", "nodes", "devices"), [(1, 1, 1), (2, 1, 2), (16, 4, 4), (32, 8, 4), (6, 1, 6)])
def test_many_replicas_are_placed_as_on_its_cluster(init: Init, replicas: int, nodes: int, devices: int) -> None:
    config, command, left = init.read({**REPLICAS, "num_replicas": replicas})
    assert command == ["train", "--on", "ray", "--nodes", str(nodes), "--devices", str(devices)]
    assert config.train.devices == replicas
    assert any("4 on each node" in line for line in left) == (nodes > 1)


def test_without_replicas_the_grid_is_searched(init: Init) -> None:
    config, command, left = init.read(GRID)
    assert (command, left) == (["search"], [])
    assert config.search is not None
    assert config.search.num_points == 32
    assert (config.search.per_trial.devices, config.train.batch) == (1, PerDevice(per_device=2))
    check_space(config)


def test_workers_become_data_parallelism_with_the_rate_as_it_is(init: Init) -> None:
    config, command, left = init.read(WORKERS)
    assert command == ["train", "--on", "ray", "--nodes", "2", "--devices", "4"]
    assert (config.train.epochs, config.train.batch, config.train.devices) == (10, PerDevice(per_device=3), 8)
    assert config.optimizer.lr == 3e-4, "its scripts do not scale it"
    (line,) = left
    assert "Decathlon's files" in line


def test_samples_become_a_random_search(init: Init) -> None:
    config, command, _ = init.read(SAMPLES)
    assert command == ["search"]
    search = config.search
    assert search is not None
    assert (search.sampler, search.trials, search.per_trial.devices, search.per_trial.cpus) == ("random", 24, 1, 10)
    assert {path: plain(dimension) for path, dimension in search.space.items()} == {
        "optimizer.lr": {"loguniform": [1e-4, 1e-2]}
    }
    check_space(config)


def test_what_a_search_does_not_take_over_is_named(init: Init) -> None:
    _, command, left = init.read({**WORKERS, **SAMPLES, "use_gpu": False, "gpu_per_trial": 2, "multinode": True})
    assert command == ["search", "--on", "slurm", "--nodes", "2"]
    text = "\n".join(left)
    for name in ("use_gpu false", "lr 0.0003", "gpus 4", "gpu_per_trial 2", "Decathlon's files"):
        assert name in text
    assert len(left) == 5


@pytest.mark.parametrize(
    ("gpus", "devices", "said"), [(0.25, 0.25, False), (1.0, 1, False), (4, 4, True), (0, 1, True)]
)
def test_gpus_per_trial(init: Init, gpus: float, devices: float, said: bool) -> None:
    config, _, left = init.read({**SAMPLES, "gpu_per_trial": gpus})
    assert config.search is not None
    assert config.search.per_trial.devices == devices
    assert any(line.startswith("gpu_per_trial") for line in left) == said


def test_several_nodes_that_are_not_counted_are_asked_for(init: Init) -> None:
    _, command, left = init.read({**SAMPLES, "multinode": True})
    assert command == ["search"]
    assert any(line.startswith("multinode true") for line in left)


@pytest.mark.parametrize(("debug", "log", "track"), [(True, "step", "none"), (False, "epoch", "tensorboard")])
@pytest.mark.parametrize("content", [REPLICAS, GRID], ids=["replicas", "grid"])
def test_debug(init: Init, content: dict[str, Any], debug: bool, log: str, track: str) -> None:
    config, _, _ = init.read({**content, "debug": debug})
    assert (config.log, config.track) == (log, track)


@pytest.mark.parametrize(("verbose", "log"), [(0, "quiet"), (1, "step"), (2, "epoch")])
@pytest.mark.parametrize("content", [WORKERS, SAMPLES], ids=["workers", "samples"])
def test_verbose(init: Init, content: dict[str, Any], verbose: int, log: str) -> None:
    config, _, _ = init.read({**content, "verbose": verbose})
    assert config.log == log


def test_data_and_overrides(init: Init, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    config, _, _ = init.read(REPLICAS, tmp_path / "shards", "train.seed=3")
    assert (config.data.source, config.data.format, config.train.seed) == (str(tmp_path / "shards"), "tfrecord", 3)
    config, _, _ = init.read(REPLICAS, "train.seed=4", "train.epochs=2")
    assert (config.train.seed, config.train.epochs) == (4, 2)
    assert config.data.source == str(tmp_path / "data" / "distmis")
    config, _, _ = init.read(REPLICAS, f"data.source={tmp_path / 'shards'}")
    assert config.data.source == str(tmp_path / "shards")


def test_the_decathlons_files_are_cut_as_the_shards_were(init: Init, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{}")
    for data in (tmp_path, tmp_path / "Task01_BrainTumour.tar"):
        config, _, left = init.read(WORKERS, data)
        assert left == []
        assert (config.data.format, config.data.regions) == ("decathlon", {"tumour": (1, 2, 3)})
        assert config.data.slices is not None and config.data.slices.z == (2, -1)
        assert plain(config)["data"]["split"] | {"val": 0.15, "test": 0.15} == plain(config)["data"]["split"]


def test_what_is_left_behind_is_said_a_line_each(init: Init) -> None:
    done = init({**REPLICAS, "dataset": "brats", "notes\n": [1]})
    assert done.code == 0
    lines = done.err.splitlines()
    assert len(lines) == 3 and all(line.startswith("not carried over: ") for line in lines)
    assert "'dataset': no key" in lines[1] and r"'notes\n': no key" in lines[2]
    assert done.out.endswith("--on ray --nodes 1 --devices 4\n")


def test_a_file_that_is_there_is_not_overwritten(init: Init, cli_here: Cli, tmp_path: Path) -> None:
    assert init(REPLICAS).code == 0
    again = cli_here("init", "--from-distmis", tmp_path / "config.json", "--out", tmp_path / "c.yaml")
    assert again.code == 2 and "c.yaml: exists" in again.err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[1, 2]", ["found list, expected an object"]),
        ("4", ["found int, expected an object"]),
        ('{"num_epochs": 4', ["config.json:1:17: not valid JSON"]),
        ("lr: 1e-3", ["config.json:1:1: not valid JSON"]),
        ("", ["not valid JSON"]),
        ("[" * 100_000, ["not valid JSON"]),
        ('{"num_epochs": ' + "9" * 5000 + "}", ["not valid JSON"]),
        ('{"num_epochs": 1, "num_epochs": 2}', ["key 'num_epochs' stands twice"]),
        ({}, ["found no key of DistMIS's config", "num_replicas, batch_size_per_replica, num_epochs, debug"]),
        ({"dataset": 1}, ["found no key of DistMIS's config"]),
        ({**GRID, "num_replica": 4}, ["unknown key; did you mean 'num_replicas'?"]),
        ({"num_replicas": 2}, [f"{key}: missing" for key in GRID]),
        ({"lr": 1e-3}, [f"{key}: missing" for key in WORKERS if key != "lr"]),
        ({"num_samples": 24}, [f"{key}: missing" for key in SAMPLES if key != "num_samples"]),
        ({**WORKERS, "num_workers": 4}, ["num_workers: found 4, expected nodes × gpus, 2 × 4 = 8"]),
        (
            {"num_replicas": 0, "batch_size_per_replica": "2", "num_epochs": 2.5, "debug": 1},
            [
                "num_replicas: found 0, expected a whole number",
                "batch_size_per_replica: found '2', expected a whole number",
                "num_epochs: found 2.5, expected a whole number",
                "debug: found 1, expected true or false",
            ],
        ),
        (
            {**WORKERS, "lr": 0, "verbose": True, "gpus": None, "use_gpu": "no", "batch_size": []},
            [
                "lr: found 0, expected a number above 0",
                "verbose: found true, expected 0, 1 or 2",
                "gpus: found null, expected a whole number",
                "use_gpu: found 'no', expected true or false",
                "batch_size: found [], expected a whole number",
            ],
        ),
        (
            {**SAMPLES, "gpu_per_trial": 1.5, "cpu_per_trial": 0},
            ["gpu_per_trial: found 1.5, expected a whole number, or a share", "cpu_per_trial: found 0, expected"],
        ),
        ('{"batch_size_per_replica": NaN, "num_epochs": 1e999, "debug": true}', ["found NaN", "found Infinity"]),
    ],
)
def test_bad_configs_are_refused_with_all_findings(
    init: Init, tmp_path: Path, content: Any, expected: list[str]
) -> None:
    done = init(content)
    assert done.code == 2
    assert done.err.startswith(f"error: {tmp_path / 'config.json'}")
    assert "\n  fix: " in done.err
    for part in expected:
        assert part in done.err
    assert not (tmp_path / "c.yaml").exists()


def test_files_that_cannot_be_read(init: Init, cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name, why in (("absent.json", "No such file"), ("binary.json", "not text"), ("", "Is a directory")):
        done = cli_here("init", "--from-distmis", tmp_path / name, "--out", tmp_path / "c.yaml")
        assert done.code == 2 and why in done.err


def test_only_plain_files_of_a_sensible_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * (2**20 + 1))
    for path, why in ((tmp_path / "pipe", "not a regular file"), (Path("/dev/zero"), "not a regular file"),
                      (tmp_path / "large", "larger than 1 MiB")):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            read_given(path)
    (tmp_path / "marked").write_text(json.dumps(GRID), encoding="utf-8-sig")
    assert json.loads(read_given(tmp_path / "marked")) == GRID


def test_a_byte_order_mark_is_no_fault() -> None:
    assert carry_over("\ufeff" + json.dumps(GRID), "j", read_recipe).verb == "search"


def test_workers_that_a_search_does_not_use_need_not_fit() -> None:
    content = {**SAMPLES, "nodes": 2, "gpus": 4, "num_workers": 3}
    assert carry_over(json.dumps(content), "j", read_recipe).verb == "search"


def test_init_needs_data_or_a_config(cli_here: Cli) -> None:
    done = cli_here("init")
    assert done.code == 2 and "init: found no DATA" in done.err


_KEYS = sorted({key for form in FORMS for key in form.keys})
_ANYTHING = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=5),
    lambda inner: some.lists(inner, max_size=2) | some.dictionaries(some.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_SENSIBLE = some.sampled_from([True, False, 0, 1, 2, 4, 8, 0.5, 1e-3, 24])


@given(
    some.sampled_from(({}, *ALL_FORMS)),
    some.dictionaries(some.sampled_from(_KEYS) | some.text(max_size=8), _SENSIBLE | _ANYTHING, max_size=3),
    some.sets(some.sampled_from(_KEYS), max_size=1),
)
@example({}, {"num_samples": 2, "epochs": 1, "batch_size": 1, "cpu_per_trial": 1, "gpu_per_trial": 0.001}, set())
@example({}, {"num_samples": 2, "epochs": 1, "batch_size": 1, "cpu_per_trial": 0.001, "gpu_per_trial": 1}, set())
def test_any_object_becomes_a_valid_config_or_is_refused(
    form: dict[str, Any], changes: dict[str, Any], without: set[str]
) -> None:
    content = {key: value for key, value in {**form, **changes}.items() if key not in without}
    try:
        carried = carry_over(json.dumps(content), "j", read_recipe)
    except ConfigError as error:
        assert error.message.startswith("j") and error.fix
        return
    config = make_config(carried.fields, name="j", base=Path("/base"))
    assert (config.search is not None) == (carried.verb == "search")


@given(
    *(some.integers(1, 300) for _ in range(3)),
    some.integers(1, 50),
    some.floats(1e-6, 10),
    some.sampled_from([0, 1, 2]),
)
def test_any_sensible_workers_keep_their_world(
    nodes: int, gpus: int, batch: int, epochs: int, lr: float, verbose: int
) -> None:
    content = {
        **{"lr": lr, "epochs": epochs, "verbose": verbose, "nodes": nodes, "gpus": gpus},
        **{"batch_size": batch, "num_workers": nodes * gpus, "use_gpu": True},
    }
    carried = carry_over(json.dumps(content), "j", read_recipe)
    config = make_config(carried.fields, name="j", base=Path("/base"))
    assert carried.place == ("--on", "ray", "--nodes", str(nodes), "--devices", str(gpus))
    assert (config.train.devices, config.train.batch) == (nodes * gpus, PerDevice(per_device=batch))
    assert (config.optimizer.lr, config.train.epochs) == (lr, epochs)
