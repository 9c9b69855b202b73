"""A config for data that has none: look at the data, choose what fits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError

from voxscale.data.formats import detect_format, find_cases
from voxscale.errors import DataError

_LARGEST_PATCH = 96
_STRIDE = 16  # of the default model


def guess_config(source: Path) -> dict[str, Any]:
    """Plain config content for `source`: its format, and patches that its volumes can fill."""
    format = detect_format(source)
    cases = find_cases(source, format)
    shapes = np.array([_shape(case.images[0]) for case in cases])
    size = [int(min(_LARGEST_PATCH, max(_STRIDE, n // _STRIDE * _STRIDE))) for n in np.median(shapes, axis=0)]
    return {"data": {"source": str(source), "format": format}, "patches": {"size": size}}


def _shape(path: Path) -> tuple[int, ...]:
    try:
        shape = nib.load(path).shape
    except (OSError, ValueError, EOFError, ImageFileError) as error:
        raise DataError(f"{path.name}: cannot be read: {error}", fix="replace the file, or move it away") from error
    if len(shape) < 3:
        raise DataError(f"{path.name}: found {len(shape)} dimensions, expected 3 or 4", fix="replace the file")
    return tuple(shape[:3])
