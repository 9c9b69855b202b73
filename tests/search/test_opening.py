"""Opening a search: what is refused of its points, and what its folder says when it is continued with more trials."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from voxscale.config.load import read_config
from voxscale.errors import ConfigError
from voxscale.launch.ray import RayNode, Share
from voxscale.runs import SearchFolder
from voxscale.search.opening import OpenedSearch, draft_search, prepare_search, section_of, write_search

SEARCH = {"space": {"optimizer.lr": {"loguniform": [1e-3, 1e-2]}}, "trials": 2}


def opened_search(config: Path, root: Path, *, held: bool) -> OpenedSearch:
    read = read_config(config)
    return OpenedSearch(SearchFolder(root), read, section_of(read), Share(cpus=1, gpus=0), 1, held=held)


def test_a_search_that_is_extended_writes_that_down(write_config: Callable[..., Path], tmp_path: Path) -> None:
    root, auto = tmp_path / "run", {"train__precision": "auto"}
    config = write_config(search=SEARCH, **auto)
    root.mkdir()
    write_search(opened_search(config, root, held=False))
    folder = SearchFolder(root)
    folder.config.write_text(folder.config.read_text().replace("precision: auto", "precision: bf16"))
    more = write_config("more.yaml", search={**SEARCH, "trials": 5}, **auto)
    write_search(opened_search(more, root, held=True))
    for file, precision in ((folder.asked, "auto"), (folder.config, "bf16")):
        assert section_of(read_config(file)).num_points == 5
        assert read_config(file).train.precision == precision, "what was settled stays, and what was asked for"
    for same in (more, folder.config):
        draft_search(read_config(same), root)
    with pytest.raises(ConfigError, match="search.trials is 5 there, 2 here"):
        draft_search(read_config(config), root)


def test_a_metric_that_only_some_points_have_is_refused(write_config: Callable[..., Path], tmp_path: Path) -> None:
    regions = [{"ball": [1]}, {"ball": [1], "rest": [1]}, {"blob": [1]}]
    search = {"space": {"data.regions": {"grid": regions}}, "metric": "dice/ball"}
    node, folder = RayNode("", "node", 2, 0), SearchFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="found 'dice/ball', expected one of .* blob"):
        prepare_search(read_config(write_config(search=search)), folder, [node], os.environ)
    search["space"] = {"data.regions": {"grid": regions[:2]}}
    assert prepare_search(read_config(write_config(search=search)), folder, [node], os.environ).num_trials == 2
