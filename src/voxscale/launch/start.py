"""Train on this machine, or say how to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from voxscale.config.schema import Config
from voxscale.launch.batch import refuse_if_queued
from voxscale.launch.folder import OpenedRun, draft_run, open_run
from voxscale.launch.local import render_commands, sweep_leftovers, train_local
from voxscale.launch.machine import look_at_machine
from voxscale.launch.outcome import train_with_restarts
from voxscale.launch.planning import write_expected
from voxscale.runs import RunFolder


def train_here(
    config: Config,
    root: Path,
    environ: Mapping[str, str],
    *,
    devices: str,
    fresh: bool,
    restarts: int = 0,
    profile: bool = False,
) -> OpenedRun:
    """Make the run folder, or open the one that is there, and train it to its end; with `profile` traced."""
    machine = look_at_machine()
    refuse_if_queued(RunFolder(root), environ)
    sweep_leftovers()
    opened = open_run(draft_run(config, root, machine, devices=devices, fresh=fresh), machine, environ)
    if opened.is_done:
        _note(config, f"{root}: done already; --fresh trains it anew")
        return opened
    plan = opened.plan
    _note(
        config,
        f"training {plan.num_train} cases on {opened.why}: {plan.num_steps} steps of {plan.global_batch} patches, "
        f"{plan.num_val} cases validate",
    )
    write_expected(opened, machine, environ)
    how = {"profile": profile, "outlive": restarts > 0}
    train_with_restarts(lambda: train_local(opened.run, opened.devices, environ, **how), restarts)
    return opened


def commands_for(
    config: Config,
    root: Path,
    environ: Mapping[str, str],
    *,
    devices: str,
    fresh: bool,
    write: bool,
    profile: bool = False,
) -> list[tuple[str, str]]:
    """Lines for starting the run by hand, each with what it is for; `write` makes the run folder they need."""
    machine = look_at_machine()
    draft = draft_run(config, root, machine, devices=devices, fresh=fresh)
    if write:
        open_run(draft, machine, environ)
    return render_commands(draft.run, draft.devices, profile=profile)


def _note(config: Config, text: str) -> None:
    if config.log != "quiet":
        print(text, file=sys.stderr)
