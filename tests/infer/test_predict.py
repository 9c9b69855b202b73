"""What is written lies on the image's own grid and is what the evaluation scored; nothing is lost or done twice."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from numpy.typing import NDArray

from conftest import Cli, tiny_config
from voxscale.data.cases import Case
from voxscale.files import read_csv, read_json
from voxscale.infer.windows import predict_volume
from voxscale.runs import RunFolder
from voxscale.train.prediction import Choice, load_predictor

CPU = torch.device("cpu")
NAMES = ("img0", "img1", "img2")


@dataclass(frozen=True)
class Trained:
    """Runs that differ in a thing or two, and the images of three cases."""

    folder: Path
    images: Path
    labels: Path

    def run(self, name: str) -> Path:
        return self.folder / name


VARIANTS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"train__seed": 1},
    "classes": {"data__regions": None, "data__spacing": [1.5, 1.0, 2.0]},
    "tangled": {"data__regions": {"a": [1, 2], "b": [2, 3]}},
}


@pytest.fixture(scope="module")
def trained(dataset: Path, cli_here: Cli, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(dataset, folder / "three-labels")
    for path in (folder / "three-labels").glob("seg*.nii.gz"):
        label = nib.load(path)
        thirds = 1 + np.indices(label.shape)[0] % 3
        nib.save(nib.Nifti1Image((np.asarray(label.dataobj) * thirds).astype(np.uint8), label.affine), path)
    for name, fields in VARIANTS.items():
        source = folder / "three-labels" if name == "tangled" else dataset
        content = tiny_config(source, **{"train__epochs": 1, "log": "quiet", **fields})
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        done = cli_here("train", folder / f"{name}.yaml", "--run", folder / name, "--devices", "1")
        assert done.code == 0, done.err
    images = folder / "images"
    images.mkdir()
    for name in NAMES:
        shutil.copy(dataset / f"{name}.nii.gz", images)
    return Trained(folder, images, dataset)


def voxels(path: Path) -> NDArray[Any]:
    return np.asarray(nib.load(path).dataobj)


def dice(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    return float(2 * (one & other).sum() / (one.sum() + other.sum()))


def outputs_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.nii.gz"))}


def test_a_label_map_scores_as_its_case_in_the_evaluation(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    rows = {row["case"]: row for row in read_csv(trained.run("one") / "cases.csv")}
    files = [trained.labels / f"img{case}.nii.gz" for case in rows]
    done = cli_here("predict", trained.run("one"), *files, "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert sorted(done.json["written"]) == sorted(path.name for path in files)
    for case, row in rows.items():
        predicted = voxels(tmp_path / "out" / f"img{case}.nii.gz")
        assert predicted.dtype == np.uint8
        truth = voxels(trained.labels / f"seg{case}.nii.gz")
        assert dice(predicted == 1, truth == 1) == pytest.approx(float(row["dice/ball"]), abs=1e-12)


@pytest.mark.parametrize("run", ["one", "classes"])
def test_the_orientation_of_the_file_does_not_matter(trained: Trained, cli_here: Cli, tmp_path: Path, run: str) -> None:
    image = nib.load(trained.images / "img0.nii.gz")
    (tmp_path / "in").mkdir()
    for codes in ("RAS", "LPI", "SRA", "PSL"):
        turn = ornt_transform(io_orientation(image.affine), axcodes2ornt(tuple(codes)))
        nib.save(image.as_reoriented(turn), tmp_path / "in" / f"{codes}.nii.gz")
    done = cli_here("predict", trained.run(run), tmp_path / "in", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    expected = voxels(tmp_path / "out" / "RAS.nii.gz")
    assert 0 < expected.sum() < expected.size
    for codes in ("LPI", "SRA", "PSL"):
        written, given = nib.load(tmp_path / "out" / f"{codes}.nii.gz"), nib.load(tmp_path / "in" / f"{codes}.nii.gz")
        assert written.shape == given.shape
        assert np.array_equal(written.affine, given.affine)
        assert np.array_equal(np.asarray(nib.as_closest_canonical(written).dataobj), expected)


def test_the_grid_is_the_images_and_the_header_is_cleared(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    angle = np.deg2rad(10)
    affine = np.array(
        [[-0.9 * np.cos(angle), 0, np.sin(angle), 5], [0, 1.1, 0, -7], [np.sin(angle), 0, 2.5, 3], [0, 0, 0, 1]]
    )
    rng = np.random.default_rng(0)
    image = nib.Nifti1Image(rng.normal(size=(21, 17, 9)).astype(np.float32), affine)
    image.header["descrip"] = b"DOE^JOHN"
    image.header.set_sform(affine, 1)
    nib.save(image, tmp_path / "scan.nii")
    done = cli_here("predict", trained.run("classes"), tmp_path / "scan.nii", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    written, given = nib.load(tmp_path / "out" / "scan.nii.gz"), nib.load(tmp_path / "scan.nii")
    assert written.shape == given.shape
    assert np.array_equal(written.affine, given.affine)
    assert written.header.get_zooms() == given.header.get_zooms()
    assert (written.header["sform_code"], written.header["qform_code"]) == (
        given.header["sform_code"],
        given.header["qform_code"],
    )
    assert b"DOE" not in gzip.decompress((tmp_path / "out" / "scan.nii.gz").read_bytes())
    assert str(tmp_path) not in (tmp_path / "out" / "predictions.json").read_text()


def test_an_ensemble_decides_by_the_mean_of_raw_outputs(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    folds = tmp_path / "folds"
    for number, name in enumerate(("one", "two"), start=1):
        shutil.copytree(trained.run(name), folds / f"fold-{number}", symlinks=True)
    for runs, out in (([trained.run("one"), trained.run("two")], "a"), ([folds], "b")):
        done = cli_here("predict", *runs, trained.images, "--out", tmp_path / out)
        assert done.code == 0, done.err
    assert outputs_in(tmp_path / "a") == outputs_in(tmp_path / "b")
    predictor, _ = load_predictor([RunFolder(trained.run(n)) for n in ("one", "two")], Choice(), CPU)
    case = Case(id="img1", images=(trained.images / "img1.nii.gz",), label=None, patient="img1")
    image = torch.from_numpy(predictor.read(case).image_cxyz)
    outputs = [
        predict_volume(member.network, image, member.windows, device=CPU) for member in predictor.ensemble.members
    ]
    expected = predictor.task.label_map(predictor.task.decide(sum(outputs) / 2))
    assert np.array_equal(voxels(tmp_path / "a" / "img1.nii.gz"), expected)
    alone = [predictor.task.label_map(predictor.task.decide(output)) for output in outputs]
    assert not any(np.array_equal(expected, other) for other in alone)


def test_probabilities_and_masks_go_with_the_label_map(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for flags in ([], ["--probabilities"], ["--masks"]):
        done = cli_here("predict", trained.run("classes"), trained.images, "--out", out, *flags)
        assert done.code == 0, done.err
    for name in NAMES:
        label_xyz = voxels(out / f"{name}.nii.gz")
        probabilities, masks = voxels(out / f"{name}_probabilities.nii.gz"), voxels(out / f"{name}_masks.nii.gz")
        assert probabilities.shape == (*label_xyz.shape, 2)
        assert probabilities.dtype == np.float32
        assert np.allclose(probabilities.sum(-1), 1, atol=1e-5)
        assert masks.dtype == np.uint8
        assert np.array_equal(masks[..., 0], label_xyz == 1)
        # Interpolated before or after the decision: the same but for borders, of which this network has many.
        assert (probabilities.argmax(-1) == label_xyz).mean() > 0.8
        assert read_json(out / f"{name}_probabilities.json") == {"channels": ["background", "1"]}
        assert read_json(out / f"{name}_masks.json") == {"channels": ["1"]}


def test_probabilities_of_regions_are_where_the_label_map_is(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    image = trained.images / "img0.nii.gz"
    for flags in ([], ["--probabilities"]):
        assert cli_here("predict", trained.run("one"), image, "--out", tmp_path / "out", *flags).code == 0
    probabilities = voxels(tmp_path / "out" / "img0_probabilities.nii.gz")
    assert np.array_equal(probabilities[..., 0] > 0.5, voxels(tmp_path / "out" / "img0.nii.gz") == 1)
    assert read_json(tmp_path / "out" / "img0_probabilities.json") == {"channels": ["ball"]}


def test_without_what_a_label_map_needs_masks_are_the_way(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    image = trained.images / "img0.nii.gz"
    done = cli_here("predict", trained.run("tangled"), image, "--out", tmp_path / "out")
    assert done.code == 2
    assert "--masks" in done.err
    assert not (tmp_path / "out").exists()
    shutil.rmtree(trained.folder / "three-labels")  # what a run was trained on need not be there
    assert cli_here("predict", trained.run("tangled"), image, "--out", tmp_path / "out", "--masks").code == 0
    assert voxels(tmp_path / "out" / "img0_masks.nii.gz").shape[3] == 2


def test_one_unreadable_file_does_not_lose_the_others(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    images, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(trained.images, images)
    (images / "damaged.nii.gz").write_bytes((images / "img0.nii.gz").read_bytes()[:-40])
    (images / "text.nii.gz").write_text("no image")
    for name in ("aaa", "img1x", "zzz"):  # first, in the middle and last
        content = bytearray((images / "img0.nii.gz").read_bytes())
        content[12:60] = bytes(value ^ 0xA5 for value in content[12:60])
        (images / f"{name}-flipped.nii.gz").write_bytes(content)
        nib.save(nib.Nifti1Image(np.zeros((9, 8), np.float32), np.eye(4)), images / f"{name}-flat.nii.gz")
    whole = nib.load(images / "img0.nii.gz")
    nib.save(nib.Nifti1Image(np.stack([whole.dataobj] * 2, axis=3), whole.affine), images / "double.nii.gz")
    given = [trained.run("one"), images, tmp_path / "gone.nii.gz", "--out", out]
    done = cli_here("predict", *given)
    assert done.code == 3
    assert sorted(outputs_in(out)) == [f"{name}.nii.gz" for name in NAMES]
    assert "10 of 13 images could not be predicted; the others are written" in done.err
    bad = [f"{name}-{fault}" for name in ("aaa", "img1x", "zzz") for fault in ("flipped", "flat")]
    assert all(f"case {name}: " in done.err for name in ("damaged", "text", "double", "gone", *bad))
    assert done.err.count("found shape (9, 8), expected three dimensions") == 3
    assert "found 2 channels, expected the 1" in done.err
    assert "Traceback" not in done.err
    assert str(tmp_path) not in done.err
    again = cli_here("predict", *given, "--json")
    assert again.code == 3
    assert again.json["skipped"] == [f"{name}.nii.gz" for name in NAMES]
    assert again.json["error"]["code"] == "data"


def test_what_is_done_is_not_done_again(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    images, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(trained.images, images)

    def predict(*options: str, run: str = "one") -> Any:
        done = cli_here("predict", trained.run(run), images, "--out", out, "--json", *options)
        return done.code, done.json

    assert predict()[0] == 0
    first = outputs_in(out)
    when = (out / "img1.nii.gz").stat().st_mtime_ns
    (out / "img0.nii.gz").unlink()
    (out / ".img9.nii.gz.0123abcd.tmp").write_text("left by a killed command")
    assert predict() == (0, {"out": str(out), "written": ["img0.nii.gz"], "skipped": ["img1.nii.gz", "img2.nii.gz"]})
    assert outputs_in(out) == first
    assert (out / "img1.nii.gz").stat().st_mtime_ns == when
    assert not list(out.glob(".*.tmp"))

    code, result = predict(run="two")
    assert code == 2
    assert len(result["error"]["message"].splitlines()) == 3
    assert "other weights (one step-" in result["error"]["message"]
    code, result = predict("--overlap", "0.25")
    assert (code, "overlap 0.5" in result["error"]["message"]) == (2, True)

    shutil.copy(images / "img2.nii.gz", images / "img1.nii.gz")
    (out / "img0.nii.gz").write_bytes((out / "img2.nii.gz").read_bytes())
    code, result = predict()
    assert code == 3
    assert result["skipped"] == ["img2.nii.gz"]
    assert "img1.nii.gz was made from another image" in result["error"]["message"]
    assert "img0.nii.gz was changed after it was made" in result["error"]["message"]
    code, result = predict("--overwrite", run="two")
    assert (code, len(result["written"])) == (0, 3)
    assert outputs_in(out)["img1.nii.gz"] == outputs_in(out)["img2.nii.gz"]


def test_what_predict_did_not_make_stays(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    images = tmp_path / "in"
    shutil.copytree(trained.images, images)
    before = outputs_in(images)
    for options in ([], ["--overwrite"]):
        done = cli_here("predict", trained.run("one"), images, "--out", images, *options)
        assert done.code == 2
        assert "would replace the image" in done.err
    (tmp_path / "out").mkdir()
    shutil.copy(images / "img0.nii.gz", tmp_path / "out")
    done = cli_here("predict", trained.run("one"), images, "--out", tmp_path / "out")
    assert done.code == 2
    assert "not made by voxscale predict" in done.err
    assert outputs_in(images) == before
    assert list(outputs_in(tmp_path / "out")) == ["img0.nii.gz"]


def test_runs_that_do_not_go_together_are_refused_with_all_reasons(
    trained: Trained, cli_here: Cli, tmp_path: Path
) -> None:
    runs = [trained.run(name) for name in ("one", "classes", "tangled")]
    done = cli_here("predict", *runs, trained.images, "--out", tmp_path / "out")
    assert done.code == 2
    for reason in ('classes: found {"ball": [1]} and {"1": [1]}', "data.spacing", '{"a": [1, 2], "b": [2, 3]}'):
        assert reason in done.err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_is_refused(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.run("one"), run, symlinks=True)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(trained.run("tangled") / "checkpoints", run / "checkpoints", symlinks=True)
    done = cli_here("predict", run, trained.images, "--out", tmp_path / "out")
    assert done.code == 2
    assert "another task, model or number of channels" in done.err
    assert "found [12, 2, 3, 3, 3], expected [12, 1, 3, 3, 3]" in done.err


@pytest.mark.parametrize("damage", ["config", "plan", "checkpoint", "name"])
def test_a_damaged_run_is_refused(trained: Trained, cli_here: Cli, tmp_path: Path, damage: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.run("one"), run, symlinks=True)
    name = "best"
    if damage == "config":
        (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("RAS", "LPS"))
    elif damage == "plan":
        (run / "plan.json").write_text("{")
    elif damage == "checkpoint":
        (run / "checkpoints" / "best" / "model.safetensors").write_bytes(b"x")
    else:
        name = "step-00000999"
    done = cli_here("predict", run, trained.images, "--out", tmp_path / "out", "--checkpoint", name)
    assert done.code == 2
    assert "fix: " in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_without_a_run_or_an_image_it_says_so(trained: Trained, cli_here: Cli, tmp_path: Path) -> None:
    assert "no run folder" in cli_here("predict", trained.images, "--out", tmp_path / "out").err
    assert "no image" in cli_here("predict", trained.run("one"), "--out", tmp_path / "out").err
    both = cli_here("predict", trained.run("one"), trained.images, "--out", tmp_path, "--masks", "--probabilities")
    assert both.code == 2
    gone = cli_here("predict", trained.run("one"), tmp_path / "gone", "--out", tmp_path / "out")
    assert gone.code == 3
    assert not (tmp_path / "out").exists()
