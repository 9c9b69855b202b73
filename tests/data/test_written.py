"""Written volumes lie where their image lies, and carry nothing else of it."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nibabel.nifti1 import Nifti1Extension
from numpy.typing import NDArray
from test_geometry import affines

from voxscale.data.cases import Case
from voxscale.data.written import read_grid, write_nifti

FILES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PLACE = ("qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "srow_x", "srow_y", "srow_z")
SECRET = b"DOE^JOHN"


def case_of(path: Path) -> Case:
    return Case(id="c", images=(path,), label=None, patient="c")


def write_like(image: Any, path: Path, voxels: NDArray[Any], source: str = "in.nii.gz") -> Any:
    """The image saved as a file, a volume written on its grid, and that read by nibabel."""
    nib.save(image, path.parent / source)
    grid = read_grid(case_of(path.parent / source))
    write_nifti(path, grid, [voxels], shape=voxels.shape, dtype=voxels.dtype)  # type: ignore[arg-type]
    return nib.load(path)


@FILES
@given(
    affines(),
    st.tuples(*[st.integers(1, 6)] * 3),
    st.sampled_from([nib.Nifti1Image, nib.Nifti2Image]),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.sampled_from(["in.nii", "in.nii.gz"]),
)
def test_the_place_in_space_is_the_images(
    tmp_path: Path, affine: NDArray[np.float64], shape: tuple[int, int, int], kind: Any, codes: Any, source: str
) -> None:
    image = kind(np.zeros(shape, np.int16), affine)
    image.header.set_qform(affine, code=codes[0], strip_shears=True)
    image.header.set_sform(affine, code=codes[1])
    image.header.set_xyzt_units("mm", "sec")
    voxels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    written = write_like(image, tmp_path / "out.nii.gz", voxels, source)
    read = nib.load(tmp_path / source)
    assert np.array_equal(np.asarray(written.dataobj), voxels)
    assert written.get_data_dtype() == np.uint8
    assert np.array_equal(written.affine, read.affine)
    assert written.header.get_zooms() == read.header.get_zooms()
    assert written.header.get_xyzt_units() == ("mm", "unknown")
    assert type(written.header) is type(read.header)
    for name in PLACE:
        assert np.array_equal(written.header[name], read.header[name], equal_nan=True), name


def test_nothing_personal_comes_along(tmp_path: Path) -> None:
    image = nib.Nifti1Image(np.zeros((3, 4, 5), np.float32), np.diag([1, 2, 3, 1]))
    for name in ("descrip", "aux_file", "db_name", "intent_name"):
        image.header[name] = SECRET
    image.header.extensions.append(Nifti1Extension("comment", SECRET))
    voxels = np.ones((3, 4, 5), np.uint8)
    written = write_like(image, tmp_path / "out.nii.gz", voxels)
    assert SECRET in gzip.decompress((tmp_path / "in.nii.gz").read_bytes())
    assert SECRET not in gzip.decompress((tmp_path / "out.nii.gz").read_bytes())
    assert len(written.header.extensions) == 0
    assert all(not bytes(written.header[name]).strip(b"\0") for name in ("descrip", "aux_file", "db_name"))


def test_channels_come_one_after_another_as_a_fourth_dimension(tmp_path: Path) -> None:
    volumes = np.random.default_rng(0).random((3, 4, 5, 6), dtype=np.float32)
    nib.save(nib.Nifti1Image(np.zeros((4, 5, 6, 2), np.int16), np.diag([1, 2, 3, 1])), tmp_path / "in.nii")
    grid = read_grid(case_of(tmp_path / "in.nii"))
    write_nifti(
        tmp_path / "o.nii.gz", grid, (volume for volume in volumes), shape=(4, 5, 6), dtype=np.float32, channels=3
    )
    read = nib.load(tmp_path / "o.nii.gz")
    assert np.array_equal(np.asarray(read.dataobj), np.moveaxis(volumes, 0, 3))
    assert read.header.get_zooms()[:3] == (1.0, 2.0, 3.0)


def test_the_same_voxels_give_the_same_bytes(tmp_path: Path) -> None:
    image = nib.Nifti1Image(np.zeros((4, 5, 6), np.int16), np.eye(4))
    voxels = np.arange(120, dtype=np.uint8).reshape(4, 5, 6)
    write_like(image, tmp_path / "a.nii.gz", voxels)
    write_like(image, tmp_path / "b.nii.gz", np.asfortranarray(voxels))
    assert (tmp_path / "a.nii.gz").read_bytes() == (tmp_path / "b.nii.gz").read_bytes()


def test_a_big_endian_image_keeps_its_place(tmp_path: Path) -> None:
    header = nib.Nifti1Header(endianness=">")
    affine = np.diag([1.5, -2.5, 3.5, 1])
    image = nib.Nifti1Image(np.zeros((2, 3, 4), ">i2"), affine, header)
    written = write_like(image, tmp_path / "out.nii.gz", np.zeros((2, 3, 4), np.uint8))
    assert np.array_equal(written.affine, affine)


def test_an_axis_beyond_nifti_1_makes_a_nifti_2(tmp_path: Path) -> None:
    image = nib.Nifti2Image(np.zeros((40000, 1, 2), np.uint8), np.diag([1, 2, 3, 1]))
    voxels = np.ones((40000, 1, 2), np.uint8)
    written = write_like(image, tmp_path / "out.nii.gz", voxels)
    assert written.shape == voxels.shape
    grid = read_grid(Case(id="r", images=(tmp_path / "x.tfrecord",), label=None, patient="r", record=3))
    write_nifti(tmp_path / "r.nii.gz", grid, [voxels], shape=(40000, 1, 2), dtype=np.uint8)
    read = nib.load(tmp_path / "r.nii.gz")
    assert isinstance(read, nib.Nifti2Image)
    assert np.array_equal(read.affine, np.eye(4))


def test_a_volume_of_another_shape_is_refused(tmp_path: Path) -> None:
    grid = read_grid(Case(id="r", images=(tmp_path / "x",), label=None, patient="r", record=0))
    with pytest.raises(ValueError, match="expected"):
        write_nifti(tmp_path / "o", grid, [np.zeros((2, 3, 5))], shape=(2, 3, 4), dtype=np.uint8)


@pytest.mark.parametrize("content", [b"", b"no image", gzip.compress(b"x" * 400, mtime=0)])
def test_what_is_no_image_has_no_grid(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.nii.gz").write_bytes(content)
    with pytest.raises(ValueError, match="."):
        read_grid(case_of(tmp_path / "in.nii.gz"))


@settings(FILES, max_examples=150)
@given(st.data())
def test_a_damaged_file_has_a_grid_or_a_reason(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes are flipped: never an error of another kind, which would stop the images after it too."""
    path = tmp_path / data.draw(st.sampled_from(["in.nii", "in.nii.gz"]))
    nib.save(nib.Nifti1Image(np.arange(210, dtype=np.int16).reshape(5, 6, 7), np.diag([1, 2, 3, 1])), path)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, min(len(content), 360) - 1), min_size=1, max_size=8)):
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        shape = read_grid(case_of(path)).get_data_shape()
        assert len(shape) == 3
        assert min(shape) > 0


@pytest.mark.parametrize("shape", [(5,), (5, 6), (5, 6, 7, 2, 2)])
def test_what_is_no_volume_is_named_by_its_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    nib.save(nib.Nifti1Image(np.zeros(shape, np.int16), np.eye(4)), tmp_path / "in.nii.gz")
    with pytest.raises(ValueError, match="expected three dimensions"):
        read_grid(case_of(tmp_path / "in.nii.gz"))
