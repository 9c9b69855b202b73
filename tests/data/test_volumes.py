"""Volumes: orientation and intensity."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nibabel.orientations import aff2axcodes

from voxscale.config.schema import Intensity
from voxscale.data.volumes import normalise, read_case, read_volume
from voxscale.errors import DataError


@pytest.mark.parametrize("flip", [(1, 1, 1), (-1, 1, -1), (-1, -1, 1)])
def test_a_voxel_keeps_its_place_in_the_world(tmp_path: Path, flip: tuple[int, int, int]) -> None:
    affine = np.diag([*(np.array(flip) * [1.0, 2.0, 3.0]), 1.0])[[1, 0, 2, 3]]
    voxels = np.zeros((5, 6, 7), np.int16)
    voxels[1, 2, 3] = 9
    nib.save(nib.Nifti1Image(voxels, affine), tmp_path / "v.nii.gz")
    turned, turned_affine = read_volume(tmp_path / "v.nii.gz", "RAS")
    assert aff2axcodes(turned_affine) == ("R", "A", "S")
    place = np.argwhere(turned == 9)[0]
    assert np.allclose(turned_affine @ [*place, 1], affine @ [1, 2, 3, 1])
    as_it_is, same_affine = read_volume(tmp_path / "v.nii.gz", None)
    assert np.array_equal(as_it_is, voxels)
    assert np.allclose(same_affine, affine)


@pytest.mark.parametrize(
    ("voxels", "complaint"),
    [
        (np.zeros((4, 4), np.float32), r"found shape \(4, 4\)"),
        (np.zeros((2, 2, 2, 2, 2), np.float32), "expected three dimensions"),
        (np.zeros((4, 0, 4), np.float32), r"found shape \(4, 0, 4\)"),
        (np.zeros((4, 4, 4), np.complex64), "found voxels of type complex64, expected numbers"),
        (np.zeros((4, 4, 4), [("R", "u1"), ("G", "u1"), ("B", "u1")]), "expected numbers"),
    ],
    ids=["2D", "5D", "no voxels", "complex", "colours"],
)
def test_what_is_no_volume_of_numbers_is_refused(tmp_path: Path, voxels: np.ndarray, complaint: str) -> None:
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), tmp_path / "v.nii")
    with pytest.raises(DataError, match=complaint):
        read_volume(tmp_path / "v.nii", "RAS")


def test_an_affine_without_space_is_refused(tmp_path: Path) -> None:
    nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4)), tmp_path / "v.nii")
    content = bytearray((tmp_path / "v.nii").read_bytes())
    content[280:328] = bytes(48)  # the three rows of the sform
    (tmp_path / "v.nii").write_bytes(content)
    with pytest.raises(DataError, match="does not place voxels in space"):
        read_volume(tmp_path / "v.nii", "RAS")


def test_a_fourth_dimension_is_channels(tmp_path: Path) -> None:
    voxels = np.random.default_rng(0).normal(size=(3, 4, 5, 2)).astype(np.float32)
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), tmp_path / "v.nii")
    image_cxyz, label = read_case((tmp_path / "v.nii",), None, "RAS")
    assert label is None
    assert np.array_equal(image_cxyz, np.moveaxis(voxels, 3, 0))


def test_zscore_over_nonzero_voxels_is_per_channel() -> None:
    image = np.zeros((2, 4, 4, 4), np.float32)
    image[0, :2] = np.random.default_rng(0).normal(5, 3, (2, 4, 4))
    image[1] = 7
    scaled = normalise(image, Intensity(zscore="nonzero"))
    assert scaled[0, :2].mean() == pytest.approx(0, abs=1e-6)
    assert scaled[0, :2].std() == pytest.approx(1, abs=1e-6)
    assert (scaled[0, 2:] == 0).all()
    assert (scaled[1] == 0).all(), "a constant channel has no deviation to divide by"


def test_window_and_percentiles_go_to_zero_and_one() -> None:
    image = np.linspace(-1000, 1000, 64, dtype=np.float32).reshape(1, 4, 4, 4)
    windowed = normalise(image, Intensity(window=(-175, 250)))
    assert (windowed.min(), windowed.max()) == (0, 1)
    assert windowed.ravel()[32] == pytest.approx((image.ravel()[32] + 175) / 425, abs=1e-6)
    assert normalise(image, Intensity(percentiles=(0.5, 99.5))).max() == 1
    assert np.array_equal(normalise(image, Intensity()), image)
