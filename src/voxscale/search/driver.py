"""The driver of a search: starts trials where there is room, watches them, stops, retries and records them.

A trial is a run folder whose ranks live in one Ray actor. Whatever happens to them, to Ray or to this process, the
ledger and the run folders say how far the search is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from voxscale.config.schema import Config
from voxscale.config.search import Asha
from voxscale.errors import (
    ConfigError,
    DataError,
    InfrastructureError,
    NotFiniteError,
    OutOfMemoryError,
    StoppedEarly,
)
from voxscale.files import read_json
from voxscale.launch.outcome import node_failures, read_failure, read_state
from voxscale.launch.ray import PLACE_S, Group, LostHeadError, RayCluster
from voxscale.launch.ray_run import node_words, worker_words
from voxscale.launch.sbatch import Request
from voxscale.plan.plan import Plan
from voxscale.runs import ON_RAY, RunFolder
from voxscale.search.asha import Halving
from voxscale.search.configs import TrialConfigs
from voxscale.search.ledger import (
    DONE,
    FAILED,
    NAN,
    PRUNED,
    RUNNING,
    WAITING,
    Ledger,
    Trial,
    best_trial,
    read_ledger,
    stopped_trials,
)
from voxscale.search.opening import OpenedSearch
from voxscale.search.progress import Progress, best_value
from voxscale.search.reached import note_reached
from voxscale.search.room import Room
from voxscale.search.samplers import Seen, propose
from voxscale.search.standing import Pace, described, time_left_s
from voxscale.train.ownership import is_live
from voxscale.train.stop import StopRequest

_LOOK_S = 0.2
_HOPELESS = (ConfigError, DataError, NotFiniteError, OutOfMemoryError)  # the same start would come to the same end
_MOST_UNBEGUN = 20  # starts of a trial on nodes that were gone


@dataclass
class Started:
    """A trial whose ranks have been started."""

    trial: Trial
    run: RunFolder
    group: Group
    reports: Path
    since: float  # when it was asked for
    first_step: int  # where it goes on
    is_told: bool = False  # to stop
    is_overdue: bool = False  # which has been said

    @property
    def has_begun(self) -> bool:
        """Whether its node program has come; Ray may not have had room for it yet."""
        return (self.reports / "node-0000.json").exists()


class Driver:
    """Drives one search to its end. `show` is called with all trials whenever something may have changed."""

    def __init__(
        self,
        opened: OpenedSearch,
        cluster: RayCluster,
        environ: Mapping[str, str],
        ledger: Ledger,
        stop: StopRequest,
        say: Callable[[str], None],
        show: Callable[[Driver], None],
        *,
        save_time_s: float,
    ) -> None:
        self.opened, self.search = opened, opened.search
        self._cluster, self._environ, self._ledger = cluster, environ, ledger
        self._stop, self._say, self._show = stop, say, show
        record = read_ledger(opened.folder.ledger)
        self.trials = record.trials
        self.progress = {trial.index: self._progress_of(trial) for trial in self.trials}
        self.running: dict[int, Started] = {}
        self._configs = TrialConfigs(opened)
        self._verdicts = record.verdicts
        self._halving: Halving | None = None
        self._warned: set[str] = set()
        self._room = Room(opened.share, opened.folder.root, cluster.nodes, say)
        self._unbegun: dict[int, int] = {}
        self._unprepared: list[Config] = []
        self._save_time_s = save_time_s
        self._unsaved: list[str] = []
        self._began = time.monotonic()

    def run(self) -> None:
        """Until every trial has ended. Raises StoppedEarly after all have saved, if a signal comes first."""
        for trial in self.trials:
            if not trial.has_ended and trial.name in stopped_trials(self._verdicts):  # an earlier driver was killed
                self._end(trial, DONE if read_state(self.opened.folder.trial(trial.index)) == "done" else PRUNED)
            elif trial.may_be_tried_again(self.search.retries):
                trial.try_again()
                self._ledger.write("again", trial=trial.index)
        try:
            while not self._is_over():
                if self._stop.signalled:
                    self._stop_all()
                self._cluster.refuse_if_gone()
                self._start_what_fits()
                self._look()
                self._show(self)
        except LostHeadError:
            self.running.clear()  # there is nobody to give anything back to
            raise
        finally:
            for started in self.running.values():
                started.group.close()
            self._count_steps()

    def _count_steps(self) -> None:
        """Of the trials that have not ended: how far they are, for whoever looks at a search that has."""
        for trial in self.trials:
            if not trial.has_ended:
                self.progress[trial.index].look()
                trial.steps = self.progress[trial.index].step

    def _is_over(self) -> bool:
        return len(self.trials) >= self.opened.num_trials and all(trial.has_ended for trial in self.trials)

    # starting

    def _start_what_fits(self) -> None:
        while (
            not self._stop.signalled
            and len(self.running) < self.room()
            and (not self.running or self._configs.learn(self.trials))
        ):
            trial = self._next_trial()
            if trial is None:
                return
            self._start(trial)

    def room(self) -> int:
        """How many trials may run at once; nodes may have come or gone."""
        most, room = self.search.max_concurrent, self._room.trials()
        if not room and self._cluster.is_ours:
            raise LostHeadError("the Ray that was started here has lost its node", fix="start the same command again")
        if not room:
            self._warn_once(f"no node of the Ray cluster has {self.opened.share} any more; waiting for one to join")
        return room if most == "auto" else min(room, most)

    def _next_trial(self) -> Trial | None:
        """The first that waits, unless ranks of an earlier start still save its state; else a new one."""
        for trial in self.trials:
            if trial.state == WAITING and not is_live(self.opened.folder.trial(trial.index)):
                return trial
        return self._propose() if len(self.trials) < self.opened.num_trials else None

    def _propose(self) -> Trial:
        index = len(self.trials)
        configuration, seed = divmod(index, self.search.seeds)
        params = propose(self.search, configuration, self._history()) if seed == 0 else self.trials[index - seed].params
        trial = Trial(index, configuration, seed, params)
        self._ledger.write("trial", trial=index, configuration=configuration, seed=seed, params=params)
        self.trials.append(trial)
        self.progress[index] = self._progress_of(trial)
        return trial

    def _history(self) -> list[Seen]:
        """What is known of the configurations so far, each by the mean of its seeds."""
        seen = []
        for first in range(0, len(self.trials), self.search.seeds):
            trials = self.trials[first : first + self.search.seeds]
            values = [trial.value for trial in trials if trial.value is not None]
            running = not all(trial.has_ended for trial in trials)
            value = mean(values) if values and not running else None
            seen.append(Seen(trials[0].configuration, trials[0].params, value, running))
        return seen

    def _start(self, trial: Trial) -> None:
        run = self.opened.folder.trial(trial.index)
        try:
            with self._stop.at_once():
                self._configs.open(trial, self._environ, self._warn_once)
        except StoppedEarly:  # while its data were prepared; now the others save
            self._unprepared.append(self._configs.of(trial))
            return
        except (ConfigError, DataError) as error:
            self._end(trial, FAILED, error.message)
            return
        if read_state(run) == "done":  # an earlier driver could not write it down
            self._end(trial, DONE)
            return
        request = Request(devices=self.opened.ranks, gpus=bool(self.opened.share.gpus))
        reports = run.next_reports(ON_RAY)
        group = Group(self.opened.share, avoid=self._room.avoided)
        words = node_words(run, request, reports, worker_words(run, request, reports))
        group.start(words, self._environ, [reports / "node-0000.out"])
        trial.state = RUNNING
        self.progress[trial.index].look()
        self._ledger.write("start", trial=trial.index, attempt=trial.losses + 1)
        self._say(f"trial {trial.index} starts: {described(trial.params)}{self._of_seed(trial)}")
        self.running[trial.index] = Started(
            trial, run, group, reports, time.monotonic(), self.progress[trial.index].step
        )

    # watching

    def _look(self) -> None:
        until = time.monotonic() + _LOOK_S
        for started in list(self.running.values()):
            self.progress[started.trial.index].look()
            self._warn_if_overdue(started)
            if started.group.is_over(wait_s=max(0.0, (until - time.monotonic()) / len(self.running))):
                self.progress[started.trial.index].look()
                del self.running[started.trial.index]
                self._take_back(started)
        time.sleep(max(0.0, until - time.monotonic()))
        self._judge()

    def _warn_if_overdue(self, started: Started) -> None:
        waited = time.monotonic() - started.since
        if waited > PLACE_S and not started.is_overdue and not started.has_begun:
            started.is_overdue = True
            self._say(
                f"warning: trial {started.trial.index}: Ray has not given it {self.opened.share} for {waited:.0f} s; "
                "see what holds the cluster with `ray status`"
            )

    def _judge(self) -> None:
        """Have the scheduler stop trials that are not worth going on with."""
        if not isinstance(self.search.scheduler, Asha):
            return
        if self._halving is None:
            validations = next(
                (_validations(Plan.read(s.run.plan)) for s in self.running.values() if s.run.plan.exists()), None
            )
            if validations is None:
                return
            self._halving = Halving(self.search.scheduler, validations, self.search.direction, self._verdicts)
        names = {trial.name: self.progress[trial.index].values for trial in self.trials}
        for verdict in self._halving.judge(names, {str(index) for index in self.running}):
            self._verdicts.append(verdict)
            trial = self.trials[int(verdict.trial)]
            value = None if math.isnan(verdict.value) else verdict.value
            self._ledger.write("verdict", trial=trial.index, rung=verdict.rung, value=value, stopped=verdict.stopped)
            if verdict.stopped and trial.index in self.running:
                self._say(f"trial {trial.index} is told to stop after {verdict.rung} validations: {verdict.value:.4f}")
                self.running[trial.index].is_told = True
                self.running[trial.index].group.stop()

    def _take_back(self, started: Started) -> None:
        """Record how a trial's ranks ended: for good, or to be started again."""
        trial, lost = started.trial, started.group.lost()
        started.group.close()
        if read_state(started.run) == "done":
            self._end(trial, DONE)
            return
        if started.is_told:
            self._end(trial, PRUNED)
            return
        error = read_failure(started.reports, [*lost, *node_failures(started.reports)])
        if isinstance(error, _HOPELESS):
            self._end(trial, NAN if isinstance(error, NotFiniteError) else FAILED, error.message)
            return
        trial.state = WAITING
        if self._stop.signalled:
            if isinstance(error, InfrastructureError):
                self._note_unsaved(trial, error.message)
            return
        if not started.has_begun and self._unbegun.setdefault(trial.index, 0) < _MOST_UNBEGUN:
            self._unbegun[trial.index] += 1  # placed on a node that was gone already: nothing was lost
            return
        if trial.losses >= self.search.retries:
            self._end(trial, FAILED, error.message, was_lost=True)
            return
        trial.losses += 1
        self._ledger.write("lost", trial=trial.index, why=error.message)
        self._say(f"trial {trial.index} was lost, and is started again: {error.message}")

    def _end(self, trial: Trial, state: str, why: str = "", *, was_lost: bool = False) -> None:
        run = self.opened.folder.trial(trial.index)
        progress = self.progress[trial.index]
        progress.look()
        metrics = read_json(run.metrics) if run.metrics.exists() else {}
        trial.state, trial.why, trial.was_lost = state, why, was_lost
        trial.value = best_value(progress.values, self.search.direction) if state in (DONE, PRUNED) else None
        trial.steps, trial.wall_s = progress.step, float(metrics.get("wall_s", 0.0))
        told = {"value": trial.value, "steps": trial.steps, "wall_s": trial.wall_s, "why": why}
        self._ledger.write("end", trial=trial.index, state=state, **told, **({"lost": True} if was_lost else {}))
        reached = "" if trial.value is None else f": {self.opened.metric} {trial.value:.4f}"
        self._say(f"trial {trial.index} {state}{reached}{f': {why.splitlines()[0]}' if why else ''}{self._so_far()}")

    # stopping

    def _stop_all(self) -> None:
        """Have every running trial save, and stop: they are continued by the next driver."""
        for index, started in list(self.running.items()):
            started.group.stop()
            if not started.has_begun:
                started.group.close()
                started.trial.state = WAITING
                del self.running[index]
        if self.running:
            self._say(f"{self._stop.reason}: waiting for {len(self.running)} trials to save")
        deadline = time.monotonic() + self._save_time_s
        while self.running and time.monotonic() < deadline:
            if not self._cluster.answers:  # told to end as we were, and the ranks save by themselves
                self._await_saved(deadline)
                break
            self._look()
        for started in self.running.values():
            started.trial.state = WAITING
            if self._cluster.answers:
                self._note_unsaved(started.trial, f"it did not end within {self._save_time_s:g} s")
        if not self._cluster.answers:
            self.running.clear()
        for progress in self.progress.values():
            progress.look()
        steps = {trial.name: self.progress[trial.index].step for trial in self.trials}
        waiting = {trial.name: steps[trial.name] for trial in self.trials if not trial.has_ended}
        self._ledger.write("stop", reason=self._stop.reason, steps=waiting)
        note_reached(self.opened.folder, sum(steps.values()), self._unprepared, self._environ)
        ended, names = sum(trial.has_ended for trial in self.trials), ", ".join(self._unsaved)
        raise StoppedEarly(
            f"stopped by {self._stop.reason}; {ended} of {self.opened.num_trials} trials have ended, "
            f"what the others had reached is saved{f', but for trial {names}' if names else ''}",
            fix="start the same command again to continue",
        )

    def _await_saved(self, deadline: float) -> None:
        """Wait for ranks that there is no Ray to ask about: each holds its run until its state is on disk."""
        while any(is_live(started.run) for started in self.running.values()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _note_unsaved(self, trial: Trial, why: str) -> None:
        self._unsaved.append(str(trial.index))
        self._say(f"warning: trial {trial.index} goes on from its last checkpoint: {why}")

    # words

    @property
    def wall_s(self) -> float:
        """Of this start."""
        return time.monotonic() - self._began

    def time_left_s(self) -> float | None:
        """None where nothing is known yet."""
        paces = [self._pace_of(started) for started in self.running.values()]
        return time_left_s(self.opened.num_trials, self.trials, paces)

    def _pace_of(self, started: Started) -> Pace:
        progress = self.progress[started.trial.index]
        steps = max(1, progress.steps)
        done_since = (progress.step - started.first_step) / steps
        return Pace(progress.step / steps, done_since, time.monotonic() - started.since)

    def _so_far(self) -> str:
        best = best_trial(self.trials, self.search.direction)
        ended = sum(trial.has_ended for trial in self.trials)
        leader = f", best so far trial {best.index} with {best.value:.4f}" if best is not None else ""
        return f" ({ended} of {self.opened.num_trials} ended{leader})"

    def _of_seed(self, trial: Trial) -> str:
        return f", seed {self._configs.of(trial).train.seed}" if self.search.seeds > 1 else ""

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._say(f"warning: {text}")

    def _progress_of(self, trial: Trial) -> Progress:
        return Progress(self.opened.folder.trial(trial.index).events, self.opened.metric)


def _validations(plan: Plan) -> int:
    whole, rest = divmod(plan.num_steps, plan.validate_every_steps)
    return whole + bool(rest)
