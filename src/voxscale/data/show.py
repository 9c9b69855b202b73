"""Draw a case, or what augmentation makes of its patches, as it will be trained on."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.affines import voxel_sizes
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from voxscale.config.schema import Config
from voxscale.data.cases import Case, Manifest
from voxscale.data.geometry import Shape
from voxscale.data.preprocess import PreparedCase, preprocess
from voxscale.data.room import beyond_memory
from voxscale.data.volumes import Floats, Labels, read_case
from voxscale.errors import ConfigError, DataError, printable
from voxscale.files import publish

COLOURS = np.array(
    [(230, 75, 60), (60, 180, 75), (65, 120, 240), (250, 190, 40), (170, 85, 220), (60, 200, 210), (240, 110, 190)],
    np.float32,
)
_OPACITY = 0.45
_EDGE = 220  # of a panel, in pixels
_CAPTION = 16
_FRAMES, _GIF_COLOURS = 32, 64
_PATCHES = 12

Picture = NDArray[np.uint8]  # (height, width, 3)
Spacing = NDArray[np.float64]


def choose_case(manifest: Manifest, wanted: str | None, out: Path) -> Case:
    """The case of that id, or the first; what cannot be drawn to `out` is refused before anything is read."""
    if out.suffix.lower() not in (".png", ".gif"):
        raise ConfigError(f"--out {out}: found {out.suffix or 'no ending'}, expected .png or .gif", fix="rename it")
    if out.is_dir():
        raise ConfigError(f"--out {out}: found a folder, expected a file", fix="choose another name")
    for case in manifest.cases:
        if wanted is None or case.id == wanted:
            return case
    ids = [case.id for case in manifest.cases]
    near = difflib.get_close_matches(wanted or "", ids, n=1) or ids[:1]
    raise DataError(f"--case {wanted}: no such case among {len(ids)}", fix=f"e.g. --case {near[0]}")


def read_prepared(case: Case, manifest: Manifest, config: Config) -> PreparedCase:
    try:
        raw = read_case(case, channels=len(manifest.channels), labels=manifest.labels)
        return preprocess(raw, config.data)
    except MemoryError as error:
        raise beyond_memory(case, config.data) from error


def draw_case(prepared: PreparedCase, channels: Sequence[str]) -> Iterator[Picture]:
    """First the planes through the middle of what is labelled, then a scroll through the case.

    A picture has a row for each channel with its three planes, labels in colour.
    """
    label = _label(prepared)
    centre = _centre(label)
    names = list(channels) or [f"channel {n}" for n in range(len(prepared.image_cxyz))]
    greys = to_greys(prepared.image_cxyz)
    spacing_mm = voxel_sizes(prepared.geometry.prepared_affine)
    for share in [0.5, *((np.arange(_FRAMES) + 0.5) / _FRAMES).tolist()]:
        at = [min(n - 1, int(2 * share * c) if share < 0.5 else int(c + (2 * share - 1) * (n - c)))
              for n, c in zip(label.shape, centre, strict=True)]  # fmt: skip
        rows = [
            [_panel(image, label, axis, at[axis], spacing_mm, f"{name} {'xyz'[axis]}={at[axis]}") for axis in range(3)]
            for name, image in zip(names, greys, strict=True)
        ]
        yield np.concatenate([np.concatenate(row, axis=1) for row in rows])


def draw_augmented(prepared: PreparedCase, config: Config, size: Shape) -> Iterator[Picture]:
    """The middle of some patches of that size, augmented as in the first epoch, then a scroll through them."""
    images, labels = _augmented(prepared, config, size)
    greys = _stretched(images, *np.percentile(images, (0.5, 99.5)))
    spacing_mm, depth = voxel_sizes(prepared.geometry.prepared_affine), images.shape[-1]
    for z in [depth // 2, *np.linspace(0, depth - 1, min(depth, _FRAMES)).astype(int).tolist()]:
        panels = [_panel(greys[n], labels[n], 2, z, spacing_mm, f"patch {n}") for n in range(_PATCHES)]
        yield np.concatenate([np.concatenate(panels[n : n + 4], axis=1) for n in range(0, _PATCHES, 4)])


def save_pictures(pictures: Iterator[Picture], path: Path) -> None:
    """A PNG of the first picture, or a GIF of the scroll that follows it, by the file's ending."""
    first = Image.fromarray(next(pictures))
    with publish(path) as temporary:
        if path.suffix.lower() == ".png":
            first.save(temporary, format="PNG")
        else:
            begin, *rest = [Image.fromarray(picture).quantize(_GIF_COLOURS) for picture in pictures]
            begin.save(temporary, format="GIF", save_all=True, append_images=rest, duration=100, loop=0)


@dataclass(frozen=True)
class _OneCase:
    """A case in memory, as the loader sees a store and a source of patches."""

    prepared: PreparedCase
    label: Labels

    device_bytes = 0

    @property
    def channels(self) -> int:
        return len(self.prepared.image_cxyz)

    def id(self, row: int) -> str:
        return "case"

    def shape(self, row: int) -> tuple[int, int, int]:
        x, y, z = self.label.shape
        return x, y, z

    def labels_at(self, row: int) -> tuple[int, ...]:
        return tuple(int(label) for label in np.unique(self.label) if label > 0)

    def places(self, row: int, label: int) -> NDArray[np.int16]:
        return np.argwhere(self.label == label).astype(np.int16)

    def read(self, row: int, box: Any, epoch: int, memory: Any) -> Any:
        import torch

        parts = (self.prepared.image_cxyz[(slice(None), *box)], self.label[box])
        return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in parts)

    read_channels = read

    def close(self) -> None:
        return


def _augmented(prepared: PreparedCase, config: Config, size: Shape) -> tuple[Floats, Labels]:
    """The first channels (n, x, y, z) and labels of some patches, exactly as the loader makes them."""
    import torch  # drawing a case as it is needs no torch

    from voxscale.data.loader import PatchLoader
    from voxscale.data.sampler import PatchSampler, Stream

    one = _OneCase(prepared, _label(prepared))
    stream = Stream(config.train.seed, num_cases=1, per_case=_PATCHES, batch=_PATCHES)
    sampler = PatchSampler(stream, one, np.zeros(1, np.int32), size, config.patches.foreground)
    loader = PatchLoader(
        sampler=sampler, store=one, source=one, size=size, transforms=config.augment, rank=0, world_size=1,
        micro_batch=_PATCHES, device=torch.device("cpu"), workers=1, prefetch=1, pin_memory=False,
    )  # fmt: skip
    (batch,) = next(loader.steps(1, 1))
    return batch.image[:, 0].numpy(), batch.target.numpy()


def _label(prepared: PreparedCase) -> Labels:
    if prepared.label_xyz is not None:
        return prepared.label_xyz
    return np.zeros(prepared.image_cxyz.shape[1:], np.uint8)


def _centre(label: Labels) -> list[int]:
    labelled = [
        np.flatnonzero(label.any(axis=tuple(other for other in range(3) if other != axis))) for axis in range(3)
    ]
    return [int(at[len(at) // 2]) if len(at) else n // 2 for at, n in zip(labelled, label.shape, strict=True)]


def to_greys(image_cxyz: Floats) -> list[Picture]:
    """Each channel as bytes, from its darkest voxels to its brightest but for the outermost."""
    return [_stretched(channel, *np.percentile(channel, (0.5, 99.5))) for channel in image_cxyz]


def _stretched(image: Floats, low: float, high: float) -> Picture:
    grey: Picture = (np.clip((image - low) / max(float(high - low), 1e-6), 0, 1) * 255).astype(np.uint8)
    return grey


def _panel(grey: Picture, label: Labels, axis: int, at: int, spacing_mm: Spacing, caption: str) -> Picture:
    """One slice, true to scale, with its labels in colour: left is the first axis' lower end, up the second's upper."""
    plane, mask = (np.take(volume, at, axis).T[::-1] for volume in (grey, label))
    colour = np.repeat(plane[..., None].astype(np.float32), 3, axis=2)
    tint = COLOURS[(mask.astype(int) - 1) % len(COLOURS)]
    colour = np.where(mask[..., None] > 0, (1 - _OPACITY) * colour + _OPACITY * tint, colour)
    slice_ = Image.fromarray(colour.astype(np.uint8))
    across, upward = np.delete(spacing_mm, axis)
    scale = _EDGE / max(slice_.width * across, slice_.height * upward)
    slice_ = slice_.resize(
        (max(1, round(slice_.width * across * scale)), max(1, round(slice_.height * upward * scale)))
    )
    panel = Image.new("RGB", (_EDGE + 4, _EDGE + _CAPTION + 4))
    panel.paste(slice_, ((_EDGE - slice_.width) // 2 + 2, _CAPTION + (_EDGE - slice_.height) // 2 + 2))
    ImageDraw.Draw(panel).text((4, 2), printable(caption)[:38], fill=(220, 220, 220))
    return np.asarray(panel)
