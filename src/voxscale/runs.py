"""Every path inside a run folder, and where runs are. One object knows them all."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from voxscale.errors import InfrastructureError
from voxscale.files import read_json

SCHEMA_VERSION = 1
REPORT = "report.html"
ON_LOCAL, ON_RAY = "local", "ray"  # kinds of starts


@dataclass(frozen=True)
class RunFolder:
    """One training run on disk. `plan.json` carries the folder's schema version."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    def make(self) -> None:
        """Make the folder, if it is not there, for its owner alone: it tells of patients.

        One that is a run keeps what its owner has allowed others.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.exists:
                self.root.chmod(0o700)
        except OSError as error:
            whose = ""
            with contextlib.suppress(OSError):
                if (found := self.root.stat().st_uid) != (own := os.geteuid()):
                    whose = f"; it belongs to user {found}, you are user {own}"
            raise InfrastructureError(
                f"run folder {self.root}: cannot be made yours alone: {error.strerror}{whose}",
                fix="choose another folder with --run",
            ) from error

    @property
    def config(self) -> Path:
        """The resolved config: every default and every automatic choice written out."""
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def split(self) -> Path:
        return self.root / "split.csv"

    @property
    def outcomes(self) -> Path:
        """Targets and features of the cases as numbers, where outcomes are predicted."""
        return self.root / "outcomes.csv"

    @property
    def encoding(self) -> Path:
        """How cells of a table became the numbers in `outcomes`."""
        return self.root / "encoding.json"

    @property
    def learnt(self) -> Path:
        """What predictions of the best checkpoint need of the training cases, e.g. a baseline hazard."""
        return self.root / "learnt.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def cases(self) -> Path:
        """The per-case metrics of the best checkpoint."""
        return self.root / "cases.csv"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def previews(self) -> Path:
        """Small pictures of some cases, as the best checkpoint predicts them."""
        return self.root / "previews"

    @property
    def preview_index(self) -> Path:
        """Says what the previews show; written last."""
        return self.previews / "index.json"

    @property
    def forecast(self) -> Path:
        """What the run was expected to take, where steps had been measured before it."""
        return self.launch / "forecast.json"

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.root / REPORT

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def last(self) -> Path:
        return self.checkpoints / "last"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def next_reports(self, kind: str) -> Path:
        """A new folder for the reports of one start; another's may be under way, only to be refused."""
        number = max(self._numbered(kind), default=-1) + 1
        while True:
            reports = self.logs / f"{kind}-{number}"
            try:
                reports.mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                return reports

    def last_reports(self, kind: str) -> Path | None:
        numbers = self._numbered(kind)
        return self.logs / f"{kind}-{max(numbers)}" if numbers else None

    def _numbered(self, kind: str) -> list[int]:
        found = (path.name.removeprefix(f"{kind}-") for path in self.logs.glob(f"{kind}-*"))
        return [int(number) for number in found if number.isdigit()]

    def usage(self, rank: int) -> Path:
        """What a rank uses of its machine; replaced every few seconds."""
        return self.logs / "usage" / f"rank-{rank:04d}.json"

    def usages(self) -> dict[int, Path]:
        """The files that ranks have left there, by rank."""
        found = ((re.fullmatch(r"rank-(\d+)\.json", path.name), path) for path in self.usage(0).parent.glob("rank-*"))
        return {int(match[1]): path for match, path in sorted(found, key=lambda each: each[1]) if match}

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    def trace(self, rank: int) -> Path:
        """What a rank did in a few steps, as `voxscale train --profile` leaves it."""
        return self.root / "profile" / f"rank-{rank:04d}.pt.trace.json.gz"

    @property
    def top_costs(self) -> Path:
        """What took most of these steps, in words."""
        return self.root / "profile" / "top.txt"

    @property
    def launch(self) -> Path:
        return self.root / "launch"

    @property
    def asked(self) -> Path:
        """The config as it was asked for, before automatic choices were settled."""
        return self.launch / "asked.yaml"

    @property
    def open_error(self) -> Path:
        """Why the job that was to open the run could not."""
        return self.launch / "open-error.json"

    @property
    def jobs(self) -> Path:
        """What was handed to a scheduler for this folder: job numbers, files and logs."""
        return self.launch / "jobs.json"

    @property
    def command(self) -> Path:
        """What a user's own script was started with."""
        return self.launch / "command.json"

    @property
    def node_program(self) -> Path:
        """A copy of launch/node.py: what each node of a job runs."""
        return self.launch / "node.py"

    @property
    def owner(self) -> Path:
        """Says who works in the folder; the lock says whether they still live."""
        return self.launch / "owner.json"

    @property
    def owner_lock(self) -> Path:
        return self.launch / "owner.lock"

    @property
    def written_whole(self) -> tuple[Path, ...]:
        """Files that only who opens or owns the run writes, each by a rename."""
        opened = (self.config, self.plan, self.split, self.outcomes, self.encoding, self.asked)
        return (*opened, self.owner, self.cases, self.metrics, self.learnt)

    @property
    def submit_lock(self) -> Path:
        """Held while jobs are handed to SLURM, so that no two commands submit one run."""
        return self.launch / "submit.lock"

    @property
    def collecting(self) -> Path:
        """Locked while the scores of folds are brought together in the folder above them."""
        return self.launch / "folds.lock"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations"

    def evaluation(self, name: str) -> Path:
        return self.evaluations / name

    @property
    def exists(self) -> bool:
        return self.config.is_file()


@dataclass(frozen=True)
class ScaleFolder:
    """What `voxscale scale` measured."""

    root: Path

    @property
    def content(self) -> Path:
        return self.root / "scale.json"

    @property
    def plot(self) -> Path:
        return self.root / "speedup.svg"

    @property
    def exists(self) -> bool:
        return self.content.is_file()


@dataclass(frozen=True)
class SearchFolder:
    """One search on disk: its trials are ordinary run folders below it."""

    root: Path

    @property
    def config(self) -> Path:
        """The config with its `search` section, every automatic choice settled. With it the folder is a search."""
        return self.root / "search.yaml"

    @property
    def asked(self) -> Path:
        return RunFolder(self.root).asked

    @property
    def ledger(self) -> Path:
        """What happened to which trial, one JSON object a line: what a search is continued from."""
        return self.root / "trials.jsonl"

    @property
    def table(self) -> Path:
        return self.root / "trials.csv"

    @property
    def configurations(self) -> Path:
        """Mean and deviation over the seeds of each configuration."""
        return self.root / "configurations.csv"

    @property
    def best(self) -> Path:
        """The best trial's config, ready to be trained."""
        return self.root / "best.yaml"

    @property
    def split(self) -> Path:
        """The one split of all trials."""
        return self.root / "split.csv"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def steps(self) -> Path:
        """The steps of all trials when the search last stopped: a job that adds none is not queued again."""
        return self.root / "launch" / "steps"

    def trial(self, index: int) -> RunFolder:
        return RunFolder(self.root / "trials" / f"{index:04d}")

    @property
    def exists(self) -> bool:
        return self.config.is_file()


def rank_log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}.log"


def error_file(folder: Path, rank: int) -> Path:
    """Where a failing rank leaves its error for whoever started it."""
    return folder / f"error-rank-{rank:04d}.json"


def error_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("error-rank-*.json"))


def runs_of(folder: Path) -> list[RunFolder]:
    """The run that a folder is, or those of the cross-validation in it; none if it is something else."""
    found = [RunFolder(path.resolve()) for path in (folder, *_folds(folder))]
    trained = [run for run in found if run.config.is_file() and run.plan.is_file()]
    return trained[:1] if trained and trained[0].root == folder.resolve() else trained


def _folds(folder: Path) -> list[Path]:
    """Those that `metrics.json` names: an earlier cross-validation may have left others. Before it is written, all."""
    try:
        return [folder / fold["run"] for fold in read_json(folder / "metrics.json")["folds"]]
    except (OSError, ValueError, KeyError, TypeError):
        numbered = (re.fullmatch(r"fold-(\d+)", path.name) for path in folder.glob("fold-*"))
        return [folder / match[0] for match in sorted(filter(None, numbered), key=lambda match: int(match[1]))]
