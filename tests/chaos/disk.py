"""A disk that fills up while a training saves: what was saved before is intact, and with room again the run goes on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from chaos.left import count_left
from chaos.report import Report
from chaos.training import Training, train_undisturbed
from voxscale.checkpoint import load_last

_SIZE = "size=600k"
_FILL_BYTES = 10_000_000  # more than there is


def fill_disk(root: Path, dataset: Path, environ: Mapping[str, str]) -> Report:
    """Train on a small file system that somebody else fills, then make room."""
    report = Report("disk full while saving")
    with report.timed():
        expected = train_undisturbed(Training(root / "undisturbed", dataset, 1, environ))
        with _small_disk(root / "small") as folder:
            training = Training(root / "full", dataset, 1, environ, place=folder / "run")
            filler = folder / "filler"
            with training.start("full") as process:
                while process.poll() is None and not training.run.last.exists():
                    time.sleep(0.001)
                _fill(filler)
                code = process.wait(timeout=120)
            report.begin()
            count_left(training, "full", report, has_launcher=True, is_over=True)
            said = training.said()
            report.expect(code == 4, f"ended with {code}: {said[-300:]}")
            report.expect("bytes" in said and "are free" in said, f"does not say what is free: {said[-300:]}")
            left = load_last(training.run, lambda text: report.wrong.append(f"a damaged checkpoint: {text}"))
            report.expect(left is not None, "no checkpoint is left")
            filler.unlink()
            with training.start("room again") as process:
                report.expect(process.wait(timeout=120) == 0, training.said()[-300:])
            count_left(training, "room again", report, has_launcher=True, is_over=True)
            report.compare(training.outcome(), expected, "with room again")
    return report


def _fill(path: Path) -> None:
    try:
        path.write_bytes(bytes(_FILL_BYTES))
    except OSError:
        return


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", _SIZE, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
