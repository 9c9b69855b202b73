"""Kernels of augmentation against SciPy, NumPy and torch's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

from voxscale.config.base import Section
from voxscale.config.training import Blur, Brightness, Contrast, Gamma, LowRes, Noise
from voxscale.data.augment import AddNoise, Coarsen, Multiply, Power, Smooth, Step, Stretch, adjust, draw
from voxscale.data.augment_batch import adjust_batch
from voxscale.data.filters import Scratch

SHAPE = (14, 16, 18)
seeds = st.integers(0, 2**32)


def make_image(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(40, 3, (3, *SHAPE)).astype(np.float32))


def adjusted(transform: Section, seed: int) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What was drawn, the image before and after."""
    before = make_image(seed)
    drawn = draw([transform], np.random.default_rng(seed), channels=3)
    after = before.clone()
    adjust(after, drawn, scratch=Scratch())
    (step,) = drawn.intensity
    return step, before.numpy().astype(float), after.numpy()


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_blur_is_a_gaussian(seed: int) -> None:
    step, before, after = adjusted(Blur(p=1, sigma=(0.3, 2.0)), seed)
    assert isinstance(step, Smooth)
    for sigmas, old, new in zip(step.sigmas, before, after, strict=True):
        if sigmas is None:
            assert np.array_equal(new, old)
            continue
        weight = gaussian_filter(np.ones(SHAPE), sigmas, truncate=3, mode="constant")
        expected = gaussian_filter(old, sigmas, truncate=3, mode="constant") / weight
        assert np.abs(new - expected).max() < 1e-3


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_low_resolution_is_down_and_up_again(seed: int) -> None:
    step, before, after = adjusted(LowRes(p=1, zoom=(0.2, 1.0)), seed)
    assert isinstance(step, Coarsen)
    for zoom, old, new in zip(step.zooms, before, after, strict=True):
        if zoom is None:
            assert np.array_equal(new, old)
            continue
        small = F.interpolate(
            torch.from_numpy(old)[None, None], size=[max(1, round(n * zoom)) for n in SHAPE], mode="nearest-exact"
        )
        assert np.abs(new - F.interpolate(small, size=SHAPE, mode="trilinear")[0, 0].numpy()).max() < 1e-3


@given(seeds, st.booleans())
@settings(max_examples=20, deadline=None)
def test_gamma_bends_and_keeps_the_moments(seed: int, invert: bool) -> None:
    step, before, after = adjusted(Gamma(p=1, gamma=(0.5, 2.0), invert=invert), seed)
    assert isinstance(step, Power)
    sign = -1 if invert else 1
    for exponent, old, new in zip(step.exponents, sign * before, sign * after, strict=True):
        bent = ((old - old.min()) / np.ptp(old)) ** exponent
        assert np.abs(new - ((bent - bent.mean()) / bent.std() * old.std() + old.mean())).max() < 1e-3


@pytest.mark.parametrize("invert", [False, True])
def test_gamma_leaves_a_constant_alone(invert: bool) -> None:
    drawn = draw([Gamma(p=1, invert=invert)], np.random.default_rng(0), channels=1)
    image, batch = torch.full((1, 4, 4, 4), 3.0), torch.full((2, 1, 4, 4, 4), 3.0)
    adjust(image, drawn, scratch=Scratch())
    adjust_batch(batch, [drawn] * 2)
    assert (image == 3).all()
    assert (batch == 3).all()


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_contrast_stretches_within_the_range(seed: int) -> None:
    step, before, after = adjusted(Contrast(p=1, factor=(0.5, 2.0)), seed)
    assert isinstance(step, Stretch)
    for factor, old, new in zip(step.factors, before, after, strict=True):
        expected = np.clip((old - old.mean()) * factor + old.mean(), old.min(), old.max())
        assert np.abs(new - expected).max() < 1e-3


def test_brightness_has_a_factor_for_each_channel() -> None:
    step, before, after = adjusted(Brightness(p=1), 5)
    assert isinstance(step, Multiply)
    assert len(set(step.factors)) == 3
    assert all(0.75 <= factor <= 1.25 for factor in step.factors)
    assert np.allclose(after, before * np.reshape(step.factors, (3, 1, 1, 1)))


def test_noise_has_the_drawn_deviation_and_no_pattern() -> None:
    step, before, after = adjusted(Noise(p=1, std=(0.5, 2.0)), 1)
    assert isinstance(step, AddNoise)
    noise = after - before
    assert noise.std() == pytest.approx(step.std, rel=0.03)
    assert abs(noise.mean()) < 0.05 * step.std
    correlation = np.corrcoef(noise.reshape(3, -1))
    assert np.abs(correlation - np.eye(3)).max() < 0.06, "channels share their noise"
    assert np.array_equal(after, adjusted(Noise(p=1, std=(0.5, 2.0)), 1)[2])
    _, other_before, other = adjusted(Noise(p=1, std=(0.5, 2.0)), 2)
    assert abs(np.corrcoef(noise.ravel(), (other - other_before).ravel())[0, 1]) < 0.06, "samples share their noise"


def test_limits_are_kept_and_channels_chosen_by_chance() -> None:
    rng = np.random.default_rng(0)
    steps: list[Step] = [
        step
        for _ in range(300)
        for step in draw([Blur(p=1), LowRes(p=1, p_channel=0.25), Gamma(p=1)], rng, channels=4).intensity
        if step is not None
    ]
    sigmas = [sigma for step in steps if isinstance(step, Smooth) for sigma in step.sigmas]
    zooms = [zoom for step in steps if isinstance(step, Coarsen) for zoom in step.zooms]
    exponents = [exponent for step in steps if isinstance(step, Power) for exponent in step.exponents]
    assert all(0.5 <= sigma <= 1 for triple in sigmas if triple for sigma in triple)
    assert all(0.5 <= zoom <= 1 for zoom in zooms if zoom)
    assert all(0.7 <= exponent <= 1.5 for exponent in exponents)
    assert abs(np.mean([triple is not None for triple in sigmas]) - 0.5) < 0.06
    assert abs(np.mean([zoom is not None for zoom in zooms]) - 0.25) < 0.06
    assert abs(np.mean(np.array(exponents) < 1) - 0.5) < 0.06


def test_scratch_gives_its_memory_again() -> None:
    scratch = Scratch()
    large = scratch.take("a", (8, 9), torch.float32)
    small = scratch.take("a", (3, 5), torch.float32)
    assert small.shape == (3, 5) and small.is_contiguous()
    assert small.data_ptr() == large.data_ptr()
    assert scratch.take("b", (3, 5), torch.float32).data_ptr() != large.data_ptr()
    assert scratch.take("a", (3, 5), torch.float16).data_ptr() != large.data_ptr()
