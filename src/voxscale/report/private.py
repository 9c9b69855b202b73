"""Errors as a page tells them: without the folders and machines that they name, as it may travel further than a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from voxscale.files import read_json
from voxscale.runs import RunFolder

_SIGN = r"""(?:[^\s'"`,;:()\[\]]|[,;:](?=\S))"""
_WORD = r"""[^\s/'"`,;:()\[\]]+"""
# Outside of quotes a folder's name may have spaces: the words up to the next slash are taken for a part of it.
_ABSOLUTE = re.compile(
    rf"""https?://\S+
    | (?<=['"`]) (?P<quoted> (?:~[\w.-]*)?/ [^'"`\n]*) (?=['"`])
    | (?<![\w./<]) (?P<bare> (?:~[\w.-]*)? / {_SIGN}+ (?:[ ](?:{_WORD}[ ]){{0,2}}{_WORD}/{_SIGN}*)*)""",
    re.VERBOSE,
)


def without_places(text: str, run: RunFolder) -> str:
    """Paths in the run folder as seen from it, of others the name alone; nodes by their numbers."""
    text = re.sub(rf"(?<![\w./]){re.escape(str(run.root))}/", "", text)
    text = _ABSOLUTE.sub(_shortened, text)
    for node, number in _nodes(run).items():
        text = re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", f"node {number}", text)
    return text


def without_folders(value: Any) -> Any:
    """A value of a config, in it the names of files alone."""
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_folders(each) for each in value]
    return name_alone(value) if isinstance(value, str) and value.startswith(("/", "~")) else value


def name_alone(path: str) -> str:
    """The folders above a file may name people."""
    return f".../{Path(path).name}"


def _shortened(found: re.Match[str]) -> str:
    path = found["quoted"] or found["bare"]
    return name_alone(path) if path else found[0]


def _nodes(run: RunFolder) -> dict[str, int]:
    """Those that came, as they left word in the reports of each attempt."""
    found = {}
    for path in sorted(run.logs.rglob("node-????.json")):
        try:
            found[str(read_json(path)["node"])] = int(path.stem.partition("-")[2])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
