"""One node of a job: meet the other nodes, then start this node's ranks as torchrun does.

    srun --ntasks-per-node 1 python node.py --nodes 2 --devices 4 --reports DIR -- -m voxscale.train.worker RUN …
    srun --ntasks-per-node 1 python node.py --nodes 2 --devices 4 --reports DIR -- script.py ARGUMENTS

Needs nothing but the standard library and torch: copies of this file and of those it needs in the run folder also
serve interpreters and images in which voxscale is not installed. Each node publishes its arrival in DIR, which all
nodes share, so that one that does not come is named; the first node's arrival carries the address and the free port of
the rendezvous. Each rank's output is kept in DIR/rank-NNNN.log, and how each node ended in DIR/node-NNNN.end.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from voxscale.launch import meeting, ranks
else:  # a copy, beside copies of these
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import meeting
    import ranks

STOPPED = 75  # the exit code of ranks that saved their state and can be continued
_FLUSH_S = 5.0  # for the last lines of ranks to reach their logs


def run_node(options: argparse.Namespace) -> int:
    """Start this node's ranks, wait for them, and leave word of how they ended."""
    reports: Path = options.reports
    reports.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    index = _index_of(options)
    if index == 0:
        (reports / "step").write_text(os.environ.get("SLURM_STEP_ID", ""))
    failures: list[ranks.RankFailure] = []
    ranks.adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, raise_early)
    unable: tuple[str, ...] = ()
    try:
        refuse_unfit(options)
        failures, received = _start(options, reports)
        ranks.await_children(_FLUSH_S)
        stopped = bool(received) or bool(failures and all(failure.exit_code == STOPPED for failure in failures))
    except EarlySignal:  # the ranks had not begun
        stopped = True
    except meeting.UnableError as error:
        stopped, unable = False, error.args
        if unable[0]:
            print("error: {}: {}\n  fix: {}".format(socket.gethostname(), *unable), file=sys.stderr, flush=True)
            failures = [ranks.RankFailure(-1, 4)]
    if stopped:
        ranks.signal_children(signal.SIGKILL)  # what the ranks left behind
    end = {
        "failures": [unable[0] if unable else str(failure) for failure in failures],
        "codes": [failure.exit_code for failure in failures],
        "ranks": [failure.rank for failure in failures],
        "times": [failure.time_s for failure in failures],
        "stopped": stopped,
        "wall_s": round(time.monotonic() - began, 3),
        **(dict(zip(("unable", "fix"), unable)) if unable else {}),  # noqa: B905 since Python 3.10
    }
    meeting.write_whole(meeting.end_file(reports, index), end)
    if unable:
        # the others wait for it, then find the end
        meeting.write_whole(meeting.arrival_file(reports, index), {"node": socket.gethostname()})
    return 4 if unable else 1 if failures and not stopped else 0


def refuse_unfit(options: argparse.Namespace) -> None:
    """What keeps this node from starting the command, as far as it can be told before."""
    folder, script = options.chdir or Path(), options.command[0]
    fix = "every node has to have the script, its folder, and torch"
    if not folder.is_dir():
        raise meeting.UnableError(f"no folder {folder}", fix)
    if not script.startswith("-") and not (folder / script).is_file():
        raise meeting.UnableError(f"no script {script}", fix)
    if not options.plain and importlib.util.find_spec("torch") is None:
        raise meeting.UnableError(f"no torch in {sys.executable}", fix)


class EarlySignal(BaseException):
    """A signal came before there were ranks to pass it on to."""


def raise_early(number: int, frame: Any) -> None:
    raise EarlySignal


def _start(options: argparse.Namespace, reports: Path) -> tuple[list[ranks.RankFailure], list[signal.Signals]]:
    place = meeting.Place()
    if options.chdir is not None:
        os.chdir(options.chdir)
    if options.nodes > 1:
        place = meeting.meet(
            reports,
            nodes=options.nodes,
            interface=options.interface,
            patience_s=options.wait,
            index=_index_of(options),
            hosts=options.hosts.split(",") if options.hosts else (),
        )
    else:
        name = socket.gethostname()
        meeting.write_whole(meeting.arrival_file(reports, 0), {"node": name, "host": name})
    program = Path(__file__).resolve().with_name("as_rank.py")
    as_rank = [str(program), str(reports), options.echo, *options.command]
    if options.plain:
        return ranks.start_one(as_rank, options.save_time, as_torchrun=False)
    if options.nodes == options.devices == 1:  # nobody to meet, and torch's agent takes seconds to import
        return ranks.start_one(as_rank, options.save_time, as_torchrun=True)
    return ranks.start_ranks(as_rank, options.devices, place=place, save_time_s=options.save_time, watched=reports)


def _index_of(options: argparse.Namespace) -> int:
    if options.nodes == 1:
        return 0
    return meeting.slurm_index() if options.index is None else int(options.index)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Start the ranks of one node of a job.")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="ranks on this node")
    parser.add_argument("--index", type=int, help="which of the nodes this is; default: as SLURM says")
    parser.add_argument("--hosts", help="the nodes' names, with commas; default: as SLURM says")
    parser.add_argument("--reports", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--interface", help="the network interface between the nodes")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="for the other nodes")
    parser.add_argument("--save-time", type=float, default=60.0, metavar="S", help="for ranks to save after a signal")
    parser.add_argument("--echo", choices=("all", "first"), default="all", help="whose output is shown")
    parser.add_argument("--chdir", type=Path, metavar="DIR", help="where the command runs; default: here")
    parser.add_argument("--plain", action="store_true", help="run the command once, without torchrun")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what `python` is to run, after --")
    options = parser.parse_args(argv)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return run_node(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
