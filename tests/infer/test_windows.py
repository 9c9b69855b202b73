"""Sliding windows against MONAI's, and against the network itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from monai.inferers import sliding_window_inference

from voxscale.infer.windows import predict_volume, starts


@given(some.integers(1, 200), some.integers(1, 64), some.floats(0, 0.95))
def test_windows_cover_the_axis(length: int, window: int, overlap: float) -> None:
    places = starts(length, window, overlap)
    assert places == sorted(set(places))
    covered = {at + offset for at in places for offset in range(window)}
    assert covered >= set(range(length))
    assert places[-1] == max(0, length - window)


@pytest.mark.parametrize("shape", [(20, 24, 17), (9, 30, 16), (8, 8, 8)])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.7])
def test_a_local_network_gives_the_same_everywhere(shape: tuple[int, int, int], overlap: float) -> None:
    image = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))

    def network(patch: torch.Tensor) -> torch.Tensor:
        return torch.stack([patch[:, 0] * 2, patch[:, 1] - 1, patch.sum(1)], dim=1)

    output = predict_volume(network, image, (16, 16, 16), overlap)
    assert torch.allclose(output, network(image[None])[0], atol=1e-5)


def test_agrees_with_monai_where_windows_agree() -> None:
    torch.manual_seed(0)
    network = torch.nn.Conv3d(1, 2, 5, padding=2)
    image = torch.randn(1, 32, 32, 32)
    with torch.no_grad():
        ours = predict_volume(network, image, (16, 16, 16), 0.5)
        theirs = sliding_window_inference(image[None], (16, 16, 16), 1, network, 0.5, mode="gaussian")[0]
    assert torch.allclose(ours, theirs, atol=1e-4)
