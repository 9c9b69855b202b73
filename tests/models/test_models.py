"""Every network of the table: built from its options, true to its stride, reproducible."""

from __future__ import annotations

import typing

import pytest
import torch

from voxscale.checkpoint import digest_of
from voxscale.config.models import ModelOptions, SegResNetOptions, UNetOptions
from voxscale.models import MODELS, build_model

SMALL = {
    "unet": UNetOptions(channels=(4, 8, 16), residual_units=1),
    "segresnet": SegResNetOptions.model_validate({"channels": [8, 16, 32]}),
}


def test_the_table_has_what_the_config_offers() -> None:
    union = typing.get_args(ModelOptions)[0]
    offered = {typing.get_args(variant)[0].model_fields["name"].default for variant in typing.get_args(union)}
    assert offered == MODELS.keys() == SMALL.keys()


@pytest.mark.parametrize("name", MODELS)
def test_output_has_the_shape_of_the_input_and_the_asked_channels(name: str) -> None:
    options = SMALL[name]
    edge = 4 * options.stride
    output = build_model(options, 2, 3, seed=0)(torch.zeros(1, 2, edge, edge, edge + options.stride))
    assert output.shape == (1, 3, edge, edge, edge + options.stride)


def test_a_size_that_does_not_fit_the_stride_does_fail() -> None:
    """The rule that the config enforces is the network's own."""
    options = SMALL["unet"]
    with pytest.raises(RuntimeError):
        build_model(options, 1, 1, seed=0)(torch.zeros(1, 1, options.stride * 4 + 1, 16, 16))


@pytest.mark.parametrize("name", MODELS)
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    digests = [digest_of(build_model(SMALL[name], 1, 1, seed=seed).state_dict()) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers were used up"
