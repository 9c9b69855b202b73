"""Read the files of a case, whole and checked. Arrays are in the file's own axis order: `image_cxyz`, `label_xyz`."""

from __future__ import annotations

import gzip
import hashlib
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import nibabel as nib
import numpy as np
from nibabel.spatialimages import HeaderDataError
from nibabel.volumeutils import apply_read_scaling
from nibabel.wrapstruct import WrapStructError
from numpy.typing import NDArray

from voxscale.data.cases import Case
from voxscale.data.findings import ERROR, WARNING, Finding
from voxscale.data.geometry import MAX_BYTES, MAX_VOXELS
from voxscale.data.images import is_image, read_cifar10_record, read_image
from voxscale.data.tfrecord import read_record
from voxscale.errors import DataError
from voxscale.memory import available_memory

Floats = NDArray[np.float32]
Labels = NDArray[np.uint8]
Affine = NDArray[np.float64]

_ROUNDING = 1e-3  # what files with a scale factor leave of whole numbers
_BLOCK = 1 << 20
_SOME = 1 << 17  # voxels that are looked at together
_MAX_OFFSET = 1 << 24  # header extensions
_FLOAT_BYTES = 4
_LONGEST = 1e9  # edge of a voxel, in whatever unit
_UNHEARD = logging.Logger("unheard", level=logging.CRITICAL + 1)  # nibabel prints what it mends in a header
_REPLACE = "replace the file, or take the case out"
_RESAVE = "save it as grey or RGB of 8 bits, or grey of 16"
_ONE_GRID = "export image and label on one grid"


@dataclass(frozen=True)
class RawCase:
    """A case as its files have it. `image_sha256` is of voxels, so that a copy under another name is found."""

    image_cxyz: Floats
    label_xyz: Labels | None
    affine: Affine
    image_sha256: str

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256(b"" if self.label_xyz is None else self.label_xyz.data)
        digest.update(self.image_sha256.encode() + self.affine.tobytes())
        return digest.hexdigest()


def read_volume(path: Path) -> tuple[NDArray[np.generic], Affine]:
    """Return (voxels, affine). Raises ValueError with the reason if the file is damaged or no volume of numbers.

    A compressed file is read to its end and its checksum verified: damaged ones can decode to wrong voxels. The
    header is checked first, so that nothing is allocated that it has no right to. Raises MemoryError for a sound file
    that is too large.
    """
    try:
        with path.open("rb") as file:
            stream: BinaryIO = gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file  # type: ignore[assignment]
            start = stream.read(_BLOCK)
            kind = _kind(start)
            header = kind(start[: kind.sizeof_hdr], check=False)
            header.check_fix(logger=_UNHEARD)
            shape, offset, expected = _layout(header)
            content = _rest(start, stream, expected)
        with np.errstate(invalid="ignore"):  # what is no number is refused below
            affine = np.asarray(header.get_best_affine(), dtype=np.float64)
        _check_affine(affine)
        if np.isinf(header["scl_slope"]):  # nibabel would leave voxels as they are
            raise ValueError(f"found scl_slope {float(header['scl_slope']):g}, expected a number to scale voxels by")
        slope, shift = header.get_slope_inter()
        voxels = np.ndarray(shape, header.get_data_dtype(), content, offset, order="F")
        return (voxels if slope is None else apply_read_scaling(voxels, slope, shift)), affine
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error  # without the path, which is of this machine
    except (EOFError, ValueError, ArithmeticError, zlib.error, HeaderDataError, WrapStructError) as error:
        raise ValueError(str(error)) from error


def read_case(case: Case, *, channels: int = 0, labels: Mapping[int, str] | None = None) -> RawCase:
    """The case, refused with all its faults at once. Raises MemoryError if there is too little for it."""
    raw, findings = examine_case(case, channels=channels, labels=labels)
    if raw is None:
        errors = [finding for finding in findings if finding.level == ERROR]
        raise DataError.from_findings(
            [str(error) for error in errors], fix="; ".join(dict.fromkeys(e.fix for e in errors))
        )
    return raw


def examine_case(
    case: Case, *, channels: int = 0, labels: Mapping[int, str] | None = None
) -> tuple[RawCase | None, list[Finding]]:
    """Read a case and list everything that is wrong with it; it comes back only if nothing makes it unsafe.

    `channels` and `labels` are what the dataset declares, if it does. Raises MemoryError if there is too little for it.
    """
    check = _Check(case, [])
    if case.record is not None:
        volumes, label = _read_records(case, check)
    else:
        volumes = [volume for path in case.images if (volume := check.read(path)) is not None]
        label = check.read(case.label) if case.label is not None else None
    image_cxyz = _stack(volumes, check) if len(volumes) >= len(case.images) else None
    if image_cxyz is not None and channels and len(image_cxyz) != channels:
        check.error(
            "missing-modality", case.images[0], f"{len(image_cxyz)} channels", f"{channels} as declared",
            "add the missing modality, or correct the dataset's description",
        )  # fmt: skip
    label_xyz = _as_labels(label, volumes, labels, check) if label is not None else None
    if image_cxyz is None or any(finding.level == ERROR for finding in check.findings):
        return None, check.findings
    affine = volumes[0][1]
    digest = hashlib.sha256(repr(image_cxyz.shape).encode())
    digest.update(image_cxyz.data)
    return RawCase(image_cxyz, label_xyz, affine, digest.hexdigest()), check.findings


def short_name(case: Case, path: Path) -> str:
    """The file's name, with its folder where that alone tells image and label apart."""
    alone = sum(file.name == path.name for file in case.files) < 2
    return path.name if alone else f"{path.parent.name}/{path.name}"


def _placed_name(case: Case, path: Path) -> str:
    """The file's short name, after the row of the table that names it."""
    name = short_name(case, path)
    # Without a table the place is the file itself, or a record of it.
    return name if not case.where or path.name in case.where else f"{case.where}: {name}"


@dataclass(frozen=True)
class _Check:
    """Collects the findings of one case."""

    case: Case
    findings: list[Finding]

    def error(self, code: str, path: Path, found: str, expected: str, fix: str) -> None:
        self._add(ERROR, code, path, found, expected, fix)

    def warn(self, code: str, path: Path, found: str, expected: str, fix: str) -> None:
        self._add(WARNING, code, path, found, expected, fix)

    def _add(self, level: str, code: str, path: Path, found: str, expected: str, fix: str) -> None:
        place = _placed_name(self.case, path)
        self.findings.append(Finding(level, code, self.case.id, place, found, expected, fix))

    def read(self, path: Path) -> tuple[NDArray[Any], Affine] | None:
        try:
            if not is_image(path):
                return read_volume(path)
            pixels, lost = read_image(path)
        except ValueError as error:
            expected = "a readable image" if is_image(path) else "a readable volume"
            self.error("unreadable", path, f"a damaged file ({error})", expected, _REPLACE)
            return None
        if lost:
            self.warn("image-kind", path, lost, "grey or RGB that is used whole", _RESAVE)
        return pixels, np.eye(4)


def read_record_case(case: Case) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """(image_cxyz, label_xyz if records of that kind have one) of a case that is a record of a file.

    Raises DataError for a record that is damaged.
    """
    path, offset = case.images[0], case.record or 0
    if path.suffix == ".tfrecord":
        return read_record(path, offset)
    try:
        return np.moveaxis(read_cifar10_record(path, offset), 3, 0), None
    except ValueError as error:
        raise DataError(f"{path.name}: {error}", fix=_REPLACE) from None


def _read_records(
    case: Case, check: _Check
) -> tuple[list[tuple[NDArray[Any], Affine]], tuple[NDArray[Any], Affine] | None]:
    """Record files know no geometry: voxels of 1 mm."""
    try:
        image_cxyz, label_xyz = read_record_case(case)
    except DataError as error:
        check.error("unreadable", case.images[0], error.message, "a whole record", _REPLACE)
        return [], None
    label = None if label_xyz is None else (label_xyz, np.eye(4))
    return [(np.moveaxis(image_cxyz, 0, 3), np.eye(4))], label


def _stack(volumes: list[tuple[NDArray[Any], Affine]], check: _Check) -> Floats | None:
    """One array (c, x, y, z) of the channel files, which must lie on one grid and hold finite numbers."""
    shape, affine = volumes[0][0].shape[:3], volumes[0][1]
    for path, (voxels, own) in zip(check.case.images, volumes, strict=False):
        if voxels.shape[:3] != shape:
            check.error("shape", path, f"shape {voxels.shape[:3]}", f"{shape} as the first channel", _ONE_GRID)
        if not np.allclose(own, affine, atol=1e-3):
            check.error("affine", path, _difference(own, affine), "that of the first channel", _ONE_GRID)
    if any(voxels.shape[:3] != shape for voxels, _ in volumes):
        return None
    channels = [np.moveaxis(voxels, 3, 0) if voxels.ndim == 4 else voxels[None] for voxels, _ in volumes]
    with np.errstate(over="ignore"):  # what becomes infinite is found below
        image_cxyz = np.ascontiguousarray(np.concatenate(channels), dtype=np.float32)
    for channel, voxels in enumerate(image_cxyz):
        path = check.case.images[min(channel, len(volumes) - 1)]
        low, high = float(voxels.min()), float(voxels.max())
        if not np.isfinite(high - low):
            count = int(np.count_nonzero(~np.isfinite(voxels)))
            found = f"{count} NaN or infinite voxels in channel {channel}"
            check.error("nan", path, found, "finite numbers", "repair or remove the case")
        elif low == high:
            check.warn("constant", path, f"{low:g} in every voxel of channel {channel}", "an image", "look at the file")
    return image_cxyz


def _as_labels(
    label: tuple[NDArray[Any], Affine],
    volumes: list[tuple[NDArray[Any], Affine]],
    declared: Mapping[int, str] | None,
    check: _Check,
) -> Labels | None:
    case = check.case
    path = case.label or case.images[0]
    voxels, affine = label
    if voxels.ndim == 4 and voxels.shape[3] == 1:
        voxels = voxels[..., 0]
    if volumes and voxels.shape != volumes[0][0].shape[:3]:
        check.error("shape", path, f"shape {voxels.shape}", f"{volumes[0][0].shape[:3]} as the image", _ONE_GRID)
    if volumes and not np.allclose(affine, volumes[0][1], atol=1e-3):
        check.error("affine", path, _difference(affine, volumes[0][1]), "that of the image", _ONE_GRID)
    label_xyz, strange = _as_bytes(voxels)
    if strange is not None:
        check.error("label-values", path, f"label {strange:.10g}", "whole numbers 0 to 255", "repair the label")
        return None
    values = np.flatnonzero(count_labels(label_xyz))
    if declared and (unknown := sorted(set(values.tolist()) - set(declared) - {0})):
        check.error(
            "label-values", path, f"labels {unknown}", f"the declared {sorted(declared)}",
            "correct the label, or declare the value",
        )  # fmt: skip
    if not values.any():
        check.warn("empty-label", path, "no labelled voxel", "at least one", "check that the label belongs here")
    return label_xyz


def _as_bytes(voxels: NDArray[Any]) -> tuple[Labels, float | None]:
    """(The voxels as bytes, a number that is none). By some planes: the whole in double precision would be large."""
    label_xyz = np.empty(voxels.shape, np.uint8)
    planes = max(1, _SOME * voxels.shape[-1] // voxels.size)
    for first in range(0, voxels.shape[-1], planes):
        some = voxels[..., first : first + planes].astype(np.float64)
        part = label_xyz[..., first : first + planes]
        with np.errstate(invalid="ignore"):
            part[...] = np.rint(some)
        whole = np.abs(part - some) <= _ROUNDING
        if not whole.all():
            return label_xyz, float(some[~whole].flat[0])
    return label_xyz, None


def count_labels(label_xyz: Labels) -> NDArray[np.int64]:
    """How many voxels have each of the 256 values. By blocks: to count the whole would take eight times its size."""
    flat, counts = label_xyz.reshape(-1), np.zeros(256, np.int64)
    for first in range(0, flat.size, _SOME):
        counts += np.bincount(flat[first : first + _SOME], minlength=256)
    return counts


def _difference(affine: Affine, other: Affine) -> str:
    return f"another affine (its numbers differ by up to {np.abs(affine - other).max():.3g})"


def _kind(start: bytes) -> Any:
    for kind in (nib.Nifti1Header, nib.Nifti2Header):
        size = kind.sizeof_hdr
        if len(start) >= size and size in (int.from_bytes(start[:4], "little"), int.from_bytes(start[:4], "big")):
            return kind
    raise ValueError("not a NIfTI file")


def _layout(header: Any) -> tuple[tuple[int, ...], int, int]:
    """Shape, where the voxels begin, how long the file has to be; refuses what is no volume of numbers."""
    shape = tuple(int(n) for n in header.get_data_shape())
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise ValueError(f"found shape {shape}, expected three dimensions, or four with channels last")
    voxels = 1
    for edge in shape:
        voxels *= edge
    if voxels > MAX_VOXELS:
        raise ValueError(f"the header promises {shape} voxels, more than {MAX_VOXELS}")
    dtype = header.get_data_dtype()
    if dtype.kind not in "iuf":
        raise ValueError(f"found voxels of type {dtype}, expected numbers")
    content = voxels * int(dtype.itemsize)
    if content > MAX_BYTES:
        raise ValueError(f"the header promises {content:,} bytes of voxels, more than {MAX_BYTES:,}")
    # Whoever reads it needs it as float32 too. How well a file packs says nothing: a real empty label packs as a bomb.
    if (needed := content + voxels * _FLOAT_BYTES) > (free := available_memory()):
        raise MemoryError(f"its {shape} voxels take {needed:,} bytes of memory, {free:,} are free")
    offset = float(header["vox_offset"])
    if not header.single_vox_offset <= offset <= _MAX_OFFSET:
        raise ValueError(f"its voxels begin at byte {offset:g}")
    return shape, int(offset), int(offset) + content


def _rest(start: bytes, stream: BinaryIO, expected: int) -> bytearray:
    """The whole content: to its end, so that a checksum there is verified, but no further than the header says.

    More is refused as less is: the header of such a file is damaged, or that of another volume.
    """
    content = bytearray(start)
    while len(content) <= expected and (block := stream.read(_BLOCK)):
        content += block
    if len(content) > expected:
        raise ValueError(f"holds more than the {expected} bytes that its header promises")
    if len(content) < expected:
        raise ValueError(f"found {len(content)} bytes, expected {expected}")
    return content


def _check_affine(affine: Affine) -> None:
    """Refuse a grid whose axes have no length or lie in a plane, of whatever unit it is."""
    with np.errstate(over="ignore"):  # what becomes infinite is refused below
        lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.isfinite(affine).all() or not lengths.all() or abs(np.linalg.det(affine[:3, :3] / lengths)) < 1e-6:
        raise ValueError("its affine does not place voxels in space")
    if lengths.min() < 1 / _LONGEST or lengths.max() > _LONGEST:
        raise ValueError(
            f"its voxels are {lengths.min():.3g} to {lengths.max():.3g} long, expected {1 / _LONGEST:g} to {_LONGEST:g}"
        )
