"""Predicting from one's own code: networks made by hand, interruptions, what was resampled, a full disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from voxscale.config.schema import Data
from voxscale.config.training import DiceCEOptions
from voxscale.data.cases import Case
from voxscale.errors import ConfigError
from voxscale.infer.ensemble import Ensemble, Member
from voxscale.infer.outputs import Making, Outputs
from voxscale.infer.predict import Predictor, predict_cases, predict_codes, predict_probabilities
from voxscale.infer.windows import Windows, predict_volume
from voxscale.tasks.losses import DiceLoss
from voxscale.tasks.segmentation import Segmentation

CPU = torch.device("cpu")


def dice(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    return float(2 * (one & other).sum() / (one.sum() + other.sum()))


def outputs_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.nii.gz"))}


def brighter(image: torch.Tensor) -> torch.Tensor:
    """Background below one half, class 1 above."""
    return torch.cat([0.5 - image, image - 0.5], dim=1)


def make_predictor(network: Callable[[torch.Tensor], torch.Tensor], *sizes: int, **data: Any) -> Predictor:
    task = Segmentation({"bright": (7,)}, exclusive=True, loss=DiceLoss(DiceCEOptions(), True))
    members = tuple(Member(network, Windows((size, size, size))) for size in sizes or (8,))
    return Predictor(Ensemble(members, CPU), task, Data(source="x", **{"intensity": {}, **data}), 1)


def save_ball(path: Path, shape: tuple[int, int, int], spacing: tuple[float, float, float]) -> NDArray[np.bool_]:
    """A soft ball of 12 mm at the centre of the grid, saved; returned are the voxels brighter than one half."""
    places = [(np.arange(n) - (n - 1) / 2) * step for n, step in zip(shape, spacing, strict=True)]
    distance = np.sqrt(sum(place**2 for place in np.meshgrid(*places, indexing="ij")))
    image = np.clip(0.5 + (12 - distance) / 8, 0, 1).astype(np.float32)
    path.parent.mkdir(exist_ok=True)
    nib.save(nib.Nifti1Image(image, np.diag([-spacing[0], spacing[1], spacing[2], 1])), path)
    return np.asarray(image > 0.5)


def case_of(path: Path) -> Case:
    name = path.name.partition(".")[0]
    return Case(id=name, images=(path,), label=None, patient=name)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"spacing": (2.0, 2.0, 2.0)},
        {"spacing": (0.7, 1.5, 3.0), "crop_foreground": True},
        {"size": (20, 24, 16), "orientation": "LPS"},
    ],
)
def test_what_was_resampled_comes_back_to_its_own_grid(tmp_path: Path, data: dict[str, Any]) -> None:
    truth = save_ball(tmp_path / "ball.nii.gz", (36, 30, 14), (1.0, 1.2, 2.5))
    predictor = make_predictor(brighter, **data)
    codes = predict_codes(predictor, predictor.read(case_of(tmp_path / "ball.nii.gz")))
    assert codes.shape == truth.shape
    if data:
        assert dice(codes == 1, truth) > 0.95
    else:
        assert np.array_equal(codes == 1, truth)


def test_dropped_slices_are_background(tmp_path: Path) -> None:
    truth = save_ball(tmp_path / "ball.nii.gz", (20, 20, 20), (1.0, 1.0, 1.0))
    predictor = make_predictor(brighter, slices={"z": [12, -1]})
    prepared = predictor.read(case_of(tmp_path / "ball.nii.gz"))
    codes = predict_codes(predictor, prepared)
    assert not codes[:, :, :12].any()
    assert np.array_equal(codes[:, :, 12:19] == 1, truth[:, :, 12:19])
    with predict_probabilities(predictor, prepared) as channels:
        background, bright = channels
    assert (background[:, :, :12] == 1).all()
    assert (bright[:, :, :12] == 0).all()
    assert np.allclose(background + bright, 1, atol=1e-6)


def test_members_with_windows_of_their_own_are_averaged_too(tmp_path: Path) -> None:
    save_ball(tmp_path / "ball.nii.gz", (20, 18, 16), (1.0, 1.0, 1.0))
    torch.manual_seed(0)
    networks = [torch.nn.Conv3d(1, 2, 3, padding=1) for _ in range(3)]
    predictor = make_predictor(brighter)
    sizes = [(8, 8, 8), (16, 8, 12), (8, 8, 8)]
    members = tuple(Member(network, Windows(size)) for network, size in zip(networks, sizes, strict=True))
    predictor = replace(predictor, ensemble=Ensemble(members, CPU))
    prepared = predictor.read(case_of(tmp_path / "ball.nii.gz"))
    image = torch.from_numpy(prepared.image_cxyz)
    with torch.no_grad():
        outputs = [predict_volume(member.network, image, member.windows) for member in members]
    mean = torch.stack(outputs).mean(0)
    clear = (mean[1] - mean[0]).abs().numpy() > 1e-5
    with torch.no_grad():
        canonical = predict_codes(predictor, prepared)
    expected = prepared.geometry.restore(predictor.task.decide(mean))
    assert np.array_equal(np.where(prepared.geometry.restore(clear), canonical, expected), expected)
    assert not list(tmp_path.glob("*tmp*"))


class Interrupting:
    """Interrupts the third image, in the middle of it."""

    def __init__(self) -> None:
        self.windows = 0

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        self.windows += 1
        if self.windows == 6:
            raise KeyboardInterrupt
        return brighter(image)


@pytest.mark.parametrize("kind", ["labels", "probabilities", "masks"])
def test_an_interrupted_command_goes_on_where_it_was(tmp_path: Path, kind: Any) -> None:
    cases = []
    for number in range(4):
        path = tmp_path / "in" / f"c{number}.nii.gz"
        save_ball(path, (12, 8, 8), (1.0 + number / 4, 1.0, 1.0))
        cases.append(case_of(path))
    making = Making(kind, [{"run": "r", "checkpoint": "c", "weights_sha256": "0"}], {"overlap": 0.5})

    def predict(network: Any, out: str) -> Any:
        return predict_cases(make_predictor(network), cases, Outputs(tmp_path / out, making, False))

    with pytest.raises(KeyboardInterrupt):
        predict(Interrupting(), "out")
    assert len(outputs_in(tmp_path / "out")) == 2
    assert not list((tmp_path / "out").glob(".*.tmp"))
    outcome = predict(brighter, "out")
    assert (len(outcome.written), len(outcome.skipped), outcome.error) == (2, 2, None)
    assert len(predict(brighter, "whole").written) == 4
    assert outputs_in(tmp_path / "out") == outputs_in(tmp_path / "whole")
    assert (tmp_path / "out" / "predictions.json").read_bytes() == (
        tmp_path / "whole" / "predictions.json"
    ).read_bytes()


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    save_ball(tmp_path / "in" / "a.nii.gz", (8, 8, 8), (1.0, 1.0, 1.0))
    (tmp_path / "out").mkdir()
    making = Making("labels", [], {})
    for content in ("{", "[]", json.dumps({"schema": 99, "outputs": {}})):
        (tmp_path / "out" / "predictions.json").write_text(content)
        with pytest.raises(ConfigError, match=r"predictions\.json"):
            predict_cases(
                make_predictor(brighter),
                [case_of(tmp_path / "in" / "a.nii.gz")],
                Outputs(tmp_path / "out", making, False),
            )


def test_a_full_disk_is_an_error_and_no_crash(tmp_path: Path, small_disk: Path) -> None:
    save_ball(tmp_path / "in" / "a.nii.gz", (40, 40, 40), (1.0, 1.0, 1.0))
    case = case_of(tmp_path / "in" / "a.nii.gz")
    outputs = Outputs(small_disk / "out", Making("probabilities", [], {}), False)
    with pytest.raises(OSError, match="No space left"):
        predict_cases(make_predictor(brighter), [case], outputs)
    assert outputs_in(small_disk / "out") == {}


def test_two_commands_do_not_write_into_one_folder(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    save_ball(tmp_path / "in" / "a.nii.gz", (8, 8, 8), (1.0, 1.0, 1.0))
    code = (
        "import sys\nfrom pathlib import Path\nfrom voxscale.infer.outputs import Making, Outputs\n"
        "with Outputs(Path(sys.argv[1]), Making('labels', [], {}), False).opened([]): pass"
    )
    with Outputs(tmp_path / "out", Making("labels", [], {}), False).opened([]):
        done = run_python("-c", code, tmp_path / "out")
    assert "another command writes into it" in done.err
    assert run_python("-c", code, tmp_path / "out").code == 0
