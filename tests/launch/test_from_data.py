"""From data alone to a trained model: `init` and `train` on every format, and what the data settings do on the way."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import yaml
from PIL import Image

from conftest import Cli, tiny_config
from layouts import LAYOUTS, example_bytes, save_volume, tensor_bytes, write_shard
from report.looking import headings_of
from voxscale.data.shared_memory import SHARED_MEMORY
from voxscale.data.synthetic import make_volume, write_cifar10
from voxscale.data.synthetic.cifar10 import CLASSES
from voxscale.files import read_csv, read_json

SIZE = (32, 24, 24)
QUICK = ["model={channels: [4, 8], residual_units: 0}", "train.epochs=1", "track=none", "log=quiet", "--devices", "1"]


def fill_volumes(folder: Path) -> None:
    """Put real voxels into the files of a layout."""
    files = sorted(path for path in folder.rglob("*.nii*"))
    for path in files:
        is_label = any(word in str(path.relative_to(folder)) for word in ("labels", "seg", "mask"))
        case = sum(map(ord, path.name.removeprefix("label").removeprefix("img").removeprefix("seg")[:2]))
        image, label = make_volume(0, case, SIZE)
        save_volume(path, label if is_label else image)


def write_records(folder: Path) -> None:
    for shard, cases in (("train_0", (0, 1)), ("valid_0", (2,))):
        examples = []
        for case in cases:
            image, label = (volume.astype(np.float32) for volume in make_volume(0, case, SIZE))
            examples.append(example_bytes(img=tensor_bytes(np.stack([image] * 2)), label=tensor_bytes(label)))
        write_shard(folder / f"{shard}.tfrecord", examples)


def write_classes(folder: Path) -> None:
    """In place of each image of a layout, four of noise: every class is to be trained on, and to be validated on."""
    rng = np.random.default_rng(0)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.unlink()
        name, dot, ending = path.name.partition(".")
        for number in range(4):
            copy = path.with_name(f"{name}{number}{dot}{ending}")
            if ending == "nii.gz":
                save_volume(copy, rng.integers(0, 255, SIZE).astype(np.int16))
            else:
                Image.fromarray(rng.integers(0, 255, SIZE[:2], np.uint8)).save(copy)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.labelled])
def test_init_writes_a_config_that_trains_as_it_is(name: str, cli_here: Cli, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    source = layout.make(tmp_path / "data")
    write_records(source) if layout.format == "tfrecord" else fill_volumes(tmp_path / "data")
    made = cli_here("init", source, "--out", tmp_path / "c.yaml")
    assert made.code == 0, made.err
    assert yaml.safe_load((tmp_path / "c.yaml").read_text())["data"]["format"] == layout.format
    checked = cli_here("doctor", tmp_path / "c.yaml")
    assert checked.code == 0, checked.out
    done = cli_here("train", tmp_path / "c.yaml", *QUICK, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "done"
    roles = {row["case"]: row["split"] for row in read_csv(tmp_path / "run" / "split.csv")}
    assert tuple(roles) == layout.ids
    if layout.format in ("list", "tfrecord"):
        assert [roles[case] for case in layout.ids].count("val") == 1
        assert roles[layout.ids[-1]] == "val", "the data states it"


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if not layout.labelled])
def test_init_writes_a_config_for_classes_that_trains_as_it_is(name: str, cli_here: Cli, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    source = layout.make(tmp_path / "data")
    if layout.format == "cifar10":
        (inside,) = {path.parent for path in source.rglob("*.bin")}
        shutil.rmtree(inside)
        write_cifar10(inside, per_batch=30)
    else:
        if name == "classes: split":  # of one class alone, no metric that could choose is defined
            (source / "val" / "dog").mkdir()
            shutil.copy(source / "val" / "cat" / "c3.png", source / "val" / "dog" / "d4.png")
        write_classes(source)
    made = cli_here("init", source, "--out", tmp_path / "c.yaml")
    assert made.code == 0, made.err
    config = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert (config["task"], config["data"]["format"]) == ("classification", layout.format)
    checked = cli_here("doctor", tmp_path / "c.yaml")
    assert checked.code == 0, checked.out
    small = ["model.width=8", *QUICK[1:]]
    done = cli_here("train", tmp_path / "c.yaml", *small, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "done"
    assert done.json["best"] is not None, "some of the data validates"
    classes = {"cat", "dog"} if layout.format == "classes" else set(CLASSES)
    assert set(read_json(tmp_path / "run" / "encoding.json")["classes"]) == classes
    if name == "classes: split":
        roles = {row["case"]: row["split"] for row in read_csv(tmp_path / "run" / "split.csv")}
        assert {case for case, role in roles.items() if role == "val"} == {
            f"{name}{number}" for name in ("c3", "d4") for number in range(4)
        }


def _packed_task(folder: Path) -> Path:
    task = LAYOUTS["decathlon: the task"].make(folder / "Task09_Spleen")
    fill_volumes(task)
    with tarfile.open(folder / "Task09_Spleen.tar", "w") as archive:
        archive.add(task, "Task09_Spleen")
    return folder / "Task09_Spleen.tar"


def test_an_archive_trains_without_a_config(cli_here: Cli, tmp_path: Path) -> None:
    done = cli_here("train", _packed_task(tmp_path), *QUICK, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "done"


def test_an_archive_is_unpacked_where_the_store_will_be_and_nowhere_else(
    cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder can be made here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "of-site"))
    monkeypatch.chdir(tmp_path)
    archive, place = _packed_task(tmp_path), "data.store=here/own"
    for words in (["doctor"], ["train", "--dry-run", "--run", "run"], ["prepare"], ["init", "--out", "c.yaml"]):
        done = cli_here(words[0], archive, place, *words[1:])
        assert done.code == 0, done.err
    assert yaml.safe_load((tmp_path / "c.yaml").read_text())["data"]["store"] == str(tmp_path / "here" / "own")
    assert len(list((tmp_path / "here" / "own" / "archives").glob("Task09*"))) == 1
    refused = cli_here("prepare", archive)
    assert refused.code == 4
    assert "set data.store to a writable folder" in refused.err
    (tmp_path / "site.yaml").write_text("scratch: $SCRATCH\n")
    on_site = ["--on", "slurm", "--list", "--json"]
    for words in ([archive], [tmp_path / "c.yaml", "data.store=null"], []):
        listed = cli_here("prepare", *words, *on_site).json
        assert listed["root"] == str(tmp_path / "of-site" / "voxscale"), "where a job of this site would put it"
        assert [each["state"] for each in listed["stores"]] == ["archive"]
    assert cli_here("prepare", archive, place, *on_site).json["root"] == str(tmp_path / "here" / "own")


@pytest.mark.parametrize(
    "fields",
    [
        {"patches__size": "full"},
        {"data__spacing": [1.5, 1.0, 2.0], "augment": "full"},
        {"data__size": [16, 32, 16], "patches__size": "full", "data__slices": {"z": [2, -1]}},
        {"data__cache": {"where": "host", "rate": 0.5}},
        {"data__cache": {"where": "device", "rate": 0.5, "replace": 0.5}, "train__epochs": 4},
        {"data__stage": "$STAGE/here"},
        {"data__split": {"folds": 4, "fold": 2, "test": 0.25}},
    ],
    ids=["full", "spacing", "size", "host", "rotating", "stage", "fold"],
)
def test_data_settings_train(
    fields: dict[str, Any],
    cli_here: Cli,
    write_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STAGE", str(tmp_path / "node"))
    config = write_config(**{"train__epochs": 1, **fields})
    done = cli_here("train", config, "--devices", 1, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "done"
    plan = read_json(tmp_path / "run" / "plan.json")
    assert (plan["stream"] == "global") == ("replace" not in fields.get("data__cache", {}))
    if fields.get("patches__size") == "full":
        assert plan["patch"] == [16, 32, 16] if "data__size" in fields else plan["patch"] == [24, 24, 16]
    assert ((tmp_path / "node" / "here").exists()) == ("data__stage" in fields)
    assert not list(SHARED_MEMORY.glob("voxscale-*")), "shared memory was left behind"


@pytest.mark.ranks
def test_two_ranks_share_the_nodes_memory_or_own_their_cases(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    plain = write_config("plain.yaml", train__epochs=2)
    hosted = write_config("hosted.yaml", train__epochs=2, data__cache={"where": "host"})
    own = write_config("own.yaml", train__epochs=2, data__cache={"where": "host", "share": "rank"})
    sums = []
    for config in (plain, hosted, own):
        done = cli_here("train", config, "--devices", 2, "--run", tmp_path / config.stem, "--json")
        assert done.code == 0, done.err
        sums.append(done.json["weights_sha256"])
    assert sums[0] == sums[1] != sums[2], "only share: rank changes what is trained on"
    assert "2 ranks" in read_json(tmp_path / "own" / "plan.json")["stream"]
    assert not list(SHARED_MEMORY.glob("voxscale-*"))


def test_a_rotating_cache_that_would_hide_cases_is_refused(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(train__epochs=2, data__cache={"rate": 0.2, "replace": 0.1})
    done = cli_here("train", config, "--run", tmp_path / "run")
    assert done.code == 2
    assert "in 2 epochs not every case would be seen" in done.err
    assert not (tmp_path / "run").exists()


def test_all_folds_together_validate_every_case_once(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    """Each by the run that did not train on it; what no run trained on is scored by all of them as one."""
    root = tmp_path / "cv"
    config = write_config(train__epochs=1, data__split={"folds": 3, "test": 0.2})
    done = cli_here("train", config, "--folds", "all", "--devices", 1, "--run", root, "--json")
    assert done.code == 0, done.err
    assert len(done.json["folds"]) == 3
    assert headings_of(root / "report.html") >= {"All folds together", "Cases by the fold that held them out"}
    assert "Training loss" in headings_of(root / "fold-3" / "report.html")
    rows = read_csv(root / "cases.csv")
    assert sorted(row["case"] for row in rows) == sorted(row["case"] for row in read_csv(root / "fold-1" / "split.csv"))
    for row in rows:
        if row["split"] == "val":
            (own,) = [
                each for each in read_csv(root / f"fold-{row['fold']}" / "cases.csv") if each["case"] == row["case"]
            ]
            assert own["dice/mean"] == row["dice/mean"]
    held_out = [float(row["dice/mean"]) for row in rows if row["split"] == "val"]
    assert done.json["summary"]["dice/mean"]["mean"] == pytest.approx(fmean(held_out))
    assert read_json(root / "metrics.json")["test"] == done.json["test"]
    again = cli_here("evaluate", root, "--split", "test", "--name", "again", "--json")
    assert again.json["summary"] == done.json["test"]
    assert [run["run"] for run in again.json["runs"]] == ["fold-1", "fold-2", "fold-3"]
    seen = cli_here("evaluate", root, "--split", "val")
    assert (seen.code, "what one holds out, another was trained on" in seen.err) == (3, True)
    refused = cli_here("train", write_config("none.yaml"), "--folds", "all", "--run", tmp_path / "none")
    assert refused.code == 2
    assert "data.split has no folds" in refused.err
    assert "data.split='{folds: 5}'" in refused.err


def test_the_same_image_in_training_and_validation_is_refused(cli_here: Cli, tmp_path: Path, dataset: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for path in dataset.glob("*.nii.gz"):
        (folder / path.name).write_bytes(path.read_bytes())
    image = nib.load(dataset / "img1.nii.gz")
    for n in range(12):  # the same voxels, written anew under every name
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj), image.affine), folder / f"img{n}.nii.gz")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_config(folder)))
    done = cli_here("train", tmp_path / "c.yaml", "--run", tmp_path / "run")
    assert done.code == 3
    assert "found the voxels of case" in done.err
    assert not (tmp_path / "run").exists()


def test_a_pattern_and_a_json_config_train(cli_here: Cli, tmp_path: Path) -> None:
    for number, patient in enumerate(("p1", "p1", "p2", "p3", "p4")):
        image, label = make_volume(0, number, SIZE)
        save_volume(tmp_path / "d" / patient / f"c{number}_t1.NII.GZ", image)
        save_volume(tmp_path / "d" / patient / f"c{number}_t2.NII.GZ", image)
        save_volume(tmp_path / "d" / patient / f"c{number}_seg.NII.GZ", label)
    images = ["{patient}/{case}_t1.NII.GZ", "{patient}/{case}_t2.NII.GZ"]
    pattern = {"image": images, "label": "{patient}/{case}_seg.NII.GZ"}
    content = {"data": {"source": "d", "pattern": pattern}, "patches": {"size": [32, 16, 16]}}
    (tmp_path / "c.json").write_text(json.dumps(content))
    assert cli_here("doctor", tmp_path / "c.json").code == 0
    done = cli_here("train", tmp_path / "c.json", *QUICK, "--run", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    rows = read_csv(tmp_path / "run" / "split.csv")
    assert [row["patient"] for row in rows] == ["p1", "p1", "p2", "p3", "p4"]
    assert rows[0]["split"] == rows[1]["split"]


def test_doctor_on_data_lists_everything_at_once(cli_here: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    LAYOUTS["pairs: row 0"].make(folder)
    fill_volumes(folder)
    (folder / "sega1.nii.gz").unlink()
    (folder / "imgb2.nii.gz").write_bytes((folder / "imgb2.nii.gz").read_bytes()[:-50])
    done = cli_here("doctor", folder, "--json")
    assert done.code == 3
    assert {finding["code"] for finding in done.json["findings"]} >= {"missing-label", "unreadable"}
    refused = cli_here("doctor", folder, "data.regions={A: [9]}", "--json")
    assert "regions" in {finding["code"] for finding in refused.json["findings"]}


def test_a_torn_patient_in_any_fold_is_refused_before_the_first(cli_here: Cli, tmp_path: Path) -> None:
    lines = ["case,image,label,patient,Fold_1,Fold_2"]
    for number in range(6):
        image, label = make_volume(0, number, SIZE)
        save_volume(tmp_path / f"{number}_image.nii", image)
        save_volume(tmp_path / f"{number}_mask.nii", label)
        folds = ("train" if number < 4 else "val", "val" if number in (0, 2) else "train")
        lines.append(f"c{number},{number}_image.nii,{number}_mask.nii,p{number // 2},{','.join(folds)}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    checked = cli_here("doctor", tmp_path / "t.csv")
    assert checked.code == 3
    assert "patient p0: found in train (c1 at t.csv row 3) and val (c0 at t.csv row 2), expected" in checked.out
    done = cli_here("train", tmp_path / "t.csv", *QUICK, "--folds", "all", "--run", tmp_path / "cv")
    assert done.code == 3
    assert not (tmp_path / "cv").exists()


def test_quarter_turns_of_whole_volumes_must_fit(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    turn = [{"name": "rotate90", "axes": [0, 2]}]
    done = cli_here("train", write_config(patches__size="full", augment=turn), "--run", tmp_path / "run")
    assert done.code == 2
    assert "rotate90 in axes [0, 2] needs equal patches.size there, found 24 and 16" in done.err


def test_a_relative_stage_is_refused_before_anything_is_made(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    done = cli_here("train", write_config(data__stage="relative"), "--devices", 1, "--run", tmp_path / "run")
    assert done.code == 2
    assert "data.stage: 'relative': expected an absolute path" in done.err
    assert not (tmp_path / "run").exists()


def test_a_stage_that_is_nowhere_is_refused_and_can_be_corrected(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    run, stage = tmp_path / "run", "$NO_SUCH_VARIABLE/x"
    done = cli_here("train", write_config(data__stage=stage), "--devices", 1, "--run", run)
    assert done.code == 2
    assert f"data.stage {stage}: this node does not set" in done.err
    corrected = write_config(data__stage=str(tmp_path / "node"))
    assert cli_here("train", corrected, "--devices", 1, "--run", run, "--json").json["state"] == "done"
    assert (tmp_path / "node").exists()


@pytest.mark.ranks
def test_ranks_with_cases_of_their_own_go_on_as_many(
    cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    own = {"share": "rank"}
    config = write_config(train__epochs=2, data__cache=own, train__stop_after={"steps": 2})
    assert cli_here("train", config, "--devices", 1, "--run", tmp_path / "run").code == 75
    refused = cli_here("train", config, "--devices", 2, "--run", tmp_path / "run")
    assert refused.code == 2
    assert "began on 1 ranks with cases of their own" in refused.err
