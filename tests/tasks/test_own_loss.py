"""A user's own loss: what it must return, and what is said where it does not. The contract suite has tasks with one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import tiny_config
from voxscale.config.load import make_config, plain
from voxscale.config.losses import OwnLossOptions
from voxscale.errors import ConfigError
from voxscale.launch.placing import own_code
from voxscale.tasks.own import OwnLoss


def own(name: str, **fields: object) -> OwnLoss:
    return OwnLoss(OwnLossOptions(name=f"own_losses:{name}", **fields))


def of_samples() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 4, 4, 4, generator=random).requires_grad_(), torch.zeros(3, 2, 4, 4, 4)


def test_numbers_of_samples_are_averaged_and_options_reach_the_function() -> None:
    output, target = of_samples()
    loss = own("squares", options={"power": 4})
    loss.check()
    rows = loss.rows(output, target)
    assert rows.shape == (3, 1)
    assert loss.loss(rows).item() == pytest.approx((output**4).mean().item())


def test_rows_are_reduced_over_the_batch() -> None:
    output, target = of_samples()
    loss = own("sums", reduce="own_losses:ratio")
    loss.check()
    assert loss.loss(loss.rows(output, target)).item() == pytest.approx(output.square().sum().item() / 3)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("absent", {}, "loss.name own_losses:absent: found nothing called absent in"),
        ("NUMBER", {}, "found int called NUMBER in"),
        ("squares", {"options": {"powr": 3}}, "unexpected keyword argument 'powr', expected a function that takes"),
        ("ratio", {}, "TypeError: too many positional arguments, expected a function that takes (output, target)"),
        ("sums", {"reduce": "own_losses:squares"}, "loss.reduce own_losses:squares: found TypeError"),
        ("sums", {"reduce": "own_nothing:ratio"}, "loss.reduce own_nothing:ratio: found ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_runs(
    name: str, fields: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        own(name, **fields).check()
    assert expected in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("mean_of_batch", {}, "found [] returned, expected [3] or [3, k]"),
        ("no_tensor", {}, "found float returned"),
        ("without_gradient", {}, "found a loss without gradient"),
        ("sums", {"reduce": "own_losses:keeps_rows"}, "found [3, 2] returned, expected a tensor of one number"),
    ],
)
def test_what_it_returns_is_looked_at(name: str, fields: dict[str, object], expected: str) -> None:
    output, target = of_samples()
    loss = own(name, **fields)
    with pytest.raises(ConfigError) as caught:
        loss.loss(loss.rows(output, target))
    assert expected in caught.value.message


def test_several_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match="several levels"):
        own("squares").rows(torch.zeros(1, 2, 3, 4, 4, 4), torch.zeros(1, 3, 4, 4, 4))


def test_it_stands_in_a_config_and_is_written_out(dataset: Path) -> None:
    content = tiny_config(dataset, loss={"name": "own_losses:sums", "reduce": "own_losses:ratio"})
    loss = plain(make_config(content, name="tiny", base=Path()))["loss"]
    assert loss == {"name": "own_losses:sums", "options": {}, "reduce": "own_losses:ratio"}
    with pytest.raises(ConfigError, match="loss.redcue: unknown key; did you mean 'reduce'"):
        make_config(tiny_config(dataset, loss={"name": "a:b", "redcue": "a:c"}), name="tiny", base=Path())


def test_images_see_the_folders_of_both_functions(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks in a container import from there; a folder with both is bound once."""
    (tmp_path / "mine_reduce.py").touch()
    monkeypatch.chdir(tmp_path)
    loss = {"name": "own_losses:sums", "reduce": "mine_reduce:ratio"}
    content = tiny_config(dataset, loss=loss, model={"name": "own_losses:network"})
    found = own_code(make_config(content, name="tiny", base=Path()))
    assert found == [Path(__file__).parents[1], tmp_path]
