"""Predicting from one's own code: networks made by hand, interruptions, what was resampled, a full disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from voxscale.config.data import Data
from voxscale.config.losses import DiceCEOptions
from voxscale.data.cases import Case
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.files import read_json
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


def test_a_full_disk_is_an_error_that_says_what_is_missing(tmp_path: Path, small_disk: Path) -> None:
    for name, edge in (("a", 12), ("b", 40), ("c", 12)):
        save_ball(tmp_path / "in" / f"{name}.nii.gz", (edge, edge, edge), (1.0, 1.0, 1.0))
    cases = [case_of(tmp_path / "in" / f"{name}.nii.gz") for name in ("a", "b", "c")]
    outputs = Outputs(small_disk / "out", Making("probabilities", [], {}), False)
    with pytest.raises(InfrastructureError) as refused:
        predict_cases(make_predictor(brighter), cases, outputs)
    assert f"case b: {outputs.path(cases[1])}: no room: found 0." in refused.value.message
    assert "expected up to 1.0 MB" in refused.value.message  # 40³ voxels, 2 channels of 4 bytes, twice
    assert list(outputs_in(small_disk / "out")) == ["a_probabilities.nii.gz"], "what is written stays"
    assert sorted(path.name for path in (small_disk / "out").glob(".*")) == []


class Failing:
    """Fails at the second image with what torch says when the machine has no memory, or with something else."""

    def __init__(self, failure: Callable[[], object]) -> None:
        self.images = 0
        self.failure = failure

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        self.images += 1
        if self.images == 2:
            self.failure()
        return brighter(image)


def many_bytes() -> object:
    return torch.empty(2**60, dtype=torch.uint8)


def wrong_shapes() -> object:
    return torch.zeros(2) + torch.zeros(3)


def three_cases(folder: Path) -> list[Case]:
    for name in ("a", "b", "c"):
        save_ball(folder / f"{name}.nii.gz", (8, 8, 8), (1.0, 1.0, 1.0))
    return [case_of(folder / f"{name}.nii.gz") for name in ("a", "b", "c")]


def test_an_image_without_memory_for_it_does_not_lose_the_others(tmp_path: Path) -> None:
    cases, outputs = three_cases(tmp_path / "in"), Outputs(tmp_path / "out", Making("labels", [], {}), False)
    outcome = predict_cases(make_predictor(Failing(many_bytes)), cases, outputs)
    assert [path.name for path in outcome.written] == ["a.nii.gz", "c.nii.gz"]
    assert outcome.error is not None
    assert "case b: does not fit into memory" in outcome.error.message
    with pytest.raises(RuntimeError, match="size of tensor"):  # a fault of the network is none of the image
        predict_cases(make_predictor(Failing(wrong_shapes)), cases, Outputs(tmp_path / "o", outputs.making, False))


def test_an_output_that_cannot_be_written_does_not_lose_the_others(tmp_path: Path) -> None:
    cases, outputs = three_cases(tmp_path / "in"), Outputs(tmp_path / "out", Making("labels", [], {}), True)
    (tmp_path / "out" / "b.nii.gz").mkdir(parents=True)
    outcome = predict_cases(make_predictor(brighter), cases, outputs)
    assert [path.name for path in outcome.written] == ["a.nii.gz", "c.nii.gz"]
    assert outcome.error is not None
    assert "case b: b.nii.gz: Is a directory" in outcome.error.message
    assert list(read_json(tmp_path / "out" / "predictions.json")["outputs"]) == ["a.nii.gz", "c.nii.gz"]


@pytest.mark.parametrize("kind", ["labels", "probabilities"])
def test_a_name_too_long_for_an_output_does_not_lose_the_others(tmp_path: Path, kind: Any) -> None:
    cases = three_cases(tmp_path / "in")
    longest = 241 if kind == "labels" else 227  # 255 without the dots, number and endings of a temporary file
    longest -= len(".nii.gz")
    for length in (longest, longest + 1):
        (tmp_path / "in" / f"{'n' * length}.nii.gz").write_bytes(cases[0].images[0].read_bytes())
    cases[1:1] = [case_of(tmp_path / "in" / f"{'n' * length}.nii.gz") for length in (longest, longest + 1)]
    outcome = predict_cases(make_predictor(brighter), cases, Outputs(tmp_path / "out", Making(kind, [], {}), False))
    assert len(outcome.written) == 4
    assert outcome.error is not None
    assert f"case {'n' * (longest + 1)}: found an output name of 242 bytes, expected 241 or less" in str(outcome.error)


def test_only_what_predict_left_is_taken_away(tmp_path: Path) -> None:
    out = tmp_path / "out"
    mine = [".notes.tmp", ".a.nii.gz.tmp", ".a.nii.gz.0123456.tmp", ".a.json.01234567.tmp", "a.nii.gz.01234567.tmp"]
    left = [".a.nii.gz.01234567.tmp", ".predictions.json.89abcdef.tmp", ".b_masks.json.00000000.tmp"]
    folders = [".cache.tmp", ".b.nii.gz.01234567.tmp"]
    for name in folders:
        (out / name).mkdir(parents=True)
    for name in (*mine, *left):
        (out / name).write_text("")
    (out / ".c.nii.gz.01234567.tmp").symlink_to(tmp_path)
    with Outputs(out, Making("labels", [], {}), False).opened([]):
        assert {path.name for path in out.iterdir()} == {*mine, *folders, ".c.nii.gz.01234567.tmp", ".lock"}
    assert not (out / ".lock").exists()


def test_no_output_takes_the_place_of_another_image(tmp_path: Path) -> None:
    save_ball(tmp_path / "in" / "a.nii", (8, 8, 8), (1.0, 1.0, 1.0))
    save_ball(tmp_path / "out" / "a.nii.gz", (8, 8, 8), (1.0, 1.0, 1.0))
    first, other = case_of(tmp_path / "in" / "a.nii"), replace(case_of(tmp_path / "out" / "a.nii.gz"), id="b")
    before = outputs_in(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"case a: its output would replace the image a\.nii\.gz"):
        predict_cases(
            make_predictor(brighter), [first, other], Outputs(tmp_path / "out", Making("labels", [], {}), True)
        )
    assert outputs_in(tmp_path / "out") == before


def test_a_pipe_in_the_place_of_an_image_is_not_waited_for(tmp_path: Path) -> None:
    cases = three_cases(tmp_path / "in")
    cases[1].images[0].unlink()
    os.mkfifo(cases[1].images[0])
    outputs = Outputs(tmp_path / "out", Making("labels", [], {}), False)
    outcome = predict_cases(make_predictor(brighter), cases, outputs)
    assert [failure.message for failure in outcome.failures] == ["case b: b.nii.gz: no regular file"]
    assert len(outcome.written) == 2


def test_what_is_said_fits_the_number(tmp_path: Path) -> None:
    cases = three_cases(tmp_path / "in")
    (tmp_path / "in" / "a.nii.gz").write_text("no image")
    predictor = replace(make_predictor(brighter), channels=2)
    alone = predict_cases(predictor, cases[:1], Outputs(tmp_path / "out", Making("labels", [], {}), False))
    assert alone.error is not None
    assert alone.error.message.splitlines()[0] == "1 of 1 image could not be predicted"
    all_of_them = predict_cases(predictor, cases, Outputs(tmp_path / "out", Making("labels", [], {}), False))
    assert all_of_them.error is not None
    assert all_of_them.error.message.splitlines()[0] == "3 of 3 images could not be predicted"
    assert "found 1 channel, expected the 2 that" in all_of_them.error.message


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
