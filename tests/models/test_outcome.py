"""Networks for outcomes: every encoder of the table and the ResNets, from image and features to a few numbers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from voxscale.checkpoint import digest_of
from voxscale.config.load import make_config
from voxscale.config.models import (
    DistMISOptions,
    DynUNetOptions,
    OwnOptions,
    ResNetOptions,
    SegResNetOptions,
    SwinUNETROptions,
    UNetOptions,
    UNETROptions,
    size_problems,
)
from voxscale.errors import ConfigError
from voxscale.models import build_model
from voxscale.models.encoders import ENCODERS
from voxscale.models.outcome import EMBEDDED, OutcomeModel, build_outcome_model

SEGMENTS: dict[str, Any] = {
    "unet": UNetOptions(channels=(4, 8, 16), residual_units=1),
    "unet plain, batch": UNetOptions(channels=(4, 8, 16), residual_units=0, norm="batch", dropout=0.1),
    "segresnet": SegResNetOptions.model_validate({"channels": [8, 16, 32]}),
    "segresnet dropout": SegResNetOptions.model_validate({"channels": [8, 16, 32], "dropout": 0.2}),
    "unetr": UNETROptions(feature_size=2, hidden=12, mlp=24, heads=3),
    "swin_unetr": SwinUNETROptions(feature_size=12, depths=(1, 1, 1, 1), heads=(1, 2, 2, 3)),
    "dynunet": DynUNetOptions(channels=(4, 8, 16)),
    "dynunet residual, supervised": DynUNetOptions(
        channels=(4, 8, 16, 16), residual=True, deep_supervision=2, norm="batch"
    ),
    "distmis_unet": DistMISOptions(channels=(4, 8, 16)),
    "distmis_unet group": DistMISOptions(channels=(4, 8, 16), norm="group", dropout=0.1),
}
RESNETS: dict[str, Any] = {
    "resnet": ResNetOptions(width=8),
    "resnet 2D": ResNetOptions(width=8, dims=2, stem="small", norm="batch"),
    "resnet 2D large": ResNetOptions(width=8, dims=2, dropout=0.2),
    "resnet 34": ResNetOptions(width=8, depth=34, norm="instance", stem="small"),
    "resnet 50": ResNetOptions(width=8, depth=50),
}
SMALL = SEGMENTS | RESNETS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only wait for one another's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def smallest(options: Any) -> tuple[int, int, int]:
    edge = options.reduction
    x = edge if options.takes_one_voxel else edge + options.stride
    return (x, edge, 1 if options.flat else edge)


def build(name: str, in_channels: int = 2, num_features: int = 3, out_channels: int = 2, seed: int = 0) -> Any:
    options = SMALL[name]
    return build_outcome_model(options, in_channels, num_features, out_channels, patch=smallest(options), seed=seed)


def batch(name: str, count: int = 2, in_channels: int = 2, num_features: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    image = torch.randn(count, in_channels, *smallest(SMALL[name]), generator=numbers)
    return image, torch.randn(count, num_features, generator=numbers)


@pytest.mark.parametrize(("num_features", "out_channels"), [(3, 2), (0, 1)])
@pytest.mark.parametrize("name", SMALL)
def test_contract(name: str, num_features: int, out_channels: int) -> None:
    model = build(name, 2, num_features, out_channels)
    image, features = batch(name, num_features=num_features)
    assert not size_problems(SMALL[name], "patches.size", smallest(SMALL[name]))
    output = model(image, features)
    assert (output.shape, output.dtype) == ((2, out_channels), torch.float32)
    output.square().sum().backward()
    without = [key for key, weight in model.named_parameters() if weight.grad is None]
    assert not without, "DDP would wait for their gradients"
    model.eval()
    other = build(name, 2, num_features, out_channels, seed=1).eval()
    state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    other.load_state_dict(load(save(state)))
    with torch.inference_mode():
        rows = model(image, features)
        assert torch.equal(other(image, features), rows)
        alone = torch.cat([model(image[n : n + 1], features[n : n + 1]) for n in range(2)])
        assert torch.allclose(alone, rows, atol=1e-5), "a case's output depends on that case alone"
        assert torch.equal(copy.deepcopy(model)(image, features), rows)


@pytest.mark.parametrize("name", SMALL)
def test_image_and_features_both_count(name: str) -> None:
    model = build(name).eval()
    image, features = batch(name)
    image.requires_grad_()
    features.requires_grad_()
    model(image, features).sum().backward()
    assert image.grad is not None and features.grad is not None
    assert all(grad.abs().sum() > 0 for grad in (*image.grad, *features.grad))


@pytest.mark.parametrize("name", SMALL)
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    digests = [digest_of(build(name, seed=seed).state_dict()) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers were used up"


@pytest.mark.parametrize("name", SMALL)
def test_outputs_start_near_zero(name: str) -> None:
    model = build(name, out_channels=1).eval()
    with torch.inference_mode():
        risks = model(*batch(name, count=3))
    assert not model.head.bias.any()
    assert risks.any() and risks.abs().max() < 1


@pytest.mark.parametrize("name", SMALL)
def test_what_a_network_says_of_itself_is_so(name: str) -> None:
    options, model = SMALL[name], build(name)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    assert bool(norms) == options.batch_statistics
    drops = [module.p for module in model.modules() if isinstance(module, torch.nn.modules.dropout._DropoutNd)]
    assert max(drops) == options.dropout == model.dropout.p
    assert ENCODERS[options.name].width(options) + EMBEDDED == model.head.in_features


@pytest.mark.parametrize("name", SEGMENTS)
def test_the_encoder_is_the_one_of_the_whole_network(name: str) -> None:
    """By name and shape; and with its weights it gives what the network itself hands to its decoder."""
    options = SMALL[name]
    whole = build_model(options, 2, 3, patch=smallest(options), seed=5)
    model = build(name)
    shapes = {key: tensor.shape for key, tensor in whole.state_dict().items()}
    state = model.encoder.state_dict()
    assert {key: shapes.get(key) for key in state} == {key: tensor.shape for key, tensor in state.items()}
    model.encoder.load_state_dict({key: whole.state_dict()[key] for key in state})
    image, _ = batch(name)
    with torch.inference_mode():
        deepest = model.encoder.eval()(image)
        assert torch.equal(deepest, deepest_of(options.name, whole.eval(), image))


def deepest_of(name: str, network: Any, image: torch.Tensor) -> torch.Tensor:
    """What a hook catches on the network's own way from encoder to decoder."""
    if name == "unet":
        part = network.model[1].submodule[1].submodule
    else:
        part = {
            "segresnet": lambda: network.down_layers[-1],
            "unetr": lambda: network.vit.norm,
            "swin_unetr": lambda: network.swinViT,
            "dynunet": lambda: network.bottleneck,
            "distmis_unet": lambda: network.down[-1],
        }[name]()
    caught: list[Any] = []
    part.register_forward_hook(lambda module, inputs, output: caught.append(output))
    network(image)
    (deepest,) = caught
    found: torch.Tensor = deepest[-1] if name == "swin_unetr" else deepest.mT if name == "unetr" else deepest
    return found


@pytest.mark.parametrize(("depth", "layers"), [(18, 20), (34, 36), (50, 53), (101, 104), (152, 155)])
def test_a_resnet_has_its_depth_and_one_norm(depth: Any, layers: int) -> None:
    """Convolutions: the stated depth without the linear layer, and the shortcuts'."""
    for dims, conv in ((2, torch.nn.Conv2d), (3, torch.nn.Conv3d)):
        model = build_outcome_model(
            ResNetOptions(depth=depth, dims=dims, width=8),
            1,
            0,
            1,
            patch=(32, 32, 1),
            seed=0,  # type: ignore[arg-type]
        )
        modules = list(model.modules())
        assert sum(isinstance(module, conv) for module in modules) == layers
        norms = [module for module in modules if isinstance(module, torch.nn.GroupNorm)]
        assert len(norms) == layers and all(norm.num_groups == 8 for norm in norms)
        assert not any(isinstance(module, torch.nn.modules.batchnorm._NormBase) for module in modules)


def test_the_default_resnet_is_the_known_one() -> None:
    """As many weights as torchvision's ResNet-18, but for its head."""
    model: Any = build_outcome_model(ResNetOptions(dims=2, norm="batch"), 3, 0, 10, patch=(64, 64, 1), seed=0)
    assert sum(weight.numel() for weight in model.parameters()) == 11_689_512 - 513 * 1000 + 513 * 10
    names = set(model.encoder.state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer2.0.downsample.0.weight", "layer4.1.bn2.bias"} <= names


@settings(max_examples=25, deadline=None)
@given(
    size=st.tuples(*[st.integers(1, 40)] * 3),
    stem=st.sampled_from(["small", "large"]),
    norm=st.sampled_from(["group", "instance", "batch"]),
    dims=st.sampled_from([2, 3]),
)
def test_a_resnet_takes_every_size_that_is_not_refused(
    size: tuple[int, int, int], stem: Any, norm: Any, dims: Any
) -> None:
    options = ResNetOptions(width=16, stem=stem, norm=norm, dims=dims)
    model = build_outcome_model(options, 1, 0, 1, patch=size, seed=0)
    problems = size_problems(options, "patches.size", size)
    if not problems:
        assert model(torch.randn(1, 1, *size), torch.zeros(1, 0)).shape == (1, 1)
        return
    (problem,) = problems
    assert problem.startswith(f"patches.size {list(size)}")
    with pytest.raises((RuntimeError, ValueError)):
        model(torch.randn(1, 1, *size), torch.zeros(1, 0))


def test_sizes_are_not_rounded_where_they_need_not_be() -> None:
    assert ResNetOptions().stride == 1
    assert not size_problems(ResNetOptions(), "patches.size", (201, 199, 61))
    assert not size_problems(ResNetOptions(dims=2), "patches.size", (33, 7, 1))
    (problem,) = size_problems(ResNetOptions(dims=2), "patches.size", (32, 32, 4))
    assert problem == "patches.size [32, 32, 4]: found 4 slices, expected 1 as model.dims is 2, or model.dims 3"
    (problem,) = size_problems(ResNetOptions(norm="batch"), "patches.size", (32, 32, 9))
    assert problem.endswith("expected an edge of at least 33")


@pytest.mark.parametrize("name", ["unet", "segresnet", "swin_unetr", "dynunet", "distmis_unet", "resnet"])
def test_whole_volumes_may_differ_from_the_trained_size(name: str) -> None:
    model = build(name).eval()
    x, y, z = (2 * n for n in smallest(SMALL[name]))
    with torch.inference_mode():
        assert model(torch.randn(1, 2, x, y, z), torch.zeros(1, 3)).shape == (1, 2)


class Half(torch.nn.Module):
    """Features in half precision without a convolution, which some virtual machines cannot do in it."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.bfloat16()


def test_the_head_computes_in_full_precision() -> None:
    model = OutcomeModel(Half(), 64, 3, 1, dropout=0.0, flat=False)
    image, features = torch.randn(8, 64, 2, 2, 2), torch.randn(8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        risks = model(image, features)
    assert risks.dtype == torch.float32
    assert torch.equal(risks, model(image, features))
    assert not torch.equal(risks, risks.bfloat16().float()), "risks are not rounded into ties"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"depth": 20}, "model.depth: found 20"),
        ({"dims": 4}, "model.dims: found 4"),
        ({"width": 12}, "width 12: expected a multiple of 8, the groups"),
        ({"stem": "tiny"}, "model.stem: found 'tiny'"),
        ({"widht": 8}, "model.widht: unknown key; did you mean 'width'?"),
    ],
)
def test_what_no_resnet_can_be_is_refused(model: dict[str, Any], expected: str) -> None:
    content = {"task": "survival", "data": {"source": "d"}, "model": {"name": "resnet", **model}}
    with pytest.raises(ConfigError) as caught:
        make_config(content, name="c.yaml", base=Path("/base"))
    assert expected in caught.value.message


def test_groups_matter_to_group_norm_alone() -> None:
    assert ResNetOptions(width=12, norm="batch").width == 12


OWN = """
import torch

class Both(torch.nn.Module):
    def __init__(self, in_channels, out_channels, num_features):
        super().__init__()
        self.encoder = torch.nn.Conv3d(in_channels, 4, 1)
        self.head = torch.nn.Linear(4 + num_features, out_channels)
    def forward(self, image, features):
        return self.head(torch.cat([self.encoder(image).mean((2, 3, 4)), features], 1))

class Alone(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.layer = torch.nn.Conv3d(in_channels, out_channels, 1)
    def forward(self, image, softly=False):
        assert softly is False
        return self.layer(image).mean((2, 3, 4))

class Wide(Alone):
    def __init__(self, in_channels, out_channels, num_features=7):
        super().__init__(in_channels, out_channels)
        assert num_features == 7

class Optional(Alone):
    def forward(self, image, features=None):
        return super().forward(image) + features.sum(1, keepdim=True)

def volumes(in_channels, out_channels):
    return torch.nn.Conv3d(in_channels, out_channels, 1)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_outcomes.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_outcomes", raising=False)
    return "own_outcomes"


def build_own(name: str, num_features: int) -> torch.nn.Module:
    return build_outcome_model(OwnOptions(name=name), 2, num_features, 3, patch=(4, 4, 4), seed=0)


@pytest.mark.parametrize(
    ("name", "num_features"), [("Both", 5), ("Both", 0), ("Alone", 0), ("Wide", 0), ("Optional", 2)]
)
def test_a_users_own_network_serves_outcomes(own: str, name: str, num_features: int) -> None:
    model = build_own(f"{own}:{name}", num_features)
    image, features = torch.randn(2, 2, 4, 4, 4), torch.randn(2, num_features)
    assert model(image, features).shape == (2, 3)
    assert set(model.state_dict()) == set(copy.deepcopy(model).state_dict())
    assert copy.deepcopy(model)(image, features).equal(model(image, features))
    assert all(not key.startswith("network") for key in model.state_dict())


@pytest.mark.parametrize(
    ("name", "num_features", "expected"),
    [
        ("Alone", 2, "found a network that takes the image alone, and 2 features; expected forward(image, features)"),
        ("volumes", 0, "found an output of (2, 3, 4, 4, 4), expected (2, 3)"),
    ],
)
def test_an_own_network_that_does_not_serve_outcomes_is_refused(
    own: str, name: str, num_features: int, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_own(f"{own}:{name}", num_features)(torch.randn(2, 2, 4, 4, 4), torch.randn(2, num_features))
    assert caught.value.message.startswith(f"model.name {own}:{name}: {expected}")
    assert caught.value.fix
