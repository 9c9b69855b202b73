"""The end of a user's script: what its nodes left behind becomes RUN/metrics.json.

    python script_end.py RUN --reports DIR

is the last line of a job: it names the ranks that failed and ends with the script's exit code. Needs nothing but the
standard library: a copy in the run folder serves interpreters and images in which voxscale is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOPPED = 75  # asked to stop, whatever the script made of it: a job that waits for this one must not begin
_NOT_STARTED = 4
_TERMINATED = -15  # by those that ended the ranks when one had failed
_CONSEQUENCES = (1, -6, _TERMINATED)  # how ranks end when another one has left them


@dataclass(frozen=True)
class Ended:
    """How a rank ended that should not have; in the order of what began it."""

    time_s: float
    consequence: bool
    code: int
    text: str

    @property
    def exit_code(self) -> int:
        """As a shell would give it."""
        return 128 - self.code if self.code < 0 else self.code


def finish(run: Path, reports: Path) -> dict[str, Any]:
    """Write how the script ended to RUN/metrics.json, and return it. Once, when all ranks have ended."""
    command = _read(run / "launch" / "command.json")
    nodes = int(command["nodes"])
    ends = [_read(path) for path in sorted(reports.glob("node-*.end.json"))]
    failed = sorted((each for path in reports.glob("node-*.end.json") for each in _failures(reports, path)), key=_first)
    failures = [each.text for each in failed if each.code != _TERMINATED or failed[0].code == _TERMINATED]
    if len(ends) < nodes and not failed:
        failures = [_missing(reports, nodes, len(ends))]
    signalled = any(end["stopped"] for end in ends) and not any(end["codes"] and not end["stopped"] for end in ends)
    state = "stopped" if signalled else "failed" if failures else "done"
    metrics = {
        "task": "script",
        "state": state,
        "exit_code": failed[0].exit_code if failed else STOPPED if signalled else _NOT_STARTED if failures else 0,
        "wall_s": max((end["wall_s"] for end in ends), default=0.0),
        "world_size": 1 if command.get("with_ray") else nodes * int(command["devices"]),
        **{name: command[name] for name in ("nodes", "devices", "command")},
        "failures": failures,
        "logs": str(reports),
    }
    _write(run / "metrics.json", metrics)
    return metrics


def _first(each: Ended) -> tuple[float, bool]:
    return each.time_s, each.consequence


def _failures(reports: Path, path: Path) -> list[Ended]:
    """What one node saw of its ranks, each with the node and the log of the rank."""
    end = _read(path)
    arrival = reports / path.name.replace(".end", "")
    node = _read(arrival)["node"] if arrival.exists() else path.name.partition(".")[0]
    return [
        Ended(
            time_s,
            code in _CONSEQUENCES,
            code,
            f"{node}: {text}" + (f", see {_log(reports, rank)}" if rank >= 0 else ""),
        )
        for rank, code, time_s, text in zip(*(end[key] for key in ("ranks", "codes", "times", "failures")))  # noqa: B905 since Python 3.10
    ]


def _log(reports: Path, rank: int) -> Path:
    return reports / f"rank-{rank:04d}.log"


def _missing(reports: Path, nodes: int, ended: int) -> str:
    came = [_read(path)["node"] for path in sorted(reports.glob("node-????.json"))]
    here = f" ({', '.join(came)})" if came else ""
    return f"{len(came)} of {nodes} nodes came{here} and {ended} ended: see the job's output for the others"


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that appears whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(content, indent=2) + "\n")
    aside.replace(path)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Say how a script's ranks ended.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--reports", type=Path, required=True, help="where the nodes left word")
    options = parser.parse_args(argv)
    metrics = finish(options.run, options.reports)
    for failure in metrics["failures"]:
        print(f"{'stopped' if metrics['state'] == 'stopped' else 'error'}: {failure}", file=sys.stderr, flush=True)
    return int(metrics["exit_code"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
