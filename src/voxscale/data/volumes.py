"""Read volumes whole and checked, bring them to one orientation and one intensity scale.

Arrays are in the image's own axis order: `image_cxyz`, `label_xyz`.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform
from numpy.typing import NDArray

from voxscale.config.schema import Intensity
from voxscale.errors import DataError

Floats = NDArray[np.float32]
Labels = NDArray[np.uint8]

MAX_VOXELS = 2**31  # a header that promises more is taken for a decompression bomb


def read_volume(path: Path, orientation: str | None) -> tuple[NDArray[np.generic], NDArray[np.float64]]:
    """Return (voxels, affine) with the axes turned to `orientation`, or as they are for None.

    The file is read to its end and its checksum verified, because a damaged file can decode to wrong voxels.
    """
    try:
        if path.name.endswith(".gz"):
            _verify_gzip(path)
        image = nib.load(path)
        _check_header(image)
        voxels = np.asanyarray(image.dataobj)
    except (OSError, EOFError, ValueError, TypeError, zlib.error, ImageFileError) as error:
        raise DataError(f"{path.name}: cannot be read: {error}", fix="replace the file") from error
    affine = np.asarray(image.affine, dtype=np.float64)
    if orientation is None:
        return voxels, affine
    turn = ornt_transform(io_orientation(affine), axcodes2ornt(tuple(orientation)))
    turned = nib.orientations.apply_orientation(voxels, turn)
    return turned, affine @ inv_ornt_aff(turn, voxels.shape[:3])


def read_case(images: tuple[Path, ...], label: Path | None, orientation: str | None) -> tuple[Floats, Labels | None]:
    """Return (image_cxyz, label_xyz), refusing what cannot be trained on."""
    channels: list[Floats] = []
    for path in images:
        voxels, affine = read_volume(path, orientation)
        volume = np.asarray(voxels, dtype=np.float32)
        channels.extend(np.moveaxis(volume, 3, 0) if volume.ndim == 4 else [volume])
        if not np.isfinite(volume).all():
            raise DataError(f"{path.name}: holds NaN or infinite voxels", fix="repair or remove the case")
    shapes = {channel.shape for channel in channels}
    if len(shapes) > 1:
        raise DataError(
            f"{images[0].name}: channels differ in shape: {sorted(shapes)}", fix="resample them to one grid"
        )
    image_cxyz = np.stack(channels)
    if label is None:
        return image_cxyz, None
    label_voxels, label_affine = read_volume(label, orientation)
    if label_voxels.shape != image_cxyz.shape[1:]:
        raise DataError(
            f"{label.name}: shape {label_voxels.shape}, expected {image_cxyz.shape[1:]} as in {images[0].name}",
            fix="export image and label on one grid",
        )
    if not np.allclose(label_affine, affine, atol=1e-3):
        raise DataError(
            f"{label.name}: its affine differs from that of {images[0].name}",
            fix="export image and label on one grid",
        )
    label_xyz = label_voxels.astype(np.uint8)
    if not np.array_equal(label_xyz, label_voxels):
        raise DataError(f"{label.name}: found labels other than whole numbers 0 to 255", fix="repair the label")
    return image_cxyz, label_xyz


def normalise(image_cxyz: Floats, intensity: Intensity) -> Floats:
    """Bring each channel to one scale."""
    return np.stack([_normalise_channel(channel, intensity) for channel in image_cxyz])


def _normalise_channel(channel: Floats, intensity: Intensity) -> Floats:
    if intensity.window is not None:
        return _rescale(channel, *intensity.window)
    if intensity.percentiles is not None:
        low, high = np.percentile(channel, intensity.percentiles)
        return _rescale(channel, float(low), float(high))
    if intensity.zscore is None:
        return channel
    mask = channel != 0 if intensity.zscore == "nonzero" else np.ones(channel.shape, dtype=bool)
    if not mask.any():
        return channel
    values = channel[mask].astype(np.float64)
    deviation = values.std() or 1.0
    return np.where(mask, (channel - values.mean()) / deviation, 0).astype(np.float32)


def _rescale(channel: Floats, low: float, high: float) -> Floats:
    return np.asarray(np.clip((channel - low) / max(high - low, 1e-8), 0, 1), dtype=np.float32)


def _check_header(image: Any) -> None:
    """Refuse, before any voxel is read, what is no volume of numbers in space."""
    shape = tuple(image.shape)
    if len(shape) not in (3, 4) or 0 in shape:
        raise ValueError(f"found shape {shape}, expected three dimensions, or four with channels last")
    if int(np.prod(shape, dtype=np.int64)) > MAX_VOXELS:
        raise ValueError(f"the header promises {shape} voxels, more than {MAX_VOXELS}")
    if image.get_data_dtype().kind not in "iuf":
        raise ValueError(f"found voxels of type {image.get_data_dtype()}, expected numbers")
    if not np.isfinite(image.affine).all() or abs(np.linalg.det(image.affine[:3, :3])) < 1e-12:
        raise ValueError("its affine does not place voxels in space")


def _verify_gzip(path: Path) -> None:
    with gzip.open(path, "rb") as stream:
        left = MAX_VOXELS * 8
        while block := stream.read(1 << 20):
            left -= len(block)
            if left < 0:
                raise ValueError("decompresses to more than a volume can hold")
