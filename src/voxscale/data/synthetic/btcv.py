"""BTCV as MONAI's UNETR tutorial lists it: `dataset_0.json` beside `imagesTr`, `labelsTr` and `imagesTs`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform
from numpy.typing import NDArray

from voxscale.config.data import Synthetic
from voxscale.data.synthetic.abdomen import ORGANS, make_abdomen
from voxscale.data.synthetic.shapes import save_nifti
from voxscale.files import write_json

LIST = "dataset_0.json"
_VALIDATION = 0.2
_FIRST_TRAINING, _FIRST_VALIDATION, _FIRST_TEST = 1, 35, 61  # the numbers of BTCV's files
_BODY_MM = (360.0, 300.0, 300.0)
_ORIENTATIONS = ("LAS", "RAS", "LPS")  # in turn: scanners do not agree


def list_btcv(folder: Path, options: Synthetic) -> list[Callable[[], None]]:
    """`options.cases` labelled cases, a fifth of them for validation, and one test image without a label."""
    for part in ("imagesTr", "labelsTr", "imagesTs"):
        (folder / part).mkdir()
    num_val = max(1, round(options.cases * _VALIDATION))
    training = list(range(_FIRST_TRAINING, _FIRST_TRAINING + options.cases - num_val))
    # Beyond 34 training cases the two would share numbers.
    first = max(_FIRST_VALIDATION, len(training) + 1)
    validation = list(range(first, first + num_val))
    test = max(_FIRST_TEST, first + num_val)
    return [
        partial(write_json, folder / LIST, _describe(training, validation, test)),
        *(partial(_write_case, folder, options, number) for number in (*training, *validation)),
        partial(_write_case, folder, options, test, labelled=False),
    ]


def _write_case(folder: Path, options: Synthetic, number: int, *, labelled: bool = True) -> None:
    image, label = make_abdomen(options.seed, number, options.size)
    stretch = np.random.default_rng([options.seed, number, 1]).uniform(0.95, 1.05, 3)
    affine = np.diag([*(np.array(_BODY_MM) * stretch / options.size), 1.0])
    codes = _ORIENTATIONS[number % len(_ORIENTATIONS)]
    part = "imagesTr" if labelled else "imagesTs"
    save_nifti(folder / part / f"img{number:04d}.nii.gz", *_turn(image, affine, codes))
    if labelled:
        save_nifti(folder / "labelsTr" / f"label{number:04d}.nii.gz", *_turn(label, affine, codes))


def _turn(
    voxels: NDArray[np.generic], affine: NDArray[np.float64], codes: str
) -> tuple[NDArray[np.generic], NDArray[np.float64]]:
    """The same volume with its axes pointing where `codes` says."""
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes))
    return nib.apply_orientation(voxels, turn), affine @ inv_ornt_aff(turn, voxels.shape)


def _describe(training: list[int], validation: list[int], test: int) -> dict[str, object]:
    """`dataset_0.json` with the fields of BTCV's list."""
    return {
        "description": "Synthetic abdomens: generated, no patient's data",
        "labels": {"0": "background", **{str(value): organ.name for value, organ in enumerate(ORGANS, start=1)}},
        "licence": "Apache-2.0",
        "modality": {"0": "CT"},
        "name": "btcv",
        "numTest": 1,
        "numTraining": len(training) + len(validation),
        "reference": "voxscale demo --like btcv",
        "release": "1.0",
        "tensorImageSize": "3D",
        "test": [f"imagesTs/img{test:04d}.nii.gz"],
        "training": [_entry(number) for number in training],
        "validation": [_entry(number) for number in validation],
    }


def _entry(number: int) -> dict[str, str]:
    return {"image": f"imagesTr/img{number:04d}.nii.gz", "label": f"labelsTr/label{number:04d}.nii.gz"}
