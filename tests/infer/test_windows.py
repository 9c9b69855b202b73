"""Sliding windows against MONAI's, and against the network itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from monai.data.utils import dense_patch_slices
from monai.inferers import sliding_window_inference
from monai.inferers.utils import _get_scan_interval

from voxscale.errors import ConfigError
from voxscale.infer.windows import Network, Size, Windows, predict_slabs, predict_volume, starts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than these small volumes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@some.composite
def layouts(draw: some.DrawFn) -> tuple[Size, Windows]:
    """A volume and windows over it, at most four along an axis; the volume may be smaller than a window."""
    overlap = draw(some.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75]))
    size = tuple(draw(some.integers(1, 14)) for _ in range(3))
    shape = tuple(draw(some.integers(1, n + 3 * max(1, int(n * (1 - overlap))))) for n in size)
    return shape, Windows(size, overlap, draw(some.sampled_from(["gaussian", "constant"])))  # type: ignore[arg-type]


def some_image(channels: int, shape: Size, seed: int = 0) -> torch.Tensor:
    return torch.randn(channels, *shape, generator=torch.Generator().manual_seed(seed))


def some_network(in_channels: int, out_channels: int, seed: int = 0) -> torch.nn.Module:
    """What it gives depends on where in the window a voxel lies, and on its neighbours."""
    torch.manual_seed(seed)
    return torch.nn.Conv3d(in_channels, out_channels, 3, padding=1).eval()


def by_monai(network: Network, image_cxyz: torch.Tensor, windows: Windows) -> torch.Tensor:
    with torch.no_grad():
        output = sliding_window_inference(
            image_cxyz[None], windows.size, 1, network, windows.overlap, mode=windows.weights
        )
    return output[0]  # type: ignore[index,return-value]


@given(some.integers(1, 200), some.integers(1, 64), some.floats(0, 0.95))
def test_windows_stand_where_monai_puts_them(length: int, window: int, overlap: float) -> None:
    places = starts(length, window, overlap)
    whole = (max(length, window),)
    interval = _get_scan_interval(whole, (window,), 1, (overlap,))
    assert places == [part.start for (part,) in dense_patch_slices(whole, (window,), interval)]
    assert {at + offset for at in places for offset in range(window)} >= set(range(length))


@settings(max_examples=150, deadline=None)
@given(layouts(), some.integers(1, 5))
def test_equals_monai(layout: tuple[Size, Windows], classes: int) -> None:
    shape, windows = layout
    network, image = some_network(2, classes), some_image(2, shape)
    ours = predict_volume(network, image, windows)
    assert not ours.requires_grad
    torch.testing.assert_close(ours, by_monai(network, image, windows), atol=1e-4, rtol=0)


@settings(deadline=None)
@given(layouts())
def test_slabs_are_in_order_disjoint_and_cover_the_volume(layout: tuple[Size, Windows]) -> None:
    shape, windows = layout
    touched, order = torch.zeros(shape, dtype=torch.int32), []
    for box, output in predict_slabs(some_network(1, 3), some_image(1, shape), windows, device=CPU):
        touched[box] += 1
        order.append(tuple(part.start for part in box))
        assert output.shape == (3, *(part.stop - part.start for part in box))
        assert output.dtype == torch.float32
    assert (touched == 1).all()
    assert order == sorted(order)


@settings(max_examples=30, deadline=None)
@given(layouts())
def test_mirrored_windows_are_the_mean_over_all_flips(layout: tuple[Size, Windows]) -> None:
    shape, windows = layout
    network, image = some_network(1, 2), some_image(1, shape)
    flips = [axes for count in range(4) for axes in itertools.combinations((2, 3, 4), count)]

    def mirrored(patch: torch.Tensor) -> torch.Tensor:
        return torch.stack([network(patch.flip(axes)).flip(axes) for axes in flips]).mean(0)

    ours = predict_volume(network, image, replace(windows, mirror=True))
    torch.testing.assert_close(ours, by_monai(mirrored, image, windows), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(20, 24, 17), (9, 30, 16), (8, 8, 8), (16, 17, 40)])
@pytest.mark.parametrize("mirror", [False, True])
def test_a_local_network_gives_the_same_everywhere(shape: Size, mirror: bool) -> None:
    def network(patch: torch.Tensor) -> torch.Tensor:
        return torch.stack([patch[:, 0] * 2, patch[:, 1] - 1, patch.sum(1)], dim=1)

    image = some_image(2, shape)
    output = predict_volume(network, image, Windows((16, 16, 16), 0.6, mirror=mirror))
    assert torch.allclose(output, network(image[None])[0], atol=1e-5)


def test_the_same_bit_for_bit_whatever_ran_before() -> None:
    network, image = some_network(1, 3), some_image(1, (25, 18, 40))
    windows = Windows((12, 12, 12), 0.5)
    first = predict_volume(network, image, windows)
    predict_volume(some_network(1, 2, seed=1), some_image(1, (40, 9, 9)), Windows((8, 16, 8), 0.7))
    assert torch.equal(predict_volume(network, image, windows), first)


def test_half_precision_images_and_outputs_are_summed_in_float32() -> None:
    image = some_image(1, (20, 20, 30)).half()
    windows = Windows((12, 12, 12), 0.75)
    network = some_network(1, 2)
    assert torch.equal(predict_volume(network, image, windows), predict_volume(network, image.float(), windows))

    def halved(patch: torch.Tensor) -> torch.Tensor:
        assert patch.dtype == torch.float32
        return patch.bfloat16()

    for mirror in (False, True):
        output = predict_volume(halved, image, replace(windows, mirror=mirror))
        assert output.dtype == torch.float32
        assert torch.allclose(output, image.bfloat16().float(), rtol=1e-5)  # sums in bfloat16 would be off by 1e-2


@pytest.mark.parametrize("mirror", [False, True])
def test_a_network_that_works_in_place_harms_neither_image_nor_result(mirror: bool) -> None:
    def network(patch: torch.Tensor) -> torch.Tensor:
        return patch.mul_(2).add_(1)

    image = some_image(1, (20, 7, 9))  # padded in two axes
    before = image.clone()
    output = predict_volume(network, image, Windows((10, 10, 10), 0.5, mirror=mirror))
    assert torch.equal(image, before)
    assert torch.allclose(output, before * 2 + 1, atol=1e-5)


def test_memory_is_of_one_slab_and_is_used_again() -> None:
    network, image, windows = some_network(1, 3), some_image(1, (16, 16, 400)), Windows((8, 8, 24), 0.5)
    memory, lengths = set(), []
    for box, output in predict_slabs(network, image, windows, device=CPU):
        memory.add((output.untyped_storage().data_ptr(), output.untyped_storage().nbytes()))
        lengths.append(box[2].stop - box[2].start)
    ((_, held),) = memory
    assert held == 3 * 16 * 16 * 24 * 4  # the length of a window along the longest axis
    assert max(lengths) == 24 // 4


def test_an_output_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"output of shape \[1, 1, 6, 6, 6\] for an input of shape \[1, 1, 8, 8, 8\]"):
        predict_volume(torch.nn.Conv3d(1, 1, 3), some_image(1, (9, 9, 9)), Windows((8, 8, 8)))
