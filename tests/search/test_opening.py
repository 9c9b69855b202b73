"""Opening a search: what is refused of its points, and what its folder says when it is continued with more trials."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from voxscale.config.load import read_config
from voxscale.config.search import PerTrial
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.launch.ray import RayNode, Share
from voxscale.runs import SearchFolder
from voxscale.search import room
from voxscale.search.opening import (
    OpenedSearch,
    check_unprepared,
    draft_search,
    prepare_search,
    section_of,
    share_of_trial,
    write_search,
)
from voxscale.search.room import Room, capacity, render_idle

SEARCH = {"space": {"optimizer.lr": {"loguniform": [1e-3, 1e-2]}}, "trials": 2}


def opened_search(config: Path, root: Path, *, held: bool) -> OpenedSearch:
    read = read_config(config)
    return OpenedSearch(SearchFolder(root), read, read, section_of(read), Share(cpus=1, gpus=0), 1, held=held)


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


def test_a_search_goes_on_with_the_ranks_and_threads_it_began_with(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Batch and rate are per device, so that with other ranks later trials would be other trainings."""
    root = tmp_path / "run"
    per_device = {"train__batch": {"per_device": 2}, "train__threads": "auto"}
    asked = {**SEARCH, "per_trial": {"devices": "all"}}
    config, folder = read_config(write_config(search=asked, **per_device)), SearchFolder(root)
    root.mkdir()
    write_search(prepare_search(config, folder, [RayNode("", "node", 2, 0)], os.environ))
    assert section_of(read_config(folder.asked)).per_trial.devices == "all"
    with pytest.raises(InfrastructureError, match=r"search\.per_trial\.devices 2: the largest node .* has 1 CPU"):
        prepare_search(config, folder, [RayNode("", "smaller", 1, 0)], os.environ)
    roomy = {**asked, "trials": 3, "per_trial": {"devices": "all", "cpus": 4}}
    again = read_config(write_config("roomy.yaml", search=roomy, **per_device))
    draft_search(again, root)
    opened = prepare_search(again, folder, [RayNode("", "larger", 8, 0)], os.environ)
    assert (opened.ranks, opened.share, opened.config.train.threads) == (2, Share(cpus=4), 1)
    write_search(opened)
    for same in (folder.config, folder.asked, tmp_path / "roomy.yaml"):
        draft_search(read_config(same), root)
    for path in (folder.asked, folder.config):
        assert (section_of(read_config(path)).trials, section_of(read_config(path)).per_trial.cpus) == (3, 4)
    other = read_config(write_config("other.yaml", search={**roomy, "per_trial": {"devices": 1}}, **per_device))
    with pytest.raises(ConfigError, match="search.per_trial.devices is 2 there, 1 here"):
        draft_search(other, root)


CPUS = [RayNode("a", "a", 4, 0), RayNode("b", "b", 2, 0)]
GPUS = [RayNode("a", "a", 16, 4), RayNode("b", "b", 8, 1), RayNode("c", "c", 64, 0)]


@pytest.mark.parametrize(
    ("nodes", "per_trial", "share", "ranks", "at_once"),
    [
        (CPUS, {}, Share(1), 1, 6),
        (CPUS, {"devices": 0.5}, Share(0.5), 1, 12),
        (CPUS, {"devices": 3}, Share(3), 3, 1),
        (CPUS, {"devices": "all"}, Share(4), 4, 1),
        (CPUS, {"cpus": 2}, Share(2), 1, 3),
        (GPUS, {}, Share(4, 1), 1, 5),
        (GPUS, {"devices": 0.25}, Share(1, 0.25), 1, 20),
        (GPUS, {"devices": 0.3, "cpus": 1}, Share(1, 0.3), 1, 15),  # three to a GPU
        (GPUS, {"devices": 2}, Share(8, 2), 2, 2),
        (GPUS, {"devices": "all"}, Share(16, 4), 4, 1),
        (GPUS, {"devices": 1, "cpus": 8}, Share(8, 1), 1, 3),
    ],
)
def test_what_a_trial_holds_and_how_many_there_is_room_for(
    nodes: list[RayNode], per_trial: dict[str, Any], share: Share, ranks: int, at_once: int
) -> None:
    assert share_of_trial(PerTrial(**per_trial), nodes) == (share, ranks)
    assert capacity(share, nodes) == at_once


@pytest.mark.parametrize(
    ("nodes", "per_trial", "words"),
    [
        (CPUS, {"devices": 5}, "search.per_trial.devices 5: the largest node of the Ray cluster has 4 CPUs"),
        (GPUS, {"devices": 5}, "search.per_trial.devices 5: the largest node of the Ray cluster has 4 GPUs"),
        (GPUS, {"devices": 1, "cpus": 32}, "no node of the Ray cluster has 1 GPU and 32 CPUs; the largest has 4 GPUs"),
    ],
)
def test_a_trial_that_fits_on_no_node(nodes: list[RayNode], per_trial: dict[str, Any], words: str) -> None:
    with pytest.raises(InfrastructureError, match=words):
        share_of_trial(PerTrial(**per_trial), nodes)


def test_a_wrong_metric_is_found_before_the_data_are_prepared(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """The config names the regions, and so what there is to measure."""
    folder, fields = SearchFolder(tmp_path / "run"), {"data__store": str(tmp_path / "store")}
    wrong = read_config(write_config(search={**SEARCH, "metric": "dice/foo"}, **fields))
    with pytest.raises(ConfigError, match="search.metric: found 'dice/foo', expected one .*: dice/ball"):
        check_unprepared(wrong, folder, Share(cpus=1), 1, os.environ)
    check_unprepared(read_config(write_config(search=SEARCH, **fields)), folder, Share(cpus=1), 1, os.environ)
    assert not (tmp_path / "store").exists()


def test_a_node_that_joins_has_room_for_trials_once_it_can_run_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known, unfit, slow = (RayNode(name, name, 2, 0) for name in ("known", "unfit", "slow"))
    alive, answers, said = [known], {"unfit": "unfit: cannot run voxscale: no module", "slow": None}, list[str]()
    monkeypatch.setattr(room, "_ASK_S", 0.0)
    monkeypatch.setattr(room, "look_at_nodes", lambda: alive)
    monkeypatch.setattr(room, "ask_nodes", lambda nodes, _: dict.fromkeys(nodes, "asked"))
    monkeypatch.setattr(room, "read_answer", lambda node, *_, **__: answers[node.id])
    of_trials = Room(Share(cpus=1), tmp_path, [known], said.append)
    assert (of_trials.trials(), of_trials.avoided) == (2, set())
    alive += [unfit, slow]
    assert (of_trials.trials(), of_trials.avoided) == (2, {"unfit", "slow"})
    answers["slow"] = ""
    assert (of_trials.trials(), of_trials.avoided) == (4, {"unfit"})
    assert said == ["warning: unfit: cannot run voxscale: no module; the search goes on without it"]
    alive.remove(known)
    assert of_trials.trials() == 2


@pytest.mark.parametrize(
    ("nodes", "at_once", "said"), [(4, 1, ", on one node, so that 3 of 4 nodes stay idle"), (2, 2, ""), (1, 4, "")]
)
def test_nodes_that_stay_idle_are_told(nodes: int, at_once: int, said: str) -> None:
    assert render_idle(nodes, at_once) == said
