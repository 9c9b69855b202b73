"""Synthetic data: pure, whole, in the very formats, and not to be solved by a threshold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from layouts import example_bytes, tensor_bytes, write_shard
from voxscale.config.data import Data, Synthetic
from voxscale.config.load import make_config
from voxscale.data.build import prepare
from voxscale.data.cases import TEST, TRAIN, VAL
from voxscale.data.formats import detect_format, find_cases
from voxscale.data.synthetic import LIKE, ensure_like, ensure_synthetic, make_volume
from voxscale.data.synthetic.abdomen import ORGANS, make_abdomen
from voxscale.data.synthetic.brain import make_brain
from voxscale.data.synthetic.distmis import make_example
from voxscale.data.synthetic.records import write_records
from voxscale.data.tfrecord import read_record, scan_records
from voxscale.data.volumes import read_case
from voxscale.errors import DataError, InfrastructureError
from voxscale.infer.baseline import threshold_dice

SIZE = (28, 24, 20)
Make = Callable[[int, int, tuple[int, int, int]], tuple[NDArray[np.generic], NDArray[np.uint8]]]


@pytest.mark.parametrize("make", [make_volume, make_brain, make_abdomen])
def test_volumes_are_a_pure_function(make: Make) -> None:
    image, label = make(0, 3, SIZE)
    again = make(0, 3, SIZE)
    assert np.array_equal(image, again[0])
    assert np.array_equal(label, again[1])
    assert not np.array_equal(image, make(1, 3, SIZE)[0])
    assert not np.array_equal(image, make(0, 4, SIZE)[0])
    assert image.shape[-3:] == label.shape == SIZE
    assert 0.01 < (label > 0).mean() < 0.5


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


@pytest.mark.parametrize("like", LIKE)
def test_likenesses_do_not_depend_on_threads_and_are_made_once(like: str, tmp_path: Path) -> None:
    options = Synthetic(cases=5, size=(20, 20, 16))
    for name, threads in (("one", 1), ("four", 4)):
        ensure_like(tmp_path / name, like, options, threads=threads)
    one, four = (_contents(tmp_path / name) for name in ("one", "four"))
    assert one == four
    ensure_like(tmp_path / "one", like, options)
    for other in ("brats", "btcv", "distmis"):
        if other != like:
            with pytest.raises(DataError, match=f"'like': '{like}'.*'like': '{other}'"):
                ensure_like(tmp_path / "one", other, options)


@pytest.mark.parametrize("like", LIKE)
def test_nothing_is_left_where_nothing_can_be_written_to_the_end(like: str, small_disk: Path) -> None:
    with pytest.raises(InfrastructureError, match="cannot be written"):
        ensure_like(small_disk / "d", like, Synthetic(cases=5, size=(48, 48, 48)))
    assert [path.name for path in small_disk.iterdir()] == [".d.lock"]


def test_brats_is_a_decathlon_task(tmp_path: Path) -> None:
    ensure_like(tmp_path / "d", "brats", Synthetic(cases=4, size=SIZE), threads=2)
    task = tmp_path / "d" / "Task01_BrainTumour"
    content = json.loads((task / "dataset.json").read_text())
    assert content["modality"] == {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"}
    assert content["labels"]["3"] == "enhancing tumour"
    assert content["numTraining"] == len(content["training"]) == 4
    assert content["training"][0] == {
        "image": "./imagesTr/BRATS_001.nii.gz",
        "label": "./labelsTr/BRATS_001.nii.gz",
    }
    assert {path.name for path in (task / "imagesTs").iterdir()} == {Path(name).name for name in content["test"]}
    manifest = find_cases(Data(source=str(task)), tmp_path)
    assert (detect_format(task), len(manifest.cases), manifest.channels[0]) == ("decathlon", 4, "FLAIR")
    raw = read_case(manifest.cases[0], channels=4, labels=manifest.labels)
    assert nib.load(task / "imagesTr" / "BRATS_001.nii.gz").shape == (*SIZE, 4)
    image_cxyz, label = make_brain(0, 0, SIZE)
    assert np.array_equal(raw.image_cxyz, image_cxyz)
    assert np.array_equal(raw.label_xyz, label)


def test_brain_has_nested_regions_of_their_own_contrast() -> None:
    for index in range(6):
        image_cxyz, label = make_brain(0, index, (40, 40, 32))
        brain = (image_cxyz > 0).all(0)
        assert not image_cxyz[:, ~brain].any(), "zero outside, in every sequence"
        assert brain[label > 0].all()
        oedema, core, enhancing = (label == value for value in (1, 2, 3))
        assert min(oedema.sum(), core.sum(), enhancing.sum()) > 50
        flair, t1gd = (
            np.array([channel[mask].mean() for mask in (oedema, core, enhancing)]) for channel in image_cxyz[[0, 2]]
        )
        healthy = [channel[brain & (label == 0)].mean() for channel in image_cxyz[[0, 2]]]
        assert flair.argmax() == 0
        assert flair[0] > healthy[0]
        assert t1gd.argmax() == 2
        assert t1gd[2] > healthy[1] > t1gd[1]


@pytest.mark.parametrize("labels", [(2, 3), (1, 2, 3), (3,)], ids=["TC", "WT", "ET"])
def test_no_threshold_on_any_sequence_finds_the_tumour(labels: tuple[int, ...]) -> None:
    """Even the best threshold of all, chosen on the very cases it is scored on."""
    cases = [make_brain(0, index, (40, 40, 32)) for index in range(6)]
    best = 0.0
    for channel in range(4):
        brains = [image_cxyz[channel] for image_cxyz, _ in cases]
        scaled = [
            (brain / brain[brain > 0].mean(), np.isin(label, labels))
            for brain, (_, label) in zip(brains, cases, strict=True)
        ]
        for threshold in np.linspace(0.5, 2.5, 41):
            for above in (True, False):
                masks = [(image > threshold) if above else (image > 0) & (image < threshold) for image, _ in scaled]
                dice = [
                    2 * (mask & truth).sum() / (mask.sum() + truth.sum())
                    for mask, (_, truth) in zip(masks, scaled, strict=True)
                ]
                best = max(best, float(np.mean(dice)))
    assert 0.2 < best < 0.75


def test_btcv_is_a_list_with_its_split(tmp_path: Path) -> None:
    ensure_like(tmp_path / "d", "btcv", Synthetic(cases=10, size=SIZE), threads=2)
    content = json.loads((tmp_path / "d" / "dataset_0.json").read_text())
    assert content["training"][0] == {"image": "imagesTr/img0001.nii.gz", "label": "labelsTr/label0001.nii.gz"}
    assert content["validation"][0] == {"image": "imagesTr/img0035.nii.gz", "label": "labelsTr/label0035.nii.gz"}
    assert list(content["labels"].values())[1:] == [organ.name for organ in ORGANS]
    assert [path.name for path in (tmp_path / "d" / "imagesTs").iterdir()] == ["img0061.nii.gz"]
    manifest = find_cases(Data(source=str(tmp_path / "d")), tmp_path)
    assert detect_format(tmp_path / "d") == "list"
    assert [case.role for case in manifest.cases].count(TRAIN) == 8
    assert [case.role for case in manifest.cases].count(VAL) == 2
    turned = set()
    for case in manifest.cases:
        image = nib.load(case.images[0])
        turned.add(nib.aff2axcodes(image.affine))
        assert image.get_data_dtype() == np.int16
        spacing = image.header.get_zooms()
        assert not np.isclose(spacing[0], spacing[2])
        upright = nib.as_closest_canonical(image)
        number = int(case.id.removeprefix("img"))
        voxels, label = make_abdomen(0, number, SIZE)
        assert np.array_equal(upright.get_fdata(), voxels)
        assert np.array_equal(nib.as_closest_canonical(nib.load(case.label)).get_fdata(), label)
    assert len(turned) == 3


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.tuples(*[st.integers(24, 48)] * 3))
def test_every_organ_is_in_every_abdomen(seed: int, size: tuple[int, int, int]) -> None:
    image, label = make_abdomen(seed, 0, size)
    assert set(np.unique(label)) == set(range(14))
    assert image.min() <= -1000
    assert -1050 < image[0, 0].mean() < -950, "air around the body"
    centre = [np.argwhere(label == value).mean(0) for value in (2, 3)]
    assert centre[0][0] > centre[1][0], "the right kidney lies to the right"


@pytest.mark.parametrize(("cases", "shards"), [(24, (16, 4, 4)), (6, (4, 1, 1)), (40, (16, 4, 4))])
def test_distmis_is_sharded_with_its_split(cases: int, shards: tuple[int, int, int], tmp_path: Path) -> None:
    folder = tmp_path / "d"
    ensure_like(folder, "distmis", Synthetic(cases=cases, size=(8, 8, 8)), threads=2)
    expected = {
        f"{role}_{n}.tfrecord"
        for role, count in zip(("train", "valid", "test"), shards, strict=True)
        for n in range(count)
    }
    assert {path.name for path in folder.glob("*.tfrecord")} == expected
    manifest = find_cases(Data(source=str(folder)), tmp_path)
    assert detect_format(folder) == "tfrecord"
    assert len(manifest.cases) == cases
    assert {case.role for case in manifest.cases} == {TRAIN, VAL, TEST}
    assert not manifest.findings


def test_distmis_examples_are_standardised_and_binary() -> None:
    example = make_example(0, 1, SIZE)
    assert example["img"].shape == (4, *SIZE)
    assert example["label"].shape == (1, *SIZE)
    assert np.allclose(example["img"].mean((1, 2, 3)), 0, atol=1e-4)
    assert np.allclose(example["img"].std((1, 2, 3)), 1, atol=1e-4)
    _, label = make_brain(0, 1, (SIZE[0], SIZE[1], SIZE[2] + 3))
    assert np.array_equal(example["label"][0], label[:, :, 2:-1] > 0)


_FLOATS = arrays.arrays(
    np.float32, st.tuples(*[st.integers(1, 6)] * 3), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@settings(max_examples=40, deadline=None)
@given(labels=st.lists(_FLOATS, min_size=1, max_size=3), channels=st.integers(1, 200))
def test_records_are_what_the_reader_reads(
    labels: list[NDArray[np.float32]], channels: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Byte for byte what the tests' own writer makes, and read back as they were."""
    examples = [{"img": np.stack([label + 1] * channels), "label": label} for label in labels]
    folder = tmp_path_factory.mktemp("records")
    write_records(folder / "train_0.tfrecord", examples)
    oracle = [example_bytes(**{name: tensor_bytes(held) for name, held in example.items()}) for example in examples]
    write_shard(folder / "oracle.tfrecord", oracle)
    assert (folder / "train_0.tfrecord").read_bytes() == (folder / "oracle.tfrecord").read_bytes()
    records = scan_records(folder / "train_0.tfrecord")
    for (offset, _), example in zip(records, examples, strict=True):
        image_cxyz, label_xyz = read_record(folder / "train_0.tfrecord", offset)
        assert np.array_equal(image_cxyz, example["img"])
        assert np.array_equal(label_xyz, example["label"])


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
