"""Every network of the table: built from its options, true to its stride, reproducible, savable."""

from __future__ import annotations

import copy
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from voxscale.checkpoint import digest_of
from voxscale.config.load import make_config
from voxscale.config.models import (
    OWN,
    DistMISOptions,
    DynUNetOptions,
    ModelOptions,
    OwnOptions,
    SegResNetOptions,
    SwinUNETROptions,
    UNetOptions,
    UNETROptions,
    size_problems,
)
from voxscale.errors import ConfigError
from voxscale.models import MODELS, build_model
from voxscale.models.encoders import ENCODERS

SMALL: dict[str, Any] = {
    "unet": UNetOptions(channels=(4, 8, 16), residual_units=1),
    "unet plain, batch": UNetOptions(channels=(4, 8, 16), residual_units=0, norm="batch", dropout=0.1),
    "segresnet": SegResNetOptions.model_validate({"channels": [8, 16, 32]}),
    "unetr": UNETROptions(feature_size=2, hidden=12, mlp=24, heads=3),
    "swin_unetr": SwinUNETROptions(feature_size=12, depths=(1, 1, 1, 1), heads=(1, 2, 2, 3)),
    "dynunet": DynUNetOptions(channels=(4, 8, 16)),
    "dynunet residual, supervised": DynUNetOptions(
        channels=(4, 8, 16, 16), residual=True, deep_supervision=2, norm="batch"
    ),
    "distmis_unet": DistMISOptions(channels=(4, 8, 16)),
    "distmis_unet group": DistMISOptions(channels=(4, 8, 16), norm="group", dropout=0.1),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only wait for one another's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def smallest(options: Any) -> tuple[int, int, int]:
    edge = options.stride
    return (edge, edge, edge) if options.takes_one_voxel else (edge, edge, 2 * edge)


def build(name: str, in_channels: int = 4, out_channels: int = 3, seed: int = 0) -> torch.nn.Module:
    return build_model(SMALL[name], in_channels, out_channels, patch=smallest(SMALL[name]), seed=seed)


def test_the_table_has_what_the_config_offers() -> None:
    union = typing.get_args(ModelOptions)[0]
    offered = {typing.get_args(variant)[0].model_fields["name"].default for variant in typing.get_args(union)}
    assert offered == ENCODERS.keys() | {OWN}
    assert offered - {"resnet"} == MODELS.keys() == {options.name for options in SMALL.values()} | {OWN}


@pytest.mark.parametrize("channels", [(4, 3), (1, 14)])
@pytest.mark.parametrize("name", SMALL)
def test_contract(name: str, channels: tuple[int, int]) -> None:
    options, size = SMALL[name], smallest(SMALL[name])
    model = build(name, *channels)
    image = torch.randn(1, channels[0], *size, generator=torch.Generator().manual_seed(0))
    levels = getattr(options, "deep_supervision", 0)
    output = model(image)
    assert output.shape == (1, *((levels + 1,) if levels else ()), channels[1], *size)
    output.square().mean().backward()
    without = [key for key, weight in model.named_parameters() if weight.grad is None]
    assert not without, "DDP would wait for their gradients"
    model.eval()
    with torch.inference_mode():
        assert model(image).shape == (1, channels[1], *size)
    state = model.state_dict()
    other = build(name, *channels, seed=1).eval()
    other.load_state_dict(load(save({key: tensor.contiguous() for key, tensor in state.items()})))
    with torch.inference_mode():
        assert torch.equal(other(image), model(image))


@pytest.mark.parametrize("name", SMALL)
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    digests = [digest_of(build(name, seed=seed).state_dict()) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers were used up"


@pytest.mark.parametrize("name", SMALL)
def test_what_a_network_says_of_itself_is_so(name: str) -> None:
    options, model = SMALL[name], build(name)
    modules = list(model.modules())
    batch_norms = [module for module in modules if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    assert bool(batch_norms) == options.batch_statistics
    drops = [module.p for module in modules if isinstance(module, torch.nn.modules.dropout._DropoutNd)]
    assert max(drops, default=0) == options.dropout
    x, y, z = smallest(options)
    larger = torch.zeros(1, 4, x, y, z + options.stride)
    if options.fixed_size:
        with pytest.raises(RuntimeError):
            model.eval()(larger)
    else:
        assert model.eval()(larger).shape[2:] == larger.shape[2:]


@pytest.mark.parametrize("name", SMALL)
def test_the_sizes_that_the_config_refuses_do_fail(name: str) -> None:
    options = SMALL[name]
    assert not size_problems(options, "patches.size", smallest(options))
    x, y, z = smallest(options)
    odd = (x, y, z + options.stride // 2)
    (problem,) = size_problems(options, "patches.size", odd)
    assert problem.startswith(f"patches.size {list(odd)} does not fit the model's strides ({options.stride}); nearest:")
    # SegResNet crops or pads nothing and MaxPool3d rounds down: each notices in its own way.
    with pytest.raises((RuntimeError, ValueError)):
        build_model(options, 1, 1, patch=odd, seed=0)(torch.zeros(1, 1, *odd))


@pytest.mark.parametrize("name", [name for name, options in SMALL.items() if not options.takes_one_voxel])
def test_one_voxel_at_the_coarsest_level_is_refused(name: str) -> None:
    options = SMALL[name]
    size = (options.stride,) * 3
    (problem,) = size_problems(options, "patches.size", size)
    assert f"expected an edge of at least {2 * options.stride}" in problem
    with pytest.raises(ValueError, match="Expected more than 1"):
        build(name, 1)(torch.zeros(1, 1, *size))


def test_checkpointing_changes_memory_alone() -> None:
    options = SMALL["swin_unetr"]
    image = torch.randn(1, 1, *smallest(options), generator=torch.Generator().manual_seed(0))
    gradients = []
    for each in (options, options.model_copy(update={"checkpoint": True})):
        model = build_model(each, 1, 2, patch=smallest(each), seed=0)
        model(image).square().mean().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(plain, checkpointed) for plain, checkpointed in zip(*gradients, strict=True))


def test_no_weight_is_saved_twice() -> None:
    model = build("dynunet residual, supervised")
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values() if tensor.numel()]
    assert len(pointers) == len(set(pointers))
    twin = copy.deepcopy(model)
    twin.skip_layers.downsample.conv1.conv.weight.data.zero_()  # type: ignore[union-attr]
    assert not twin.input_block.conv1.conv.weight.any(), "the copy's chain is its own"  # type: ignore[union-attr]
    assert model.input_block.conv1.conv.weight.any()  # type: ignore[union-attr]


def test_distmis_unet_has_the_stated_filters() -> None:
    model = build_model(DistMISOptions(), 4, 1, patch=(16, 16, 16), seed=0)
    widths = [module.out_channels for module in model.modules() if isinstance(module, torch.nn.Conv3d)]
    assert widths == [8, 8, 16, 16, 32, 32, 64, 64, 32, 32, 16, 16, 8, 8, 1]
    norm = next(module for module in model.modules() if isinstance(module, torch.nn.BatchNorm3d))
    features = norm(torch.randn(2, 8, 4, 4, 4) * 3 + 5)
    assert torch.allclose(features.mean((0, 2, 3, 4)), torch.zeros(8), atol=1e-5), "over channels, not another axis"


def refusal(**model: Any) -> str:
    content = {"data": {"source": "d"}, "model": model}
    with pytest.raises(ConfigError) as caught:
        make_config(content, name="c.yaml", base=Path("/base"))
    return caught.value.message


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"name": "unt"}, ["model: found name 'unt', expected unet, segresnet", "did you mean 'unet'?"]),
        ({"name": "my.module"}, [f"distmis_unet, resnet, {OWN}"]),
        ({"name": "dynunet", "chanels": [4]}, ["model.chanels: unknown key; did you mean 'channels'?"]),
        ({"name": "a.b:c", "stide": 8}, ["model.stide: unknown key; did you mean 'stride'?"]),
        ({"name": "a b:c"}, ["model.name: found 'a b:c', expected"]),
        ({"name": "a.b:c", "options": {"in_channels": 1}}, ["options.in_channels: comes from the data; leave it out"]),
        ({"name": "unetr", "hidden": 100}, ["model: hidden 100: expected a multiple of 12, its heads"]),
        (
            {"name": "swin_unetr", "feature_size": 20, "heads": [3, 6, 12, 24]},
            [
                "feature_size 20: expected a multiple of 12",
                "stage 1 features 20: expected a multiple of 3, its heads",
                "stage 4",
            ],
        ),
        ({"name": "dynunet", "deep_supervision": 4}, ["deep_supervision 4: expected 0 to 3 for 5 channels"]),
        ({"name": "distmis_unet", "norm": "group", "channels": [6, 8, 10]}, ["channels 6", "channels 10"]),
        (
            {"name": "segresnet", "channels": [12, 20], "blocks_up": [1, 1]},
            ["channels [12, 20]: expected each twice", "channels 12: expected a multiple of", "found 2 blocks_down"],
        ),
    ],
)
def test_what_no_network_can_be_is_refused_all_at_once(model: dict[str, Any], expected: list[str]) -> None:
    message = refusal(**model)
    for part in expected:
        assert part in message


def test_a_users_own_network_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_here.py").write_text(
        "import torch\n"
        "def network(in_channels, out_channels, width):\n"
        "    return torch.nn.Conv3d(in_channels, out_channels * width, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = OwnOptions(name="mine_here:network", options={"width": 2}, stride=8)
    model = build_model(options, 2, 3, patch=(8, 8, 8), seed=0)
    assert model(torch.zeros(1, 2, 8, 8, 8)).shape == (1, 6, 8, 8, 8)
    assert options.stride == 8
    again = build_model(options, 2, 3, patch=(8, 8, 8), seed=0)
    assert digest_of(again.state_dict()) == digest_of(model.state_dict())


@pytest.mark.parametrize(
    ("text", "function", "expected"),
    [
        (None, "f", "found ModuleNotFoundError: No module named 'mine_{n}'"),
        ("def f(:", "f", "found SyntaxError"),
        ("raise SystemExit(3)", "f", "found SystemExit: 3 when mine_{n} was imported"),
        ("def g(): pass", "f", "found nothing called f in"),
        ("f = 3", "f", "found int called f in"),
        ("def f(in_channels, out_channels): return 1 / 0", "f", "found ZeroDivisionError: division by zero"),
        ("def f(in_channels): pass", "f", "found TypeError"),
        ("def f(in_channels, out_channels): return [1]", "f", "found list returned, expected a torch.nn.Module"),
    ],
)
def test_what_is_wrong_with_a_users_own_network_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, function: str, expected: str
) -> None:
    number = abs(hash((text, expected)))
    if text is not None:
        (tmp_path / f"mine_{number}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError) as caught:
        build_model(OwnOptions(name=f"mine_{number}:{function}"), 1, 1, patch=(8, 8, 8), seed=0)
    assert f"model.name mine_{number}:{function}: " in caught.value.message
    assert expected.format(n=number) in caught.value.message
    assert "expected" in caught.value.message
    assert caught.value.fix


def test_networks_are_imported_when_they_are_built() -> None:
    code = "import sys, voxscale.models; print([name for name in sys.modules if name.startswith('monai')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
