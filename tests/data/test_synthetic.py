"""Synthetic data: pure, whole, and not to be solved by a threshold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from voxscale.config.load import make_config
from voxscale.config.schema import Synthetic
from voxscale.data.build import prepare
from voxscale.data.formats import find_cases
from voxscale.data.synthetic import ensure_synthetic, make_volume
from voxscale.errors import DataError
from voxscale.infer.baseline import threshold_dice


def test_volumes_are_a_pure_function() -> None:
    image, label = make_volume(0, 3, (24, 20, 16))
    again = make_volume(0, 3, (24, 20, 16))
    assert np.array_equal(image, again[0])
    assert np.array_equal(label, again[1])
    assert not np.array_equal(image, make_volume(1, 3, (24, 20, 16))[0])
    assert 0.01 < label.mean() < 0.5


def test_folder_is_made_once_with_row_0_names(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    ensure_synthetic(folder, Synthetic(cases=3, size=(16, 16, 16)), threads=2)
    assert {path.name for path in folder.glob("*.nii.gz")} == {
        f"{kind}{n}.nii.gz" for kind in ("img", "seg") for n in range(3)
    }
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    ensure_synthetic(folder, Synthetic(cases=3, size=(16, 16, 16)))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    with pytest.raises(DataError, match="made from"):
        ensure_synthetic(folder, Synthetic(cases=4, size=(16, 16, 16)))


def test_a_threshold_does_not_solve_it(tmp_path: Path) -> None:
    ensure_synthetic(tmp_path / "d", Synthetic(cases=12, size=(48, 48, 48)))
    config = make_config({"data": {"source": str(tmp_path / "d")}}, name="c", base=Path())
    manifest = find_cases(config.data, tmp_path)
    store = prepare(manifest, config.data, tmp_path / "store", patch=None, threads=2)
    dice = threshold_dice(store, manifest.cases, manifest.cases)
    assert 0.2 < dice < 0.7, "even a threshold chosen on the very cases it is scored on"
