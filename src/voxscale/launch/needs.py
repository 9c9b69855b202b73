"""Say what an image's Python lacks, all of it at once, and how to add it.

    python3 needs.py [--json] --enter='apptainer exec --bind DIR IMAGE' 'torch>=2.11' 'monai>=1.6.1' …

Runs inside the image, as a file: it must do with the standard library of an old Python. Ends with 4 if something is
missing or too old.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib import metadata
from pathlib import PurePath

_OLDEST = (3, 11)
_LEAST = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?.*?>=\s*([0-9][0-9.]*)|([A-Za-z0-9._-]+)")


def release_of(version: str) -> tuple[int, ...]:
    """The numbers of a version: 2.11.0a0+git is (2, 11, 0), so a vendor's early build of a release counts as it."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def is_at_least(found: str, least: str) -> bool:
    """Whether a version is another or later; 2.11 is 2.11.0."""
    numbers = [release_of(found), release_of(least)]
    length = max(map(len, numbers))
    ours, theirs = ((*each, *(0,) * (length - len(each))) for each in numbers)
    return ours >= theirs


def lacking(requirements: list[str]) -> dict[str, str]:
    """The requirements that are not met, each with what was found instead."""
    found = {}
    for requirement in requirements:
        match = _LEAST.match(requirement)
        if match is None:
            continue
        name, least = match[1] or match[3], match[2] or "0"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[requirement] = "not there"
        else:
            if not is_at_least(version, least):
                found[requirement] = f"found {version}"
    return found


def describe(found: dict[str, str], enter: str) -> dict[str, str]:
    """(message, fix) for what is lacking."""
    python = "{}.{}".format(*sys.version_info[:2])
    lines = [f"{need}: {what}" for need, what in found.items()]
    is_old = sys.version_info[:2] < _OLDEST
    if is_old:
        lines.insert(0, "Python>={}.{}: found {}".format(*_OLDEST, python))
    message = "\n  ".join([f"the image's Python {python} lacks what voxscale needs", *lines])
    # Every rank is torch: one from elsewhere would hardly fit the image's drivers and libraries.
    if is_old or any(re.match(r"torch\b", need) for need in found):
        fix = "choose an image with these, such as a newer PyTorch or MONAI image, or make one: voxscale image build"
    else:
        names = " ".join(map(shlex.quote, found))
        own = "env PYTHONUSERBASE=DIR PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --user"
        where = PurePath("DIR", "lib", f"python{python}", "site-packages")
        fix = f"with a folder DIR of yours: {enter} {own} {names}; then set container.packages to {where}"
    return {"message": message, "fix": fix}


def main(arguments: list[str]) -> int:
    enter = "".join(word[len("--enter=") :] for word in arguments if word.startswith("--enter="))
    found = lacking([word for word in arguments if not word.startswith("--")])
    if not found and sys.version_info[:2] >= _OLDEST:
        return 0
    said = describe(found, enter)
    if "--json" in arguments:
        print(json.dumps(said))
    else:
        print(f"error: {said['message']}\n  fix: {said['fix']}", file=sys.stderr, flush=True)
    return 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
