"""Which tests may run beside each other (`pytest -n 2 --dist loadgroup`): many wait for a scheduler most of the time.

What runs on the one SLURM, or wants Debian's packages, stays with one worker, and so does what runs on Ray. Every other
file is a group of its own, so that what its tests share is made once. The longest groups come first.
"""

from __future__ import annotations

import pytest

_OF_DEBIAN = {"charliecloud", "apptainer", "image_folder"}
_FIRST = {"slurm": 0, "ray": 1}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and after the marks of the lab
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    groups = {item: _group_of(item) for item in items}
    items.sort(key=lambda item: _FIRST.get(groups[item], 2))
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))


def _group_of(item: pytest.Item) -> str:
    if item.get_closest_marker("slurm") or item.get_closest_marker("browser"):
        return "slurm"
    if _OF_DEBIAN & set(getattr(item, "fixturenames", ())):
        return "slurm"
    return "ray" if item.get_closest_marker("ray") else item.path.name
