"""The command line as people meet it: help, errors, listings."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
import yaml

from conftest import Cli, Finished
from golden import assert_golden
from voxscale import cli
from voxscale.errors import ConfigError
from voxscale.launch.sbatch import DEBUG_COMMUNICATION

VERBS = (
    *("demo", "init", "doctor", "show", "prepare", "plan", "train", "search", "evaluate", "predict"),
    *("scale", "launch", "runs", "watch", "report", "cancel", "export", "site", "image"),
)


@pytest.mark.parametrize("verb", ["", *VERBS, "site detect", "site check", "image build"])
def test_help(cli_here: Cli, verb: str) -> None:
    done = cli_here(*verb.split(), "--help")
    assert done.code == 0
    assert_golden(f"help-{verb.replace(' ', '-') or 'voxscale'}.txt", done.out)


def test_every_verb_is_in_the_help(cli_here: Cli) -> None:
    commands = cli_here("--help").out.partition("Commands:\n")[2]
    assert tuple(re.findall(r"^  (\w+)", commands, flags=re.MULTILINE)) == VERBS
    for words in ((), ("site",), ("image",)):
        assert "..." not in cli_here(*words, "--help").out.partition("Commands:\n")[2], "each in a whole sentence"


def test_the_list_of_verbs_says_what_each_says_of_itself(run_python: Callable[..., Finished]) -> None:
    """They are listed without being loaded."""
    lazily = "import sys, voxscale.cli as cli; cli.make_app('train'); assert 'voxscale.cli.planning' not in sys.modules"
    assert run_python("-c", lazily).code == 0
    listed = {name: about for name, (_, about) in cli.VERBS.items()}
    commands = typer.main.get_command(cli.make_app()).commands  # type: ignore[attr-defined]
    assert listed == {name: re.split(r"(?<=[.])\s", each.help)[0].replace("\n", " ") for name, each in commands.items()}


def test_help_comes_without_torch(run_python: Callable[..., Finished]) -> None:
    """A login node answers at once: only typer and what it needs is loaded for help."""
    code = (
        "import sys\nfrom voxscale.cli import app\n"
        "for words in [['--help'], *([verb, '--help'] for verb in sys.argv[1:])]:\n"
        "    app(words, standalone_mode=False)\n"
        "heavy = {'torch', 'monai', 'numpy', 'scipy', 'yaml', 'nibabel', 'blosc2', 'ray'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = run_python("-c", code, *VERBS)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    "module",
    [
        *("config.load", "config.site", "plan.plan", "plan.resources", "launch.local", "launch.folder"),
        *("launch.machine", "launch.cluster_run", "launch.script_job", "launch.detect", "launch.check"),
        *("launch.definition", "launch.cancel", "report.listing", "report.watching", "report.watched", "report.write"),
    ],
)
def test_rooms_for_the_login_node_load_no_torch(run_python: Callable[..., Finished], module: str) -> None:
    done = run_python("-c", f"import sys, voxscale.{module}; assert 'torch' not in sys.modules")
    assert done.code == 0, done.err


def test_version(cli_here: Cli) -> None:
    assert re.fullmatch(r"voxscale \d+\.\d+\.\d+\n", cli_here("--version").out)


@pytest.fixture
def bad_inputs(
    tmp_path: Path, dataset: Path, write_config: Callable[..., Path], cli_here: Cli
) -> dict[str, list[object]]:
    """One command for each way in which users go wrong."""
    good, run = write_config(), tmp_path / "run"
    (tmp_path / "empty").mkdir()
    (tmp_path / "corrupt.yaml").write_text("data: {source: x\ntrain: ]\n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("not a run")
    (tmp_path / "file").write_text("")
    other, damaged, each = tmp_path / "other", tmp_path / "damaged", tmp_path / "each"
    per_device = write_config("each.yaml", train__batch={"per_device": 2})
    for config, folder in ((good, other), (good, damaged), (per_device, each)):
        assert cli_here("train", config, "--run", folder, "--no-start").code == 0
    (damaged / "plan.json").write_text("{")
    return {
        "no such config": ["train", tmp_path / "absent.yaml"],
        "corrupt YAML": ["train", tmp_path / "corrupt.yaml"],
        "unknown key": ["train", good, "optimizer.lrr=1", "trian.epochs=2"],
        "unknown model": ["train", good, "model={name: unett}"],
        "patch does not fit the strides": ["train", good, "patches.size=[17, 16, 16]"],
        "override without =": ["train", good, "train.epochs"],
        "missing data": ["train", write_config("missing.yaml", data__source=str(tmp_path / "absent")), "--run", run],
        "empty data folder": ["train", tmp_path / "empty", "--run", run],
        "folder without images": ["train", tmp_path / "notes", "--run", run],
        "too few cases": ["train", good, "data.split={val: 0.5, test: 0.49}", "--run", run],
        "batch does not divide": ["train", good, "train.batch=5", "--devices", "2", "--run", run],
        "devices not a number": ["train", good, "--devices", "many", "--run", run],
        "run folder holds another config": ["train", good, "optimizer.lr=1e-3", "train.seed=4", "--run", other],
        "run folder is something else": ["train", good, "--run", tmp_path / "notes"],
        "no write permission": ["train", good, "--run", "/sys/voxscale"],
        "run folder below a file": ["train", good, "--run", tmp_path / "file" / "run"],
        "store cannot be written": ["train", good, "data.store=/sys/voxscale", "--run", run],
        "unknown metric": ["train", good, "validate.metric=dice/wt", "--run", run],
        "nccl without GPUs": ["train", good, "train.backend=nccl", "--run", run],
        "fresh on what is no run": ["train", good, "--run", tmp_path / "notes", "--fresh"],
        "dry run without data": ["train", tmp_path / "missing.yaml", "--run", run, "--dry-run"],
        "dry run on another config": ["train", good, "train.seed=5", "--run", other, "--dry-run"],
        "another batch per device": ["train", per_device, "train.batch={per_device: 4}", "--run", each],
        "plan.json damaged": ["train", good, "--run", damaged],
        "init of what is not there": ["init", tmp_path / "absent"],
        "init where nothing can be written": ["init", dataset, "--out", tmp_path / "file" / "c.yaml"],
        "evaluate what is no run": ["evaluate", tmp_path / "empty"],
        "evaluate without checkpoint": ["evaluate", other],
        "evaluate with a path as name": ["evaluate", other, "--name", "../x"],
        "config exists": ["init", dataset, "--out", good],
        "unknown flag": ["train", good, "--gpus", "2"],
        "unknown verb": ["trian", good],
        "unknown launcher": ["train", good, "--on", "moon"],
    }


EXIT_CODES = {
    "missing data": 3,
    "empty data folder": 3,
    "folder without images": 3,
    "too few cases": 3,
    "no write permission": 4,
    "nccl without GPUs": 4,
    "dry run without data": 3,
    "init where nothing can be written": 4,
    "run folder below a file": 4,
    "store cannot be written": 4,
}


def test_bad_input_gets_a_message_with_the_fix(
    cli_here: Cli, bad_inputs: dict[str, list[object]], tmp_path: Path, dataset: Path
) -> None:
    def files() -> set[Path]:
        return set(tmp_path.rglob("*"))

    before, blocks = files(), []
    for what, arguments in bad_inputs.items():
        done = cli_here(*arguments)
        assert done.code == EXIT_CODES.get(what, 2), (what, done)
        assert done.out == ""
        assert "Traceback" not in done.err
        text = f"## {what} (exit {done.code})\n{done.err}"
        blocks.append(text.replace(str(tmp_path), "TMP").replace(str(dataset.parent), "DATA"))
    assert files() == before, "something was half-written"
    assert_golden("errors.txt", "\n".join(blocks))


def test_errors_as_json(cli_here: Cli, write_config: Callable[..., Path]) -> None:
    done = cli_here("train", write_config(), "train.batch=5", "--devices", "2", "--json")
    assert done.code == 2
    assert done.err == ""
    assert done.json == {
        "error": {
            "code": "config",
            "message": "train.batch 5 does not divide over 2 ranks",
            "fix": "use 1 or 5 devices, or train.batch=6",
        }
    }
    assert cli_here("train", "--json", "--gpus").json["error"]["code"] == "config"


def test_debug_shows_the_traceback(cli_here: Cli) -> None:
    assert "Traceback" in cli_here("train", "absent.yaml", "--debug").err


def test_init_writes_a_config_that_trains_as_it_is(cli_here: Cli, dataset: Path, tmp_path: Path) -> None:
    made = cli_here("init", dataset, "--out", tmp_path / "c.yaml")
    assert made.code == 0
    content = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert content["patches"]["size"] == [32, 16, 16]
    small = ["model={channels: [4, 8]}", "train.epochs=1", "track=none", "--devices", "1"]
    done = cli_here("train", tmp_path / "c.yaml", *small, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "done"


def test_a_data_folder_trains_without_a_config(cli_here: Cli, dataset: Path, tmp_path: Path) -> None:
    small = ["model={channels: [4, 8]}", "train.epochs=1", "track=none", "--devices", "1"]
    done = cli_here("train", dataset, *small, "--run", tmp_path / "run")
    assert done.code == 0, done.err
    assert "done: best dice/mean" in done.out


def test_dry_run_prints_and_writes_nothing(cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path) -> None:
    done = cli_here("train", write_config(), "--run", tmp_path / "run", "--devices", "2", "--dry-run")
    assert done.code == 0
    assert "torchrun --standalone --nproc-per-node 2" in done.out
    assert not (tmp_path / "run").exists()


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(
    session_environ: dict[str, str], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    main, side = pty.openpty()
    command = [sys.executable, "-m", "voxscale", "train", str(write_config(train__epochs=2)), "--devices", "1"]
    environ = {**session_environ, "TERM": "xterm"}
    with subprocess.Popen([*command, "--run", str(tmp_path / "run")], stderr=side, stdout=side, env=environ) as job:
        os.close(side)
        shown = b""
        while True:
            try:
                block = os.read(main, 4096)
            except OSError:  # the other side is closed
                break
            if not block:
                break
            shown += block
    os.close(main)
    assert job.returncode == 0
    text = shown.decode()
    assert re.search(r"training  loss \d\.\d{4} .*10/10", text)
    assert "epoch 2/2" in text


@pytest.mark.parametrize(("log", "lines"), [("quiet", 0), ("epoch", 5), ("step", 15)])
def test_log_says_as_much_as_asked(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path, log: str, lines: int
) -> None:
    done = cli_here("train", write_config(log=log), "--devices", "1", "--run", tmp_path / "run")
    assert done.code == 0
    assert len(done.err.splitlines()) == lines
    assert len((tmp_path / "run" / "events.jsonl").read_text().splitlines()) > 10, "events are always written"


def test_one_damaged_run_does_not_hide_the_others(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("good", "bad"):
        assert cli_here("train", write_config(), "--run", tmp_path / "runs" / name, "--no-start").code == 0
    (tmp_path / "runs" / "bad" / "metrics.json").write_text('{"state": "done", "best": "x"}')
    rows = {Path(row["run"]).name: row["state"] for row in cli_here("runs", tmp_path / "runs", "--json").json["runs"]}
    assert rows == {"good": "new", "bad": "damaged"}
    assert "damaged" in cli_here("runs", tmp_path / "runs").out


@pytest.mark.parametrize("content", ["garbage", "", "[]", '{"state": "stopped"}', '{"best": 3}'])
def test_a_damaged_metrics_file_does_not_stop_training(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path, content: str
) -> None:
    config, alone = write_config(train__epochs=1), ["--run", tmp_path / "run", "--devices", "1"]
    assert cli_here("train", config, *alone, "--no-start").code == 0
    (tmp_path / "run" / "metrics.json").write_text(content)
    done = cli_here("train", config, *alone, "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "done"


def test_runs_lists_state_progress_metric_and_age(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, runs = write_config(), tmp_path / "runs"
    alone = ["--devices", "1"]
    assert cli_here("train", config, *alone, "--run", runs / "a").code == 0
    assert cli_here("train", config, "train.stop_after={steps: 3}", *alone, "--run", runs / "b").code == 75
    assert cli_here("train", config, "--run", runs / "c", "--no-start").code == 0
    rows = {Path(row["run"]).name: row for row in cli_here("runs", runs, "--json").json["runs"]}
    assert {name: (row["state"], row["step"], row["steps"]) for name, row in rows.items()} == {
        "a": ("done", 10, 10),
        "b": ("stopped", 3, 10),
        "c": ("new", 0, 10),
    }
    metrics = json.loads((runs / "a" / "metrics.json").read_text())
    assert rows["a"]["best"] == metrics["best"]["value"]
    table = cli_here("runs", runs).out
    assert re.search(r"/a +done +10/10 \(100 %\) +dice/mean 0\.\d{4} +\d+ s\n", table)
    assert cli_here("runs", tmp_path / "none").out == f"no runs in {tmp_path / 'none'}\n"


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_communication_is_debugged_on_this_machine_too(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Ranks that are started here have the variables of this process."""
    for name in DEBUG_COMMUNICATION:
        monkeypatch.setenv(name, "")  # as it was, after the test
    seen: list[dict[str, str]] = []

    def refuse(*_: object, **__: object) -> None:
        seen.append({name: os.environ[name] for name in DEBUG_COMMUNICATION})
        raise ConfigError("enough", fix="none")

    monkeypatch.setattr("voxscale.launch.start.train_here", refuse)
    monkeypatch.setattr("voxscale.launch.given.given_runs", refuse)
    words = ["train", write_config(), "--run", tmp_path] if verb == "train" else ["evaluate", tmp_path]
    assert "enough" in cli_here(*words, "--debug-comm").err
    assert seen == [DEBUG_COMMUNICATION]
