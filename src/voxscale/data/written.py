"""Write volumes as NIfTI on the grid of an image that was read, with nothing else of that image's header."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import nibabel as nib
import numpy as np
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError
from numpy.typing import DTypeLike, NDArray

from voxscale.data.cases import Case
from voxscale.data.formats.sources import what_is_at
from voxscale.data.geometry import Shape

Header = Any  # nibabel's Nifti1Header or Nifti2Header

# Only what places voxels in space is taken over, so that no name, date or comment can come along.
_PLACE = (
    *("qform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("sform_code", "srow_x", "srow_y", "srow_z"),
)
_SPATIAL_UNITS = 7  # the bits of xyzt_units that are not of time
_LONGEST = 32767  # what NIfTI-1 can say of an axis
_PLANES_BYTES = 1 << 24
_UNHEARD = logging.Logger("unheard", level=logging.CRITICAL + 1)  # nibabel prints what it mends in a header


def read_grid(case: Case) -> Header:
    """A header with the shape, spacing, orientation and units of the case's (first) image and no voxel type yet.

    Records know no geometry: theirs is a header without shape, of voxels of 1 mm. Raises ValueError with the reason.
    """
    if case.record is not None:
        header = nib.Nifti1Header()
        header.set_sform(np.eye(4), code="scanner")
        header.set_qform(np.eye(4), code="scanner")
        return header
    own, shape = _read_header(case.images[0])
    grid = type(own)()
    grid.set_data_shape(shape)
    for name in _PLACE:
        grid[name] = own[name]
    grid["pixdim"][:4] = own["pixdim"][:4]
    grid["xyzt_units"] = int(own["xyzt_units"]) & _SPATIAL_UNITS
    return grid


def write_nifti(
    path: Path, grid: Header, volumes: Iterable[NDArray[Any]], *, shape: Shape, dtype: DTypeLike, channels: int = 0
) -> None:
    """Write volumes (x, y, z), one after another, as one compressed file; with `channels`, as a fourth dimension.

    The volumes may be made one at a time. The same voxels give the same bytes. For `publish` to rename: the ending of
    `path` does not matter.
    """
    header = _to_nifti2(grid) if max(*shape, channels) > _LONGEST else grid.copy()
    header.set_data_shape((*shape, channels) if channels else shape)
    header.set_data_dtype(dtype)
    header.set_slope_inter(1, 0)
    level = 1 if np.dtype(dtype).kind == "f" else 6  # floats hardly get smaller, label maps do
    with path.open("wb") as file, gzip.GzipFile("", "wb", level, fileobj=file, mtime=0) as stream:
        header.write_to(stream)
        for volume in volumes:
            if volume.shape != tuple(shape):
                raise ValueError(f"found a volume of {volume.shape}, expected {tuple(shape)}")
            _write_voxels(stream, volume, header.get_data_dtype())


def _write_voxels(stream: BinaryIO | gzip.GzipFile, volume: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """A few planes at a time: files have x running fastest, and a copy of the whole could be large."""
    x, y, z = volume.shape
    planes = max(1, _PLANES_BYTES // (x * y * dtype.itemsize))
    for first in range(0, z, planes):
        stream.write(np.ascontiguousarray(volume[:, :, first : first + planes].T, dtype).data)


def _read_header(path: Path) -> tuple[Header, Shape]:
    try:
        if (strange := what_is_at(path)) is not None:  # a pipe would never end
            raise ValueError(strange)
        with path.open("rb") as file:
            stream: Any = gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file
            start = stream.read(nib.Nifti2Header.sizeof_hdr)
        sizes = int.from_bytes(start[:4], "little"), int.from_bytes(start[:4], "big")
        kind = nib.Nifti2Header if nib.Nifti2Header.sizeof_hdr in sizes else nib.Nifti1Header
        header = kind(start[: kind.sizeof_hdr], check=False)
        header.check_fix(logger=_UNHEARD)
        shape = tuple(int(edge) for edge in header.get_data_shape())
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except (EOFError, ValueError, ArithmeticError, zlib.error, HeaderDataError, WrapStructError) as error:
        raise ValueError(str(error)) from error
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise ValueError(f"found shape {shape}, expected three dimensions, or four with channels last")
    return header, (shape[0], shape[1], shape[2])


def _to_nifti2(grid: Header) -> Header:
    larger = nib.Nifti2Header()
    for name in (*_PLACE, "xyzt_units"):
        larger[name] = grid[name]
    larger["pixdim"][:4] = grid["pixdim"][:4]
    return larger
