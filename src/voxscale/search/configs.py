"""The config of each trial: the search's own with the trial's values, and with what all trials compute by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from voxscale.config.load import read_config, render_config
from voxscale.config.schema import Config
from voxscale.files import write_text
from voxscale.launch.batch import copy_programs
from voxscale.launch.folder import draft_run, open_run
from voxscale.launch.machine import look_at_machine
from voxscale.search.ledger import Trial
from voxscale.search.opening import OpenedSearch
from voxscale.search.space import with_params

_CHOICES = ("precision", "compile", "channels_last")


class TrialConfigs:
    """Makes the trials' configs and run folders."""

    def __init__(self, opened: OpenedSearch) -> None:
        self._opened, self._base = opened, opened.config

    def of(self, trial: Trial) -> Config:
        return with_params(self._base, {**trial.params, "train.seed": self._base.train.seed + trial.seed})

    def open(self, trial: Trial, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
        """Make the trial's run folder, or take up the one that is there."""
        run, config = self._opened.folder.trial(trial.index), self.of(trial)
        if run.exists:  # what was settled for it stays
            held = read_config(run.asked)
            train = {name: getattr(held.train, name) for name in _CHOICES}
            config = config.model_copy(update={"train": config.train.model_copy(update=train)})
        draft = draft_run(config, run.root, self._opened.machine, devices=str(self._opened.ranks))
        open_run(draft, look_at_machine(), environ, split=self._opened.folder.split, warn=warn)
        copy_programs(run)

    def learn(self, trials: Sequence[Trial]) -> bool:
        """Take over what the first trial has measured to be best (precision, compilation, layout): trials that compute
        in different ways would not compare. Returns whether it is known."""
        shared = [name for name in _CHOICES if f"train.{name}" not in self._opened.search.space]
        if not _unsettled(self._base, shared):
            return True
        for trial in trials:
            run = self._opened.folder.trial(trial.index)
            if run.exists and not _unsettled(config := read_config(run.config), shared):
                choice = {name: getattr(config.train, name) for name in shared}
                self._base = self._base.model_copy(update={"train": self._base.train.model_copy(update=choice)})
                write_text(self._opened.folder.config, render_config(self._base))
                return True
        return False


def _unsettled(config: Config, names: Sequence[str]) -> bool:
    return any(getattr(config.train, name) == "auto" for name in names)
