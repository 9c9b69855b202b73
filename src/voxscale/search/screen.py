"""What a person sees of a search: a live table on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from voxscale.search.driver import Driver
from voxscale.search.ledger import Trial
from voxscale.search.progress import best_value
from voxscale.search.standing import described, leader
from voxscale.terminal import clock, is_terminal

_MOST_ROWS = 16


@dataclass(frozen=True)
class Screen:
    say: Callable[[str], None]
    show: Callable[[Driver], None]


@contextmanager
def open_screen(log: str) -> Iterator[Screen]:
    """`log` is the config's: `quiet` says nothing but warnings."""

    def wanted(text: str) -> bool:
        return log != "quiet" or text.startswith("warning")

    if not is_terminal() or log == "quiet":
        yield Screen(lambda text: print(text, file=sys.stderr, flush=True) if wanted(text) else None, lambda _: None)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield Screen(lambda text: console.print(Text(text)), lambda driver: live.update(render_table(driver)))


def render_table(driver: Driver) -> Any:
    """Running trials first, then the best; above them how far the search is, and how long it may take yet."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ended = sum(trial.has_ended for trial in driver.trials)
    left = driver.time_left_s()
    words = [f"{ended} of {driver.opened.num_trials} trials ended, {len(driver.running)} running"]
    best = leader(driver.trials, driver.progress, driver.search.direction)
    words += [f"best trial {best[0]}: {best[1]:.4f}"] if best is not None else []
    words += [f"about {clock(left)} left"] if left is not None else []
    table = Table(box=None, pad_edge=False)
    for name in ("trial", "state", "step", driver.opened.metric, "values"):
        table.add_column(name)
    for trial in _shown(driver):
        progress = driver.progress[trial.index]
        value = trial.value if trial.has_ended else best_value(progress.values[-1:], driver.search.direction)
        style = "bold green" if best is not None and trial.index == best[0] else ""
        table.add_row(
            str(trial.index),
            "waiting" if trial.index in driver.running and not driver.running[trial.index].has_begun else trial.state,
            f"{progress.step}/{progress.steps}" if progress.steps else "",
            "" if value is None else f"{value:.4f}",
            described(trial.params),
            style=style,
        )
    return Group(Text(" · ".join(words), style="bold"), table)  # a title would be broken to the table's width


def _shown(driver: Driver) -> list[Trial]:
    sign = 1 if driver.search.direction == "max" else -1
    running = [trial for trial in driver.trials if not trial.has_ended]
    ended = [trial for trial in driver.trials if trial.has_ended]
    ended.sort(key=lambda trial: (trial.value is None, -sign * (trial.value or 0.0)))
    return [*running, *ended][:_MOST_ROWS]
