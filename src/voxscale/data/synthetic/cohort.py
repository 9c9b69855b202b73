"""A cohort with outcomes: chest CTs in which a lesion is seen, and a table of times, events and clinical features.

    FOLDER/cohort.csv           patient, NIFTI path, time (days), event, age, sex, smoker, calcium, Fold_1 … Fold_5
    FOLDER/images/P001.nii.gz   int16, Hounsfield units

The hazard grows with the lesion (its size and density), with age and with smoking; sex and calcium say nothing. It is
Weibull's; patients are lost at random, and whoever is left when the study ends is censored there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from voxscale.config.data import Synthetic
from voxscale.data.synthetic.shapes import Size, make_unit_grid, save_nifti, smooth_field, squared_distance
from voxscale.files import publish, write_csv

TABLE = "cohort.csv"
FOLDS = tuple(f"Fold_{number}" for number in range(1, 6))
FIRST_DAY, LAST_DAY = 34, 2447
COLUMNS = ("patient", "NIFTI path", "time", "event", "age", "sex", "smoker", "calcium", *FOLDS)

_LESION, _AGE = 2.2, 1.2  # log hazard per standard deviation
_SMOKER = {"no": 0.0, "former": 0.8, "yes": 1.6}
_MEAN_AGE, _AGE_SPREAD = 62.0, 9.0
_SHAPE, _SCALE = 1.2, 22_000.0  # of Weibull's distribution, in days
_LOST = (800.0, 6000.0)  # days between which patients would be lost, were the study longer

_AIR, _FAT, _MUSCLE, _LUNG, _BLOOD, _BONE = -1000, -100, 50, -830, 40, 450
_NOISE, _TEXTURE = 15.0, 15.0
_BODY_MM = (336.0, 288.0, 256.0)


@dataclass(frozen=True)
class Patient:
    """What is true of a patient; `size` and `density` of the lesion have mean 0 and deviation 1 over patients."""

    index: int
    size: float
    density: float
    age: float
    sex: str
    smoker: str
    calcium: float
    time: int
    event: int

    @property
    def name(self) -> str:
        return f"P{self.index + 1:03d}"

    @property
    def lesion(self) -> float:
        return 0.8 * self.size + 0.6 * self.density

    @property
    def lesion_hazard(self) -> float:
        """The part of the log hazard that only the image tells."""
        return _LESION * self.lesion

    @property
    def feature_hazard(self) -> float:
        """The part of the log hazard that the table tells."""
        return _AGE * (self.age - _MEAN_AGE) / _AGE_SPREAD + _SMOKER[self.smoker]

    @property
    def log_hazard(self) -> float:
        return self.lesion_hazard + self.feature_hazard


def write_cohort(folder: Path, *, cases: int, size: Size, seed: int, threads: int = 1) -> None:
    """Make a new folder with a cohort, whole or not at all; the bytes do not depend on `threads`."""
    with publish(folder) as temporary, ThreadPoolExecutor(threads) as pool:
        temporary.mkdir()
        files = list_cohort(temporary, Synthetic(cases=cases, size=size, seed=seed))
        for done in [pool.submit(file) for file in files]:
            done.result()


def list_cohort(folder: Path, options: Synthetic) -> list[Callable[[], None]]:
    """What writes each file of a cohort below a folder that exists, in any order."""
    (folder / "images").mkdir()
    patients = make_patients(options.seed, options.cases)
    return [
        partial(_write_table, folder / TABLE, patients, options.seed),
        *(partial(_write_image, folder, options, patient) for patient in patients),
    ]


def make_patients(seed: int, count: int) -> list[Patient]:
    """The patients of a cohort; the first of a larger one are those of a smaller."""
    return [_make_patient(seed, index) for index in range(count)]


def make_chest(seed: int, patient: Patient, size: Size) -> NDArray[np.int16]:
    """image_xyz in HU, axes to the right, to the front and up; a pure function of its arguments."""
    rng = np.random.default_rng([seed, patient.index])
    grid = make_unit_grid(size)
    girth = rng.uniform(0.86, 0.94)
    around = np.sqrt(squared_distance(grid[:2], (0, 0), (girth, 0.85 * girth)))
    image = np.select([around > 1, around > rng.uniform(0.86, 0.92)], [_AIR, _FAT], _MUSCLE).astype(np.float64)
    image[squared_distance(grid[:2], (0, -0.58), (0.11, 0.11)) < 1] = _BONE
    for side in (-0.46, 0.46):
        centre = np.array([side, -0.02, 0.0]) + rng.uniform(-0.03, 0.03, 3)
        image[squared_distance(grid, centre, (0.30, 0.52, 0.88) * rng.uniform(0.92, 1.08, 3)) < 1] = _LUNG
    heart = np.array([-0.12, 0.14, -0.15]) + rng.uniform(-0.04, 0.04, 3)
    image[squared_distance(grid, heart, (0.38, 0.36, 0.46) * rng.uniform(0.93, 1.07, 3)) < 1] = _BLOOD
    place = heart + rng.uniform(-0.12, 0.12, 3)
    radius = 0.21 + 0.07 * patient.size  # 0.09 to 0.33 of half the body
    distance = squared_distance(grid, place, radius * rng.uniform(0.95, 1.05, 3))
    image[distance < max(1.0, distance.min() * 1.0001)] = 600 + 200 * patient.density  # 254 to 946
    image += np.where(around <= 1, _TEXTURE * smooth_field(rng, size, knots=6), 0) + rng.normal(scale=_NOISE, size=size)
    return np.clip(np.round(image), -1024, 3071).astype(np.int16)


def _make_patient(seed: int, index: int) -> Patient:
    rng = np.random.default_rng([seed, index, 1])
    size, density = rng.uniform(-np.sqrt(3), np.sqrt(3), 2).tolist()
    truth = Patient(
        index=index,
        size=size,
        density=density,
        age=round(float(np.clip(rng.normal(_MEAN_AGE, _AGE_SPREAD), 30, 92)), 1),
        sex=str(rng.choice(["F", "M"])),
        smoker=str(rng.choice(list(_SMOKER), p=[0.45, 0.3, 0.25])),
        calcium=round(float(rng.lognormal(4.0, 1.0)), 1),
        time=0,
        event=0,
    )
    happens = FIRST_DAY + _SCALE * (rng.exponential() / np.exp(truth.log_hazard)) ** (1 / _SHAPE)
    lost = min(rng.uniform(*_LOST), LAST_DAY)
    return replace(truth, time=int(min(happens, lost)), event=int(happens <= lost))


def _write_table(path: Path, patients: Sequence[Patient], seed: int) -> None:
    fold = _folds(patients, seed)
    write_csv(path, COLUMNS, (_row(patient, fold[patient.index]) for patient in patients))


def _row(patient: Patient, fold: int) -> dict[str, object]:
    return {
        "patient": patient.name,
        "NIFTI path": f"images/{patient.name}.nii.gz",
        **{name: getattr(patient, name) for name in ("time", "event", "age", "sex", "smoker", "calcium")},
        **{name: "val" if number == fold else "train" for number, name in enumerate(FOLDS)},
    }


def _folds(patients: Sequence[Patient], seed: int) -> list[int]:
    """In which fold each validates: by lot, with as many events in one as in another."""
    lots = np.random.default_rng([seed, len(patients), 2]).random(len(patients))
    order = np.lexsort((lots, np.array([patient.event for patient in patients])))
    folds = np.empty(len(patients), np.int64)
    folds[order] = np.arange(len(patients)) % len(FOLDS)
    return [int(fold) for fold in folds]


def _write_image(folder: Path, options: Synthetic, patient: Patient) -> None:
    affine = np.diag([*(np.array(_BODY_MM) / options.size), 1.0])
    save_nifti(folder / "images" / f"{patient.name}.nii.gz", make_chest(options.seed, patient, options.size), affine)
