"""How soon it answers: `voxscale --help` beside an empty typer app, and the time to the first step of a prepared run.

    python bench/startup.py [--rounds 15] [--json]

The empty app has as many verbs, which do nothing and have no options; the two take turns, and medians count. The first
step is that of `voxscale train --devices 1`, in a process that has torch and MONAI's networks imported already: what
counts is the time from there until its first batch is handed to the network. It comes on top of these imports, which
are printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

GOALS = {"help.ratio": 1.3, "first_step_s": 1.0}
EMPTY = """
import typer
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
def verb() -> None:
    "Do nothing."
for number in range({verbs}):
    app.command(name=f"verb{{number}}")(verb)
app()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # the part that trains, in a process of its own
    options = parser.parse_args()
    if options.train:
        print(json.dumps(time_first_step(options.train)), flush=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(options, Path(scratch)), indent=None if options.json else 2))


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    from voxscale.cli import VERBS

    empty = scratch / "empty.py"
    empty.write_text(EMPTY.format(verbs=len(VERBS)))
    ways = {"ours": ["-m", "voxscale", "--help"], "empty": [str(empty), "--help"]}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for words in ways.values():
        run(words)  # compiled files and the page cache
    for turn in range(options.rounds):
        for name in sorted(ways, reverse=turn % 2 == 1):
            began = time.perf_counter()
            run(ways[name])
            times[name].append(time.perf_counter() - began)
    config = write_config(scratch)
    run(["-m", "voxscale", "prepare", str(config)])
    steps = [json.loads(run([__file__, "--train", str(config)]).splitlines()[-1]) for _ in range(3)]
    return {
        **{f"help.{name}_s": round(median(each), 4) for name, each in times.items()},
        "help.ratio": round(median(times["ours"]) / median(times["empty"]), 3),
        **{name: round(median(each[name] for each in steps), 3) for name in steps[0]},
        "goals": GOALS,
        "rounds": options.rounds,
    }


def write_config(scratch: Path) -> Path:
    path = scratch / "small.yaml"
    path.write_text(
        "data: {source: data, synthetic: {cases: 8, size: [64, 64, 64]}, regions: {ball: [1]}, store: store}\n"
        "patches: {size: [32, 32, 32]}\nmodel: {name: unet, channels: [8, 16, 32]}\n"
        "train: {epochs: 1, batch: 2, precision: fp32, compile: false, channels_last: false}\nlog: quiet\ntrack: none\n"
    )
    return path


def time_first_step(config: Path) -> dict[str, float]:
    """Train in this process, and note when the first batch comes to the network."""
    began = time.perf_counter()
    import monai.networks.nets  # noqa: F401
    import torch  # noqa: F401

    imported = time.perf_counter()
    from voxscale.cli import main as voxscale
    from voxscale.train.trainer import Trainer

    take, first = Trainer.take, []

    def timed(self: Trainer, *arguments: Any) -> Any:
        first.append(time.perf_counter())
        return take(self, *arguments)

    Trainer.take = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        sys.argv = ["voxscale", "train", str(config), "--devices", "1", "--run", f"{scratch}/run", "--json"]
        try:
            voxscale()
        except SystemExit as ended:
            if ended.code:
                raise
    return {"imports_s": imported - began, "first_step_s": first[0] - imported}


def run(words: list[str]) -> str:
    """Both sides with compiled files, which pip makes of what it installs; a checkout makes them at its first start."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environ)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
