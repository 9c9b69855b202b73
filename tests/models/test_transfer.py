"""Encoders taken over from other runs, and held as they are."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from voxscale.checkpoint import digest_of
from voxscale.config.models import (
    DistMISOptions,
    DynUNetOptions,
    ResNetOptions,
    SegResNetOptions,
    SwinUNETROptions,
    UNetOptions,
    UNETROptions,
)
from voxscale.errors import ConfigError
from voxscale.models import build_model
from voxscale.models.outcome import build_outcome_model
from voxscale.models.transfer import freeze_encoder, take_encoder

PATCH = (32, 32, 64)
SEGMENTS: dict[str, Any] = {
    "unet": UNetOptions(channels=(4, 8, 16)),
    "segresnet": SegResNetOptions.model_validate({"channels": [8, 16]}),
    "unetr": UNETROptions(feature_size=2, hidden=12, mlp=24, heads=3),
    "swin_unetr": SwinUNETROptions(feature_size=12, depths=(1, 1, 1, 1), heads=(1, 2, 2, 3)),
    "dynunet": DynUNetOptions(channels=(4, 8, 16), norm="batch"),
    "distmis_unet": DistMISOptions(channels=(4, 8, 16)),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def outcome(options: Any, in_channels: int = 1, num_features: int = 2, out_channels: int = 1, seed: int = 0) -> Any:
    return build_outcome_model(options, in_channels, num_features, out_channels, patch=PATCH, seed=seed)


def segmenting(options: Any, in_channels: int = 1, seed: int = 7) -> nn.Module:
    return build_model(options, in_channels, 3, patch=PATCH, seed=seed)


@pytest.mark.parametrize("name", SEGMENTS)
def test_from_segmentation_to_outcomes(name: str) -> None:
    whole, model = segmenting(SEGMENTS[name]).state_dict(), outcome(SEGMENTS[name])
    head = copy.deepcopy(model.head.state_dict())
    transfer = take_encoder(model, whole)
    state = model.encoder.state_dict()
    assert set(transfer.loaded) == set(state)
    assert all(torch.equal(tensor, whole[key]) for key, tensor in state.items())
    assert digest_of(model.head.state_dict()) == digest_of(head), "the head is the model's own"
    assert not transfer.differing and not transfer.missing
    assert set(transfer.left) == set(whole) - set(state)
    assert f"encoder: {len(state)} of {len(state)} tensors taken over; {len(transfer.left)} left" in transfer.as_text()


def test_from_pretraining_to_survival() -> None:
    """Another head, other features: all of the encoder comes over, and the source's own head stays."""
    options = ResNetOptions(width=8, norm="batch")
    source = outcome(options, num_features=0, out_channels=12, seed=3)
    source.encoder.bn1.running_mean.fill_(0.25)
    model = outcome(options, num_features=4)
    transfer = take_encoder(model, source.state_dict())
    assert digest_of(model.encoder.state_dict()) == digest_of(source.encoder.state_dict())
    assert transfer.left == ("head.bias", "head.weight")
    assert transfer.as_text().endswith("2 left in the source, no part of this encoder: head.bias, head.weight")


@pytest.mark.parametrize("name", SEGMENTS)
def test_from_outcomes_back_to_segmentation(name: str) -> None:
    source, model = outcome(SEGMENTS[name]).state_dict(), segmenting(SEGMENTS[name])
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    transfer = take_encoder(model, source)
    assert {f"encoder.{key}" for key in transfer.loaded} == {key for key in source if key.startswith("encoder.")}
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, source[f"encoder.{key}"] if key in transfer.loaded else before[key])
    assert transfer.part == "network" and transfer.missing


def test_other_channels_are_a_reason_not_a_crash() -> None:
    source, model = segmenting(SEGMENTS["segresnet"], in_channels=4).state_dict(), outcome(SEGMENTS["segresnet"])
    before = copy.deepcopy(model.encoder.state_dict())
    transfer = take_encoder(model, source)
    ((name, shapes),) = transfer.differing.items()
    assert name.startswith("convInit") and shapes == ((8, 4, 3, 3, 3), (8, 1, 3, 3, 3))
    assert f"1 of another shape: {name} (found 8×4×3×3×3, expected 8×1×3×3×3)" in transfer.as_text()
    assert torch.equal(before[name], model.encoder.state_dict()[name])
    record = json.loads(json.dumps(transfer.as_json()))
    assert record["differing"] == [{"name": name, "found": [8, 4, 3, 3, 3], "expected": [8, 1, 3, 3, 3]}]
    assert record["part"] == "encoder" and len(record["loaded"]) == len(model.encoder.state_dict()) - 1
    assert record["missing"] == [] and record["left"] == list(transfer.left)


def test_running_statistics_that_the_source_has_not_are_named() -> None:
    source = outcome(ResNetOptions(width=8, norm="group")).state_dict()
    transfer = take_encoder(outcome(ResNetOptions(width=8, norm="batch")), source)
    assert "bn1.running_mean" in transfer.missing and "bn1.weight" in transfer.loaded
    assert f"{len(transfer.missing)} not in the source: bn1.running_mean, " in transfer.as_text()
    assert f" and {len(transfer.missing) - 3} more" in transfer.as_text()


def test_unetr_of_another_patch_keeps_its_own_positions() -> None:
    options = SEGMENTS["unetr"]
    source = build_model(options, 1, 2, patch=(16, 16, 32), seed=1).state_dict()
    transfer = take_encoder(outcome(options), source)
    assert transfer.differing == {"vit.patch_embedding.position_embeddings": ((1, 2, 12), (1, 16, 12))}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SegResNetOptions.model_validate({"channels": [8, 16]}), "not in the source"),
        (UNetOptions(channels=(6, 12, 24)), "of another shape: model.0."),  # the slopes of its activations would fit
    ],
)
def test_a_source_that_does_not_fit_is_refused_with_the_reasons(source: Any, expected: str) -> None:
    model = outcome(SEGMENTS["unet"])
    before = digest_of(model.state_dict())
    with pytest.raises(ConfigError) as caught:
        take_encoder(model, segmenting(source).state_dict())
    first, *reasons = caught.value.message.split("\n")
    assert first == "train.init_from: found no layer that fits the encoder"
    assert any(expected in reason for reason in reasons)
    assert caught.value.fix and digest_of(model.state_dict()) == before


def test_an_empty_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="not in the source"):
        take_encoder(outcome(SEGMENTS["unet"]), {})


def step(model: nn.Module) -> None:
    """Two steps with decay, and a validation between them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    numbers = torch.Generator().manual_seed(0)
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        image = torch.randn(3, 1, 32, 32, 4, generator=numbers)
        model(image, torch.randn(3, 2, generator=numbers)).square().sum().backward()
        optimizer.step()
        model.eval()


@pytest.mark.parametrize(
    "options",
    [
        ResNetOptions(width=8, norm="batch", stem="small", dropout=0.1),
        DistMISOptions(channels=(4, 8), dropout=0.1),
        UNetOptions(channels=(4, 8), norm="batch"),
    ],
)
def test_a_frozen_encoder_stays_as_it_is_and_then_trains(options: Any) -> None:
    model = outcome(options)
    freeze_encoder(model, True)
    encoder, head = digest_of(model.encoder.state_dict()), digest_of(model.head.state_dict())
    step(model)
    assert digest_of(model.encoder.state_dict()) == encoder, "weights or running statistics moved"
    assert digest_of(model.head.state_dict()) != head
    assert all(weight.grad is None for weight in model.encoder.parameters())
    assert all(weight.requires_grad for part in (model.head, model.embed) for weight in part.parameters())
    freeze_encoder(model, False)
    step(model)
    after = model.encoder.state_dict()
    assert digest_of(after) != encoder
    assert {int(tensor) for key, tensor in after.items() if key.endswith("num_batches_tracked")} == {2}


def test_freezing_holds_statistics_and_leaves_dropout() -> None:
    model = outcome(DistMISOptions(channels=(4, 8), dropout=0.1))

    def modes() -> tuple[set[bool], set[bool], bool]:
        of = [{part.training for part in model.encoder.modules() if isinstance(part, kind)} for kind in KINDS]
        return of[0], of[1], model.head.training

    freeze_encoder(model, True)
    assert modes() == ({False}, {True}, True)
    model.eval()
    assert modes() == ({False}, {False}, False)
    freeze_encoder(model, True)
    model.train()
    assert modes() == ({False}, {True}, True)
    freeze_encoder(model, False)
    assert modes() == ({True}, {True}, True)
    model.eval()
    freeze_encoder(model, False)
    assert modes() == ({False}, {False}, False)


KINDS = (nn.BatchNorm3d, nn.Dropout3d)


def test_norms_that_replace_the_frozen_ones_are_held_too() -> None:
    """As SyncBatchNorm does on GPUs, after the freeze; and a copy holds its own."""
    model = outcome(ResNetOptions(width=8, norm="batch", stem="small"))
    freeze_encoder(model, True)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    converted.train()
    norms = [part for part in converted.encoder.modules() if isinstance(part, nn.SyncBatchNorm)]
    assert norms and not any(norm.training for norm in norms)
    assert not any(part.training for part in model.encoder.modules() if isinstance(part, nn.BatchNorm3d))
    freeze_encoder(converted, False)
    assert all(norm.training for norm in norms)
    model.train()
    assert not any(part.training for part in model.encoder.modules() if isinstance(part, nn.BatchNorm3d))


def test_a_network_without_an_encoder_cannot_be_frozen() -> None:
    with pytest.raises(ConfigError, match="found a network without a part called encoder"):
        freeze_encoder(nn.Linear(2, 2), True)
