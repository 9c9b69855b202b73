"""BraTS as the Medical Segmentation Decathlon ships it: `Task01_BrainTumour`, four sequences in one 4D file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from voxscale.config.data import Synthetic
from voxscale.data.synthetic.brain import CHANNELS, make_brain
from voxscale.data.synthetic.shapes import save_nifti
from voxscale.files import write_json

TASK = "Task01_BrainTumour"
_NUM_UNLABELLED = 2  # images of imagesTs, which the Decathlon publishes without labels


def list_brats(folder: Path, options: Synthetic) -> list[Callable[[], None]]:
    """`options.cases` cases in `imagesTr` and `labelsTr`, two images in `imagesTs`, and `dataset.json`."""
    task = folder / TASK
    for part in ("imagesTr", "labelsTr", "imagesTs"):
        (task / part).mkdir(parents=True)
    training = [f"BRATS_{number:03d}.nii.gz" for number in range(1, options.cases + 1)]
    test = [f"BRATS_{options.cases + number:03d}.nii.gz" for number in range(1, _NUM_UNLABELLED + 1)]
    return [
        partial(write_json, task / "dataset.json", _describe(training, test)),
        *(partial(_write_case, task, options, index, name) for index, name in enumerate(training)),
        *(partial(_write_image, task, options, len(training) + index, name) for index, name in enumerate(test)),
    ]


def _write_case(task: Path, options: Synthetic, index: int, name: str) -> None:
    image_cxyz, label = make_brain(options.seed, index, options.size)
    save_nifti(task / "imagesTr" / name, np.moveaxis(image_cxyz, 0, -1), np.eye(4))
    save_nifti(task / "labelsTr" / name, label, np.eye(4))


def _write_image(task: Path, options: Synthetic, index: int, name: str) -> None:
    image_cxyz, _ = make_brain(options.seed, index, options.size)
    save_nifti(task / "imagesTs" / name, np.moveaxis(image_cxyz, 0, -1), np.eye(4))


def _describe(training: list[str], test: list[str]) -> dict[str, object]:
    """`dataset.json` with the Decathlon's fields."""
    return {
        "name": "BRATS",
        "description": "Synthetic gliomas: generated, no patient's data",
        "reference": "voxscale demo --like brats",
        "licence": "Apache-2.0",
        "release": "1.0",
        "tensorImageSize": "4D",
        "modality": {str(number): name for number, name in enumerate(CHANNELS)},
        "labels": {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"},
        "numTraining": len(training),
        "numTest": len(test),
        "training": [{"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in training],
        "test": [f"./imagesTs/{name}" for name in test],
    }
