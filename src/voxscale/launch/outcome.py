"""How a run ended, read from its folder: never from the exit code of what started its ranks.

    python -m voxscale.launch.outcome RUN --reports DIR --world-size N

is the last line of a job: it says what went wrong and ends with the exit code of the training.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from voxscale.config.load import read_config
from voxscale.errors import (
    ANOTHER_RANK,
    BY_CODE,
    LESS_MEMORY,
    InfrastructureError,
    OutOfMemoryError,
    RankLostError,
    StoppedEarly,
    TimedOutError,
    VoxscaleError,
)
from voxscale.files import read_json, write_json
from voxscale.launch.ranks import OUT_OF_MEMORY
from voxscale.plan.plan import Plan
from voxscale.runs import ON_LOCAL, RunFolder, error_files
from voxscale.train.events import read_events
from voxscale.train.ownership import is_live

_MOST_CASES = 10  # that are named
_UNABLE = f"ended with exit code {InfrastructureError.exit_code}"
_ENDED_BY_AGENT = "killed by signal 15"  # once another has failed
LOST = "lost"  # a file among the reports of a job that lost a rank


def read_state(run: RunFolder) -> str | None:
    """How the last start of a run ended: done, stopped, failed; None if it was not written down."""
    try:
        return str(read_json(run.metrics)["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def judge(
    run: RunFolder, reports: Path, failures: Sequence[str], *, world_size: int, otherwise: VoxscaleError | None = None
) -> None:
    """Raise what made a run fail or stop early, if it is not done; a failure that was not written down is now."""
    state = read_state(run)
    if state == "done":
        return
    error = read_failure(reports, failures, otherwise=otherwise, run=run)
    if state is None and not isinstance(error, StoppedEarly) and not is_live(run):
        with suppress(OSError):  # the disk may be full
            _record_failure(run, world_size)
    raise error


def read_failure(
    reports: Path, failures: Sequence[str], *, otherwise: VoxscaleError | None = None, run: RunFolder | None = None
) -> VoxscaleError:
    """What went wrong, as the ranks left it in `reports`; what was seen of them from outside comes second.

    Where none of them could tell of the step, that of the run's last event is told.
    """
    records = [read_json(path) for path in error_files(reports)]
    for record in records:
        if kind := BY_CODE.get(record["code"]):
            place = "" if issubclass(kind, StoppedEarly) else f"rank {record['rank']}: "
            return kind(place + record["message"], fix=record["fix"])
    fix = f"see {reports}; start the same command again to continue from the last checkpoint"
    timed_out = [record for record in records if record["code"] == TimedOutError.code]
    witness = next((record for record in (*timed_out, *records) if record.get("cases")), None)
    silent, where = _silent_ranks(records, witness) if witness is not None else ("", "")
    if timed_out:  # where none is silent, they do not reach each other
        message = timed_out[0]["message"].replace(ANOTHER_RANK, silent or ANOTHER_RANK)
        return RankLostError(message + where, fix=fix if silent else timed_out[0]["fix"] or fix)
    if starved := [failure for failure in failures if failure.endswith(OUT_OF_MEMORY)]:
        return _out_of_memory(starved[0], where, run)
    if any("killed by signal 9" in failure for failure in failures):
        fix += "; if nobody killed it, this machine had too little memory: lower train.micro_batch"
    if not otherwise and any(_UNABLE in failure for failure in failures):  # ranks say why, unless they cannot write it
        free = shutil.disk_usage(reports).free
        return InfrastructureError(
            f"{'; '.join(failures)}; {free:,} bytes are free in {reports}, where they write why",
            fix="see what they printed; make room, and start the same command again to continue",
        )
    told = [f"rank {record['rank']} ended" for record in records]  # because another was lost
    causes = [failure for failure in failures if not any(text in failure for text in told)] or failures
    causes = [cause for cause in causes if not cause.endswith(_ENDED_BY_AGENT)] or causes
    if causes and not where:
        where = _after_step(run)
    return otherwise or RankLostError(("; ".join(causes) or "the ranks ended before their work did") + where, fix=fix)


def _out_of_memory(failure: str, where: str, run: RunFolder | None) -> OutOfMemoryError:
    at_once = f", {Plan.read(run.plan).at_once}" if run is not None and run.plan.exists() else ""
    return OutOfMemoryError(f"{failure}{where or _after_step(run)}{at_once}", fix=LESS_MEMORY)


def _after_step(run: RunFolder | None) -> str:
    return f" after step {step}" if run is not None and (step := _last_step(run.events)) else ""


def train_with_restarts(train: Callable[[], None], restarts: int) -> None:
    """Train; after a rank was lost again, from the last checkpoint, at most so often."""
    for left in reversed(range(restarts + 1)):
        try:
            train()
            break
        except RankLostError as error:
            if left == 0:
                raise
            print(f"warning: {error.message}; starting again from the last checkpoint", file=sys.stderr, flush=True)


def _silent_ranks(records: Sequence[dict[str, Any]], witness: dict[str, Any]) -> tuple[str, str]:
    """(The ranks that left no word, where they were), as another one saw it."""
    cases, place = witness["cases"], f" {where}" if (where := witness.get("where")) else ""
    silent = [rank for rank in range(len(cases)) if all(record["rank"] != rank for record in records)]
    if not silent:
        return "", place
    some = list(dict.fromkeys(case for rank in silent for case in cases[rank]))
    theirs = ", ".join(some[:_MOST_CASES]) + (f" and {len(some) - _MOST_CASES} more" if len(some) > _MOST_CASES else "")
    names = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
    return names, place + (f", with cases {theirs}" if theirs else "")


def last_reports(run: RunFolder) -> Path:
    """Where the ranks of the last start left their reports: of a job, else of this machine."""
    of_job = newest_reports(run)
    by_hand = error_files(run.logs)  # removed when another start begins
    return of_job if by_hand or of_job != run.logs else run.last_reports(ON_LOCAL) or run.logs


def newest_reports(
    run: RunFolder, *, since: int = 0, until: float = math.inf, restarts: Mapping[int, int] | None = None
) -> Path:
    """Where the ranks of the last attempt left their reports; without one, all logs.

    Only jobs numbered from `since` to `until` count. Of one in `restarts`, which says how often it was queued again,
    only its last attempt does: the one before may have come to another end.
    """
    attempts = {}
    for path in run.logs.glob("*-*"):
        number, _, count = path.name.partition("-")
        if not (number.isdigit() and count.isdigit()):
            continue
        job, attempt = int(number), int(count)
        if since <= job <= until and (restarts or {}).get(job, attempt) == attempt:
            attempts[job, attempt] = path
    return attempts[max(attempts)] if attempts else run.logs


def node_failures(reports: Path) -> list[str]:
    """What the nodes of a job saw of their ranks' ends, each with its node; the earliest first: it may be the cause."""
    found = []
    for path in sorted(reports.glob("node-*.end.json")):
        end = read_json(path)
        found += [
            (time, f"{_node(reports, path)}: {text}") for time, text in zip(end["times"], end["failures"], strict=True)
        ]
    return [text for _, text in sorted(found)]


def unsaid(reports: Path, nodes: int) -> VoxscaleError | None:
    """What is to be said of ranks that left no error themselves."""
    ends = {path: read_json(path) for path in sorted(reports.glob("node-*.end.json"))}
    for path, end in ends.items():
        if end.get("unable"):
            return InfrastructureError(f"{_node(reports, path)}: {end['unable']}", fix=end["fix"])
    if (missing := _missing_nodes(reports, nodes)) is not None:
        return missing
    if ends and all(end["stopped"] for end in ends.values()):
        return StoppedEarly("stopped by a signal; nothing new was saved", fix="start the same command again")
    return None


def _missing_nodes(reports: Path, nodes: int) -> InfrastructureError | None:
    """What is to be said if not all nodes of a job have come."""
    came = [read_json(reports / f"node-{index:04d}.json") for index in range(nodes) if _arrived(reports, index)]
    if len(came) == nodes:
        return None
    here = f" ({', '.join(arrival['node'] for arrival in came)})" if came else ""
    return InfrastructureError(
        f"{len(came)} of {nodes} nodes came{here}: the others could not start their ranks",
        fix=f"see the job's output; every node has to see {reports.parent}, the interpreter and the image",
    )


def _arrived(reports: Path, index: int) -> bool:
    return (reports / f"node-{index:04d}.json").exists()


def _node(reports: Path, end: Path) -> str:
    """The node that left word of its end; one that was stopped early may not have said its name."""
    arrival = reports / end.name.replace(".end", "")
    return str(read_json(arrival)["node"]) if arrival.exists() else end.name.partition(".")[0]


def _record_failure(run: RunFolder, world_size: int) -> None:
    """Write the `metrics.json` that the ranks could not write any more, from their events."""
    if not run.exists:
        return  # a search, whose trials say how they ended
    events = read_events(run.events)
    bests = [event for event in events if event["event"] == "checkpoint" and event.get("best")]
    metrics: dict[str, Any] = {
        "task": read_config(run.config).task,
        "state": "failed",
        "best": {key: bests[-1][key] for key in ("step", "metric", "value")} if bests else None,
        "summary": {},
        "world_size": world_size,
        "steps": _last_step(run.events),
        "wall_s": events[-1]["time_s"] if events else 0.0,
        "weights_sha256": None,
    }
    write_json(run.metrics, metrics)


def _last_step(events: Path) -> int:
    return max((event["step"] for event in read_events(events)), default=0)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m voxscale.launch.outcome", description="Say how a job's run ended.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--limit", default="", help="`reached`: the job queues itself again")
    parser.add_argument("--evaluation", action="store_true", help="the ranks evaluated the run, they did not train it")
    options = parser.parse_args(arguments)
    run, reports = RunFolder(options.run), options.reports
    failures, otherwise = node_failures(reports), unsaid(reports, options.nodes)
    try:
        if not options.evaluation:
            judge(run, reports, failures, world_size=options.world_size, otherwise=otherwise)
        elif failures or otherwise or error_files(reports):
            raise read_failure(reports, failures, otherwise=otherwise)
    except VoxscaleError as error:
        if isinstance(error, RankLostError):
            (reports / LOST).touch()
        if options.limit == "reached" and isinstance(error, StoppedEarly):
            error.fix = ""  # the job goes on by itself
        if "VOXSCALE_ATTEMPT" not in os.environ:  # a launcher in the same allocation says it itself
            print(error.as_text(), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
