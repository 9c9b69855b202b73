"""The synthetic cohort: pure, in the form of a real table, and with a truth that can be learned."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from voxscale.config.data import Data, Synthetic
from voxscale.data.formats import detect_format, find_cases
from voxscale.data.synthetic.cohort import FOLDS, Patient, list_cohort, make_chest, make_patients, write_cohort
from voxscale.data.volumes import read_case
from voxscale.files import read_csv

SIZE = (48, 48, 32)


def harrell(risk: NDArray[np.float64], patients: list[Patient]) -> float:
    """Of all pairs in which one is known to have had the event first, how often that one was at higher risk."""
    time, event = (np.array([getattr(p, name) for p in patients]) for name in ("time", "event"))
    comparable = (time[:, None] < time[None]) & (event[:, None] == 1)
    higher = (risk[:, None] > risk[None]) + 0.5 * (risk[:, None] == risk[None])
    return float(higher[comparable].mean())


def of(patients: list[Patient], name: str) -> NDArray[np.float64]:
    return np.array([getattr(patient, name) for patient in patients], np.float64)


@pytest.mark.parametrize("seed", range(8))
def test_the_truth_can_be_learned_from_image_and_features(seed: int) -> None:
    patients = make_patients(seed, 200)
    assert harrell(of(patients, "log_hazard"), patients) >= 0.80
    assert harrell(of(patients, "lesion_hazard"), patients) >= 0.70
    assert harrell(of(patients, "feature_hazard"), patients) >= 0.60
    assert 0.2 < of(patients, "event").mean() < 0.4
    assert abs(harrell(of(patients, "calcium"), patients) - 0.5) < 0.12, "says nothing"
    assert abs(harrell(np.array([p.sex == "M" for p in patients], float), patients) - 0.5) < 0.12


def test_times_are_those_of_a_study(tmp_path: Path) -> None:
    patients = make_patients(0, 1000)
    time, event = of(patients, "time"), of(patients, "event")
    assert 34 <= time.min() < 100
    assert time.max() == 2447
    assert (time[event == 0] == 2447).mean() > 0.2, "censored by the study's end"
    assert (time[event == 0] < 2447).mean() > 0.2, "and lost before it"
    assert 0.25 < event.mean() < 0.35


def test_what_is_seen_tells_the_hazard() -> None:
    """Voxels brighter than blood and off the spine, counted and weighed: no network, and not the truth."""
    patients = make_patients(3, 80)
    seen = []
    for patient in patients:
        image = make_chest(3, patient, SIZE).astype(np.float64)
        front = image[:, SIZE[1] * 5 // 16 :]  # without the spine
        seen.append(np.clip(front - 130, 0, None).sum())
    assert np.corrcoef(np.argsort(np.argsort(seen)), np.argsort(np.argsort(of(patients, "lesion"))))[0, 1] > 0.85
    assert harrell(np.array(seen), patients) > 0.65


def test_a_chest_is_a_pure_function_and_looks_like_ct() -> None:
    first, second = make_patients(0, 2)
    image = make_chest(0, first, SIZE)
    assert image.dtype == np.int16
    assert np.array_equal(image, make_chest(0, first, SIZE))
    assert not np.array_equal(image, make_chest(0, second, SIZE))
    assert not np.array_equal(image, make_chest(1, first, SIZE))
    assert abs(np.median(image[:3, :3]) + 1000) < 30, "air around"
    assert 0.05 < ((image > -950) & (image < -700)).mean() < 0.4, "lungs"
    assert (image > 400).any()


def test_files_do_not_depend_on_threads(tmp_path: Path) -> None:
    for name, threads in (("one", 1), ("four", 4)):
        write_cohort(tmp_path / name, cases=6, size=(24, 24, 16), seed=5, threads=threads)
    one, four = (
        {str(p.relative_to(tmp_path / name)): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()}
        for name in ("one", "four")
    )
    assert one == four
    assert set(one) == {"cohort.csv", *(f"images/P{n:03d}.nii.gz" for n in range(1, 7))}
    write_cohort(tmp_path / "other", cases=6, size=(24, 24, 16), seed=6)
    assert (tmp_path / "other" / "cohort.csv").read_bytes() != one["cohort.csv"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_table_is_found_as_users_write_theirs(tmp_path: Path) -> None:
    write_cohort(tmp_path / "d", cases=25, size=(16, 16, 12), seed=2, threads=2)
    table = tmp_path / "d" / "cohort.csv"
    assert detect_format(table) == "table"
    manifest = find_cases(Data(source=str(table)), tmp_path)
    assert manifest.findings == ()
    assert [case.patient for case in manifest.cases] == [f"P{n:03d}" for n in range(1, 26)]
    rows = read_csv(table)
    patients = make_patients(2, 25)
    for row, patient, case in zip(rows, patients, manifest.cases, strict=True):
        assert (row["patient"], int(row["time"]), int(row["event"])) == (patient.name, patient.time, patient.event)
        assert case.row == row
        assert Counter(row[fold] for fold in FOLDS) == {"val": 1, "train": 4}
    for fold in FOLDS:
        validating = [row for row in rows if row[fold] == "val"]
        assert len(validating) == 5
        assert abs(sum(int(row["event"]) for row in validating) - of(patients, "event").sum() / 5) <= 1
    assert {row["smoker"] for row in rows} == {"no", "former", "yes"}
    image = nib.load(case.images[0])
    assert image.get_data_dtype() == np.int16
    assert nib.aff2axcodes(image.affine) == ("R", "A", "S")
    assert read_case(case).image_cxyz.shape == (1, 16, 16, 12)


def test_the_work_is_listed_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    files = list_cohort(tmp_path / "d", Synthetic(cases=3, size=(16, 16, 12), seed=1))
    assert len(files) == 4
    for file in reversed(files):
        file()
    write_cohort(tmp_path / "e", cases=3, size=(16, 16, 12), seed=1)
    assert (tmp_path / "d" / "cohort.csv").read_text() == (tmp_path / "e" / "cohort.csv").read_text()
