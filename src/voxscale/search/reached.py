"""What a job compares to see whether it is worth being queued again: `launch/steps` of a search.

It holds the steps of all trials, and of data that were still being prepared how many cases are. Whenever there is
something new to continue from, it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from voxscale.config.schema import Config
from voxscale.errors import StoppedEarly
from voxscale.files import write_text
from voxscale.launch.folder import count_prepared
from voxscale.runs import SearchFolder


def note_reached(folder: SearchFolder, steps: int, unprepared: Sequence[Config], environ: Mapping[str, str]) -> None:
    """`unprepared` are configs whose data were being prepared."""
    cases = sum(count_prepared(config, environ) for config in unprepared)
    write_text(folder.steps, f"{steps}{f' and {cases} cases' if cases else ''}\n")


@contextmanager
def noted_progress(folder: SearchFolder, config: Config, environ: Mapping[str, str]) -> Iterator[None]:
    """Note how far the data of a new search are, if the body, which prepares them, is stopped early; in a job alone."""
    try:
        yield
    except StoppedEarly:
        if folder.steps.parent.exists() and not folder.exists:
            note_reached(folder, 0, [config], environ)
        raise
